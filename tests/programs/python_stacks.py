#!/usr/bin/env python3
"""Allocates in every way in which Python code can come to call a C function, and says from where.

python_stacks.py

Each scenario runs twice with one and the same code: once `call` writes down the stack that Python
itself sees, once it is the driver's cuMemAlloc_v2. The sizes are unique, and above (3 + R) << 24 in rank R; truth, on stdout:

    PID n
    STACK {"scenario": .., "bytes": .., "frames": [[function, file, line], ...]}    innermost first
    REUSED reused=N alike=N    how many code objects had an earlier one's address
    MISSED ...      a scenario that this interpreter can't run

Functions are named as `frames` names them: by qualified name from 3.11 on. Needs the simulated
libcuda.so.1 on LD_LIBRARY_PATH. Python 3.8 or later.
"""
import asyncio
import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

NEW = sys.version_info >= (3, 11)
POINTER = ctypes.byref(ctypes.c_uint64())
WARM = 200  # calls after which every interpreter has specialized its instructions
REPEATS = 5  # how often each stack is met
FRESH = 150  # pieces of code that are evaluated beside memory that was never written to
KEPT = []  # what moves them on

cuda = ctypes.CDLL("libcuda.so.1")
held = ctypes.PyDLL("libcuda.so.1")
for library in (cuda, held):
    library.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
# Another range in each process.
sizes = itertools.count((int(os.environ.get("FIRST", "1")) << 24) + 512, 512)
context = ctypes.c_void_p()


def say(line):
    """One write for each line: processes and threads share the pipe."""
    os.write(1, (line + "\n").encode())


def frames_of(frame):
    found = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if NEW else code.co_name
        found.append([name, code.co_filename, frame.f_lineno])
        frame = frame.f_back
    return found


class Expectation:
    """Called as the driver's function is; notes the stack instead."""

    def __init__(self, scenario, sizes):
        self.scenario = scenario
        self.sizes = sizes

    def __call__(self, pointer, size):
        frames = frames_of(sys._getframe(1))
        for actual in self.sizes:
            say("STACK " + json.dumps(dict(scenario=self.scenario, bytes=actual, frames=frames)))
        return 0


def nothing(pointer, size):
    return 0


def run(scenario, allocate=cuda.cuMemAlloc_v2, warm=0, pause=0.0):
    """Runs a scenario with each of the functions from one line."""
    own = [next(sizes) for _ in range(REPEATS)]
    calls = [(nothing, 0, 0)] * warm + [(Expectation(scenario.__code__.co_name, own), 0, 0)]
    for call, size, wait in calls + [(allocate, size, pause) for size in own]:
        time.sleep(wait) if wait else None
        scenario(call, size)


def set_context():
    if cuda.cuCtxSetCurrent(context) != 0:
        raise RuntimeError("cuCtxSetCurrent")


def start_cuda():
    if cuda.cuInit(0) != 0 or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) != 0:
        raise RuntimeError("no simulated GPU")
    set_context()


# The scenarios.


def straight(call, size):
    call(POINTER, size)


def nested(call, size):
    def inner():
        def innermost():
            call(POINTER, size)
        innermost()
    inner()


def many_lines(call, size):
    (
        call(
            POINTER,
            # A comment, so that
            # the arguments end
            (size +
             0),
        )
    )


class Library:
    """A method call over several lines, which CPython places at the method's name."""

    def __init__(self, call):
        self.alloc = call


def many_lines_method(call, size):
    library = Library(call)
    (library
        .alloc(
            POINTER,
            size))


def long_loop(call, size):
    for at in range(3):
        if at == 1:
            call(POINTER, size)
        else:
            pass


def thread(call, size):
    def body():
        set_context()
        call(POINTER, size)

    one = threading.Thread(target=body, name="one")
    one.start()
    one.join()


def foreign_thread(call, size):
    """A thread that C made comes into Python."""
    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def body(_):
        set_context()
        call(POINTER, size)

    libc, started = ctypes.CDLL(None), ctypes.c_ulong()
    if libc.pthread_create(ctypes.byref(started), None, body, None) != 0:
        raise RuntimeError("pthread_create")
    libc.pthread_join(started, None)


def generator(call, size):
    def numbers():
        yield 1
        call(POINTER, size)
        yield 2

    def outer():
        yield from numbers()

    list(outer())


def generator_closed(call, size):
    def numbers():
        try:
            yield 1
        finally:
            call(POINTER, size)

    numbers_ = numbers()
    next(numbers_)
    numbers_.close()


def coroutine(call, size):
    async def leaf():
        await asyncio.sleep(0)
        call(POINTER, size)

    async def values():
        yield 1
        await leaf()

    async def middle():
        async for _ in values():
            pass

    async def main():
        await asyncio.gather(middle())

    asyncio.run(main())


def callback(call, size):
    """Through C and back."""
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def compare(one, other):
        call(POINTER, size)
        return 0

    two = (ctypes.c_uint64 * 2)(1, 2)
    ctypes.CDLL(None).qsort(two, ctypes.c_size_t(2), ctypes.c_size_t(8), compare)


def comprehension(call, size):
    [call(POINTER, at) for at in [size]]


def set_and_dict_comprehensions(call, size):
    {1: {call(POINTER, at) for at in [size]} for _ in range(1)}


def generator_expression(call, size):
    sum(call(POINTER, at) for at in [size])


def lambdas(call, size):
    (lambda: (lambda at: call(POINTER, at))(size))()


def reduced(call, size):
    functools.reduce(lambda before, at: before or call(POINTER, at), [0, size])


def sorted_by_key(call, size):
    sorted([size], key=lambda at: call(POINTER, at))


def mapped(call, size):
    list(map(lambda at: functools.partial(call, POINTER)(at), [size]))


class Made:
    """What a specialized call enters through a frame that no traceback shows (3.12, 3.13)."""

    def __init__(self, call, size):
        call(POINTER, size)


class MadeFirst(Made):
    def __init__(self, call, size):
        super().__init__(call, size)


def made(call, size):
    MadeFirst(call, size)


def made_by_new(call, size):
    class New:
        def __new__(cls, call):
            call(POINTER, size)
            return super().__new__(cls)

    New(call)


def class_body(call, size):
    class Body:
        call(POINTER, size)


class Descriptors:
    def __init__(self, call, size):
        self.call, self.size = call, size

    @property
    def value(self):
        return self.call(POINTER, self.size)

    def __getattr__(self, name):
        return self.value

    def __getitem__(self, key):
        return self.missing

    def __lt__(self, other):
        return bool(self[0])


def descriptors(call, size):
    one = Descriptors(call, size)
    one < one


def decorator(call, size):
    def traced(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper

    @traced
    @functools.lru_cache(maxsize=None)
    def decorated(at):
        return call(POINTER, at)

    decorated(at=size)


class Leaving:
    def __init__(self, call, size):
        self.call, self.size = call, size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call(POINTER, self.size)


def with_statement(call, size):
    with Leaving(call, size) as leaving:
        leaving.size += 0

    del leaving


def with_statement_raised(call, size):
    try:
        with Leaving(call, size):
            raise ValueError(
                "out")
    except ValueError:
        pass


class Dying:
    def __init__(self, call, size):
        self.call, self.size = call, size

    def __del__(self):
        self.call(POINTER, self.size)


def finalizer(call, size):
    dying = Dying(call, size)
    dying = None


def finalizer_of_a_cycle(call, size):
    dying = Dying(call, size)
    dying.own = dying
    del dying
    gc.collect()


def exception_handler(call, size):
    try:
        raise KeyError(size)
    except KeyError as error:
        call(POINTER, error.args[0])
    finally:
        size += 0


def compiled(source, name, file):
    """The function of this name out of source text that claims to be the file's."""
    namespace = {"POINTER": POINTER}
    exec(compile(source, file, "exec"), namespace)
    return namespace.pop(name)


def executed(call, size):
    exec(compile("\n\nstatement = 1\ncall(POINTER, size)", "<made up>", "exec"),
         {"call": call, "size": size, "POINTER": POINTER})


def evaluated(call, size):
    eval("call(POINTER, size)", {"call": call, "size": size, "POINTER": POINTER})


def evaluated_beside_fresh_memory(call, size):
    """What is evaluated is soon gone, and may lie at the end of what was ever written to."""
    KEPT.extend(bytes(length) for length in range(0, 24, 2))
    eval("call(POINTER, size)", {"call": call, "size": size, "POINTER": POINTER})


UNUSUAL = [
    ("größe", "/tmp/Übung/größe.py"),
    ("模型训练", "/tmp/模型/训练.py"),
    ("f\U0001f980", "/tmp/\U0001f980/\U0001f525.py"),
    ("semi;colon and space", "/tmp/with space;semicolon.py"),
]


def unusual(name, file):
    """A scenario of this name in this file; a name need not be one that source can spell."""
    function = compiled("def f(call, size):\n\n    call(POINTER, size)\n", "f", file)
    names = dict(co_name=name, co_qualname=name) if NEW else dict(co_name=name)
    function.__code__ = function.__code__.replace(**names)
    return function


STATEMENTS = "".join(f"    a{n} = (size,\n\n         {n})\n" for n in range(600))
long_function = compiled(
    f"def long_function(call, size):\n{STATEMENTS}    call(POINTER, size)\n    size = 0\n",
    "long_function", "long.py")


def long_table(call, size):
    """More of a line table than is copied with the code object."""
    long_function(call, size)


def recursion(depth, call, size):
    if depth == 0:
        call(POINTER, size)
    else:
        recursion(depth - 1, call, size)


def recursion_50(call, size):
    recursion(50, call, size)


def recursion_300(call, size):
    recursion(300, call, size)


def identity(code):
    """What tells a code object from another at its address, without a look at its strings."""
    lines = code.co_linetable if sys.version_info >= (3, 10) else code.co_lnotab
    return id(code), id(code.co_name), id(code.co_filename), id(lines)


def same_address():
    """Functions whose code objects lie at one address, one after the other.

    Names of other lengths put the strings elsewhere. Those whose strings too have the addresses of
    an earlier one's are told apart by nothing but their characters.
    """
    addresses, identities, found = set(), set(), dict.fromkeys(("reused", "alike"), 0)
    for at in range(100):
        name = "fun_" + "x" * (at % 40) + str(at)
        function = compiled(f"def {name}(call, size):\n    call(POINTER, size)\n", name,
                            "/made/file_%s.py" % name)
        address, whole = id(function.__code__), identity(function.__code__)
        kind = "alike" if whole in identities else "reused"
        if address in addresses or not addresses:
            found[kind] += 1
            addresses.add(address)
            identities.add(whole)
            size = next(sizes)
            for call in (Expectation(kind, [size]), cuda.cuMemAlloc_v2):
                function(call, size)
        del function
    say("REUSED " + " ".join(f"{kind}={count}" for kind, count in found.items()))


def subinterpreter():
    """The same module in another interpreter of this process."""
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:
        import _interpreters as interpreters
    run_string = getattr(interpreters, "run_string", None) or interpreters.exec
    own = [next(sizes) for _ in range(REPEATS)]
    script = f"""
import sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
sys.dont_write_bytecode = True
import python_stacks as stacks
def subinterpreter(call, size):
    call(stacks.POINTER, size)
stacks.sizes = iter({own!r})
stacks.run(subinterpreter)
"""
    version = sys.version_info[:2]
    if version >= (3, 13):
        interpreter = interpreters.create("legacy")
    elif version >= (3, 10):
        interpreter = interpreters.create(isolated=False)
    else:
        interpreter = interpreters.create()
    failed = run_string(interpreter, script)
    if failed:
        say(f"MISSED subinterpreter: {failed}")
    interpreters.destroy(interpreter)


def in_child(call, size):
    straight(call, size)


def child():
    linger()
    start_cuda()
    run(in_child)
    linger()


# How many times slower than a real machine this one is: kernels that are emulated put probes in one
# by one, and seconds pass before a new process has them all.
SLOWNESS = int(os.environ.get("VRAMSCOPE_TEST_SLOWNESS", 1))


def linger():
    """The agent looks at a process, its libraries and long line tables while they are there."""
    time.sleep(2 if SLOWNESS == 1 else 3)


def children():
    """A forked child and two ranks, before this process has used CUDA."""
    global sizes
    own, sizes = sizes, itertools.count((2 << 24) + 512, 512)
    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    sizes = own
    command = [sys.executable, os.path.abspath(__file__), "child"]
    ranks = []
    for rank in range(2):
        if SLOWNESS > 1:
            (ranks[-1].wait if ranks else forked.join)()  # One at a time has its probes sooner.
        env = dict(os.environ, FIRST=str(3 + rank), RANK=str(rank))
        ranks.append(subprocess.Popen(command, env=env))
    forked.join()
    if forked.exitcode or any([rank.wait() for rank in ranks]):
        raise RuntimeError("a child failed")


WARMED = [straight, nested, many_lines, many_lines_method, long_loop, generator, comprehension,
          lambdas, reduced, made, made_by_new, descriptors, decorator, with_statement, finalizer,
          exception_handler]
ONCE = [thread, foreign_thread, generator_closed, coroutine, callback, comprehension,
        set_and_dict_comprehensions, generator_expression, sorted_by_key, mapped, class_body,
        with_statement_raised, finalizer_of_a_cycle, executed, evaluated, long_table, made, with_statement]
ONCE += [unusual(*names) for names in UNUSUAL]


def straight_held(call, size):
    straight(call, size)


def everything():
    children()
    start_cuda()
    for scenario in ONCE:
        run(scenario)
    for scenario in WARMED:
        run(scenario, warm=WARM)
    for scenario in (straight_held, nested, callback, generator):
        run(scenario, allocate=held.cuMemAlloc_v2)
    for _ in range(FRESH):
        run(evaluated_beside_fresh_memory)
        time.sleep(0.01)  # the agent keeps up with new code
    run(recursion_50, pause=0.1)  # in which the agent asks for more of the stack
    run(recursion_300)
    same_address()
    subinterpreter()
    linger()


def main():
    if sys.argv[1:] == ["child"]:
        child()
    else:
        say(f"PID {os.getpid()}")
        everything()


if __name__ == "__main__":
    main()
