"""w2: 200 MiB of tensors; PyTorch's own segments against the log, with both allocators."""

import re

from harness.log import blocks, live, maps, merged, spots
from harness.registry import check

HOLD_S = 8
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def record(context, outcome, kind):
    """One recording of w2 an allocator, shared by the checks that look at it."""
    env = EXPANDABLE if kind == "expandable" else None
    command = context.script("w2.py", str(HOLD_S))
    return context.record(outcome, f"w2-{kind}", command, env, timeout=75)


def last(rows, column):
    """Last value of a column that is known, or None."""
    rows = rows[rows[column].notna()].sort_values("ts_ns")
    return None if rows.empty else int(rows.iloc[-1][column])


def compare_totals(outcome, log, proc_id, at_ns, allocated, reserved):
    """PyTorch's totals, as the log has them last at a time."""
    usage = log.table("site_usage")
    usage = usage[(usage.proc_id == proc_id) & (usage.level == "tensor") & (usage.ts_ns <= at_ns)]
    samples = log.table("process_samples")
    samples = samples[(samples.proc_id == proc_id) & (samples.ts_ns <= at_ns)]
    outcome.expect_equal("site_usage: tensor bytes", last(usage, "live_bytes"), allocated)
    outcome.expect_equal(
        "process_samples: torch_allocated", last(samples, "torch_allocated_bytes"), allocated
    )
    outcome.expect_equal(
        "process_samples: torch_reserved", last(samples, "torch_reserved_bytes"), reserved
    )


def compare_segments(outcome, events, at_ns, segments, reserved):
    """Default allocator: a segment is a live block of cuMemAlloc_v2."""
    held = live(blocks(events), at_ns)
    held = held[(held.level == "device") & (held.api == "cuMemAlloc_v2")]
    seen = spots(held)
    missing = sorted(set(segments) - seen)
    outcome.expect("every segment is a live block: address and size", not missing, missing)
    outcome.expect_equal("sum of the segments", sum(size for _, size in segments), reserved)
    others = sorted(seen - set(segments))
    outcome.figure("live blocks that are not PyTorch's", len(others))
    outcome.figure("bytes of them", sum(size for _, size in others))


def compare_maps(outcome, events, at_ns, segments, reserved):
    """Expandable segments: live maps cover the segments exactly, live handles add up to them."""
    held = live(blocks(events), at_ns)
    held = held[(held.level == "device") & (held.api == "cuMemCreate")]
    mapped = maps(events, at_ns)
    covered = merged((addr, size) for addr, (size, _) in mapped.items())
    outcome.expect_equal("live maps cover the segments exactly", covered, merged(segments))
    outcome.expect_equal("sum of the segments", sum(size for _, size in segments), reserved)
    outcome.expect_equal("sum of live handles", int(held.size_bytes.sum()), reserved)
    behind = {alloc_id for _, alloc_id in mapped.values()}
    outcome.expect_equal("handles behind the maps", behind, {int(i) for i in held.alloc_id})
    outcome.figure("live maps", len(mapped))


def w2(context, outcome, kind):
    """One allocator."""
    recording = record(context, outcome, kind)
    output, log = recording.program.output, recording.log
    outcome.expect_equal("exit code", recording.code, 0)
    outcome.expect_equal("losses", log.losses(), {})
    pid = int(recording.program.match(r"^PID (\d+)")[1])
    segments = [
        (int(addr, 16), int(size))
        for addr, size in re.findall(r"^LEAK segment (0x[0-9a-f]+) (\d+)", output, re.M)
    ]
    true = recording.program.match(r"^TRUE allocated_bytes=(\d+) reserved_bytes=(\d+)")
    allocated, reserved = int(true[1]), int(true[2])
    at_ns = recording.program.line_time_ns(r"^READY") + 500_000_000
    events = log.of(pid)
    proc_id = log.process(pid).proc_id
    compare_totals(outcome, log, proc_id, at_ns, allocated, reserved)
    compare = compare_maps if kind == "expandable" else compare_segments
    compare(outcome, events, at_ns, segments, reserved)
    outcome.figure("segments", len(segments))
    outcome.figure("reserved bytes", reserved)
    outcome.figure(
        "events by function",
        {f"{op} {api}": int(n) for (op, api), n in events.groupby(["op", "api"]).size().items()},
    )


@check("w2-default", "PyTorch's segments and totals, native allocator", 90)
def w2_default(context, outcome):
    w2(context, outcome, "default")


@check("w2-expandable", "PyTorch's segments and totals, expandable segments", 90)
def w2_expandable(context, outcome):
    w2(context, outcome, "expandable")
