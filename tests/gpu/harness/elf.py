"""Just enough ELF to find a function of a shared library in a process's memory."""

import re
import struct


def _sections(data):
    offset = struct.unpack_from("<Q", data, 0x28)[0]
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for index in range(count):
        yield struct.unpack_from("<IIQQQQIIQQ", data, offset + index * size)


def dynamic_symbols(data):
    """Name -> virtual address of the exported functions of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    sections = list(_sections(data))
    symbols = {}
    for _, kind, _, _, offset, size, link, _, _, entry in sections:
        if kind != 11 or not entry:  # SHT_DYNSYM
            continue
        strings = sections[link][4]
        for at in range(offset, offset + size, entry):
            name, info, _, index, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            if info & 0xF == 2 and index:  # STT_FUNC, defined
                end = data.index(b"\0", strings + name)
                symbols[data[strings + name : end].decode(errors="replace")] = value
    return symbols


def file_offset(data, address):
    """Where in the file a virtual address lies."""
    start = struct.unpack_from("<Q", data, 0x20)[0]
    size, count = struct.unpack_from("<HH", data, 0x36)
    for index in range(count):
        kind, _, offset, vaddr, _, in_file, _, _ = struct.unpack_from(
            "<IIQQQQQQ", data, start + index * size
        )
        if kind == 1 and vaddr <= address < vaddr + in_file:  # PT_LOAD
            return offset + address - vaddr
    raise ValueError(f"address {address:#x} lies in no loaded part of the file")


def executable_maps(pid, name):
    """(start, end, file offset, path) of the executable mappings of a library."""
    found = []
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or "x" not in fields[1] or not re.search(name, fields[5]):
                continue
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append((start, end, int(fields[2], 16), fields[5].strip()))
    return found


class Entries:
    """First bytes of a library's functions, in its file and in a process that maps it."""

    LENGTH = 16

    def __init__(self, pid, library, names):
        self.pid = pid
        maps = executable_maps(pid, library)
        if not maps:
            raise RuntimeError(f"process {pid} maps no {library}")
        self.path = maps[0][3]
        with open(self.path, "rb") as file:
            data = file.read()
        symbols = dynamic_symbols(data)
        self.places = {}
        for name in names:
            if name not in symbols:
                continue
            offset = file_offset(data, symbols[name])
            for start, end, mapped, path in maps:
                if path == self.path and mapped <= offset < mapped + end - start:
                    bytes_of_file = data[offset : offset + self.LENGTH]
                    self.places[name] = (start + offset - mapped, bytes_of_file)

    def changed(self):
        """Functions whose bytes in memory are not the file's now."""
        names = []
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            for name, (address, expected) in self.places.items():
                memory.seek(address)
                if memory.read(len(expected)) != expected:
                    names.append(name)
        return names
