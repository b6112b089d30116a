#!/usr/bin/env python3
"""Trains a small GPT-like model; a program for stacks, leaks and costs.

gpt_train.py [--leak none|list|graph] [--shape launch|gpu] (--steps N | --serve)

`launch`: small matrices, so that a step's time is the time of its launches. `gpu`: large ones, so
that it is the GPU's. With --serve it reads orders from stdin: `window LABEL SECONDS` trains that
long and prints `WINDOW label=L steps=N median_ms=M mean_ms=M`, `recorder on|off` turns PyTorch's own
memory history (Python stacks) on or off, `pairs LABEL SECONDS` is `window` with a step of 1,000
blocks that come and go below 14 Python frames, `quit` ends.

Prints `READY` after the warm-up, `LEAK line=FILE:LINE` where it leaks on purpose, `STEPS n`.
"""

import argparse
import inspect
import sys
import time

import torch
from torch import nn
from torch.nn import functional

SHAPES = {"launch": (8, 256, 8, 128, 4), "gpu": (8, 1024, 16, 1024, 16)}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, device=x.device, dtype=torch.bool).tril()
        weights = functional.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers, width, heads, vocabulary=1024):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trainer:
    def __init__(self, shape, leak):
        layers, width, heads, self.length, self.batch = SHAPES[shape]
        self.model = Model(layers, width, heads).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.leak, self.kept = leak, []

    def step(self):
        tokens = torch.randint(0, 1024, (self.batch, self.length + 1), device="cuda")
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.keep(logits, loss)
        return loss

    def keep(self, logits, loss):
        if self.leak == "list":
            self.kept.append(logits.detach().clone())  # the leak
        elif self.leak == "graph":
            self.kept.append(loss)


def leaking_line():
    lines, first = inspect.getsourcelines(Trainer.keep)
    return first + next(n for n, line in enumerate(lines) if "# the leak" in line)


def window(trainer, label, seconds):
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        trainer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    median, mean = times[len(times) // 2], sum(times) / len(times)
    print(f"WINDOW label={label} steps={len(times)} median_ms={median:.3f} mean_ms={mean:.3f}")


PAIRS = 1000
DEPTH = 14


def allocate(depth):
    """Blocks that come and go below so many Python frames."""
    if depth:
        allocate(depth - 1)
    else:
        for _ in range(PAIRS):
            torch.empty(1024, device="cuda")


def pairs(label, seconds):
    """As `window`, but a step is 1,000 blocks that come and go: its milliseconds are us a pair."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        allocate(DEPTH)
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    print(f"WINDOW label={label} steps={len(times)} median_ms={times[len(times) // 2]:.4f}")


def serve(trainer):
    for order in sys.stdin:
        words = order.split()
        if words[0] == "quit":
            return
        if words[0] == "recorder":
            on = words[1] == "on"
            torch.cuda.memory._record_memory_history("all" if on else None, stacks="python")
        elif words[0] == "pairs":
            pairs(words[1], float(words[2]))
        else:
            window(trainer, words[1], float(words[2]))
        print("DONE", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--leak", choices=["none", "list", "graph"], default="none")
    parser.add_argument("--shape", choices=list(SHAPES), default="launch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    trainer = Trainer(arguments.shape, arguments.leak)
    for _ in range(5):
        trainer.step()
    torch.cuda.synchronize()
    if arguments.leak == "list":
        print(f"LEAK line=gpt_train.py:{leaking_line()}")
    print("READY", flush=True)
    if arguments.serve:
        serve(trainer)
    else:
        for _ in range(arguments.steps):
            trainer.step()
        torch.cuda.synchronize()
        print(f"STEPS {arguments.steps}")


if __name__ == "__main__":
    main()
