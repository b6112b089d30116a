"""Writes small logs in vramscope's layout, for the tests of these checks."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

I64, I32, TEXT = pa.int64(), pa.int32(), pa.string()

# Columns that the checks read, with their types in the log.
COLUMNS = {
    "events": {
        "seq": I64,
        "ts_ns": I64,
        "duration_ns": I64,
        "proc_id": I64,
        "pid": I32,
        "tid": I32,
        "op": TEXT,
        "api": TEXT,
        "level": TEXT,
        "nvml_index": I32,
        "gpu_uuid": TEXT,
        "cuda_ordinal": I32,
        "addr": I64,
        "size_bytes": I64,
        "delta_bytes": I64,
        "alloc_id": I64,
        "stack_id": I64,
        "implicit": pa.bool_(),
        "result": I32,
        "backward_pass": I64,
    },
    "processes": {
        "ts_ns": I64,
        "proc_id": I64,
        "pid": I32,
        "ns_pid": I32,
        "exit_code": I32,
        "rank": I32,
        "local_rank": I32,
        "world_size": I32,
        "from_start": pa.bool_(),
    },
    "process_libs": {"ts_ns": I64, "kind": TEXT, "probes": I32, "probes_available": I32},
    "losses": {"ts_ns": I64, "pid": I32, "reason": TEXT, "count": I64},
    "oom": {"ts_ns": I64, "proc_id": I64, "api": TEXT},
    "annotations": {"ts_ns": I64, "proc_id": I64, "kind": TEXT, "text": TEXT},
    "breakdown": {
        "ts_ns": I64,
        "proc_id": I64,
        "gpu_uuid": TEXT,
        "category": TEXT,
        "bytes": I64,
    },
    "site_usage": {
        "ts_ns": I64,
        "proc_id": I64,
        "level": TEXT,
        "stack_id": I64,
        "live_bytes": I64,
    },
    "process_samples": {
        "ts_ns": I64,
        "proc_id": I64,
        "torch_allocated_bytes": I64,
        "torch_reserved_bytes": I64,
        "torch_peak_allocated_bytes": I64,
        "torch_peak_reserved_bytes": I64,
    },
    "device_samples": {"ts_ns": I64, "read_ns": I64},
    "devices": {"gpu_uuid": TEXT, "nvml_index": I32},
    "stacks": {
        "stack_id": I64,
        "site": TEXT,
        "frame_ids": pa.list_(I64),
        "complete": pa.bool_(),
        "incomplete_reason": TEXT,
    },
    "frames": {
        "frame_id": I64,
        "function": TEXT,
        "file": TEXT,
        "line": I32,
        "module": TEXT,
        "kind": TEXT,
    },
}

PROC_ID = -7_000_000_000_000_000_001


def schema(table):
    """Arrow schema of a table."""
    return pa.schema(list(COLUMNS[table].items()))


def as_table(table, rows):
    """Rows as an Arrow table; columns that a row lacks are NULL."""
    names = COLUMNS[table]
    return pa.table(
        {name: pa.array([row.get(name) for row in rows], kind) for name, kind in names.items()}
    )


class Events:
    """Makes rows of events as the account makes them."""

    def __init__(self, pid):
        self.pid, self.rows, self.blocks, self.last_id = pid, [], {}, 0

    def row(self, op, api, level, **fields):
        """Adds a row; its number is its time."""
        seq = len(self.rows) + 1
        self.rows.append(
            {
                "seq": seq,
                "ts_ns": seq * 1000,
                "duration_ns": 1,
                "proc_id": PROC_ID,
                "pid": self.pid,
                "tid": self.pid,
                "op": op,
                "api": api,
                "level": level,
                "nvml_index": 0,
                "gpu_uuid": "GPU-x",
                "cuda_ordinal": 0,
                "addr": 0,
                "size_bytes": None,
                "delta_bytes": 0,
                "alloc_id": 0,
                "stack_id": 0,
                "implicit": False,
                "result": 0,
                **fields,
            }
        )

    def alloc(self, api, level, addr, size, tid=None, op="alloc"):
        """An allocation; gives its number."""
        self.last_id += 1
        self.blocks[self.last_id] = (level, addr, size)
        self.row(
            op,
            api,
            level,
            addr=addr,
            size_bytes=size,
            delta_bytes=size or 0,
            alloc_id=self.last_id,
            tid=tid or self.pid,
        )
        return self.last_id

    def free(self, api, alloc_id, implicit=False, level=None, **fields):
        """A free; with `level="virtual"` a release that leaves references behind."""
        own, addr, size = self.blocks[alloc_id]
        closes = level is None
        self.row(
            "free",
            api,
            level or own,
            addr=addr,
            size_bytes=size,
            alloc_id=alloc_id,
            delta_bytes=-(size or 0) if closes else 0,
            implicit=implicit,
            **fields,
        )
        if closes:
            del self.blocks[alloc_id]

    def exit(self):
        """The end of the process frees the rest."""
        for alloc_id in list(self.blocks):
            self.free("exit", alloc_id, implicit=True)


def write(path, tables):
    """Writes sealed files, one a table, and empty ones for the tables not given."""
    path = Path(path)
    for name in COLUMNS:
        folder = path / name / "date=2026-11-30"
        folder.mkdir(parents=True, exist_ok=True)
        table = as_table(name, tables.get(name, []))
        pq.write_table(table, folder / f"{name}-0123abcd-000001.parquet")
    (path / "manifest-0123abcd.json").write_text(json.dumps({"schema_version": 1}))


def write_journal(path, name, rows, number=2, torn_bytes=0):
    """Writes a journal, its tail cut off by `torn_bytes`."""
    folder = Path(path) / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-0123abcd-{number:06}.arrows"
    with pa.ipc.new_stream(str(file), schema(name)) as stream:
        for row in rows:
            for batch in as_table(name, [row]).to_batches():
                stream.write_batch(batch)
    if torn_bytes:
        data = file.read_bytes()
        file.write_bytes(data[:-torn_bytes])
    return file
