"""Of vramscope's GPU checks (tests/gpu): a program that prints its own true account, by address.

50 x 4 MiB tensors kept in a list; prints what the allocator holds, then sleeps.

Usage: w2.py [SECONDS]. The caller sets PYTORCH_CUDA_ALLOC_CONF (expandable_segments:True or
nothing).
"""

import os
import sys
import time

import torch

kept = []


def leak_tensors():
    for _ in range(50):
        kept.append(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))


print("PID", os.getpid(), flush=True)
leak_tensors()
torch.cuda.synchronize()
for seg in torch.cuda.memory_snapshot():
    print(f"LEAK segment 0x{seg['address']:x} {seg['total_size']} tid={os.getpid()}")
print("CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"))
print(
    f"TRUE allocated_bytes={torch.cuda.memory_allocated()} "
    f"reserved_bytes={torch.cuda.memory_reserved()}"
)
print("READY", flush=True)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 3)
