"""Of vramscope's GPU checks (tests/gpu): what a job can die of when memory is short.

Usage: oom_kinds.py too-large|leak|fragmented|other. Each catches the exception, frees what it holds,
and goes on; it prints

  OOM {"line", "size"}      where it asks in vain, and for how much
  AFTER {"sum", "again"}    that what it computes is right, and that it gets memory again

`other` is to be run beside `oom_kinds.py hold`, which takes most of the GPU and waits for its stdin.
`leak` and `fragmented` are limited to a part of the GPU, as a shared one would be.
"""

import os
import sys
import time

import torch
from marks import marked, say

MIB = 1 << 20


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def shape(mib):
    """What `block` makes, for lines that are to be named themselves."""
    return {"size": (mib * MIB,), "dtype": torch.uint8, "device": "cuda"}


def free_mib():
    return torch.cuda.mem_get_info()[0] // MIB


def too_large(kept):
    kept.append(block(64))
    say("OOM", line=marked(too_large), size=(4 << 40))
    time.sleep(1.5)
    return torch.empty(**shape(4 << 20))  # here


def leak(kept):
    """A tensor more each step, until there is no room for one."""
    say("OOM", line=marked(leak), size=1024 * MIB)
    while True:
        kept.append(torch.empty(**shape(1024)))  # here
        time.sleep(0.25)


def fragmented(kept):
    """Half of every segment is free, and nothing else is."""
    pieces = []
    while free_mib() > 1500:
        pieces.append([block(9) for _ in range(64)])
    for group in pieces:
        kept.extend(group[::2])
        group.clear()
    torch.cuda.empty_cache()
    say("OOM", line=marked(fragmented), size=4096 * MIB)
    time.sleep(1.5)
    return torch.empty(**shape(4096))  # here


def other(kept):
    kept.append(block(2048))
    size = free_mib() + 4096
    say("OOM", line=marked(other), size=size * MIB)
    time.sleep(1.5)
    return torch.empty(**shape(size))  # here


def hold():
    kept = [block(1024) for _ in range(max(1, free_mib() // 1024 - 12))]
    say("HOLD", bytes=len(kept) * 1024 * MIB)
    sys.stdin.readline()


def main():
    kind = sys.argv[1]
    say("PID", pid=os.getpid())
    ones = torch.ones(1000, device="cuda")
    if kind == "hold":
        return hold()
    if kind == "leak":
        # So that a minute's leak fills it: what a smaller GPU would be.
        filler = [block(1024) for _ in range(max(0, free_mib() // 1024 - 60))]
    kept = []
    time.sleep(1.5)
    try:
        {"too-large": too_large, "leak": leak, "fragmented": fragmented, "other": other}[kind](kept)
    except torch.OutOfMemoryError as error:
        say("TOLD", text=str(error).splitlines()[0][:300])
    kept.clear()
    again = block(512)
    again.fill_(1)
    say("AFTER", sum=float(ones.sum()), again=int(again[:1000].sum()))
    time.sleep(0.5)


main()
