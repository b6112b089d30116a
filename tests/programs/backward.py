#!/usr/bin/env python3
"""Backward passes, whose gradients the engine's own thread allocates.

backward.py [PASSES]

Each pass runs one MulBackward0 with a gradient that is kept, two MmBackward0 and one
NllLossBackward0, and a backward function written in Python that runs a pass within the pass. Truth,
on stdout:

    TRUE passes=N line=FILE:LINE gradients=N gradient_bytes=N

Needs the simulated GPU's libraries on LD_LIBRARY_PATH and simtorch on PYTHONPATH.
"""
import inspect
import os
import sys
import time

import simtorch as torch

MIB = 1 << 20
GRADIENT_BYTES = 2 * MIB


def say(line):
    os.write(1, (line + "\n").encode())


def forward(scale, weights):
    hidden = torch.empty(MIB) * scale
    for weight in weights:
        hidden = hidden @ weight
    return hidden


def step(scale, weights, again):
    output = torch.checkpoint(lambda hidden: hidden @ again, forward(scale, weights))
    output.loss().backward()


def line_of_backward():
    lines, first = inspect.getsourcelines(step)
    offset = next(i for i, line in enumerate(lines) if ".backward()" in line)
    return f"{os.path.basename(__file__)}:{first + offset}"


def main():
    passes = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    say(f"PID {os.getpid()}")
    time.sleep(1.5)  # importing PyTorch takes as long
    scale = torch.empty(GRADIENT_BYTES, requires_grad=True)
    weights = [torch.empty(MIB, requires_grad=True) for _ in range(2)]
    again = torch.empty(MIB, requires_grad=True)
    gradients = []
    for _ in range(passes):
        step(scale, weights, again)
        gradients.append(scale.grad)
        for tensor in (scale, again, *weights):
            tensor.grad = None
        time.sleep(0.05)
    say(f"TRUE passes={passes} line={line_of_backward()} gradients={len(gradients)} "
        f"gradient_bytes={GRADIENT_BYTES}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
