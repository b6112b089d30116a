#!/usr/bin/env python3
"""A pretend training job on the simulated GPUs, one rank of which leaks.

leak_job.py [--ranks N] [--seconds S] [--leaky RANK | --healthy]

The launcher starts the workers with RANK, LOCAL_RANK and WORLD_SIZE set, as torchrun does. Each
worker trains for S seconds: activations and gradients that come and go, parameters, optimizer
state and a workspace that stay. The leaky rank keeps every step's outputs in a list that nobody
empties. Truth, on stdout:

    WORKER rank=R pid=P device=D
    TRUE rank=R pid=P steps=N kept_tensors=N kept_bytes=N line=FILE:LINE
    TORCH rank=R pid=P allocated=N reserved=N peak=N workspace=N

Needs the simulated GPU's libraries on LD_LIBRARY_PATH and simtorch on PYTHONPATH. Python 3.8 or
later.
"""
import argparse
import inspect
import os
import subprocess
import sys
import time

import simtorch as torch

MIB = 1 << 20
STEP_SECONDS = 0.1
BATCH_BYTES = 12 * MIB
LAYERS = 8


def say(line):
    """One write for each line: the workers share a pipe, and print() may write a line in parts."""
    os.write(1, (line + "\n").encode())


class Model:
    """Parameters and optimizer state, which live as long as the job."""

    def __init__(self):
        self.parameters = [torch.empty(24 * MIB, requires_grad=True) for _ in range(LAYERS)]
        self.moments = [torch.zeros(48 * MIB) for _ in range(LAYERS)]

    def forward(self, batch):
        hidden = batch
        for parameter in self.parameters:
            hidden = hidden @ parameter
        return hidden

    def optimizer_step(self):
        for parameter in self.parameters:
            parameter.grad = None


class History:
    """Keeps the last outputs; the leaky one keeps them all."""

    def __init__(self, leaky):
        self.limit = None if leaky else 2
        self.outputs = []

    def append(self, outputs):
        self.outputs.append(outputs)
        if self.limit is not None:
            del self.outputs[: -self.limit]


def train_step(model, history):
    batch = torch.empty(BATCH_BYTES)
    outputs = model.forward(batch)
    outputs.loss().backward()
    model.optimizer_step()
    history.append(outputs.detach())


def leak_line():
    """FILE:LINE of the allocation that is never freed."""
    lines, first = inspect.getsourcelines(train_step)
    offset = next(i for i, line in enumerate(lines) if "history.append(" in line)
    return f"{os.path.abspath(__file__)}:{first + offset}"


def work(args):
    rank = int(os.environ["RANK"])
    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    say(f"WORKER rank={rank} pid={os.getpid()} device={device}")
    torch.cuda.set_device(device)
    model = Model()
    workspace = torch.cuda.RawBlock(64 * MIB)  # beside PyTorch, as a library's is
    history = History(leaky=rank == args.leaky)
    steps, end = 0, time.monotonic() + args.seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        train_step(model, history)
        steps += 1
        time.sleep(max(0.0, begin + STEP_SECONDS - time.monotonic()))
    kept = history.outputs if rank == args.leaky else []
    kept_bytes = sum(tensor.size_bytes for tensor in kept)
    say(f"TRUE rank={rank} pid={os.getpid()} steps={steps} kept_tensors={len(kept)} "
        f"kept_bytes={kept_bytes} line={leak_line()}")
    say(f"TORCH rank={rank} pid={os.getpid()} allocated={torch.cuda.memory_allocated(device)} "
        f"reserved={torch.cuda.memory_reserved(device)} "
        f"peak={torch.cuda.max_memory_allocated(device)} workspace={workspace.size_bytes}")
    os._exit(0)  # as a killed job does: nothing is freed by a call


def launch(args):
    workers = []
    for rank in range(args.ranks):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks))
        workers.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env=env))
    return max(worker.wait() for worker in workers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--leaky", type=int, default=2, help="the rank that leaks")
    parser.add_argument("--healthy", dest="leaky", action="store_const", const=-1)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return work(args)
    say(f"PID {os.getpid()}")
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
