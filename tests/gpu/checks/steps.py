"""torch_steps: PyTorch's totals and peaks at every step, and its segments among the live blocks."""

import json
import re

from harness.log import blocks, live, spots
from harness.registry import check

STEPS = 100
# A step's last call comes before its line, the next step's first one 0.55 s after it.
SLACK_NS = 500_000_000

TOTALS = {
    "allocated": "torch_allocated_bytes",
    "reserved": "torch_reserved_bytes",
    "max_allocated": "torch_peak_allocated_bytes",
    "max_reserved": "torch_peak_reserved_bytes",
}


def record(context, outcome):
    """The run, made once."""
    command = context.script("torch_steps.py", str(STEPS))
    return context.record(outcome, "torch-steps", command, timeout=105)


@check("torch-steps", "100 steps: totals, peaks and segments equal PyTorch's at each", 110)
def torch_steps(context, outcome):
    recording = record(context, outcome)
    output, log = recording.program.output, recording.log
    outcome.expect_equal("exit code", recording.code, 0)
    pid = int(recording.program.match(r"^PID (\d+)")[1])
    steps = [json.loads(line) for line in re.findall(r"^STEP (.*)", output, re.M)]
    outcome.expect_equal("steps", len(steps), STEPS)
    outcome.expect_equal("losses", log.losses(), {})
    proc_id = log.process(pid).proc_id
    compare_totals(outcome, log, proc_id, steps)
    compare_segments(outcome, log.of(pid), steps)


def at(rows, ns):
    """Last row at or before a time."""
    index = rows.ts_ns.searchsorted(ns, side="right")
    return None if index == 0 else rows.iloc[int(index) - 1]


def compare_totals(outcome, log, proc_id, steps, who=""):
    """The last rows of each step; `who` begins what is expected, where there are several."""
    usage = log.table("site_usage")
    usage = usage[(usage.proc_id == proc_id) & (usage.level == "tensor") & (usage.stack_id == 0)]
    usage = usage.sort_values("ts_ns").reset_index(drop=True)
    samples = log.table("process_samples")
    samples = samples[(samples.proc_id == proc_id) & samples.torch_reserved_bytes.notna()]
    samples = samples.sort_values("ts_ns").reset_index(drop=True)
    wrong = {"site_usage": [], **{column: [] for column in TOTALS.values()}}
    for step in steps:
        row = at(usage, step["ns"] + SLACK_NS)
        seen = None if row is None else int(row.live_bytes)
        if seen != step["allocated"]:
            wrong["site_usage"].append((step["step"], seen, step["allocated"]))
        row = at(samples, step["ns"] + SLACK_NS)
        for key, column in TOTALS.items():
            seen = None if row is None else int(row[column])
            if seen != step[key]:
                wrong[column].append((step["step"], seen, step[key]))
    for what, steps_wrong in wrong.items():
        outcome.expect(
            f"{who}{what} equals PyTorch's at every step",
            not steps_wrong,
            f"{len(steps_wrong)} steps differ (step, seen, true): {steps_wrong[:5]}",
        )
    outcome.figure(f"{who}rows of totals", len(samples))


def compare_segments(outcome, events, steps, who=""):
    """Every segment is a live block at every step; the sum less a constant is what is reserved."""
    every = blocks(events)
    every = every[(every.level == "device") & (every.api == "cuMemAlloc_v2")]
    missing, rests = [], []
    for step in steps:
        held = live(every, step["ns"] + SLACK_NS // 2)
        seen = spots(held)
        segments = {(addr, size) for addr, size in step["segments"]}
        if segments - seen:
            missing.append((step["step"], sorted(segments - seen)[:3]))
        rests.append(sum(size for _, size in seen) - step["reserved"])
    outcome.expect(f"{who}every segment is a live block at every step", not missing, missing[:5])
    outcome.expect(
        f"{who}live cuMemAlloc_v2 bytes less a constant equal memory_reserved at every step",
        len(set(rests)) == 1,
        f"rest by step: {rests}",
    )
    outcome.figure(f"{who}live bytes that are not PyTorch's", rests[-1] if rests else None)
    outcome.figure(f"{who}segments opened", len(every))
    most = max((step["reserved"] for step in steps), default=None)
    outcome.figure(f"{who}most reserved", most)
