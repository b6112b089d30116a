"""Of vramscope's GPU checks (tests/gpu): CuPy arrays of known sizes, made at known lines.

One from CuPy's pool, one without a pool, one from a stream-ordered pool. CuPy rounds to 512 bytes
and these sizes are multiples of it, so that the driver is asked for exactly what is said.
"""

import os
import time

import cupy
from marks import say, say_allocated

MIB = 1 << 20
kept = []


def pooled(size):
    return cupy.zeros(size, dtype=cupy.uint8)  # here


def direct(size):
    with cupy.cuda.using_allocator(None):
        return cupy.empty(size, dtype=cupy.uint8)  # here


def ordered(size):
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        return cupy.empty(size, dtype=cupy.uint8)  # here


def main():
    say("PID", pid=os.getpid(), version=cupy.__version__)
    for function, size, level in (
        (pooled, 64 * MIB, "device"),
        (direct, 96 * MIB, "device"),
        (ordered, 160 * MIB, "pool"),
    ):
        kept.append(function(size))
        assert kept[-1].nbytes == size
        say_allocated(function, size, level)
    cupy.cuda.Device().synchronize()
    say("HELD", pool_bytes=cupy.get_default_memory_pool().total_bytes(), ns=time.time_ns())
    time.sleep(1)


main()
