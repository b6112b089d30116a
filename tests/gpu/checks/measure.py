"""First measurements: what the driver and NVML do, without vramscope. Figures, nothing to pass."""

import re

from harness.registry import check

STEP_S = 30


class Stepper:
    """Drives a program from step to step and reads NVML at each."""

    def __init__(self, context, outcome, table, program, role):
        self.nvml, self.outcome, self.table = context.nvml, outcome, table
        self.program, self.pids = program, {role: program.pid}
        self.waiting = False
        self.handle = None

    def until(self, name=None):
        """Goes on to the step of that name, which is read too; without one, to the end."""
        while True:
            if self.waiting:
                self.program.say()
                self.waiting = False
            line = self.program.next_line(STEP_S)
            if line is None:
                if name is not None or self.program.code:
                    raise RuntimeError(
                        f"{self.program.name} ended with {self.program.code}: "
                        f"{self.program.error[-400:]}"
                    )
                return
            word, _, rest = line.partition(" ")
            if word == "STEP":
                self.waiting = True
                self.read(rest)
                if rest == name:
                    return
            elif word == "FIGURE":
                key, value = rest.split()
                self.outcome.figure(key, int(value))
            elif word == "HANDLE":
                self.handle = rest
            elif word == "CHILD":
                self.pids["importer"] = int(rest)

    def read(self, step):
        """Adds a row: bytes by process and on the device, and how they changed."""
        rows = self.outcome.tables.setdefault(self.table, [])
        before = rows[-1] if rows else {}
        row = {"step": step}
        used = {role: self.nvml.process_used(pid) for role, pid in self.pids.items()}
        used["device"] = self.nvml.device_used()
        for key, value in used.items():
            row[key] = value
            old = before.get(key)
            row[f"{key} change"] = None if value is None or old is None else value - old
        rows.append(row)


def act(context, outcome, what, role="process"):
    """One mode of the program `measure`, to its end."""
    program = context.start(outcome, [context.built("measure"), what], stdin=True)
    Stepper(context, outcome, what, program, role).until()


@check("measure-rounding", "what the driver takes for blocks of each size", 60, ["measure"])
def rounding(context, outcome):
    act(context, outcome, "rounding")


@check("measure-context", "what a bare context costs: C program, PyTorch", 75, ["measure"])
def bare_context(context, outcome):
    act(context, outcome, "context")
    program = context.start(outcome, context.script("torch_context.py"), stdin=True)
    Stepper(context, outcome, "torch", program, "process").until()


@check("measure-ipc", "what NVML charges for an IPC import of 256 MiB", 60, ["measure"])
def ipc(context, outcome):
    exporter = context.start(outcome, [context.built("measure"), "export"], stdin=True)
    first = Stepper(context, outcome, "ipc", exporter, "exporter")
    first.until("exported")
    if not re.fullmatch(r"[0-9a-f]{128}", first.handle or ""):
        raise RuntimeError(f"no IPC handle of 64 bytes: {first.handle!r}")
    command = [context.built("measure"), "import", first.handle]
    importer = context.start(outcome, command, stdin=True)
    second = Stepper(context, outcome, "ipc", importer, "importer")
    second.pids["exporter"] = exporter.pid
    second.until()
    first.until()


@check("measure-vmm-import", "what NVML charges for memory imported by fd", 60, ["vmm_refs"])
def vmm_import(context, outcome):
    program = context.start(outcome, [context.built("vmm_refs"), "2", "steps"], stdin=True)
    Stepper(context, outcome, "vmm import", program, "exporter").until()


@check("measure-managed", "what NVML charges for 256 MiB of managed memory", 60, ["measure"])
def managed(context, outcome):
    act(context, outcome, "managed")


@check("measure-pinned", "what NVML charges for 256 MiB of pinned host memory", 60, ["measure"])
def pinned(context, outcome):
    act(context, outcome, "pinned")


@check("measure-pool", "what NVML charges for a stream-ordered pool", 60, ["measure"])
def pool(context, outcome):
    act(context, outcome, "pool")


def until_ready(program, pids):
    """Reads up to the next READY; notes the processes that the program names."""
    while (line := program.next_line(STEP_S)) != "READY":
        if line is None:
            ended = f"{program.name} ended with {program.poll()}"
            raise RuntimeError(f"{ended}: {program.error[-400:]}")
        if found := re.fullmatch(r"(EXPORTER|IMPORTER) (\d+)", line):
            pids[found[1].lower()] = int(found[2])


@check("measure-share", "what is left of shared memory when one process ends", 60, ["share"])
def share(context, outcome):
    for order in ("exporter-first", "importer-first"):
        program = context.start(outcome, [context.built("share"), order], stdin=True)
        stepper = Stepper(context, outcome, f"share {order}", program, "starter")
        stepper.pids = {}
        for step in ("both hold it", "one has ended", "the other let go"):
            until_ready(program, stepper.pids)
            stepper.read(step)
            program.say()
        program.wait(STEP_S)
