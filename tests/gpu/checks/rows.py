"""Every function of the probe table, called once on the real driver: each is its row of the log."""

import difflib
import re

import pandas as pd

from harness.registry import check

_CALL = re.compile(
    r"^CALL (?P<api>\w+) rc=(?P<rc>-?\d+) op=(?P<op>\S+) level=(?P<level>\S+)"
    r" addr=0x(?P<addr>[0-9a-f]+) size=(?P<size>\S+) delta=(?P<delta>-?\d+) pid=(?P<pid>\d+)",
    re.M,
)
_SKIPPED = re.compile(r"^CALL-SKIPPED api=(\w+) why=(.*)$", re.M)


def told(output):
    """What the program says of its calls: those with a row, as the row's words."""
    rows = []
    for call in _CALL.finditer(output):
        if call["op"] == "-":
            continue
        size = None if call["size"] == "-" else int(call["size"])
        words = (call["level"], int(call["addr"], 16), size, int(call["delta"]))
        rows.append((int(call["pid"]), call["api"], call["op"], int(call["rc"]), *words))
    return rows


def logged(events):
    """The same of the log's rows, but those of frees that no call made."""
    rows = []
    for event in events[~events.implicit.astype(bool)].itertuples():
        size = None if pd.isna(event.size_bytes) else int(event.size_bytes)
        words = (event.level, int(event.addr) & (2**64 - 1), size, int(event.delta_bytes))
        rows.append((int(event.pid), event.api, event.op, int(event.result), *words))
    return rows


def compared(rows):
    """What of the rows has to be equal: of a refused call only that it was refused, and how. What
    it asked for is nothing that the program prints of calls that a driver may refuse."""
    return [row[:4] if row[2] == "fail" else row for row in rows]


def differences(wanted, found):
    """Rows that the log lacks, and rows that it has beyond those told, in order."""
    wanted, found = compared(wanted), compared(found)
    lines = []
    matcher = difflib.SequenceMatcher(None, wanted, found, autojunk=False)
    for what, i, until_i, j, until_j in matcher.get_opcodes():
        if what == "equal":
            continue
        lines += [f"told, not in the log: {row}" for row in wanted[i:until_i]]
        lines += [f"in the log, not told: {row}" for row in found[j:until_j]]
    return lines


def figures(outcome, output):
    """Which functions worked, which the driver refused, which were not called and why."""
    worked = {call["api"] for call in _CALL.finditer(output) if call["op"] != "fail"}
    refused = {
        f"{call['api']} ({call['rc']})"
        for call in _CALL.finditer(output)
        if call["op"] == "fail" and call["api"] not in worked
    }
    outcome.figure("functions that worked", len(worked))
    outcome.figure("refused by this driver (result)", ", ".join(sorted(refused)) or "none")
    left = [f"{api}: {why}" for api, why in _SKIPPED.findall(output) if api not in worked]
    outcome.figure("not called", ", ".join(dict.fromkeys(left)) or "none")


@check("every-row", "every function of the probe table once: each is its row", 90, ["every_row"])
def every_row(context, outcome):
    command = [context.built("every_row"), "straight"]
    recording = context.record(outcome, "every-row", command, timeout=80)
    output, log = recording.program.output, recording.log
    outcome.expect_equal("exit code", recording.code, 0)
    outcome.expect("the program came to its end", "MADE " in output, output[-300:])
    found = differences(told(output), logged(log.events))
    outcome.expect_equal("rows that differ", found[:12], [])
    outcome.expect_equal("losses", log.losses(), {})
    figures(outcome, output)
