"""Of vramscope's GPU checks (tests/gpu): JAX arrays of known sizes, made at known lines.

The caller sets XLA_PYTHON_CLIENT_PREALLOCATE, _MEM_FRACTION and _ALLOCATOR. Prints what each line
made, and at the end how much XLA's own allocator holds of the device, where it says so.
"""

import os
import time

import jax
import numpy
from jax import numpy as jnp
from marks import say, say_allocated

MIB = 1 << 20
kept = []


def put(size):
    return jax.device_put(numpy.zeros(size, dtype=numpy.uint8))  # here


def computed(size):
    return jnp.full((size,), 7, dtype=jnp.uint8)  # here


def main():
    say("PID", pid=os.getpid(), version=jax.__version__)
    # Each larger than all before it together, so that no region of the pool has room for it.
    for function, size in ((put, 64 * MIB), (computed, 512 * MIB)):
        kept.append(function(size).block_until_ready())
        assert kept[-1].nbytes == size
        say_allocated(function, size)
    stats = jax.devices()[0].memory_stats() or {}
    say("HELD", ns=time.time_ns(), **{key: int(value) for key, value in stats.items()})
    time.sleep(1)


main()
