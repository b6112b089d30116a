#!/usr/bin/env python3
"""Runs vramscope's GPU checks: python3 tests/gpu/run.py --bin PATH --out DIR [--only NAME,...]

Needs root, an NVIDIA GPU, nvcc, and Python with torch, pandas, pyarrow (nvidia-ml-py is used where
it is there). The exit code is the number of checks that failed or could not run. See README.md.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import checks  # noqa: E402,F401  (registers them)
from harness.build import Builder  # noqa: E402
from harness.context import Context  # noqa: E402
from harness.machine import describe, gpu_count  # noqa: E402
from harness.nvml import Nvml  # noqa: E402
from harness.outcome import Outcome  # noqa: E402
from harness.registry import CHECKS, WORDS, lacking  # noqa: E402
from harness.report import keep_logs, write_json, write_markdown  # noqa: E402


class OutOfTime(BaseException):
    """The check took too long. No `Exception`, so that no check catches it by the way."""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", required=True, help="the vramscope binary")
    parser.add_argument("--out", required=True, help="folder for results.json, results.md, logs")
    parser.add_argument("--only", help="names of checks, with commas; a prefix ending in * too")
    parser.add_argument("--budget", type=float, default=470, help="seconds for all of it")
    parser.add_argument("--work", help="folder for builds and logs (default: a temporary one)")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    return parser.parse_args()


def chosen(only):
    """The checks asked for, in their order."""
    if not only:
        return list(CHECKS.values())
    wanted = [name.strip() for name in only.split(",") if name.strip()]

    def fits(check, word):
        return check.name == word or (word.endswith("*") and check.name.startswith(word[:-1]))

    for word in wanted:
        if not any(fits(check, word) for check in CHECKS.values()):
            raise SystemExit(f"there is no check {word!r}; there are {', '.join(CHECKS)}")
    return [check for check in CHECKS.values() if any(fits(check, word) for word in wanted)]


def on_alarm(_number, _frame):
    raise OutOfTime


def run_check(check, context, seconds):
    """Runs one check; whatever happens in it ends here."""
    outcome = Outcome(check.name, check.about)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        check.run(context, outcome)
    except OutOfTime:
        outcome.error = f"the check took longer than {seconds:.0f} s"
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}".replace("\n", " / ")[:900]
        outcome.trace = traceback.format_exc(limit=6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        context.stop_all()
    outcome.end()
    return outcome


def run_all(selected, context, out, machine, budget):
    """Runs the checks one after the other; what was found is on disk after each."""
    outcomes, end = [], time.monotonic() + budget
    for check in selected:
        left = end - time.monotonic()
        lacks = lacking(check, context.gpus)
        if lacks:
            outcome = Outcome(check.name, check.about)
            outcome.lacks = lacks
        elif left < 5:
            outcome = Outcome(check.name, check.about)
            outcome.skipped = "no time was left for it"
        else:
            outcome = run_check(check, context, min(check.seconds, left))
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
        write_json(out / "results.json", machine, outcomes)
        write_markdown(out / "results.md", machine, outcomes)
    return outcomes


def open_nvml():
    try:
        return Nvml()
    except Exception as error:  # checks that need it say so themselves
        print(f"NVML: {error}", file=sys.stderr)
        return None


def on_term(_number, _frame):
    raise SystemExit(143)


def main():
    args = arguments()
    if args.list:
        for check in CHECKS.values():
            needs = "" if check.gpus == 1 else f" (needs {WORDS[check.gpus]} GPUs)"
            print(f"{check.name:20} {check.about}{needs}")
        return 0
    selected = chosen(args.only)
    binary = Path(args.bin)
    if not os.access(binary, os.X_OK):
        raise SystemExit(f"{binary} is no program: build it with `cargo build --release -p agent`")
    if os.geteuid() != 0:
        raise SystemExit("the checks record with eBPF and need root")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGTERM, on_term)
    with tempfile.TemporaryDirectory(prefix="vramscope-gpu-") as temporary:
        work = Path(args.work or temporary)
        builder = Builder(HERE, work / "build")
        builder.start([name for check in selected for name in check.builds])
        nvml = open_nvml()
        context = Context(binary, HERE, work, builder, nvml, gpu_count(nvml))
        command = "python3 tests/gpu/run.py --bin vramscope --out DIR"
        command += f" --only {args.only}" if args.only else ""
        machine = describe(binary, nvml, command)
        try:
            outcomes = run_all(selected, context, out, machine, args.budget)
        finally:
            context.stop_all()
        for name in keep_logs(out / "failed.tar.gz", outcomes):
            print(f"not kept, too large: {name}")
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.status == "skipped" for outcome in outcomes)
    print(
        f"{len(outcomes)} checks, {failed} failed or not run, {skipped} skipped; "
        f"see results.md in {out}"
    )
    return min(failed, 125)


if __name__ == "__main__":
    sys.exit(main())
