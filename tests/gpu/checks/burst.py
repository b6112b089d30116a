"""burst: 8 threads that allocate and free as fast as they can; seen + lost = made."""

import re

from harness.log import blocks, live, seq_gaps, spots
from harness.registry import check

THREADS = 8
APIS = {
    "async": (
        ("cuMemAllocAsync", "cuMemAllocAsync_ptsz"),
        ("cuMemFreeAsync", "cuMemFreeAsync_ptsz"),
    ),
    "sync": (("cuMemAlloc_v2",), ("cuMemFree_v2",)),
}


def said(line):
    """Figures of the BURST line."""
    return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", line)}


def compare_held(outcome, output, events, level):
    """The blocks that the threads keep, by address."""
    held = live(blocks(events))
    held = held[held.level == level]
    seen = sorted(spots(held))
    true = sorted(
        (int(addr, 16), int(size))
        for addr, size in re.findall(r"^LEAK held (0x[0-9a-f]+) (\d+)", output, re.M)
    )
    outcome.expect_equal("blocks held", len(true), THREADS)
    outcome.expect_equal("live blocks by address and size", seen, true)


def burst(context, outcome, mode, pairs):
    """Without the agent, then with it."""
    program = context.built("burst")
    command = [program, str(THREADS), str(pairs), mode, "1"]
    alone = said(context.run(outcome, command, timeout=45).match(r"^BURST (.*)")[1])
    recording = context.record(outcome, f"burst-{mode}", command, timeout=70)
    outcome.expect_equal("exit code", recording.code, 0)
    output, log = recording.program.output, recording.log
    figures = said(recording.program.match(r"^BURST (.*)")[1])
    pid = int(recording.program.match(r"^PID (\d+)")[1])
    events = log.of(pid)
    alloc_apis, free_apis = APIS[mode]
    allocs = int(((events.op == "alloc") & events.api.isin(alloc_apis)).sum())
    frees = int(((events.op == "free") & events.api.isin(free_apis) & ~events.implicit).sum())
    made, lost = int(figures["allocs"] + figures["frees"]), log.lost_calls()
    outcome.expect_equal("seen + lost = made", allocs + frees + lost, made)
    outcome.expect_equal("gaps in seq", seq_gaps(log.events), 0)
    if not log.losses():
        compare_held(outcome, output, events, "pool" if mode == "async" else "device")
    outcome.figure("made", made)
    outcome.figure("lost", log.losses())
    outcome.figure("calls a second", round(made / (figures["wall_ms"] / 1e3)))
    for key in ("wall_ms", "ns_per_pair_per_thread"):
        outcome.figure(f"{key} alone", alone[key])
        outcome.figure(f"{key} recorded", figures[key])
    outcome.figure("ratio", round(figures["wall_ms"] / alone["wall_ms"], 3))
    outcome.figure("bytes of the log an event", round(log.size_bytes() / max(1, len(events)), 1))


@check("burst-async", "160,000 cudaMallocAsync pairs from 8 threads", 120, ["burst"])
def burst_async(context, outcome):
    burst(context, outcome, "async", 20_000)


@check("burst-sync", "32,000 cudaMalloc pairs from 8 threads", 120, ["burst"])
def burst_sync(context, outcome):
    burst(context, outcome, "sync", 4_000)


@check("brake", "3,200,000 cudaMallocAsync pairs from 8 threads, with a limit of 2 %", 120, ["burst"])
def brake(context, outcome):
    """The program loses the two functions that it calls, pays for them no longer, and is unharmed."""
    command = [context.built("burst"), str(THREADS), "400000", "async", "1"]
    alone = said(context.run(outcome, command, timeout=60).match(r"^BURST (.*)")[1])
    recording = context.record(outcome, "brake", command, timeout=90, max_overhead="2")
    outcome.expect_equal("exit code", recording.code, 0)
    figures = said(recording.program.match(r"^BURST (.*)")[1])
    log = recording.log
    notes = log.table("annotations")
    brakes = notes[notes.kind == "brake"]
    outcome.expect_equal("steps", len(brakes), 1)
    outcome.expect("it is said", "the probes cost pid" in recording.program.error)
    losses = log.losses()
    outcome.expect_equal("functions that it lost", losses.get("brake"), 2)
    events = log.of(int(recording.program.match(r"^PID (\d+)")[1]))
    seen = int(events.api.isin(APIS["async"][0] + APIS["async"][1]).sum())
    made = int(figures["allocs"] + figures["frees"])
    outcome.expect("seen + lost < made", seen + log.lost_calls() < made)
    outcome.figure("made", made)
    outcome.figure("seen", seen)
    outcome.figure("lost", losses)
    outcome.figure("said", brakes.text.iloc[0] if len(brakes) else None)
    for key in ("wall_ms", "ns_per_pair_per_thread"):
        outcome.figure(f"{key} alone", alone[key])
        outcome.figure(f"{key} with the brake", figures[key])
    outcome.figure("ratio", round(figures["wall_ms"] / alone["wall_ms"], 3))
