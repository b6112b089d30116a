"""kill -9 of the agent in full flow: the program, its library's bytes, the log."""

import signal
import time

from harness.elf import Entries
from harness.log import Log
from harness.registry import check
from harness.windows import summary, windows, within

FUNCTIONS = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuInit",
    "cuCtxSetCurrent",
    "cuMemHostAlloc",
]
PATIENCE_S = 5


def seconds_until(condition):
    """Seconds until `condition()` holds, or None."""
    begin = time.monotonic()
    while time.monotonic() - begin < PATIENCE_S:
        if condition():
            return round(time.monotonic() - begin, 3)
        time.sleep(0.01)
    return None


@check("kill", "kill -9 of the agent: program unharmed, probes gone, log readable", 75, ["pairs"])
def kill(context, outcome):
    pairs = context.start(outcome, [context.built("pairs"), "60"])
    pairs.wait_line(r"^READY", 30)
    entries = Entries(pairs.pid, r"/libcuda\.so", FUNCTIONS)
    outcome.expect("cuMemAlloc_v2 is found in libcuda", "cuMemAlloc_v2" in entries.places)
    outcome.expect_equal("functions that differ from the file before", entries.changed(), [])
    time.sleep(1.2)
    before = windows(pairs)
    agent, path = context.attach(outcome, "kill", pairs.pid)
    context.wait_attached(agent, pairs.pid)
    time.sleep(2.0)
    patched = entries.changed()
    outcome.figure("functions that differ from the file while attached", patched)
    outcome.expect("cuMemAlloc_v2 is probed while attached", "cuMemAlloc_v2" in patched)
    outcome.expect("the agent records until it is killed", agent.poll() is None, agent.error[-300:])
    killed_ns, killed_at = time.time_ns(), time.monotonic_ns()
    agent.signal(signal.SIGKILL)
    agent.wait(10)
    gone = seconds_until(lambda: not entries.changed())
    outcome.expect("libcuda's bytes are the file's again", gone is not None, entries.changed())
    outcome.figure("seconds until they were", gone)
    look_at_program(outcome, pairs, before, killed_at)
    look_at_log(context, outcome, path, killed_ns)


def look_at_program(outcome, pairs, before, killed_at):
    """Its windows go on, as fast as before."""
    time.sleep(1.5)
    outcome.expect("the program runs on", pairs.poll() is None)
    after = within(windows(pairs), [(killed_at + 500_000_000, time.monotonic_ns())])
    outcome.expect("windows keep coming", len(after) >= 4, f"{len(after)} windows in 1 s")
    for mode in ("sync", "async"):
        outcome.figure(f"ns a {mode} pair before", summary(before, mode)["median_ns"])
        outcome.figure(f"ns a {mode} pair after", summary(after, mode)["median_ns"])
    pairs.signal(signal.SIGTERM)
    outcome.expect_equal("exit code of the program", pairs.wait(15), 0)


def look_at_log(context, outcome, path, killed_ns):
    """Readable as it is, and after `recover`; at most the last second is missing."""
    events = Log(path).events
    outcome.figure("events before the kill", len(events))
    if not outcome.expect("events reached the log before the kill", not events.empty):
        return
    missing_s = (killed_ns - int(events.ts_ns.max())) / 1e9
    outcome.figure("seconds missing before the kill", round(missing_s, 3))
    outcome.expect("at most the last second is missing", missing_s <= 1.0, f"{missing_s:.3f} s")
    outcome.figure("lost", Log(path).losses())
    program, said = context.report(outcome, path)
    outcome.expect_equal("exit code of report", program.code, 0)
    outcome.expect("report --json is JSON", said is not None, program.error[-300:])
    recovery = context.run(outcome, [context.binary, "recover", path], timeout=40)
    outcome.expect_equal("exit code of recover", recovery.code, 0)
    recovered = Log(path).events
    outcome.expect_equal("events after recover", len(recovered), len(events))
    program, _ = context.report(outcome, path)
    outcome.expect_equal("exit code of report after recover", program.code, 0)
