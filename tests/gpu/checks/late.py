"""Attaching to a program that holds memory already."""

from harness.log import Log, breakdown_sums
from harness.registry import check


@check("late-attach", "attach after the leaks: NVML's figure is before_attach", 60, ["w1-static"])
def late_attach(context, outcome):
    env = {"W1_ONLY": "leak", "W1_PAUSE_MS": "100"}
    program = context.start(outcome, [context.built("w1-static"), "0", "14"], env)
    program.wait_line(r"^READY", 25)
    used = context.nvml.process_used(program.pid)
    outcome.figure("NVML bytes at attach", used)
    agent, path = context.attach(outcome, "late-attach", program.pid, "--duration", "4")
    outcome.expect_equal("exit code of attach", agent.wait(30), 0)
    outcome.keep += context.save(agent, "late-attach")
    outcome.expect("the program runs on", program.poll() is None)
    compare(outcome, path, program.pid, used)
    outcome.expect_equal("exit code of the program", program.wait(25), 0)


def compare(outcome, path, pid, used):
    """The log: one sum, and nothing unexplained, since the program did nothing meanwhile."""
    log = Log(path)
    row = log.process(pid)
    outcome.expect_equal("seen from the start", bool(row.from_start), False)
    kinds = set(log.table("annotations").kind)
    outcome.expect("late_attach is annotated", "late_attach" in kinds, sorted(kinds))
    table = log.table("breakdown")
    sums = breakdown_sums(table[table.proc_id == row.proc_id])
    if outcome.expect("there is a breakdown", not sums.empty):
        outcome.expect_equal("breakdown adds up", {int(d) for d in sums.difference}, {0})
        outcome.expect_equal("NVML's figure in the log", {int(b) for b in sums.nvml_used}, {used})
        before = {None if b is None else int(b) for b in sums.before_attach.dropna()}
        outcome.expect_equal("before_attach", before, {used})
        outcome.expect_equal("unexplained", {int(b) for b in sums.unexplained}, {0})
    outcome.figure("breakdown samples", len(sums))
    outcome.expect_equal("losses", log.losses(), {})
