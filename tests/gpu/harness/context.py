"""What every check is given: the binary under test, programs, recordings."""

import json
import os
import re
import sys
import time
from pathlib import Path

from harness.elf import Entries
from harness.log import Log
from harness.programs import Program


class Recording:
    """A program under `vramscope run`, after its end."""

    def __init__(self, program, log_path, files):
        self.program, self.log, self.files = program, Log(log_path), files

    @property
    def code(self):
        """Exit code of `vramscope run`, which is the program's."""
        return self.program.code

    def said(self, word, **facts):
        """What the program printed as `WORD {json}`: all of it, or what has these facts."""
        lines = re.findall(rf"^{word} (\{{.*)", self.program.output, re.M)
        every = [json.loads(line) for line in lines]
        return [one for one in every if all(one[key] == value for key, value in facts.items())]


class Context:
    """Starts programs and remembers them, so that none outlives its check."""

    def __init__(self, binary, sources, work, builder, nvml, gpus=1):
        self.binary, self.sources = Path(binary).resolve(), Path(sources)
        self.logs = Path(work) / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.builder, self.nvml, self.gpus = builder, nvml, gpus
        self._running = []
        self._recordings = {}

    def environment(self, extra=None):
        """This process's environment without vramscope's own variables, plus `extra`."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("VRAMSCOPE_")}
        env["PYTHONUNBUFFERED"] = "1"
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            env.pop(name, None)
        env.update(extra or {})
        return env

    def built(self, name):
        """Path of a CUDA program."""
        return self.builder.path(name)

    def script(self, name, *arguments):
        """Command line of one of the Python programs."""
        return [sys.executable, self.sources / name, *arguments]

    def start(self, outcome, command, env=None, stdin=False):
        """Starts a program; it is stopped at the end of the check at the latest."""
        outcome.commands.append(shown(command, env))
        program = Program(command, self.environment(env), stdin)
        self._running.append(program)
        return program

    def run(self, outcome, command, env=None, timeout=60):
        """Runs a program to its end."""
        program = self.start(outcome, command, env)
        program.wait(timeout)
        return program

    def record(self, outcome, name, command, env=None, timeout=60, max_overhead="none"):
        """Runs a program under `vramscope run`, once for all checks that name the same."""
        if name not in self._recordings:
            try:
                self._recordings[name] = self._record(
                    outcome, name, command, env, timeout, max_overhead
                )
            except Exception as error:
                self._recordings[name] = error
                raise
        known = self._recordings[name]
        if isinstance(known, Exception):
            raise RuntimeError(f"recording {name} failed before: {known}")
        outcome.keep += known.files
        return known

    def _record(self, outcome, name, command, env, timeout, max_overhead):
        path = self.logs / name
        run = [self.binary, "run", "-o", path, "--max-overhead", max_overhead, "--"]
        program = self.start(outcome, [*run, *command], env)
        try:
            program.wait(timeout)
        finally:
            files = [path, *self.save(program, name)]
            outcome.keep += files
        if not path.is_dir():
            raise RuntimeError(f"no log, exit code {program.code}: {program.error[-600:]}")
        return Recording(program, path, files)

    def attach(self, outcome, name, pid, *options):
        """Starts `vramscope attach`; gives the program and the log's path."""
        path = self.logs / name
        limits = ["--max-overhead", "none"]
        command = [self.binary, "attach", str(pid), "-o", path, *limits, *options]
        outcome.keep.append(path)
        return self.start(outcome, command), path

    def wait_attached(self, agent, pid, timeout=20):
        """Waits until the agent says that it records, or its probes are seen in the process."""
        entries = Entries(pid, r"/libcuda\.so", ["cuMemAlloc_v2"])
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if agent.find(r"recording .* log ", stderr=True) or entries.changed():
                return
            if agent.poll() is not None:
                raise RuntimeError(f"attach ended with {agent.code}: {agent.error[-600:]}")
            time.sleep(0.01)
        raise TimeoutError(f"attach was not in place within {timeout} s: {agent.error[-600:]}")

    def save(self, program, name):
        """Writes a program's output beside the logs."""
        out, err = self.logs / f"{name}.out.txt", self.logs / f"{name}.err.txt"
        out.write_text(program.output[-400_000:] + "\n", encoding="utf-8")
        err.write_text(program.error[-400_000:] + "\n", encoding="utf-8")
        return [out, err]

    def report(self, outcome, log_path, timeout=60):
        """`vramscope report --json`: exit code and what it says (None: not JSON)."""
        program = self.run(outcome, [self.binary, "report", log_path, "--json"], timeout=timeout)
        try:
            return program, json.loads(program.output)
        except ValueError:
            return program, None

    def stop_all(self):
        """Stops what still runs."""
        for program in self._running:
            if program.poll() is None:
                program.stop()
        self._running.clear()


def shown(command, env=None):
    """A command line without this machine's paths."""
    words = [f"{key}={value}" for key, value in (env or {}).items()]
    for word in map(str, command):
        words.append(os.path.basename(word) if word.startswith("/") else word)
    return " ".join(words)
