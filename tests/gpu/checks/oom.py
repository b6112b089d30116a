"""Out of memory, four ways: the report names line and cause, and the program goes on as before."""

from harness.registry import check

KINDS = {
    "too-large": "too_large",
    "leak": "growth",
    "fragmented": "fragmentation",
    "other": "other_processes",
}


@check("oom-kinds", "four kinds of out of memory: line, cause, who held what", 240)
def oom_kinds(context, outcome):
    rows = []
    for kind, cause in KINDS.items():
        holder = None
        if kind == "other":
            holder = context.start(outcome, context.script("oom_kinds.py", "hold"), stdin=True)
            while not (holder.next_line(60) or "HOLD").startswith("HOLD"):
                pass
        name = f"oom-{kind}"
        command = context.script("oom_kinds.py", kind)
        recording = context.record(outcome, name, command, timeout=120)
        if holder:
            holder.say("")
            holder.wait(30)
        look_at(context, outcome, kind, cause, recording, rows)
    outcome.table("findings", rows)


def look_at(context, outcome, kind, cause, recording, rows):
    """What the report says of one of them."""
    outcome.expect_equal(f"{kind}: exit code", recording.code, 0)
    outcome.expect_equal(f"{kind}: PyTorch raised", len(recording.said("TOLD")), 1)
    after = recording.said("AFTER")
    outcome.expect_equal(f"{kind}: it goes on", after, [{"sum": 1000.0, "again": 1000}])
    asked = recording.said("OOM")[0]
    report = context.report(outcome, context.logs / f"oom-{kind}")[1]
    refusals = [f for f in report["findings"] if f["kind"] == "out_of_memory"]
    by_torch = [f for f in refusals if f["api"] == "c10"]
    outcome.expect_equal(f"{kind}: PyTorch's refusals", len(by_torch), 1)
    for refusal in by_torch:
        rows.append({"kind": kind, "sentence": refusal["sentence"]})
        outcome.expect(
            f"{kind}: it is at {asked['line']}",
            (refusal["site"] or "").startswith(asked["line"]),
            refusal["site"],
        )
        outcome.expect_equal(f"{kind}: cause", refusal["cause"], cause)
        outcome.expect_equal(f"{kind}: outcome", refusal["outcome"], "raised")
        outcome.expect(f"{kind}: somebody held memory", bool(refusal["holders"]))
        for holder in refusal["holders"]:
            sums = holder["breakdown"]
            total = sum(part["bytes"] for part in sums["parts"])
            outcome.expect_equal(
                f"{kind}: parts of pid {holder['pid']}", total, sums["nvml_used_bytes"]
            )
    outcome.expect_equal(f"{kind}: losses", recording.log.losses(), {})
