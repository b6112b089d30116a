"""References of virtual-memory handles: they close exactly, also through a refused request."""

import json
import re

from harness.log import blocks, live, maps, merged, references, seq_gaps
from harness.registry import check


@check(
    "vmm-refs",
    "two processes share memory by fd, NCCL's teardown: references close",
    60,
    ["vmm_refs"],
)
def vmm_refs(context, outcome):
    recording = context.record(outcome, "vmm-refs", [context.built("vmm_refs"), "4"], timeout=40)
    outcome.expect_equal("exit code", recording.code, 0)
    output, log = recording.program.output, recording.log
    said = [
        {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
        for line in re.findall(r"^REFS (.*)", output, re.M)
    ]
    outcome.expect_equal("processes", len(said), 2)
    for true in said:
        pid = true.pop("pid")
        who = "parent" if true["created"] else "child"
        seen = references(log.of(pid))
        for key, value in true.items():
            outcome.expect_equal(f"{who}: {key}", seen[key], value)
        outcome.expect_equal(f"{who}: unknown frees", seen["unknown_frees"], 0)
        outcome.expect_equal(f"{who}: maps at the end", maps(log.of(pid)), {})
        # A forked child may enter cuInit before its probes are in place: it is complete all the
        # same, since no call before the end of cuInit can hold memory.
        if who == "parent":
            from_start = bool(log.process(pid).from_start)
            outcome.expect_equal(f"{who}: seen from the start", from_start, True)
    whole = references(log.events)
    taken = whole["created"] + whole["retained"] + whole["imported"]
    outcome.expect_equal("created + retained + imported = released", whole["released"], taken)
    held = live(blocks(log.events))
    outcome.expect("nothing is live at the end", held.empty, held[["api", "level", "addr"]].values)
    compare_shared(outcome, output, log)
    outcome.expect_equal("losses", log.losses(), {})
    outcome.figure("references", whole)


def compare_shared(outcome, output, log):
    """SHARED lines: handle and size of each block on both sides."""
    every = blocks(log.events)
    for what, level in (("created", "device"), ("imported", "imported")):
        lines = re.findall(rf"^SHARED {what} pid=\d+ (0x[0-9a-f]+) (\d+)", output, re.M)
        true = sorted((int(handle, 16), int(size)) for handle, size in lines)
        rows = every[every.level == level]
        outcome.expect_equal(
            f"handles {what}", sorted(int(a) for a in rows.addr), [a for a, _ in true]
        )
        if level == "device":
            outcome.expect_equal(
                "their sizes", sorted(int(s) for s in rows.size_bytes), sorted(s for _, s in true)
            )
    # The size of an import is known from its first map.
    imports = log.events[(log.events.op == "map") & (log.events.level == "imported")]
    outcome.expect_equal(
        "bytes imported",
        int(imports.delta_bytes.sum()),
        sum(int(size) for size in re.findall(r"^SHARED imported .* (\d+)$", output, re.M)),
    )
    sums = log.events.groupby("level").delta_bytes.sum()
    outcome.expect_equal("sum(delta_bytes) by level", {k: int(v) for k, v in sums.items() if v}, {})


@check("nccl", "NCCL with one rank: created + retained + imported = released", 80)
def nccl(context, outcome):
    recording = context.record(outcome, "nccl", context.script("nccl1.py"), timeout=70)
    outcome.expect_equal("exit code", recording.code, 0)
    output, log = recording.program.output, recording.log
    outcome.expect_equal("losses", log.losses(), {})
    events = log.of(int(recording.program.match(r"^PID (\d+)")[1]))
    seen = references(events)
    outcome.figure("references", seen)
    said = re.search(r"^ALLREDUCE (\S+) (\S+)", output, re.M)
    outcome.figure("NCCL version", said[2] if said else None)
    if seen["created"]:
        taken = seen["created"] + seen["retained"] + seen["imported"]
        outcome.expect_equal("created + retained + imported = released", seen["released"], taken)
        at_ns = int(recording.program.match(r"^DESTROYED (\d+)")[1]) + 500_000_000
        held = live(blocks(events), at_ns)
        held = held[held.api == "cuMemCreate"]
        outcome.expect(
            "no handle is live after destroy", held.empty, held[["addr", "size_bytes"]].values
        )


@check("oom", "a refused 4 TiB with expandable segments: every handle closes", 90)
def oom(context, outcome):
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    recording = context.record(outcome, "oom", context.script("expandable_oom.py"), env, timeout=80)
    output, log = recording.program.output, recording.log
    outcome.expect_equal("exit code", recording.code, 0)
    refused = recording.program.match(r"^REFUSED (\w+) seconds=([\d.]+)")
    outcome.expect_equal("the request was refused", refused[1], "True")
    outcome.expect("the program's data is whole", "SUM True" in output)
    outcome.figure("seconds of the refused request", float(refused[2]))
    outcome.expect_equal("losses", log.losses(), {})
    outcome.expect_equal("gaps in seq", seq_gaps(log.events), 0)
    pid = int(recording.program.match(r"^PID (\d+)")[1])
    events = log.of(pid)
    outcome.figure("references", references(events))
    outcome.expect("refused cuMemCreate calls are seen", references(events)["refused"] >= 1)
    outcome.expect("rows of oom", len(log.table("oom")) >= 1)
    for line in re.findall(r"^HELD (.*)", output, re.M):
        compare_held(outcome, events, json.loads(line))


def compare_held(outcome, events, true):
    """One HELD line: segments, maps, handles and references at that time."""
    when, at_ns = true["when"], true["ns"] + 300_000_000
    before = events[events.ts_ns <= at_ns]
    held = live(blocks(events), at_ns)
    held = held[(held.level == "device") & (held.api == "cuMemCreate")]
    mapped = maps(events, at_ns)
    segments = [(addr, size) for addr, size in true["segments"]]
    covered = merged((addr, size) for addr, (size, _) in mapped.items())
    outcome.expect_equal(f"{when}: maps cover the segments exactly", covered, merged(segments))
    outcome.expect_equal(
        f"{when}: live handles add up", int(held.size_bytes.sum()), true["reserved"]
    )
    handles = {alloc_id for _, alloc_id in mapped.values()}
    outcome.expect_equal(f"{when}: handles behind maps", handles, {int(i) for i in held.alloc_id})
    count = references(before)
    open_ = count["created"] + count["retained"] + count["imported"] - count["released"]
    outcome.expect_equal(f"{when}: created - released = live", open_, len(held))
    outcome.figure(f"live handles {when}", len(held))
