#!/usr/bin/env python3
"""Two ranks on two GPUs; rank 1 loads a checkpoint that was saved on GPU 0, onto GPU 0.

stray_context.py [SECONDS [MIB]]

Truth, on stdout:

    TRUE rank=R pid=P device=D loads=FILE:LINE     (of rank 1 only)

Needs the simulated GPU's libraries on LD_LIBRARY_PATH and simtorch on PYTHONPATH.
"""
import inspect
import os
import subprocess
import sys
import time

import simtorch as torch

MIB = 1 << 20
SIZE = int(sys.argv[2]) * MIB if len(sys.argv) > 2 else 4 * MIB


def say(line):
    os.write(1, (line + "\n").encode())


def resume(device):
    saved = torch.load(SIZE)
    return saved.to(device)


def line_of_load():
    lines, first = inspect.getsourcelines(resume)
    offset = next(i for i, line in enumerate(lines) if "torch.load" in line)
    return f"{os.path.basename(__file__)}:{first + offset}"


def work(rank, seconds):
    torch.cuda.set_device(rank)
    parameters = [torch.empty(24 * MIB, requires_grad=True) for _ in range(8)]
    state = resume(rank) if rank == 1 else None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hidden = torch.empty(8 * MIB)
        for parameter in parameters:
            hidden = hidden @ parameter
        hidden.loss().backward()
        for parameter in parameters:
            parameter.grad = None
        time.sleep(0.05)
    loads = line_of_load() if state else ""
    say(f"TRUE rank={rank} pid={os.getpid()} device={rank} loads={loads}")
    os._exit(0)


def launch():
    say(f"PID {os.getpid()}")
    workers = []
    for rank in ("0", "1"):
        env = dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
        workers.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(launch())
    work(int(os.environ["RANK"]), float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
