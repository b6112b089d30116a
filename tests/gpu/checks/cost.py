"""What recording costs a call: one process, the agent attached and gone in turn."""

import signal
import time

from harness.log import Log
from harness.programs import proc_cpu_seconds, proc_memory
from harness.registry import check
from harness.windows import summary, windows, within

CYCLES = 6
HOLD_S = 1.3
# Probes come and go for this long around the moment that the agent tells.
SETTLE_NS = 250_000_000

# Measured on another H200 with the same driver branch, sync and async pairs alone at 94 and 1.3 us.
PEERS = [
    {"tool": "GPUprobe 2025-03", "sync": "x1.04", "async": "not traced"},
    {"tool": "a bpftrace script on libcuda", "sync": "x1.13", "async": "x5.60"},
    {"tool": "ingero 0.17", "sync": "x1.21", "async": "not traced"},
]


def hold(context, outcome, pairs, cycle):
    """Attaches, holds, detaches; the times and what the agent used."""
    asked_ns = time.monotonic_ns()
    agent, path = context.attach(outcome, f"cost-{cycle}", pairs.pid)
    context.wait_attached(agent, pairs.pid)
    began_ns, cpu = time.monotonic_ns(), proc_cpu_seconds(agent.pid)
    time.sleep(HOLD_S)
    ended_ns, cpu = time.monotonic_ns(), proc_cpu_seconds(agent.pid) - cpu
    memory = stop(agent)
    code = agent.wait(40)
    log, usage = Log(path), agent.usage
    return {
        "code": code,
        "asked_ns": asked_ns,
        "attached": (began_ns + SETTLE_NS, ended_ns),
        "gone_ns": time.monotonic_ns(),
        "cpu_share": round(cpu / ((ended_ns - began_ns) / 1e9), 3),
        "cpu_s_whole_life": round(usage.ru_utime + usage.ru_stime, 2) if usage else None,
        "peak_rss_bytes": memory.get("VmHWM"),
        "anonymous_bytes": memory.get("RssAnon"),
        "events": log.count("events"),
        "log_bytes": log.size_bytes(),
        "lost": log.losses(),
    }


def stop(agent):
    """Ctrl-C; its memory while it finishes. (Its resource usage would tell this process's.)"""
    memory = proc_memory(agent.pid)
    agent.signal(signal.SIGINT)
    end = time.monotonic() + 40
    while agent.poll() is None and time.monotonic() < end:
        try:
            memory.update(proc_memory(agent.pid))
        except OSError:
            break
        time.sleep(0.01)
    return memory


@check(
    "cost", "ns a pair with and without the agent, alternating; its CPU and memory", 100, ["pairs"]
)
def cost(context, outcome):
    pairs = context.start(outcome, [context.built("pairs"), "95"])
    pairs.wait_line(r"^READY", 30)
    cycles, alone, free_ns = [], [], time.monotonic_ns()
    for cycle in range(CYCLES):
        time.sleep(HOLD_S)
        try:
            held = hold(context, outcome, pairs, cycle)
        finally:
            note(outcome, pairs, cycles, alone)
        alone.append((free_ns + SETTLE_NS, held["asked_ns"]))
        free_ns = held["gone_ns"]
        cycles.append(held)
        note(outcome, pairs, cycles, alone)
    outcome.expect("the program runs on", pairs.poll() is None)
    outcome.expect_equal("exit codes of attach", {held["code"] for held in cycles}, {0})
    for mode in ("sync", "async"):
        for row in outcome.tables["pairs"]:
            if row["pair"] == mode:
                outcome.expect(f"5 windows or more, {mode}, {row['agent']}", row["windows"] >= 5)
    pairs.stop()


def note(outcome, pairs, cycles, alone):
    """The tables, as far as the cycles have come."""
    found = windows(pairs)
    with_agent = within(found, [held["attached"] for held in cycles])
    without = within(found, alone)
    rows, ratios = [], {}
    for mode in ("sync", "async"):
        both = [summary(without, mode), summary(with_agent, mode)]
        if all(part["median_ns"] for part in both):
            ratios[mode] = f"x{both[1]['median_ns'] / both[0]['median_ns']:.2f}"
            outcome.figure(
                f"ns more a {mode} pair", round(both[1]["median_ns"] - both[0]["median_ns"], 1)
            )
        for agent, part in zip(("without", "with"), both):
            rows.append({"pair": mode, "agent": agent, **part})
    outcome.table("pairs", rows)
    own = {"tool": "vramscope", "sync": ratios.get("sync"), "async": ratios.get("async")}
    outcome.table("beside other tools", [own, *PEERS])
    keys = (
        "cpu_share",
        "cpu_s_whole_life",
        "peak_rss_bytes",
        "anonymous_bytes",
        "events",
        "log_bytes",
        "lost",
    )
    outcome.table("agent by cycle", [{key: held[key] for key in keys} for held in cycles])
    rates = [held["events"] / (HOLD_S + 2 * SETTLE_NS / 1e9) for held in cycles]
    outcome.figure("events a second, about", [round(rate) for rate in rates])
