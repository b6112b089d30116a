"""Of vramscope's GPU checks (tests/gpu): inference whose key-value cache grows token by token.

Usage: grow_cache.py [SECONDS]. Every few tokens the cache is made anew, one size larger, as frameworks
without a paged cache do: the old one is free, in a piece that is too small from then on.
"""

import os
import sys
import time

import torch


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 8
    print("PID", os.getpid(), flush=True)
    layers, heads, width, step = 16, 16, 128, 64
    weight = torch.randn(heads * width, heads * width, device="cuda", dtype=torch.half)
    cache = torch.zeros(layers, 2, heads, step, width, device="cuda", dtype=torch.half)
    (cache[0, 0].reshape(heads, -1)[:, : heads * width] @ weight).sum().item()
    print("READY", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        grown = cache.new_zeros(layers, 2, heads, cache.shape[3] + step, width)
        grown[:, :, :, : cache.shape[3]] = cache
        cache = grown
        for _ in range(4):
            tokens = cache[:, 0, :, -1].reshape(layers, heads * width) @ weight
            cache[:, 0, :, -1] = tokens.view(layers, heads, width)
        torch.cuda.synchronize()
        time.sleep(0.02)
    print(f"LENGTH {cache.shape[3]}", flush=True)


main()
