#!/usr/bin/env python3
"""Puts the libraries of real PyTorch wheels that are probed into a folder: fetch.py FOLDER.

Only these members of each wheel are fetched, in pieces of the archive, and pinned by sha256: the
wheels of x86-64 have up to 900 MB, the members a tenth. They are not ours to ship. Prints a line for
each library: version, machine, path. Some 850 MB are fetched; of each library only headers and exported
symbols are kept, at their places in a file that is empty elsewhere: 62 MB in all.
Standard library only, Python 3.8 or later.
"""
import hashlib
import http.client
import io
import pathlib
import struct
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib

HOST = "https://files.pythonhosted.org/packages"
LIBRARIES = ["libc10.so", "libtorch_cpu.so"]
TRIES = 3
PIECE = 8 << 20
# Type of the section with exported symbols.
DYNSYM = 11
# (version, wheel, its place, sha256 of each library). The last one was the newest on 2026-12-01.
WHEELS = [
    ("2.1.2", "torch-2.1.2-cp311-cp311-manylinux1_x86_64.whl",
     "da/6a/7fb9d82db4568834ff6d4df2fe3b143de4ed65a3f8f93e7daed703626cb6",
     ["1224972ba3a83a84ea7b374fb454cb42a2f70cfe73cf7ed5cc52bfcde2bddab7",
      "f1cbeea080c071a1c73bf38768d90c0c53ab3921a530b85f15c9842d95e085c8"]),
    ("2.1.2", "torch-2.1.2-cp311-cp311-manylinux2014_aarch64.whl",
     "25/6b/5837c3458aa1f4b22ba39d5ee22c8bdd498df320ec1ccc9039d27de41246",
     ["5acf6c0ffcbc248b37636f9af4f3cc337b6b8f177cf07ae8eb0b6eb5f678589a",
      "57dd6dd3fc4563a7794bf8a37399ad945b31d6e095b8ad1ad022474757e72931"]),
    ("2.4.1", "torch-2.4.1-cp311-cp311-manylinux1_x86_64.whl",
     "ea/ea/4ab009e953bca6ff35ad75b8ab58c0923308636c182c145dc63084f7d136",
     ["ff4eddb5dec320702e7cf1a35af3a83cf2fcce29c68e4bfeeb0e0bfd48724041",
      "7d755082242d1f04aa4c0079a7b0bdad2dfc412d31fc065ae634beaf2287c804"]),
    ("2.4.1", "torch-2.4.1-cp311-cp311-manylinux2014_aarch64.whl",
     "8f/a1/b31f94b4631c1731261db9fdc9a749ef58facc3b76094a6fe974f611f239",
     ["2885131626896b002d9065e26aa539cf3b9745a1f7dab1343be54b8bddeb87bd",
      "587f678e36ce82ef1f91498a85ee7dc7d97991d50bab063a62ddbbfbcc1ce57d"]),
    ("2.6.0", "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl",
     "78/a9/97cbbc97002fff0de394a2da2cdfa859481fdca36996d7bd845d50aa9d8d",
     ["9e8b46af9a5b5f1bf3200f2aabc3376597f1fb4787a179428e8c91f7253af78d",
      "6a356e5505acb5c4babd7a20c7b470d879cac278f5357b58311af3e65b976d45"]),
    ("2.6.0", "torch-2.6.0-cp311-cp311-manylinux_2_28_aarch64.whl",
     "6d/fa/134ce8f8a7ea07f09588c9cc2cea0d69249efab977707cf67669431dcf5c",
     ["4d28a7d208af84dadbe1fb5f8af811dd1bd482eca864601c0f73d59ac3eec352",
      "9ebb47fde90ac4cc1529c0b7955f7f6323b0c10b4b82dbe4d7695e9f13b506cf"]),
    ("2.8.0", "torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl",
     "5a/63/4fdc45a0304536e75a5e1b1bbfb1b56dd0e2743c48ee83ca729f7ce44162",
     ["11add41a25c7803dcbcae77fb42b428d94e091c72738d4b0b923f3bc21fe2f11",
      "e3e3a4336ba0dadc0d7f856fca5880f4f967f6a46f7c326f03588aacc0b4550a"]),
    ("2.8.0", "torch-2.8.0-cp311-cp311-manylinux_2_28_aarch64.whl",
     "8f/c4/3e7a3887eba14e815e614db70b3b529112d1513d9dae6f4d43e373360b7f",
     ["c9dfb6fa2bbce14c3e09fd14601299e6a457e7db924aef44b77d9b4e3da700cf",
      "9ddb6367501297b3e740984001b37489d54b87f4bef47dfe5419d56d706d1576"]),
    ("2.15.0", "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl",
     "06/7d/57b7f46934e1148b436889e385693bfcb94ae047b3fe0b6015922e3b66f7",
     ["bb1fe5b9b16d125c2725891fd124ee50b6264691981f0e4aafb371549e2c6e59",
      "893d1a7de3f9a5a5c931718aae7f94db22256dda0a07e50912d8c75b7ebbfcaa"]),
    ("2.15.0", "torch-2.15.0-cp311-cp311-manylinux_2_28_aarch64.whl",
     "8c/06/439e6434bef959507463fa3fd21c580304f3798ea06ab3e932ef908cff1d",
     ["103965aaf9ef84e0399aaad965261b3d7fd468558236295b95ee7def930e8d83",
      "e211e551ca5bfc7390bdda8c3165b928da1940cf57d89df56697b01647e02285"]),
]


def fail(reason):
    sys.exit(f"fetch: {reason}")


def piece(url, begin, end):
    """Bytes of a file, with its whole length."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-{end - 1}"})
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                length = answer.headers.get("Content-Range", "").rpartition("/")[2]
                if answer.status != 206 or not length.isdigit():
                    fail(f"{url}: the server does not give parts of files")
                return answer.read(), int(length)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if not left:
                fail(f"{url}: {error}")
            time.sleep(1)


class Remote(io.RawIOBase):
    """A file that is read where it lies."""

    def __init__(self, url):
        super().__init__()
        self.url, self.at = url, 0
        self.length = piece(url, 0, 1)[1]

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        end = min(self.at + len(buffer), self.length)
        if self.at >= end:
            return 0
        data, _ = piece(self.url, self.at, end)
        buffer[:len(data)] = data
        self.at += len(data)
        return len(data)


def kept(elf):
    """Where a 64-bit library's headers and exported symbols lie: (offset, size) of each."""
    elf.seek(0)
    header = struct.unpack("<16sHHIQQQIHHHHHH", elf.read(64))
    programs, sections, (program_size, programs_n), (section_size, sections_n, names) = (
        header[5], header[6], header[9:11], header[11:14])
    elf.seek(sections)
    table = [struct.unpack("<IIQQQQIIQQ", elf.read(section_size)) for _ in range(sections_n)]
    exported = [section for section in table if section[1] == DYNSYM]
    wanted = exported + [table[section[6]] for section in exported] + [table[names]]
    return [(0, 64), (programs, program_size * programs_n), (sections, section_size * sections_n),
            *((section[4], section[5]) for section in wanted)]


def hollow(whole, path):
    """Keeps of a library what is looked at."""
    with open(path, "wb") as to:
        to.truncate(whole.seek(0, io.SEEK_END))
        for offset, size in kept(whole):
            whole.seek(offset)
            to.seek(offset)
            to.write(whole.read(size))


def extract(archive, name, sha256, path):
    """Puts a library at a path, if it is the pinned one."""
    found, unfinished = hashlib.sha256(), path.with_suffix(".part")
    with tempfile.TemporaryFile(dir=path.parent) as whole:
        with archive.open(f"torch/lib/{name}") as source:
            for data in iter(lambda: source.read(PIECE), b""):
                found.update(data)
                whole.write(data)
        if found.hexdigest() != sha256:
            fail(f"{name} for {path} has sha256 {found.hexdigest()}, expected {sha256}")
        hollow(whole, unfinished)
    unfinished.rename(path)


def fetch(wheel, place, pins, folder):
    """The libraries of a wheel; those that are there are not fetched again."""
    missing = [(name, sha256) for name, sha256 in zip(LIBRARIES, pins)
               if not (folder / f"{name}-{sha256[:16]}" / name).exists()]
    if not missing:
        return
    with zipfile.ZipFile(io.BufferedReader(Remote(f"{HOST}/{place}/{wheel}"), PIECE)) as archive:
        for name, sha256 in missing:
            path = folder / f"{name}-{sha256[:16]}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            extract(archive, name, sha256, path)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: fetch.py FOLDER")
    folder = pathlib.Path(sys.argv[1]).resolve()
    for version, wheel, place, pins in WHEELS:
        try:
            fetch(wheel, place, pins, folder)
        except (zipfile.BadZipFile, zlib.error, KeyError, OSError) as error:
            fail(f"{wheel}: {error}")
        machine = "aarch64" if "aarch64" in wheel else "x86-64"
        for name, sha256 in zip(LIBRARIES, pins):
            print(version, machine, folder / f"{name}-{sha256[:16]}" / name)


if __name__ == "__main__":
    main()
