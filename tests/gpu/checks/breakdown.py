"""Breakdown: the parts add up to NVML's figure exactly; what is unexplained is told, and little."""

import pandas as pd

from checks import segments, steps, w1
from harness.log import breakdown_sums
from harness.registry import check

MIB = 1 << 20
# What may be unexplained of a process: 2 % of what NVML charges, or this.
ALLOWED = 16 * MIB


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


# Programs, each with its environment: PyTorch with each of its allocators, and others.
PROGRAMS = {
    "gpt-native": (["gpt_train.py", "--steps", "400"], {}),
    "gpt-expandable": (
        ["gpt_train.py", "--steps", "400"],
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "gpt-async": (
        ["gpt_train.py", "--steps", "400"],
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    ),
    "inference": (["grow_cache.py", "8"], {}),
    "cupy": (["cupy_sites.py"], {}),
    "jax": (["jax_sites.py"], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
}


@check(
    "closure",
    "training, inference, CuPy, JAX: what is unexplained is at most 2 % or 16 MiB",
    420,
    packages=("cupy", "jax"),
)
def closure(context, outcome):
    rows = []
    for name, (command, env) in PROGRAMS.items():
        recording = context.record(outcome, name, context.script(*command), env, timeout=120)
        outcome.expect_equal(f"{name}: exit code", recording.code, 0)
        closes(outcome, name, recording, rows)
    outcome.table("samples after the warm-up", rows)


def closes(outcome, name, recording, rows):
    """Every sample after the warm-up (READY, or the first half) closes."""
    table = recording.log.table("breakdown")
    sums = breakdown_sums(table[table.proc_id != 0])
    try:
        ready_ns = recording.program.line_time_ns(r"^READY")
    except RuntimeError:
        ready_ns = sums.ts_ns.median()
    after = sums[sums.ts_ns >= ready_ns]
    outcome.expect(f"{name}: samples after the warm-up", len(after) >= 1, len(after))
    outcome.expect_equal(f"{name}: sums that are off", int((sums.difference != 0).sum()), 0)
    allowed = (after.nvml_used * 0.02).clip(lower=ALLOWED)
    worst = after[after.unexplained.abs() > allowed]
    outcome.expect(
        f"{name}: unexplained",
        worst.empty,
        f"{len(worst)} of {len(after)} samples: {worst.tail(3).to_dict('records')}",
    )
    for sample in after.tail(1).itertuples():
        parts = ["nvml_used", "tensors", "reusable", "returnable", "cached", "library", "pools"]
        parts += ["context", "modules", "rounding", "unexplained"]
        values = {part: getattr(sample, part, None) for part in parts}
        mib = {k: None if pd.isna(v) else round(int(v) / MIB, 1) for k, v in values.items()}
        rows.append({"program": name, **mib})


@check("breakdown-steps", "the breakdown's tensors are PyTorch's between 100 steps", 100)
def breakdown_steps(context, outcome):
    recording = steps.record(context, outcome)
    said = recording.said("STEP")
    table = recording.log.table("breakdown")
    tensors = table[(table.category == "tensors")].sort_values("ts_ns")
    outcome.expect("samples", len(tensors) >= 40, len(tensors))
    compared, wrong = 0, []
    for sample in tensors.itertuples():
        before = [step for step in said if step["ns"] < sample.ts_ns]
        # A program that sleeps: from a step's word until half a second later nothing changes.
        if before and sample.ts_ns - before[-1]["ns"] < 450_000_000:
            compared += 1
            if int(sample.bytes) != before[-1]["allocated"]:
                wrong.append((before[-1]["step"], int(sample.bytes), before[-1]["allocated"]))
    outcome.expect("samples between steps", compared >= 30, compared)
    outcome.expect(f"{compared} samples equal PyTorch's total", not wrong, wrong[:5])
