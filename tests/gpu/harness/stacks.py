"""Stacks of a log: who allocated what, and every frame on the way."""

import os

import pandas as pd


def _stacks(log):
    """One row a stack; runs of a log may name the same twice."""
    return log.table("stacks").drop_duplicates("stack_id").set_index("stack_id")


def note_complete(outcome, log, who=""):
    """Notes how many stacks reach their thread's start, and why the others do not; the share."""
    stacks = log.table("stacks")
    share = float(stacks.complete.mean())
    outcome.figure(f"{who}stacks taken", len(stacks))
    outcome.figure(f"{who}share of complete stacks", round(share, 4))
    reasons = stacks[~stacks.complete].incomplete_reason.value_counts().to_dict()
    outcome.figure(f"{who}why not", reasons)
    return share


def placed(log, events):
    """Events with the site and the libraries of their stack; NULL where the log has no stack."""
    stacks = _stacks(log)
    modules = log.table("frames").drop_duplicates("frame_id").set_index("frame_id").module

    def libraries(stack_id):
        found = modules.reindex(stacks.loc[stack_id].frame_ids).dropna()
        return frozenset(os.path.basename(path) for path in found)

    known = [int(i) for i in events.stack_id.unique() if i in stacks.index]
    facts = stacks.loc[known, ["site", "complete"]]
    facts = facts.assign(libraries=[libraries(stack_id) for stack_id in known])
    return events.merge(facts, left_on="stack_id", right_index=True, how="left")


def goes_through(rows, library):
    """Which rows of `placed` have a library of that name's beginning in their stack."""
    return rows.libraries.map(
        lambda names: isinstance(names, frozenset) and any(n.startswith(library) for n in names)
    ).astype(bool)


def by_site(rows):
    """A line a site, function and level, most bytes first."""
    groups = rows.groupby(["site", "api", "level"], dropna=False).size_bytes.agg(["count", "sum"])
    lines = [
        {"site": site, "function": api, "level": level, "count": int(count), "bytes": int(total)}
        for (site, api, level), count, total in groups.itertuples()
    ]
    return sorted(lines, key=lambda line: -line["bytes"])


def longest(log, stack_ids):
    """The complete stack of most frames among some, or None."""
    stacks = _stacks(log)
    stacks = stacks[stacks.complete & stacks.index.isin([int(i) for i in stack_ids])]
    return None if stacks.empty else int(stacks.frame_ids.map(len).idxmax())


def whole(log, stack_id):
    """Every frame of a stack, innermost first, as lines of a table."""
    frames = log.table("frames").drop_duplicates("frame_id").set_index("frame_id")
    lines = []
    for number, frame_id in enumerate(_stacks(log).loc[stack_id].frame_ids):
        frame = frames.loc[frame_id]
        where = f"{os.path.basename(frame.file)}:{frame.line}" if _known(frame.file) else None
        lines.append(
            {
                "frame": number,
                "kind": frame.kind,
                "function": frame.function,
                "line": where,
                "library": os.path.basename(frame.module) if _known(frame.module) else None,
            }
        )
    return lines


def _known(value):
    return value is not None and not pd.isna(value)
