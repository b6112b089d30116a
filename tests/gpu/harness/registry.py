"""The list of checks: a decorator adds one."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A check: `run(context, outcome)` notes what it finds in `outcome`."""

    name: str
    about: str
    seconds: int
    builds: tuple
    run: Callable


CHECKS = {}


def check(name, about, seconds, builds=()):
    """Registers a check that takes at most `seconds` and needs the CUDA programs `builds`."""

    def add(run):
        CHECKS[name] = Check(name, about, seconds, tuple(builds), run)
        return run

    return add
