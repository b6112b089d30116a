#!/usr/bin/env python3
"""Programs that leak and programs that do not, each a process of its own.

corpus.py [--jobs N] [--seed N] [--seconds S] [--steps N] [--pause S] [CASE ...]

Runs the named cases, or all, N at a time. A case is a function of leaking.py or healthy.py that
makes the step of a training loop; what it allocates and never lets go of is at the lines that end
in the comment `# leak`. Truth, on stdout:

    CASE name=NAME pid=P steps=N leaks=FILE:LINE,FILE:LINE     (leaks= alone: none)

Needs the simulated GPU's libraries on LD_LIBRARY_PATH and simtorch on PYTHONPATH. Python 3.8 or
later.
"""
import argparse
import inspect
import os
import random
import subprocess
import sys
import time

import healthy
import leaking

STAGGER_SECONDS = 0.05  # 27 programs that begin in the same moment are no case of their own
CASES = {**leaking.CASES, **healthy.CASES}


def say(line):
    """One write for each line: the cases share a pipe, and print() may write a line in parts."""
    os.write(1, (line + "\n").encode())


def leaks_of(case):
    """FILE:LINE of each allocation of a case that is never freed."""
    lines, first = inspect.getsourcelines(case)
    file = os.path.basename(inspect.getsourcefile(case))
    marked = (n for n, line in enumerate(lines, first) if line.rstrip().endswith("# leak"))
    return [f"{file}:{n}" for n in marked]


def train(step, dice, args):
    """At least so many steps, over at least so many seconds, each as long as it likes."""
    begin, n = time.monotonic(), 0
    while n < args.steps or time.monotonic() - begin < args.seconds:
        step(n)
        n += 1
        due = begin + args.seconds * n / args.steps * dice.uniform(0.95, 1.0)
        time.sleep(max(0.0, due - time.monotonic()))
    return n


def run_case(name, args):
    say("READY")
    sys.stdin.readline()
    case = CASES[name]
    dice = random.Random(f"{args.seed} {name}")
    step = case(dice)  # held until the end, with all that it keeps
    steps = train(step, dice, args)
    say(f"CASE name={name} pid={os.getpid()} steps={steps} leaks={','.join(leaks_of(case))}")
    os._exit(0)  # as a killed job does: nothing is freed by a call


def start(name, args):
    options = [f"--seed={args.seed}", f"--seconds={args.seconds}", f"--steps={args.steps}"]
    command = [sys.executable, __file__, *options, "--child", name]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, universal_newlines=True)


def run_together(names, args):
    """Starts the cases, lets them go, and gives the worst exit code. None of them starts
    while others train: with few processors that would stop those for seconds."""
    children = [start(name, args) for name in names]
    for child in children:
        child.stdout.readline()
    time.sleep(args.pause)  # importing PyTorch takes as long
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
        time.sleep(STAGGER_SECONDS)
    for child in children:
        for line in child.stdout:
            say(line.rstrip())
    return max(abs(child.wait()) for child in children)


def launch(args):
    names = args.cases or list(CASES)
    batches = [names[at:at + args.jobs] for at in range(0, len(names), args.jobs)]
    return max(run_together(batch, args) for batch in batches)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--jobs", type=int, default=len(CASES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=18.0)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--pause", type=float, default=1.5, help="seconds before the first call")
    parser.add_argument("--child", action="store_true", help="be the case, do not start it")
    args = parser.parse_args()
    if args.child:
        return run_case(args.cases[0], args)
    say(f"PID {os.getpid()}")
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
