"""Of vramscope's GPU checks (tests/gpu): how a bare PyTorch process grows, for NVML to be read.

Prints STEP and a name, and waits for a line on stdin; FIGURE lines tell what PyTorch holds.
"""

import os

import torch


def step(name):
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        print(f"FIGURE torch_reserved_at_{name} {torch.cuda.memory_reserved()}")
    print(f"STEP {name}", flush=True)
    input()


def main():
    print("PID", os.getpid(), flush=True)
    step("before_init")
    torch.cuda.init()
    step("init")
    x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    step("one_tensor")
    y = (x + 1).sum()
    step("elementwise")
    z = x @ x
    step("matmul")
    (y + z.sum()).backward()
    step("backward")


main()
