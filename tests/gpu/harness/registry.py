"""The list of checks: a decorator adds one."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

WORDS = {0: "none", 1: "one", 2: "two"}


@dataclass(frozen=True)
class Check:
    """A check: `run(context, outcome)` notes what it finds in `outcome`."""

    name: str
    about: str
    seconds: int
    builds: tuple
    run: Callable
    gpus: int = 1
    packages: tuple = ()


CHECKS = {}


def check(name, about, seconds, builds=(), gpus=1, packages=()):
    """Registers a check that takes at most `seconds` and needs the CUDA programs `builds`.

    Where a machine has fewer GPUs or lacks a Python package the check is skipped, which is no
    failure: the machine is what it is.
    """

    def add(run):
        CHECKS[name] = Check(name, about, seconds, tuple(builds), run, gpus, tuple(packages))
        return run

    return add


def lacking(check, gpus):
    """What a machine with so many GPUs lacks for a check, in words; None: nothing."""
    if check.gpus > gpus:
        return f"needs {WORDS[check.gpus]} GPUs, has {WORDS.get(gpus, gpus)}"
    missing = [name for name in check.packages if find_spec(name) is None]
    return f"needs Python with {', '.join(missing)}" if missing else None
