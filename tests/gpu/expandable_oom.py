"""Of vramscope's GPU checks (tests/gpu): a refused request of 4 TiB that the program survives.

Usage: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True expandable_oom.py. The allocator fills the
card with handles, fails, gives them back and raises; the program catches it and goes on. Prints
what is held before, after, and once half of it is freed.
"""

import json
import os
import time

import torch


def say(when):
    torch.cuda.synchronize()
    segments = [[s["address"], s["total_size"]] for s in torch.cuda.memory_snapshot()]
    figures = {
        "when": when,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "segments": segments,
        "ns": time.time_ns(),
    }
    print("HELD", json.dumps(figures), flush=True)
    time.sleep(0.6)


def refused():
    try:
        torch.empty(4 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return True
    return False


def main():
    print("PID", os.getpid(), flush=True)
    kept = [torch.ones(10 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
    say("before")
    start = time.monotonic()
    print(f"REFUSED {refused()} seconds={time.monotonic() - start:.3f}", flush=True)
    total = sum(int(tensor.sum(dtype=torch.int64)) for tensor in kept)
    print(f"SUM {total == 16 * (10 << 20)}", flush=True)
    say("after")
    del kept[8:]
    torch.cuda.empty_cache()
    kept.append(torch.ones(1024, device="cuda"))
    say("freed")
    print("READY", flush=True)


main()
