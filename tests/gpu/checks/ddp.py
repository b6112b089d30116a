"""Two ranks under DDP: references close, totals, ranks; a stray context and a leak of one rank."""

import socket
import sys

import pandas as pd

from checks import steps as every_step
from checks import training
from harness.log import blocks, live, maps, references
from harness.registry import check
from harness.stacks import by_site, goes_through, longest, placed, whole

OWN_FILES = ("ddp_train.py:", "gpt_train.py:")
HANDLES = ("cuMemCreate", "cuMemImportFromShareableHandle")
# Kinds of findings that say that something grows.
GROWTH = ("leak", "growth")


def free_port():
    """A port of this host that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def train(context, outcome, name, *arguments):
    """Records a job that torchrun starts; its output, its log, what its ranks say of themselves."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2"]
    command += [f"--rdzv-id={name}", f"--master_port={free_port()}"]
    command += [context.sources / "ddp_train.py", *arguments]
    recording = context.record(outcome, name, command, timeout=110)
    outcome.expect_equal("exit code", recording.code, 0)
    outcome.expect_equal("losses", recording.log.losses(), {})
    ranks = sorted(recording.said("RANK"), key=lambda true: true["rank"])
    outcome.expect_equal("ranks", [true["rank"] for true in ranks], [0, 1])
    return recording, ranks


def report(context, outcome, name):
    """The report's findings."""
    return context.report(outcome, context.logs / name)[1]["findings"]


def compare_identity(outcome, log, true):
    """Rank, job and device of a process."""
    who, process = f"rank {true['rank']}", log.process(true["pid"])
    for column in ("rank", "local_rank", "world_size"):
        seen = process[column]
        outcome.expect_equal(f"{who}: {column}", None if pd.isna(seen) else int(seen), true[column])
    outcome.expect_equal(f"{who}: seen from the start", bool(process.from_start), True)
    events = log.of(true["pid"])
    taken = events[(events.op == "alloc") & (events.level == "device")]
    outcome.expect_equal(
        f"{who}: devices of its device memory",
        {str(uuid): int(n) for uuid, n in taken.gpu_uuid.value_counts(dropna=False).items()},
        {true["uuid"]: len(taken)},
    )


def compare_references(outcome, who, events):
    """What takes references and what drops them are as many; of one process or of several."""
    seen = references(events)
    outcome.figure(f"{who}: references", seen)
    outcome.expect(f"{who}: there are handles", seen["created"] > 0)
    outcome.expect(f"{who}: memory of another rank is imported", seen["imported"] > 0)
    taken = seen["created"] + seen["retained"] + seen["imported"]
    outcome.expect_equal(
        f"{who}: created + retained + imported = released", seen["released"], taken
    )
    outcome.expect_equal(f"{who}: mapped = unmapped", seen["unmapped"], seen["mapped"])
    outcome.expect_equal(f"{who}: unknown frees", seen["unknown_frees"], 0)
    handles = blocks(events)
    handles = handles[handles.api.isin(HANDLES)]
    uncalled = handles[handles.closed_by.isna() | handles.implicit.astype("boolean")]
    outcome.expect(
        f"{who}: every handle is freed by a call",
        uncalled.empty,
        uncalled[["api", "addr", "size_bytes", "closed_by"]].values[:5],
    )


def compare_end(outcome, who, events, destroyed_ns):
    """Nothing of NCCL's is left after its end; what no call freed is told apart."""
    held = live(blocks(events), destroyed_ns + 500_000_000)
    handles = held[held.api.isin(HANDLES)]
    outcome.expect(f"{who}: no handle is live after destroy", handles.empty, handles.addr.values)
    outcome.expect_equal(f"{who}: maps at the end", maps(events), {})
    freed = events[events.implicit & (events.op == "free")]
    sums = freed.groupby(["api", "level"]).delta_bytes.agg(["count", "sum"])
    outcome.figure(
        f"{who}: freed by no call",
        {f"{api}, {level}": [int(n), int(-s)] for (api, level), n, s in sums.itertuples()},
    )
    calls = sorted(set(freed.api[freed.api.str.contains("Free|Release$|Unmap")]))
    outcome.expect(f"{who}: no freeing call is said to be none", not calls, calls)
    level = events.groupby("level").delta_bytes.sum()
    outcome.expect_equal(
        f"{who}: sum(delta_bytes) by level", {k: int(v) for k, v in level.items() if v}, {}
    )


def compare_steps(outcome, log, true, steps):
    """PyTorch's totals and segments."""
    who = f"rank {true['rank']}: "
    events = log.of(true["pid"])
    every_step.compare_totals(outcome, log, log.process(true["pid"]).proc_id, steps, who)
    every_step.compare_segments(outcome, events, steps, who)


def nccl_sites(outcome, log, true):
    """Where NCCL's own memory is allocated: the user's line, or NCCL's own threads."""
    who, events = f"rank {true['rank']}", log.of(true["pid"])
    taken = placed(log, events[(events.op == "alloc") & (events.level == "device")])
    nccl = taken[goes_through(taken, "libnccl")]
    outcome.expect(f"{who}: NCCL's allocations are seen", not nccl.empty)
    # PyTorch's native allocator makes no handles: whatever does is NCCL.
    others = taken[(taken.api == "cuMemCreate") & ~goes_through(taken, "libnccl")]
    outcome.expect(
        f"{who}: libnccl is in the stack of every cuMemCreate",
        others.empty,
        others[["site", "size_bytes"]].values[:5],
    )
    strange = [site for site in nccl.site.unique() if not is_own_or_nccl(site)]
    outcome.expect(f"{who}: their sites are the program's lines or NCCL", not strange, strange)
    outcome.figure(f"{who}: NCCL's device bytes", int(nccl.size_bytes.sum()))
    outcome.figure(
        f"{who}: of them with a complete stack",
        round(float(nccl.complete.astype("boolean").fillna(False).mean()), 4),
    )
    outcome.table(f"NCCL's allocations, {who}", by_site(nccl))
    return nccl


def is_own_or_nccl(site):
    """A line of the program, or NCCL's library for its own threads."""
    return site.startswith((*OWN_FILES, "libnccl"))


def show_stacks(outcome, log, true, nccl):
    """The deepest stack of a tensor, and the one of NCCL's largest block."""
    usage = log.table("site_usage")
    own = usage[(usage.proc_id == log.process(true["pid"]).proc_id) & (usage.level == "tensor")]
    tensor = longest(log, own.stack_id.unique())
    if outcome.expect("a tensor has a complete stack", tensor is not None):
        outcome.table("whole stack: training", whole(log, tensor))
    largest = nccl.sort_values("size_bytes").stack_id.iloc[-1]
    outcome.figure("NCCL's largest block", int(nccl.size_bytes.max()))
    outcome.table("whole stack: NCCL's largest block", whole(log, int(largest)))


@check("ddp", "two ranks of DDP: references close, totals and ranks are true", 150, gpus=2)
def ddp(context, outcome):
    arguments = ["--steps", "200", "--every", "20"]
    recording, ranks = train(context, outcome, "ddp", *arguments)
    log = recording.log
    outcome.figure("NCCL version", ranks[0]["nccl"])
    jobs = {log.process(true["pid"]).job for true in ranks}
    outcome.expect_equal("job", jobs, {"ddp"})
    for true in ranks:
        rank, events = true["rank"], log.of(true["pid"])
        compare_identity(outcome, log, true)
        compare_references(outcome, f"rank {rank}", events)
        compare_end(
            outcome, f"rank {rank}", events, recording.said("DESTROYED", rank=rank)[0]["ns"]
        )
        steps = recording.said("STEP", rank=rank)
        outcome.expect_equal(f"rank {rank}: steps looked at", len(steps), 10)
        compare_steps(outcome, log, true, steps)
    compare_references(outcome, "both", log.events)
    whole_ = references(log.events)
    outcome.expect_equal("exported = imported", whole_["imported"], whole_["exported"])
    kinds = [f["kind"] for f in report(context, outcome, "ddp")]
    outcome.expect_equal("kinds of findings", kinds, ["nothing"])
    training.complete_share(outcome, log)
    nccl = [nccl_sites(outcome, log, true) for true in ranks]
    show_stacks(outcome, log, ranks[0], nccl[0])


def compare_stray(outcome, findings, log, ranks, true):
    """One finding: rank 1's context on rank 0's GPU, at the line that made it."""
    found = [f for f in findings if f["kind"] == "context"]
    outcome.figure("findings", [f["sentence"] for f in findings])
    if not outcome.expect_equal("findings of contexts", len(found), 1):
        return
    process, own = log.process(ranks[1]["pid"]), found[0]
    for key, expected in (
        ("rank", 1),
        ("pid", int(process.pid)),
        ("gpu_uuid", ranks[0]["uuid"]),
        ("main_gpu_uuid", ranks[1]["uuid"]),
        ("site", true["site"]),
    ):
        outcome.expect_equal(key, own[key], expected)
    devices = log.table("devices").drop_duplicates("gpu_uuid").set_index("gpu_uuid")
    number = int(devices.loc[ranks[0]["uuid"]].nvml_index)
    expected = f"rank 1 (pid {int(process.pid)}) held a context on GPU {number}"
    outcome.expect("the sentence names them", own["sentence"].startswith(expected), own["sentence"])
    outcome.figure("NVML's bytes of it", own["bytes"])


def contexts_of(log, pid):
    """The rows about contexts of a process, as evidence."""
    events = log.of(pid)
    rows = placed(log, events[events.op == "ctx"])
    rows = rows[rows.api.str.contains("Retain|Create|Release|Reset")]
    columns = ["api", "cuda_ordinal", "nvml_index", "result", "site", "complete"]
    return [dict(zip(columns, row, strict=True)) for row in rows[columns].values.tolist()]


def stray(context, outcome, name, what):
    """Rank 1 touches GPU 0; nothing but that is found."""
    arguments = ["--steps", "60", "--stray", what, "--file", context.logs / f"{name}.pt"]
    recording, ranks = train(context, outcome, name, *arguments)
    true = recording.said("STRAY")[0]
    outcome.figure("PyTorch's reserve on GPU 0 then", true["reserved"])
    outcome.table("rank 1's contexts", contexts_of(recording.log, ranks[1]["pid"]))
    findings = report(context, outcome, name)
    compare_stray(outcome, findings, recording.log, ranks, true)
    outcome.expect_equal("kinds", sorted(f["kind"] for f in findings), ["context", "nothing"])


@check("stray-context", "rank 1 loads weights onto GPU 0: found at its line", 120, gpus=2)
def stray_context(context, outcome):
    stray(context, outcome, "stray-context", "model")


@check("stray-tensor", "rank 1 makes one small tensor on GPU 0: found at its line", 120, gpus=2)
def stray_tensor(context, outcome):
    stray(context, outcome, "stray-tensor", "tensor")


@check("stray-checkpoint", "the same with the optimizer's state, once loaded", 120, gpus=2)
def stray_checkpoint(context, outcome):
    stray(context, outcome, "stray-checkpoint", "everything")


def leak(context, outcome, name, steps):
    """Rank 1 keeps a tensor a step: the report's findings, its pid and the line."""
    recording, ranks = train(context, outcome, name, "--steps", steps, "--leak-rank", "1")
    pid = int(recording.log.process(ranks[1]["pid"]).pid)
    findings = report(context, outcome, name)
    outcome.figure("findings", [f["sentence"] for f in findings])
    return findings, pid, recording.said("LEAK")[0]["line"]


@check("rank-leak", "rank 1 keeps a tensor a step: found at its line, rank 0 is not", 150, gpus=2)
def rank_leak(context, outcome):
    compare_leak(outcome, *leak(context, outcome, "rank-leak", "1500"))


@check("rank-leak-short", "the same in 500 steps: found, or said to be too short", 120, gpus=2)
def rank_leak_short(context, outcome):
    compare_short_leak(outcome, *leak(context, outcome, "rank-leak-short", "500"))


def compare_leak(outcome, findings, pid, line):
    """One finding, of rank 1, at its line; nothing else grows."""
    leaks = [f for f in findings if f["kind"] == "leak"]
    outcome.expect_equal("leaks: rank and pid", [(f["rank"], f["pid"]) for f in leaks], [(1, pid)])
    sites = [f["site"] for f in leaks]
    outcome.expect(
        f"it is at {line}", all((site or "").startswith(f"{line} ") for site in sites), sites
    )
    others = [f["sentence"] for f in findings if f["kind"] in GROWTH and f.get("rank") != 1]
    outcome.expect("nothing of rank 0", not others, others)
    outcome.expect_equal("kinds", [f["kind"] for f in findings], ["leak"])


def compare_short_leak(outcome, findings, pid, line):
    """A leak at its line, or a word that it is not known or too short; never that none grew."""
    if any(f["kind"] == "leak" for f in findings):
        compare_leak(outcome, findings, pid, line)
        return
    nothing = [f for f in findings if f["kind"] == "nothing"]
    claims = [f["sentence"] for f in nothing if not (f["not_judged"] or f.get("unclear"))]
    outcome.expect("nobody says that no process grew", not claims, claims)
