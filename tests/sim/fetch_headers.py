#!/usr/bin/env python3
"""Puts NVIDIA's own headers into a folder: fetch_headers.py FOLDER.

The simulated libraries are compiled against the real prototypes, so that a mistake in the agent's
table of argument registers can't hide behind the same mistake in the simulation. The headers are
NVIDIA's and are not ours to ship: they are unpacked from pinned wheels at build time. Standard
library only, Python 3.8 or later.
"""
import hashlib
import html.parser
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile

# (project, version, sha256 of the wheel, folder of the headers in the wheel, headers to unpack).
# The x86-64 wheels serve every machine: headers do not differ. `crt/host_defines.h` left the
# runtime's wheel in CUDA 12 and has a small wheel of its own since 13.0; it only defines
# attribute macros.
# The driver's header is of the newest CUDA, since it declares all that came since; the runtime's are
# those of the simulated `libcudart.so.12`.
WHEELS = [
    ("nvidia-cuda-runtime", "13.5.37",
     "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
     "nvidia/cu13/include/", ["cuda.h"]),
    ("nvidia-cuda-runtime-cu12", "12.9.79",
     "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3",
     "nvidia/cuda_runtime/include/",
     ["cuda_runtime_api.h", "driver_types.h", "vector_types.h", "builtin_types.h", "device_types.h",
      "surface_types.h", "texture_types.h", "library_types.h",
      "cuda_device_runtime_api.h", "host_defines.h"]),
    ("nvidia-nvml-dev-cu12", "12.9.79",
     "8bb367913c62cb65be9ae386c58dbf573f1f9e2f01cae54abb87bf5f63c6069e",
     "nvidia/nvml_dev/include/", ["nvml.h"]),
    ("nvidia-cuda-crt", "13.0.88",
     "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
     "nvidia/cu13/include/", ["crt/host_defines.h"]),
]
PLATFORMS = ["manylinux2014_x86_64", "manylinux_2_17_x86_64"]


def by_pip(project, version, folder):
    """The wheel's bytes, or None where pip is missing or fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--only-binary", ":all:", "--dest", folder, f"{project}=={version}"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    wheels = sorted(pathlib.Path(folder).glob(project.replace("-", "_") + "-*.whl"))
    return wheels[0].read_bytes() if done.returncode == 0 and wheels else None


class Links(html.parser.HTMLParser):
    """Collects the href of every link of a simple index page."""

    def __init__(self):
        super().__init__()
        self.hrefs = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def by_index(project, version):
    """The wheel's bytes from the simple index."""
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{project}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        links = Links()
        links.feed(answer.read().decode())
    name = f"{project.replace('-', '_')}-{version}-"
    for href in links.hrefs:
        file = urllib.parse.urlsplit(href).path.rsplit("/", 1)[-1]
        if file.startswith(name) and file.endswith(".whl") and PLATFORMS[0] in file:
            with urllib.request.urlopen(urllib.parse.urljoin(page, href), timeout=180) as answer:
                return answer.read()
    sys.exit(f"fetch_headers: {page} lists no wheel of {project} {version} for {PLATFORMS[0]}")


def wheel(project, version, sha256):
    with tempfile.TemporaryDirectory() as folder:
        data = by_pip(project, version, folder) or by_index(project, version)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        sys.exit(f"fetch_headers: {project} {version} has sha256 {found}, expected {sha256}")
    return zipfile.ZipFile(io.BytesIO(data))


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch_headers.py FOLDER")
    target = pathlib.Path(sys.argv[1])
    for project, version, sha256, prefix, headers in WHEELS:
        if all((target / header).exists() for header in headers):
            continue
        archive = wheel(project, version, sha256)
        for header in headers:
            path = target / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(prefix + header))


if __name__ == "__main__":
    main()
