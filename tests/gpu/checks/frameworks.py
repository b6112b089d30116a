"""Sites of what is not PyTorch: CuPy, JAX and a C++ program, by their own lines and bytes."""

import re

from harness.log import blocks, live
from harness.registry import check
from harness.stacks import by_site, longest, note_complete, placed, whole

MIB = 1 << 20


def record(context, outcome, name, command, env=None):
    """Records a program; its log and the rows of what it allocated, with their sites."""
    recording = context.record(outcome, name, command, env, timeout=60)
    outcome.expect_equal(f"{name}: exit code", recording.code, 0)
    log = recording.log
    outcome.expect_equal(f"{name}: losses", log.losses(), {})
    events = log.of(recording.said("PID")[0]["pid"])
    rows = placed(log, events[(events.op == "alloc") & events.level.isin(["device", "pool"])])
    outcome.table(f"allocations of {name}", by_site(rows)[:12])
    note_complete(outcome, log, f"{name}: ")
    return recording, rows


def at_site(rows, fits, level=None):
    """Sizes of what was allocated at the sites that fit, at one level or at any."""
    here = rows[[bool(fits(site)) for site in rows.site.fillna("")]]
    here = here if level is None else here[here.level == level]
    return [int(size) for size in here.size_bytes]


def compare_exact(outcome, name, rows, true, fits, shown):
    """One block at the place, of exactly the bytes; where else it is, if it is not there."""
    sizes = at_site(rows, fits, true["level"])
    elsewhere = rows[rows.size_bytes == true["bytes"]].site.tolist()
    outcome.expect(
        f"{name}: {true['bytes']} B at {shown}",
        sizes == [true["bytes"]],
        f"sizes there {sizes}; blocks of that size at {elsewhere}",
    )


def exactly(site):
    """Fits this site alone."""
    return lambda seen: seen == site


@check("sites-cupy", "CuPy: each array's bytes at its line", 80, packages=("cupy",))
def sites_cupy(context, outcome):
    recording, rows = record(context, outcome, "cupy", context.script("cupy_sites.py"))
    outcome.figure("CuPy version", recording.said("PID")[0]["version"])
    allocated = recording.said("ALLOC")
    outcome.expect_equal("arrays", len(allocated), 3)
    for true in allocated:
        compare_exact(outcome, "cupy", rows, true, exactly(true["site"]), true["site"])
    pool = [true["bytes"] for true in allocated if true["function"] == "pooled"]
    outcome.expect_equal(
        "CuPy's own total of its pool", recording.said("HELD")[0]["pool_bytes"], sum(pool)
    )
    stack = longest(recording.log, rows[rows.level == "device"].stack_id)
    if outcome.expect("a device block has a complete stack", stack is not None):
        outcome.table("whole stack: CuPy", whole(recording.log, stack))


# How JAX's allocator takes memory from the driver: in growing regions, all at once, by array.
JAX = {
    "jax-grow": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "jax-whole": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".10"},
    "jax-platform": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
}
# The granularity of the driver's memory, to which a pool may be rounded.
GRANULE = 2 * MIB


@check("sites-jax", "JAX: what XLA takes, at the lines that made it", 170, packages=("jax",))
def sites_jax(context, outcome):
    for name, env in JAX.items():
        recording, rows = record(context, outcome, name, context.script("jax_sites.py"), env)
        outcome.figure("JAX version", recording.said("PID")[0]["version"])
        allocated, held = recording.said("ALLOC"), recording.said("HELD")[0]
        outcome.expect_equal(f"{name}: arrays", len(allocated), 2)
        outcome.figure(f"{name}: XLA's own figures", held)
        if name == "jax-whole":
            compare_whole(outcome, name, rows, allocated, held)
        else:
            compare_each(outcome, name, rows, allocated)
        if "pool_bytes" in held:
            compare_pool(outcome, name, rows, held)
        stack = longest(recording.log, rows.stack_id)
        if stack is not None:
            outcome.table(f"whole stack: {name}", whole(recording.log, stack))


def compare_each(outcome, name, rows, allocated):
    """Each line took at least its bytes: a region of XLA's pool is at most twice as large."""
    for true in allocated:
        sizes = at_site(rows, exactly(true["site"]))
        elsewhere = rows[rows.size_bytes >= true["bytes"]].site.tolist()
        outcome.expect(
            f"{name}: {true['bytes']} B to twice that at {true['site']}",
            true["bytes"] <= sum(sizes) <= 2 * true["bytes"],
            f"sizes there {sizes}; blocks of that size or more at {elsewhere}",
        )


def compare_whole(outcome, name, rows, allocated, held):
    """One block for all, taken at the first line that needs memory."""
    limit = held["bytes_limit"]
    sizes = at_site(rows, exactly(allocated[0]["site"]))
    large = rows[rows.size_bytes >= MIB][["site", "size_bytes"]].values.tolist()
    outcome.expect(
        f"{name}: the pool of {limit} B at {allocated[0]['site']}",
        abs(max(sizes, default=0) - limit) < GRANULE,
        f"sizes there {sizes}; large blocks {large}",
    )
    later = at_site(rows, exactly(allocated[1]["site"]))
    outcome.expect(f"{name}: the second array takes nothing", sum(later) < MIB, later)


def compare_pool(outcome, name, rows, held):
    """XLA's own total: the driver gave at least that, and little beside it."""
    given, pool = int(rows.size_bytes.sum()), held["pool_bytes"]
    outcome.figure(f"{name}: bytes beside XLA's pool", given - pool)
    outcome.expect(
        f"{name}: XLA's pool_bytes are what the driver gave, but for 64 MiB",
        pool <= given <= pool + 64 * MIB,
        f"given {given}, pool_bytes {pool}",
    )


CPP = ("sites-shared", "sites-static", "sites-nodebug")


@check("sites-cpp", "a C++ program: file and line, or the function where no debug info is", 60, CPP)
def sites_cpp(context, outcome):
    for name in CPP:
        recording, rows = record(context, outcome, name, [context.built(name)])
        allocated = recording.said("ALLOC")
        outcome.expect_equal(f"{name}: blocks", len(allocated), recording.said("HELD")[0]["blocks"])
        for true in allocated:
            compare_exact(outcome, name, rows, true, cpp_site(name, true), cpp_shown(name, true))
        stack = longest(recording.log, rows.stack_id)
        if stack is not None:
            outcome.table(f"whole stack: {name}", whole(recording.log, stack))
        held = live(blocks(recording.log.events))
        held = held[held.level.isin(["device", "pool"])]
        outcome.expect_equal(
            f"{name}: live bytes at the end",
            int(held.size_bytes.sum()),
            sum(true["bytes"] for true in allocated),
        )


def cpp_shown(name, true):
    """The place as a site should name it."""
    if name == "sites-nodebug":
        return f"{true['outer']} ({name})"
    return f"sites.cu:{true['line']} {true['function']}"


def cpp_site(name, true):
    """Fits a site of that place; arguments and the like after the function's name may be there."""
    if name == "sites-nodebug":
        return re.compile(rf"{true['outer']}\b.*\({name}\)$").match
    return re.compile(rf"sites\.cu:{true['line']} {true['function']}\b").match
