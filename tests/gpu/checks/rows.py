"""Every function of the probe table, called once on the real driver: each is its row of the log."""

import re

import pandas as pd

from harness.registry import check

_CALL = re.compile(
    r"^CALL (?P<api>\w+) rc=(?P<rc>-?\d+) op=(?P<op>\S+) level=(?P<level>\S+)"
    r" addr=0x(?P<addr>[0-9a-f]+) size=(?P<size>\S+) delta=(?P<delta>-?\d+) pid=\d+ tid=\d+$",
    re.M,
)


def told(output):
    """What the program says of its calls: those with a row, as the row's words."""
    rows = []
    for call in _CALL.finditer(output):
        if call["op"] == "-":
            continue
        size = None if call["size"] == "-" else int(call["size"])
        addr = int(call["addr"], 16)
        words = (call["api"], call["op"], call["level"], addr, size, int(call["delta"]))
        rows.append((*words, int(call["rc"])))
    return rows


def logged(events):
    """The same of the log's rows."""
    rows = []
    for event in events.itertuples():
        size = None if pd.isna(event.size_bytes) else int(event.size_bytes)
        addr = int(event.addr) & (2**64 - 1)
        words = (event.api, event.op, event.level, addr, size, int(event.delta_bytes))
        rows.append((*words, int(event.result)))
    return rows


def differences(wanted, found):
    """Rows that differ, in order. Of a refused call only that it was refused is compared: what it
    asked for is the program's guess."""
    lines = []
    for index, (true, row) in enumerate(zip(wanted, found)):
        refused = true[1] == "fail" and row[0] == true[0] and row[1] == "fail" and row[6] == true[6]
        if true != row and not refused:
            lines.append(f"row {index}: {row}, the program says {true}")
    if len(wanted) != len(found):
        lines.append(f"{len(found)} rows, the program says {len(wanted)}")
    return lines


@check("every-row", "every function of the probe table once: each is its row", 60, ["every_row"])
def every_row(context, outcome):
    recording = context.record(outcome, "every-row", [context.built("every_row")], timeout=50)
    output, log = recording.program.output, recording.log
    outcome.expect_equal("exit code", recording.code, 0)
    events = log.events[~log.events.implicit.astype(bool)]
    # The driver calls functions of its own accord while it starts; those the program made are told.
    wanted, found = told(output), logged(events)
    outcome.expect_equal("rows that differ", differences(wanted, found)[:12], [])
    outcome.expect_equal("losses", log.losses(), {})
    apis = {row[0] for row in wanted if row[1] != "fail"}
    silent = {call["api"] for call in _CALL.finditer(output) if call["op"] == "-"}
    outcome.figure("functions that worked", len(apis | silent))
    refused = [
        f"{row[0]} ({row[6]})" for row in wanted if row[1] == "fail" and row[0] not in apis
    ]
    outcome.figure("functions that this driver refused (result)", ", ".join(refused) or "none")
    skipped = re.findall(r"^SKIPPED (\w+) why=(.*)$", output, re.M)
    outcome.figure("not called", ", ".join(f"{api}: {why}" for api, why in skipped) or "none")
