"""Of vramscope's GPU checks (tests/gpu): what a program says of its own lines, true by its text."""

import fcntl
import inspect
import json
import os


def marked(function, mark="# here"):
    """`file:line` of the one line of a function that carries a mark."""
    lines, first = inspect.getsourcelines(function)
    found = [first + number for number, line in enumerate(lines) if mark in line]
    assert len(found) == 1, (function, found)
    return f"{os.path.basename(inspect.getsourcefile(function))}:{found[0]}"


def say(word, **facts):
    """Prints a word and facts as JSON, in one piece: ranks share the stream."""
    text = f"{word} {json.dumps(facts)}\n".encode()
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while text:
            text = text[os.write(1, text) :]


def say_allocated(function, size, level="device"):
    """Prints what a function allocated at its marked line."""
    site = f"{marked(function)} {function.__qualname__}"
    say("ALLOC", site=site, function=function.__name__, bytes=size, level=level)
