"""Debian's packages, pinned by sha256, unpacked and not installed. Standard library only."""
import hashlib
import io
import lzma
import sys
import tarfile
import urllib.error
import urllib.request

# Debian keeps a version in its pool until a suite has a newer one; the snapshot keeps it for ever.
MAIN = ["https://deb.debian.org/debian/pool/main",
        "https://snapshot.debian.org/archive/debian/20261130T000000Z/pool/main"]
SECURITY = ["https://deb.debian.org/debian-security/pool/updates/main",
            "https://snapshot.debian.org/archive/debian-security/20261130T000000Z/pool/updates/main"]


def fail(reason):
    sys.exit(f"fetch: {reason}")


def checked(data, sha256, name):
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        fail(f"{name} has sha256 {found}, expected {sha256}")
    return data


def package(sources, path, sha256):
    """The bytes of a package, from the first source that has it."""
    missed = []
    for source in sources:
        url = f"{source}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=120) as answer:
                return checked(answer.read(), sha256, url)
        except (urllib.error.URLError, TimeoutError) as error:
            missed.append(f"{url}: {error}")
    fail("no source has the pinned package (a newer one may have taken its place: then pin that in "
         f"{sys.argv[0]}):\n  " + "\n  ".join(missed))


def data_of(package_bytes):
    """The files of a package, which is an `ar` archive of archives."""
    at = len(b"!<arch>\n")
    while at + 60 <= len(package_bytes):
        name = package_bytes[at:at + 16].strip().rstrip(b"/")
        size = int(package_bytes[at + 48:at + 58])
        if name == b"data.tar.xz":
            return lzma.decompress(package_bytes[at + 60:at + 60 + size])
        at += 60 + size + size % 2
    fail("a package without data.tar.xz")


def unpack(sources, path, sha256, prefixes, folder):
    """Puts the files of a package whose paths begin with one of the prefixes into a folder."""
    data = data_of(package(sources, path, sha256))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            name = member.name[2:] if member.name.startswith("./") else member.name
            wanted = any(name.startswith(prefix) for prefix in prefixes)
            # Links to configuration outside of the folder, such as sitecustomize.py, lead nowhere.
            outside = member.issym() and member.linkname.startswith("/")
            if wanted and not outside and ".." not in name.split("/"):
                archive.extract(member, folder, set_attrs=not member.isdir())
