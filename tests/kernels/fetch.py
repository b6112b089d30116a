#!/usr/bin/env python3
"""Puts Debian's kernels into a folder, for virtual machines: fetch.py FOLDER.

The pinned packages are unpacked, not installed: nothing outside of FOLDER changes. Prints a line for
each kernel: its package, its version and the path of its image. x86-64 only. Standard library only,
Python 3.8 or later.

The "cloud" flavour has what the other one has but for drivers of devices, in a third of the bytes.
"""
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import debian  # noqa: E402

# (package, version, sha256), of Debian 11, 12 and 13; all by way of security updates
PACKAGES = [
    ("linux-image-5.10.0-46-cloud-amd64", "5.10.262-1",
     "18d94781d1b3052e21967ac2262239e5f14fbf511d6c3e110629d7aa35340760"),
    ("linux-image-6.1.0-57-cloud-amd64", "6.1.192-3",
     "4fdd0172a8c3f41a97e92465b2ac1867e1c10d82d7aeed3d26ee7a5d14df1754"),
    ("linux-image-6.12.118+deb13-cloud-amd64", "6.12.118-1",
     "07f23ba1de88377d700e1e2f5b2ee495ff89b0d0bb73fdbd3eac8f6b27609b9a"),
]


def image(folder, name, version, sha256):
    """The kernel's image; fetched unless it is there."""
    found = folder / sha256 / "boot" / name.replace("linux-image", "vmlinuz")
    if not found.exists():
        shutil.rmtree(folder / sha256, ignore_errors=True)
        building = folder / "building"
        shutil.rmtree(building, ignore_errors=True)
        os.makedirs(building)
        path = f"l/linux-signed-amd64/{name}_{version}_amd64.deb"
        debian.unpack(debian.SECURITY, path, sha256, ["boot/vmlinuz"], building)
        # The folder appears whole or not at all.
        building.rename(folder / sha256)
    return found


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch.py FOLDER")
    folder = pathlib.Path(sys.argv[1]).resolve()
    for name, version, sha256 in PACKAGES:
        print(name, version, image(folder, name, version, sha256))


if __name__ == "__main__":
    main()
