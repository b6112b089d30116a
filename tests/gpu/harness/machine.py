"""Where the checks ran: everything that a figure has to be read with."""

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata

from harness.build import find_nvcc


def _says(command):
    """Last line of what a program prints, or why there is none."""
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"unknown (exit code {done.returncode})"


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _nvcc():
    try:
        return _says([find_nvcc(), "--version"])
    except FileNotFoundError:
        return "not installed"


def gpu_count(nvml):
    """GPUs that the checks may use; one where NVML does not say."""
    try:
        return nvml.count() if nvml else 1
    except Exception as error:  # a check of one GPU runs all the same
        print(f"NVML: {error}", file=sys.stderr)
        return 1


def describe(binary, nvml, command):
    """Facts by name."""
    facts = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    try:
        facts.update(nvml.machine() if nvml else {"gpu": "none"})
    except Exception as error:  # what is wrong with NVML must not hide the rest
        facts["gpu"] = f"unknown ({error})"
    facts.update(
        {
            "gpus": gpu_count(nvml),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "pyarrow": _version("pyarrow"),
            "cupy": _version("cupy-cuda13x"),
            "jax": _version("jax"),
            "nvcc": _nvcc(),
            "vramscope": _says([binary, "--version"]),
            "command": command,
        }
    )
    return facts
