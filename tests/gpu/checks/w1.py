"""w1: plain, virtual-memory and other threads' leaks, refused calls, pairs; by address."""

import re

from harness.log import blocks, live, maps, seq_gaps
from harness.registry import check

# Long enough for NVML's process list to be read a few times after READY.
HOLD_S = 8
PAIRS = 2000


def record(context, outcome, cudart):
    """One recording of w1 a way of linking, shared by the checks that look at it."""
    command = [context.built(f"w1-{cudart}"), str(PAIRS), str(HOLD_S)]
    return context.record(outcome, f"w1-{cudart}", command, timeout=50)


def truth(output):
    """What w1 said."""
    blocks_said = [
        (word, kind, int(addr, 16), int(size), int(tid))
        for word, kind, addr, size, tid in re.findall(
            r"^(LEAK|FREED) (\w+) (0x[0-9a-f]+) (\d+) tid=(\d+)", output, re.M
        )
    ]
    sums = dict(re.findall(r"(\w+)=(\d+)", re.search(r"^TRUE (.*)", output, re.M)[1]))
    counts = dict(re.findall(r"(\w+)=(\d+)", re.search(r"^COUNTS (.*)", output, re.M)[1]))
    return {
        "pid": int(re.search(r"^PID (\d+)", output, re.M)[1]),
        "leaks": [b[1:] for b in blocks_said if b[0] == "LEAK"],
        "freed": [b[1:] for b in blocks_said if b[0] == "FREED"],
        "sums": {key: int(value) for key, value in sums.items()},
        "counts": {key: int(value) for key, value in counts.items()},
    }


def holders(held):
    """(address, size, tid) -> how often it is live, of blocks of `cuMemAlloc_v2`."""
    plain = held[(held.level == "device") & (held.api == "cuMemAlloc_v2")]
    return sorted(
        (int(a), int(s), int(t)) for a, s, t in zip(plain.addr, plain.size_bytes, plain.tid)
    )


def compare_leaks(outcome, true, events):
    """Live blocks against LEAK lines, one by one, both ways."""
    held = live(blocks(events))
    plain = [(a, s, t) for kind, a, s, t in true["leaks"] if kind in ("plain", "thread")]
    seen = holders(held)
    missing = sorted(set(plain) - set(seen))
    extra = sorted(set(seen) - set(plain))
    outcome.expect_equal("LEAK lines of cudaMalloc", len(plain), 14)
    outcome.expect(
        "every plain and thread leak is live: address, size, thread", not missing, missing
    )
    outcome.expect("nothing else of cuMemAlloc_v2 is live", not extra, extra)

    mapped = maps(events)
    created = held[(held.level == "device") & (held.api == "cuMemCreate")]
    sizes = {int(i): int(s) for i, s in zip(created.alloc_id, created.size_bytes)}
    wrong, handles = [], set()
    for kind, addr, size, _ in true["leaks"]:
        if kind == "vmm":
            map_size, alloc_id = mapped.get(addr, (None, None))
            handles.add(alloc_id)
            if map_size != size or sizes.get(alloc_id) != size:
                wrong.append((hex(addr), map_size, sizes.get(alloc_id)))
    outcome.expect("every vmm leak is mapped and its handle never released", not wrong, wrong)
    outcome.expect_equal("live handles", set(sizes), handles)
    return held, sizes


def compare_sums(outcome, true, held, sizes):
    """Bytes by group against the TRUE line."""
    size_of = {(int(a), int(t)): int(s) for a, s, t in holders(held)}
    for kind in ("plain", "thread"):
        seen = sum(size_of.get((a, t), 0) for k, a, _, t in true["leaks"] if k == kind)
        outcome.expect_equal(f"bytes of {kind} leaks", seen, true["sums"][f"{kind}_bytes"])
    outcome.expect_equal("bytes of vmm leaks", sum(sizes.values()), true["sums"]["vmm_bytes"])


def compare_freed(outcome, true, events):
    """FREED lines: each closed by a call."""
    every = blocks(events)
    wrong = []
    for _, addr, size, tid in true["freed"]:
        found = every[(every.addr == addr) & (every.size_bytes == size) & (every.tid == tid)]
        if len(found) != 1 or found.iloc[0].closed_by != "cuMemFree_v2":
            wrong.append((hex(addr), found[["size_bytes", "closed_by"]].to_dict("records")))
    outcome.expect_equal("FREED lines", len(true["freed"]), 4)
    outcome.expect("every freed block is closed by cuMemFree_v2", not wrong, wrong)


def compare_counts(outcome, true, events, log):
    """Rows by function against the COUNTS line."""
    counts = true["counts"]

    def rows(op, prefix):
        named = events.api.isin([prefix, prefix + "_ptsz"])
        return int(((events.op == op) & named & ~events.implicit).sum())

    outcome.expect_equal("cudaMalloc", rows("alloc", "cuMemAlloc_v2"), counts["cudaMalloc"])
    # cudaFree(0), an idiom of initialisation, is no row.
    outcome.expect_equal("cudaFree", rows("free", "cuMemFree_v2"), counts["cudaFree"] - 1)
    outcome.expect_equal(
        "cudaMallocAsync", rows("alloc", "cuMemAllocAsync"), counts["cudaMallocAsync"]
    )
    outcome.expect_equal("cudaFreeAsync", rows("free", "cuMemFreeAsync"), counts["cudaFreeAsync"])
    outcome.expect_equal("cuMemCreate", rows("alloc", "cuMemCreate"), counts["cuMemCreate"])
    failed = events[events.op == "fail"]
    outcome.expect_equal("failed calls", len(failed), true["sums"]["failed_calls"])
    refused = failed[(failed.api == "cuMemAlloc_v2") & (failed.size_bytes == 1 << 50)]
    outcome.expect_equal("refused calls of 1 PiB", len(refused), counts["cudaMalloc_failed"])
    outcome.figure("results of failed calls", sorted({int(code) for code in failed.result}))
    oom = log.table("oom")
    outcome.expect_equal("rows of oom", len(oom), int((failed.result == 2).sum()))


def compare_identity(outcome, true, log, events):
    """Who did it: pid, device, from the start, exit code; and the order of the rows."""
    row = log.process(true["pid"])
    pids = sorted({int(pid) for pid in events.pid})
    outcome.expect_equal("pid of every event", pids, [int(row.pid)])
    outcome.expect(
        "the leaks of threads have tids of their own",
        all(t != true["pid"] for kind, _, _, t in true["leaks"] if kind == "thread"),
    )
    outcome.expect_equal("seen from the start", bool(row.from_start), True)
    outcome.expect_equal(
        "exit code in processes", None if row.exit_code is None else int(row.exit_code), 0
    )
    held = live(blocks(events))
    known = held[held.level == "device"].gpu_uuid.notna()
    outcome.expect(
        "every live device block has its GPU", known.all(), f"{int((~known).sum())} have none"
    )
    outcome.expect_equal("gaps in seq", seq_gaps(log.events), 0)
    outcome.expect_equal("losses", log.losses(), {})
    libraries = log.table("process_libs")
    libcuda = libraries[libraries.kind == "libcuda"]
    outcome.figure(
        "functions of libcuda probed / available",
        sorted({(int(a), int(b)) for a, b in zip(libcuda.probes, libcuda.probes_available)}),
    )


def w1(context, outcome, cudart):
    """All of it."""
    recording = record(context, outcome, cudart)
    outcome.expect_equal("exit code", recording.code, 0)
    recording.program.match(r"^COUNTS ")
    true = truth(recording.program.output)
    log = recording.log
    events = log.of(true["pid"])
    outcome.figure("events", len(events))
    outcome.figure("bytes of the log an event", round(log.size_bytes() / max(1, len(events)), 1))
    held, sizes = compare_leaks(outcome, true, events)
    compare_sums(outcome, true, held, sizes)
    compare_freed(outcome, true, events)
    compare_counts(outcome, true, events, log)
    compare_identity(outcome, true, log, events)
    program, said = context.report(outcome, log.path)
    outcome.expect_equal("exit code of report", program.code, 0)
    outcome.expect("report --json is JSON", said is not None, program.error[-300:])
    pairs = re.findall(r"^PAIRS (\w+) .*ns_median_block=(\d+)", recording.program.output, re.M)
    for mode, median in pairs:
        outcome.figure(f"ns a {mode} pair, recorded", int(median))


@check("w1-shared", "w1, libcudart.so: leaks by address, counts, sums", 110, ["w1-shared"])
def w1_shared(context, outcome):
    w1(context, outcome, "shared")


@check("w1-static", "w1, static cudart: leaks by address, counts, sums", 90, ["w1-static"])
def w1_static(context, outcome):
    w1(context, outcome, "static")
