"""Of vramscope's GPU checks (tests/gpu): random tensor work, and what PyTorch says of it.

Usage: torch_steps.py [STEPS [PAUSE_S]]. A step trains a small MLP once and allocates and frees
tensors of random sizes; every tenth gives the cache back first. After each step one line

  STEP {"step", "ns", "allocated", "reserved", "max_allocated", "max_reserved", "segments"}

with `time.time_ns()`, PyTorch's totals and peaks (never reset), and address and size of every
segment of its memory snapshot; then the program sleeps, so that a reader who polls has seen them.
"""

import json
import os
import random
import sys
import time

import torch


def mlp_step(model, optimizer):
    optimizer.zero_grad()
    rows = random.choice([16, 64, 256])
    loss = model(torch.randn(rows, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()


def random_tensors(kept):
    for _ in range(random.randrange(5, 40)):
        size = int(2 ** random.uniform(6, 25))
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(kept) > 40:
            kept.pop(random.randrange(len(kept)))
    if random.random() < 0.1:
        kept.clear()


def say(step):
    torch.cuda.synchronize()
    segments = [[s["address"], s["total_size"]] for s in torch.cuda.memory_snapshot()]
    figures = {
        "step": step,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "segments": segments,
        "ns": time.time_ns(),
    }
    print("STEP", json.dumps(figures), flush=True)


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.55
    random.seed(20261130)
    torch.manual_seed(20261130)
    print("PID", os.getpid(), flush=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    mlp_step(model, optimizer)  # the libraries allocate their own share here, before step 0
    for step in range(steps):
        if step % 10 == 9:
            torch.cuda.empty_cache()  # seen with the allocations that follow
        mlp_step(model, optimizer)
        random_tensors(kept)
        say(step)
        time.sleep(pause_s)
    print("READY", flush=True)


main()
