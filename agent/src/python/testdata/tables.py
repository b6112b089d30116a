"""Prints, for many code objects: line table in hex, first line, and OFFSET:LINE of each instruction.

The lines are what PyCode_Addr2Line says, the function behind tracebacks, held against co_lines().
"""
import ctypes
import os
import sys
import types

addr2line = ctypes.pythonapi.PyCode_Addr2Line
addr2line.argtypes = [ctypes.py_object, ctypes.c_int]
addr2line.restype = ctypes.c_int

SOURCES = [
    """
import functools
@functools.lru_cache(
    maxsize=
        None)
@functools.wraps(len)
def decorated(a,
              b=lambda x: (x +

                           1),
              *c):
    return [
        (x,
         y)
        for x in a
        if x for y in
        range(
            10)
    ]

class C(
    object,
):
    '''doc'''
    x: int = 1
    def method(self): return {k: v for k, v in
        self.items()}
    async def go(self):
        async with self as s:
            async for x in s:
                await x(
                    1,
                    2)
        return [y async for y in s]
    def gen(self):
        got = yield (
            1 +
            2)
        yield from self

def tries(x):
    for i in x:
        try:
            with open(x) as f, open(
                    f) as g:
                if i:
                    continue
                elif g:
                    break
                return f(
                    g)
        except (KeyError,
                ValueError) as error:
            raise TypeError(
                error) from error
        except OSError:
            pass
        else:
            del f
        finally:
            print(
                'x')
    else:
        while x: x -= 1
    assert x, (
        'message')
    return f"{x} {x!r:>{i}} {x +
1}" if False else x
""".replace("{x +\n1}", "{x + 1}"),
    "def a():\n    x = 1" + "\n" * 127 + "\n    y = 2" + "\n" * 128 + "    z = 3" + "\n" * 5000
    + "    return (x +\n" + "\n" * 300 + "y)\n",
    "\n" * 70000 + "def f():\n    return g(\n1,\n\n2)\nf()\n",
    "def f(x):\n" + "".join("    x = x + %d\n" % n for n in range(2000)) + "    return x\n",
    "x = [" + ", ".join("y" for _ in range(400)) + "]; z = 1\nw = (\n\n\n" + "+\n".join(
        "x" for _ in range(300)) + ")\n",
    "def f():\n    while True:\n        if a: break\n        b(); c(\n1); d()\n    return lambda: (\n1)\n",
]
if sys.version_info >= (3, 10):
    SOURCES.append("""
def m(x):
    match x:
        case [1,
              2, *rest] if rest:
            return rest
        case {'k': v, **more}:
            return (v,
                    more)
        case str() | int():
            pass
        case _:
            return None
""")
if sys.version_info >= (3, 11):
    SOURCES.append("""
def g():
    try:
        a()
    except* (ValueError,
             TypeError) as e:
        b(
            e)
""")
if sys.version_info >= (3, 12):
    SOURCES.append("type X[T] = list[\nT]\ndef f[T: (\nint, str)](x: T) -> T:\n    return [y\nfor y in x]\n")


def stdlib():
    root = os.path.dirname(os.__file__)
    for folder in ("", "asyncio", "json", "email", "unittest", "test"):
        folder = os.path.join(root, folder)
        if not os.path.isdir(folder):
            continue
        names = sorted(n for n in os.listdir(folder) if n.endswith(".py"))
        wanted = {"test_grammar.py", "test_patma.py", "test_coroutines.py", "test_traceback.py"}
        for name in [n for n in names if n in wanted] if folder.endswith("test") else names[::4]:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                yield file.read()


def codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def show(code):
    lines = [addr2line(code, at) for at in range(0, len(code.co_code), 2)]
    if hasattr(code, "co_lines"):
        for start, end, line in code.co_lines():
            for at in range(start, end, 2):
                assert lines[at // 2] == (-1 if line is None else line), (code, at)
    table = code.co_linetable if hasattr(code, "co_linetable") else code.co_lnotab
    shown = " ".join("%d:%s" % (n * 2, "-" if line == -1 else line) for n, line in enumerate(lines))
    print(table.hex() or "-", code.co_firstlineno, shown)


for source in SOURCES + list(stdlib()):
    try:
        whole = compile(source, "x.py", "exec")
    except (SyntaxError, ValueError):
        continue
    for code in codes(whole):
        show(code)
for code in codes(compile(SOURCES[0], "x.py", "exec")):
    show(code.replace(co_firstlineno=2000000000))
