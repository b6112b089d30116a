"""Breakdown: the parts add up to NVML's figure exactly; what is unexplained is told."""

import pandas as pd

from checks import segments, w1
from harness.log import breakdown_sums
from harness.registry import check


@check(
    "breakdown",
    "the parts of every sample add up to NVML's figure; unexplained",
    180,
    ["w1-static"],
)
def breakdown(context, outcome):
    recordings = {
        "w1-static": lambda: w1.record(context, outcome, "static"),
        "w2-default": lambda: segments.record(context, outcome, "default"),
        "w2-expandable": lambda: segments.record(context, outcome, "expandable"),
    }
    rows = []
    for name, record in recordings.items():
        try:
            look_at(outcome, name, record(), rows)
        except Exception as error:  # the other programs are still worth looking at
            outcome.expect(f"{name} could be looked at", False, error)
        outcome.table("after READY", rows)


def look_at(outcome, name, recording, rows):
    """Every sample of one program."""
    log = recording.log
    pid = int(recording.program.match(r"^PID (\d+)")[1])
    ready_ns = recording.program.line_time_ns(r"^READY")
    table = log.table("breakdown")
    sums = breakdown_sums(table[table.proc_id == log.process(pid).proc_id])
    off = sums[sums.difference != 0]
    outcome.expect(
        f"{name}: every sample adds up exactly",
        off.empty and not sums.empty,
        f"{len(sums)} samples, off: {off.head(3).to_dict('records')}",
    )
    after = sums[sums.ts_ns >= ready_ns]
    outcome.expect(f"{name}: samples after READY", len(after) >= 1, f"{len(sums)} before it")
    outcome.expect(f"{name}: nothing is before attach", after.before_attach.dropna().empty)
    for sample in after.itertuples():
        row = {"program": name, "s after READY": round((sample.ts_ns - ready_ns) / 1e9, 2)}
        for column in ("nvml_used", "library", "tensors", "context", "modules", "unexplained"):
            value = getattr(sample, column)
            row[column] = None if pd.isna(value) else int(value)
        rows.append(row)
    unexplained = sorted({int(b) for b in after.unexplained.dropna()})
    outcome.figure(f"{name}: unexplained bytes after READY", unexplained)
    outcome.figure(f"{name}: samples", len(sums))
    reading = log.table("device_samples").read_ns
    outcome.figure(f"{name}: ns of an NVML memory reading, median", int(reading.median()))
