"""Writes what was found: results.json for programs, results.md for docs/measured.md."""

import json
import tarfile
from pathlib import Path

# What is kept of failing checks may be this large in all.
KEPT_BYTES = 14 << 20
HERE = str(Path(__file__).resolve().parents[1])
HEADINGS = {
    "pass": "passed",
    "fail": "FAILED",
    "figures": "figures only",
    "not run": "NOT RUN",
    "skipped": "skipped",
}


def _plain(value):
    """Values of numpy and pandas as JSON's own."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _write(path, text):
    """Writes a file; where these checks lie on this machine is nobody's business."""
    Path(path).write_text(text.replace(HERE, "tests/gpu") + "\n", encoding="utf-8")


def write_json(path, machine, outcomes):
    """All of it."""
    whole = {"machine": machine, "checks": [outcome.as_dict() for outcome in outcomes]}
    _write(path, json.dumps(whole, indent=1, default=_plain))


def _cell(value):
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) >= 1 << 20:
        return f"{value} ({value / (1 << 20):.3f} MiB)"
    return str(value).replace("|", "/").replace("\n", " ")


def _table(rows):
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(key)) for key in keys) + " |")
    return lines


def _section(outcome):
    lines = [f"### {outcome.name}: {HEADINGS[outcome.status]}", "", f"{outcome.about}.", ""]
    for expectation in outcome.expectations:
        if not expectation["ok"]:
            lines.append(f"- NOT: {expectation['what']}: {_cell(expectation['detail'])}")
    if outcome.error:
        lines.append(f"- ended by: {_cell(outcome.error)}")
    if outcome.skipped or outcome.lacks:
        lines.append(f"- {outcome.skipped or outcome.lacks}")
    for command in outcome.commands[:4]:
        lines.append(f"- `{command[:160]}`")
    if outcome.figures:
        figures = [{"figure": key, "value": value} for key, value in outcome.figures.items()]
        lines += ["", *_table(figures)]
    for name, rows in outcome.tables.items():
        if rows:
            lines += ["", f"{name}:", "", *_table(rows)]
    return [*lines, ""]


def write_markdown(path, machine, outcomes):
    """For people."""
    lines = ["# Measured on a GPU", ""]
    lines += _table([{"what": key, "value": value} for key, value in machine.items()])
    lines += ["", "## Checks", ""]
    lines += _table(
        [
            {
                "check": outcome.name,
                "result": HEADINGS[outcome.status],
                "hold": f"{sum(e['ok'] for e in outcome.expectations)}/{len(outcome.expectations)}",
                "s": outcome.seconds,
                "what": outcome.about,
            }
            for outcome in outcomes
        ]
    )
    lines += ["", "## Figures", ""]
    for outcome in outcomes:
        lines += _section(outcome)
    _write(path, "\n".join(lines))


def _size(path):
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def keep_logs(path, outcomes):
    """Packs logs and outputs of failing checks, the smallest first; names what had no room."""
    kept = {Path(item) for outcome in outcomes if outcome.failed for item in outcome.keep}
    room, left_out = KEPT_BYTES, []
    if not kept:
        return left_out
    with tarfile.open(path, "w:gz") as archive:
        for item in sorted((item for item in kept if item.exists()), key=_size):
            size = _size(item)
            if size > room:
                left_out.append(item.name)
                continue
            room -= size
            archive.add(item, arcname=item.name)
    return left_out
