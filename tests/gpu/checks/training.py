"""Training with stacks: a planted leak at its line, silence without one, and what it costs a step."""

import random
import re
import signal
import statistics
from pathlib import Path

from harness.registry import check
from harness.stacks import note_complete

ROUNDS = 20
WINDOW_S = 1.0
SETTLE_S = 1.3
# `recorder` is PyTorch's own memory history with Python stacks: what a user has without us.
MODES = ("alone", "driver", "totals", "sites", "recorder")
DETAIL = {"driver": "off", "totals": "totals", "sites": "sites"}


def train(context, outcome, name, *arguments):
    """Records a training run; its output and its log."""
    command = context.script("gpt_train.py", *arguments)
    recording = context.record(outcome, name, command, timeout=150)
    outcome.expect_equal("exit code", recording.code, 0)
    return recording


def findings(context, outcome, name):
    """The report's findings."""
    return context.report(outcome, context.logs / name)[1]["findings"]


def complete_share(outcome, log):
    """Share of stacks that reach their thread's start without an address that is not known."""
    share = note_complete(outcome, log)
    outcome.expect("98 % of stacks are complete", share >= 0.98, f"{share:.4f}")


@check("train-leak", "a list that keeps a tensor a step: found at its line", 120)
def train_leak(context, outcome):
    recording = train(context, outcome, "train-leak", "--leak", "list", "--steps", "1000")
    line = recording.program.match(r"LEAK line=(\S+)").group(1)
    leaks = [f for f in findings(context, outcome, "train-leak") if f["kind"] == "leak"]
    outcome.figure("findings", [leak["sentence"] for leak in leaks])
    outcome.expect_equal("leaks", len(leaks), 1)
    outcome.expect(f"it is at {line}", line in leaks[0]["sentence"], leaks[0]["sentence"])
    complete_share(outcome, recording.log)
    outcome.expect_equal("losses", recording.log.losses(), {})


@check("train-healthy", "the same without the list: no finding", 120)
def train_healthy(context, outcome):
    recording = train(context, outcome, "train-healthy", "--steps", "1000")
    kinds = [f["kind"] for f in findings(context, outcome, "train-healthy")]
    outcome.expect_equal("kinds of findings", kinds, ["nothing"])
    complete_share(outcome, recording.log)


def order(program, text):
    """Gives an order and waits until it is done; what the program said."""
    program.say(text)
    said = []
    while "DONE" not in said:
        said.append(program.next_line(60))
        if said[-1] is None:
            raise RuntimeError(f"{program.name} ended at {text!r}: {program.error[-600:]}")
    return "\n".join(said)


def window(context, outcome, program, mode, number, step="window"):
    """Trains (or makes pairs) for a window in a mode; median milliseconds a step."""
    agent = None
    if mode in DETAIL:
        name = f"train-cost-{mode}-{number}"
        agent, path = context.attach(outcome, name, program.pid, "--detail", DETAIL[mode])
        outcome.keep.remove(path)
        context.wait_attached(agent, program.pid)
    if mode == "recorder":
        order(program, "recorder on")
    # A code object is taken for granted once it was the same for a second.
    order(program, f"{step} warm {SETTLE_S}")
    found = re.search(r"median_ms=(\S+)", order(program, f"{step} {mode} {WINDOW_S}"))
    if mode == "recorder":
        order(program, "recorder off")
    if agent:
        agent.signal(signal.SIGINT)
        agent.wait(30)
    return float(found.group(1))


def upper_bound(values):
    """Upper end of the 95 % interval of the median, by resampling."""
    source = random.Random(1)
    medians = sorted(
        statistics.median(source.choices(values, k=len(values))) for _ in range(2000)
    )
    return medians[int(len(medians) * 0.975)]


def rows(times):
    """A line a mode: its times, and the ratios to the window without anything in its round."""
    for mode in MODES:
        pairs = [(one[mode] / one["alone"] - 1) * 100 for one in times if mode in one]
        if pairs:
            yield {
                "mode": mode,
                "windows": len(pairs),
                "median ms a step": round(statistics.median(t[mode] for t in times), 3),
                "median of the paired differences, %": round(statistics.median(pairs), 2),
                "lowest": round(min(pairs), 2),
                "highest": round(max(pairs), 2),
                "upper 95 % bound": round(upper_bound(pairs), 2),
            }


def serving(context, outcome, shape):
    """The training program, waiting for orders."""
    command = context.script("gpt_train.py", "--shape", shape, "--serve")
    program = context.start(outcome, command, stdin=True)
    while program.next_line(90) != "READY":
        pass
    return program


def rounds(context, outcome, program, count, step, title):
    """The times of each round, by mode."""
    times = []
    for number in range(count):
        # Another order each round, so that no mode always follows the same one.
        turn = random.Random(number).sample(MODES, len(MODES))
        times.append({m: window(context, outcome, program, m, number, step) for m in turn})
        outcome.table(title, list(rows(times)))
    return times


def cost(context, outcome, shape):
    program = serving(context, outcome, shape)
    times = rounds(context, outcome, program, ROUNDS, "window", f"step times, {shape}")
    cost = [one["sites"] - one["alone"] for one in times]
    theirs = [one["recorder"] - one["alone"] for one in times]
    outcome.figure("sites, ms more a step, median", round(statistics.median(cost), 3))
    outcome.figure("PyTorch's recorder, ms more a step, median", round(statistics.median(theirs), 3))
    outcome.expect("the program runs on", program.poll() is None)
    program.stop()


def runs(agent):
    """(runs, nanoseconds) of each of an agent's programs, by their descriptors."""
    found = {}
    folder = Path(f"/proc/{agent.pid}/fdinfo")
    for entry in folder.iterdir():
        try:
            lines = entry.read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if "run_time_ns" in fields:
            tag = fields["prog_tag"].strip()
            found[tag] = (int(fields["run_cnt"]), int(fields["run_time_ns"]))
    return found


@check("hit-cost", "time that our programs take at a tensor event, without the trap", 120)
def hit_cost(context, outcome):
    """Uses the kernel's own statistics, which cost some nanoseconds a run themselves."""
    switch = Path("/proc/sys/kernel/bpf_stats_enabled")
    program = serving(context, outcome, "launch")
    for mode, detail in DETAIL.items():
        agent, path = context.attach(outcome, f"hit-{mode}", program.pid, "--detail", detail)
        outcome.keep.remove(path)
        context.wait_attached(agent, program.pid)
        order(program, f"window warm {SETTLE_S}")
        switch.write_text("1")
        try:
            before = runs(agent)
            order(program, "window hits 3")
            after = runs(agent)
        finally:
            switch.write_text("0")
        hits = [(a[0] - before[tag][0], a[1] - before[tag][1]) for tag, a in after.items()]
        count, took = max(hits)
        if count:
            outcome.figure(f"{mode}: hits, ns a hit", [count, round(took / count)])
        agent.signal(signal.SIGINT)
        agent.wait(30)
    outcome.expect("the program runs on", program.poll() is None)
    program.stop()


@check("pair-cost", "a block that comes and goes below 14 Python frames, each mode in turn", 240)
def pair_cost(context, outcome):
    program = serving(context, outcome, "launch")
    times = rounds(context, outcome, program, 8, "pairs", "us a pair (an allocation and a free)")
    for mode in MODES[1:]:
        more = statistics.median(one[mode] - one["alone"] for one in times)
        outcome.figure(f"{mode}: us more an event, median", round(more / 2, 3))
    outcome.expect("the program runs on", program.poll() is None)
    program.stop()


@check("train-cost-launch", "a launch-bound step with and without recording", 540)
def cost_launch(context, outcome):
    cost(context, outcome, "launch")


@check("train-cost-gpu", "a GPU-bound step with and without recording", 540)
def cost_gpu(context, outcome):
    cost(context, outcome, "gpu")
