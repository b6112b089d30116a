"""Where the checks ran: everything that a figure has to be read with."""

import datetime
import os
import platform
import subprocess
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


def describe(binary, nvml, command):
    """Facts by name."""
    facts = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    try:
        facts.update(nvml.machine() if nvml else {"gpu": "none"})
    except Exception as error:  # what is wrong with NVML must not hide the rest
        facts["gpu"] = f"unknown ({error})"
    facts.update(
        {
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "pyarrow": _version("pyarrow"),
            "nvcc": _nvcc(),
            "vramscope": _says([binary, "--version"]),
            "command": command,
        }
    )
    return facts
