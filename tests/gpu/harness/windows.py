"""Windows of the program `pairs`: what an allocation cost, when."""

import re
from statistics import median


def windows(program):
    """Mode, start and end (CLOCK_MONOTONIC, nanoseconds) and pairs of every window so far."""
    found = []
    for _, _, text in list(program.lines):
        match = re.fullmatch(r"WINDOW (\w+) (\d+) (\d+) (\d+)", text)
        if match:
            found.append((match[1], int(match[2]), int(match[3]), int(match[4])))
    return found


def within(found, phases):
    """Windows that lie whole inside one of the (start, end) phases."""
    return [w for w in found if any(start <= w[1] and w[2] <= end for start, end in phases)]


def ns_per_pair(found, mode):
    """Cost of a pair in each window of a mode."""
    return [(end - start) / pairs for m, start, end, pairs in found if m == mode]


def summary(found, mode):
    """Median, spread and number of a mode's windows."""
    costs = sorted(ns_per_pair(found, mode))
    if not costs:
        return {"windows": 0, "median_ns": None, "p10_ns": None, "p90_ns": None}

    def at(share):
        return round(costs[min(len(costs) - 1, int(share * len(costs)))], 1)

    return {
        "windows": len(costs),
        "median_ns": round(median(costs), 1),
        "p10_ns": at(0.1),
        "p90_ns": at(0.9),
    }
