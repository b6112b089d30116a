#!/usr/bin/env python3
"""A pretend training job on the simulated GPUs, one rank of which leaks.

leak_job.py [--ranks N] [--seconds S] [--leaky RANK | --healthy]

The launcher starts the workers with RANK, LOCAL_RANK and WORLD_SIZE set, as torchrun does. Each
worker trains for S seconds: activations that come and go, parameters and a workspace that stay.
The leaky rank keeps every step's losses in a list that nobody empties. Truth, on stdout:

    WORKER rank=R pid=P device=D
    TRUE rank=R pid=P steps=N kept_tensors=N kept_bytes=N line=FILE:LINE
    TORCH rank=R pid=P allocated=N reserved=N peak=N

Needs the simulated libc10.so and libcuda.so.1 on LD_LIBRARY_PATH. Python 3.8 or later.
"""
import argparse
import ctypes
import inspect
import os
import subprocess
import sys
import time

MIB = 1 << 20
STEP_SECONDS = 0.1
LEAK_BYTES = 12 * MIB

torch = ctypes.CDLL("libc10.so")
torch.sim_torch_alloc.restype = ctypes.c_void_p
torch.sim_torch_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int]
torch.sim_torch_free.argtypes = [ctypes.c_void_p]
for total in ("sim_torch_allocated", "sim_torch_reserved", "sim_torch_peak"):
    getattr(torch, total).restype = ctypes.c_size_t


def say(line):
    """One write for each line: the workers share a pipe, and print() may write a line in parts."""
    os.write(1, (line + "\n").encode())


class Tensor:
    """A block of the caching allocator; freed with its last reference, as a tensor is."""

    def __init__(self, size_bytes, device):
        self.size_bytes = size_bytes
        self.ptr = torch.sim_torch_alloc(size_bytes, device)
        if not self.ptr:
            raise RuntimeError(f"CUDA out of memory: tried to allocate {size_bytes >> 20} MiB")

    def __del__(self):
        torch.sim_torch_free(self.ptr)


class Model:
    """Parameters and optimizer state, which live as long as the job."""

    def __init__(self, device):
        self.device = device
        self.parameters = [Tensor(24 * MIB, device) for _ in range(8)]
        self.moments = [Tensor(48 * MIB, device) for _ in range(8)]

    def forward(self):
        activations = []
        for layer in range(8):
            activations.append(Tensor((layer + 1) * 3 * MIB, self.device))
        return activations

    def backward(self, activations):
        while activations:
            gradient = Tensor(24 * MIB, self.device)
            activations.pop()
            del gradient


class Metrics:
    """Keeps the last losses; the leaky one keeps them all."""

    def __init__(self, device, leaky):
        self.device = device
        self.limit = None if leaky else 2
        self.history = []

    def log_losses(self):
        losses = Tensor(LEAK_BYTES, self.device)
        self.history.append(losses)
        if self.limit is not None:
            del self.history[: -self.limit]


def leak_line():
    """FILE:LINE of the allocation that is never freed."""
    lines, first = inspect.getsourcelines(Metrics.log_losses)
    offset = next(i for i, line in enumerate(lines) if "Tensor(" in line)
    return f"{os.path.abspath(__file__)}:{first + offset}"


def allocate_workspace():
    """A block from the driver, beside PyTorch: what a library's workspace looks like."""
    cuda = ctypes.CDLL("libcuda.so.1")
    ptr = ctypes.c_uint64()
    code = cuda.cuMemAlloc_v2(ctypes.byref(ptr), ctypes.c_size_t(64 * MIB))
    if code != 0:
        raise RuntimeError(f"cuMemAlloc_v2: error {code}")
    return ptr.value


def count_devices():
    """How many GPUs the driver shows to this process."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        raise RuntimeError("no simulated GPU")
    return count.value


def train_step(model, metrics):
    activations = model.forward()
    model.backward(activations)
    metrics.log_losses()


def work(args):
    rank = int(os.environ["RANK"])
    device = int(os.environ["LOCAL_RANK"]) % count_devices()
    say(f"WORKER rank={rank} pid={os.getpid()} device={device}")
    model = Model(device)
    allocate_workspace()
    metrics = Metrics(device, leaky=rank == args.leaky)
    steps, end = 0, time.monotonic() + args.seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        train_step(model, metrics)
        steps += 1
        time.sleep(max(0.0, begin + STEP_SECONDS - time.monotonic()))
    kept = metrics.history if rank == args.leaky else []
    kept_bytes = sum(tensor.size_bytes for tensor in kept)
    say(f"TRUE rank={rank} pid={os.getpid()} steps={steps} kept_tensors={len(kept)} "
        f"kept_bytes={kept_bytes} line={leak_line()}")
    say(f"TORCH rank={rank} pid={os.getpid()} allocated={torch.sim_torch_allocated(device)} "
        f"reserved={torch.sim_torch_reserved(device)} peak={torch.sim_torch_peak(device)}")
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
