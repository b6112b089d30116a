"""Calls through everything that makes a frame, prints the frames of each thread, and waits.

For each thread a line `thread IDENT`, then NAME, FILE and LINE of its frames, innermost first.
"""
import functools
import os
import sys
import threading

waiting = False


def show(frame):
    lines = ["thread %d" % threading.get_ident()]
    while frame:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        line = "-" if frame.f_lineno is None else frame.f_lineno
        lines.append("%s\t%s\t%s" % (name, code.co_filename, line))
        frame = frame.f_back
    print("\n".join(lines), flush=True)


def wait():
    if waiting:
        show(sys._getframe()); print(".", flush=True); os.read(0, 1)
    return 0


def calls(*functions):
    return functions[0](*functions[1:])


def over_lines(first, *rest):
    return calls(
        first,
        *rest
    ) or [
        0,
    ]


def in_lambda(*rest):
    return sorted([1], key=lambda _: (
        calls(*rest)) or 0)


def in_generator(*rest):
    def generator():
        yield 1
        yield calls(
            *rest)
    return [
        x for x in generator()
    ]


def in_comprehension(*rest):
    return {
        x:
            calls(*rest)
        for x in range(1)
    }


def in_coroutine(*rest):
    async def inner():
        return calls(*rest)

    async def outer():
        x = 1
        return await inner(
        )
    try:
        outer().send(None)
    except StopIteration:
        return 0


def in_reduce(*rest):
    return functools.reduce(lambda x, y:
                            calls(*rest), [1, 2])


class Odd:
    def __init__(self, rest):
        self.rest = rest

    @property
    def value(self):
        return self.missing

    def __getattr__(self, name):
        return calls(*self.rest)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        calls(*self.rest)
        return True

    def __add__(self, other):
        with self:
            other = 1 / (
                0)
        return other

    def __call__(self):
        try:
            pass
        finally:
            self.value


def in_operators(*rest):
    odd = Odd(rest)
    return (
        odd
        + 1)


def in_call(*rest):
    return Odd(rest)()


def in_handler(*rest):
    try:
        raise ValueError(
            1)
    except (TypeError,
            ValueError):
        for _ in range(1):
            calls(*rest)


def in_class(*rest):
    def decorator(one):
        calls(*rest)
        return one

    @decorator
    class Local:
        @staticmethod
        @decorator
        def method():
            return 1


LONG = "a_long_name_" * 30
SPREAD = "def spread(*rest):\n    x = 0\n" + "".join(
    "    x = (x +\n%s  %d)\n" % ("\n" * (n % 200), n) for n in range(700)
) + "    return calls(*rest)\n"
MADE = {}
for file, source in [
    ("latin/f\xfc.py", "def f\xfcr(*rest):\n    return calls(*rest)\n"),
    ("\u0444\u0430\u0439\u043b.py", "def \u0444(*rest):\n\n    return calls(*rest)\n"),
    ("\U0001f600/x.py", "def \U00020000(*rest):\n\n\n    return calls(*rest)\n"),
    ("/" + "deep/" * 100 + "x.py", "def %s(*rest):\n    return calls(*rest)\n" % LONG),
    ("\u0444" * 300 + ".py", "def %s(*rest):\n    return calls(*rest)\n" % ("\u0444" * 200)),
    ("\U0001f600" * 99 + "abc", "def wide(*rest):\n    return calls(*rest)\n"),
    ("spread.py", SPREAD),
]:
    exec(compile(source, file, "exec"), globals(), MADE)

if sys.version_info >= (3, 10):
    exec(compile("""
def in_match(*rest):
    match rest:
        case [*_] if calls(
                *rest):
            return 1
        case _:
            return 0
""", "match.py", "exec"), globals(), MADE)

STEPS = [
    over_lines, in_lambda, in_generator, in_comprehension, in_coroutine, in_reduce, in_operators,
    in_call, in_handler, in_class, over_lines,
] + list(MADE.values())


def everything():
    return calls(*STEPS, wait)


def in_thread():
    show(sys._getframe()); started.set(); stopped.acquire()


# What is called often is compiled to other instructions.
for _ in range(100):
    everything()
started, stopped = threading.Event(), threading.Lock()
stopped.acquire()
threading.Thread(target=in_thread, daemon=True).start()
started.wait()
waiting = True
exec("""
everything(
)
""")
