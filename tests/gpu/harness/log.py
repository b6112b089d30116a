"""Reads a vramscope log with pyarrow and pandas, and replays its events.

Independent of vramscope's own reader: what it says of a log is what any Parquet reader sees, plus
the journals (Arrow IPC streams) of a log that is not sealed.
"""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

# Causes of free rows that are no doing of the program.
END_OF_PROCESS = ("exit", "exec")
# Operations that put something into the books.
OPENING = ("alloc", "import", "reserve")
# Reasons of the kernel half that stand for one call each that is not among the events.
LOST_CALLS = (
    "ring_full",
    "pending_full",
    "pending_overwritten",
    "exit_without_enter",
    "call_interrupted",
)

_NULLABLE = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}


def _journal(path):
    """Batches of a journal as far as it is whole."""
    batches = []
    try:
        with pa.ipc.open_stream(path) as stream:
            for batch in stream:
                batches.append(batch)
    except (pa.ArrowInvalid, OSError, EOFError):
        pass  # a killed writer leaves a torn tail, or a file of no bytes
    return batches


class Log:
    """One log folder."""

    def __init__(self, path):
        self.path = Path(path)
        self._tables = {}

    def table(self, name):
        """A table as a data frame; integers stay integers where NULLs are among them."""
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def _read(self, name):
        sealed = sorted((self.path / name).rglob("*.parquet"))
        parts = [pq.ParquetFile(path).read() for path in sealed]
        stems = {path.stem for path in sealed}
        for path in sorted((self.path / "journal").glob(f"{name}-*.arrows")):
            # While a file is sealed both exist for a moment, with the same rows.
            batches = [] if path.stem in stems else _journal(path)
            if batches:
                parts.append(pa.Table.from_batches(batches))
        if not parts:
            raise FileNotFoundError(f"the log has no table {name}")
        whole = pa.concat_tables(parts, promote_options="default")
        return whole.to_pandas(types_mapper=_NULLABLE.get)

    def count(self, name):
        """Rows in the sealed files of a table, without reading them."""
        files = (self.path / name).rglob("*.parquet")
        return sum(pq.ParquetFile(path).metadata.num_rows for path in files)

    @property
    def events(self):
        """Every event, in the order of `seq`."""
        if "sorted events" not in self._tables:
            self._tables["sorted events"] = (
                self.table("events").sort_values("seq").reset_index(drop=True)
            )
        return self._tables["sorted events"]

    def process(self, pid):
        """Latest row about a process, by its host pid or its pid in its own namespace."""
        rows = self.table("processes")
        rows = rows[(rows.pid == pid) | (rows.ns_pid == pid).fillna(False)]
        if rows.empty:
            raise LookupError(f"the log knows no process {pid}")
        return rows.sort_values("ts_ns").iloc[-1]

    def of(self, pid):
        """Events of one process."""
        events = self.events
        return events[events.proc_id == self.process(pid).proc_id]

    def losses(self):
        """Lost by reason; empty where nothing was."""
        rows = self.table("losses")
        return {str(key): int(sum_) for key, sum_ in rows.groupby("reason")["count"].sum().items()}

    def lost_calls(self):
        """Calls that are known to be missing among the events."""
        return sum(count for reason, count in self.losses().items() if reason in LOST_CALLS)

    def size_bytes(self):
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())


def seq_gaps(events):
    """Numbers missing or doubled between the first `seq` and the last."""
    if events.empty:
        return 0
    seq = events.seq
    return (
        int(seq.max() - seq.min() + 1 - len(seq)) if seq.is_unique else int(seq.duplicated().sum())
    )


def blocks(events):
    """One row an allocation: what it is, and when, by what and whether it was closed.

    The row that closes an allocation has its level; releases that leave references behind are
    rows of level `virtual`.
    """
    opened = events[events.op.isin(OPENING)]
    columns = ["alloc_id", "proc_id", "pid", "tid", "ts_ns", "api", "level", "addr", "size_bytes"]
    columns += ["gpu_uuid", "nvml_index"]
    closed = events[(events.op == "free") & (events.alloc_id != 0)]
    closed = closed[["alloc_id", "level", "ts_ns", "api", "tid", "implicit"]]
    closed = closed.rename(columns={"ts_ns": "closed_ns", "api": "closed_by", "tid": "closed_tid"})
    return opened[columns].merge(closed, on=["alloc_id", "level"], how="left")


def live(all_blocks, at_ns=None):
    """Blocks that the program held: at a time, or when the log or the process ended."""
    never = all_blocks.closed_by.isna() | all_blocks.closed_by.isin(END_OF_PROCESS)
    if at_ns is None:
        return all_blocks[never]
    later = (all_blocks.closed_ns > at_ns).fillna(False)
    return all_blocks[(all_blocks.ts_ns <= at_ns) & (never | later)]


def spots(rows):
    """(address, size) of every block."""
    return {(int(a), int(s)) for a, s in zip(rows.addr, rows.size_bytes, strict=True)}


def maps(events, at_ns=None):
    """Address -> (size, alloc_id) of the maps of one process, at a time or at the end."""
    rows = events[events.op.isin(["map", "unmap"])]
    if at_ns is not None:
        rows = rows[rows.ts_ns <= at_ns]
    held = {}
    rows = rows.sort_values(["ts_ns", "seq"], kind="stable")
    for op, addr, size, alloc_id in zip(rows.op, rows.addr, rows.size_bytes, rows.alloc_id):
        if op == "map":
            held[int(addr)] = (int(size), int(alloc_id))
        else:
            held.pop(int(addr), None)
    return held


def merged(ranges):
    """Touching and overlapping (start, size) ranges made one, as sorted (start, end)."""
    result = []
    for start, size in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], start + size))
        else:
            result.append((start, start + size))
    return result


def references(events):
    """Counts of calls that take or drop references of VMM handles."""

    def count(op, api):
        return int(((events.op == op) & (events.api == api)).sum())

    return {
        "created": count("alloc", "cuMemCreate"),
        "refused": count("fail", "cuMemCreate"),
        "retained": count("retain", "cuMemRetainAllocationHandle"),
        "imported": count("import", "cuMemImportFromShareableHandle"),
        "exported": count("export", "cuMemExportToShareableHandle"),
        "mapped": count("map", "cuMemMap"),
        "unmapped": count("unmap", "cuMemUnmap"),
        "released": count("free", "cuMemRelease"),
        "unknown_frees": int(((events.op == "free") & (events.alloc_id == 0)).sum()),
    }


# What adds up to NVML's figure.
PARTS = [
    "tensors",
    "reusable",
    "returnable",
    "graph_pools",
    "cached",
    "library",
    "pools",
    "context",
    "modules",
    "rounding",
    "before_attach",
    "unexplained",
]


def breakdown_sums(table):
    """One row a (ts_ns, proc_id, gpu_uuid) with NVML's figure: the parts and what is missing."""
    wide = table.pivot_table(
        index=["ts_ns", "proc_id", "gpu_uuid"], columns="category", values="bytes", aggfunc="sum"
    )
    parts = PARTS
    for column in ["nvml_used", "live_device", "live_pool", *parts]:
        if column not in wide:
            wide[column] = pd.NA
    wide = wide[wide.nvml_used.notna()].astype("Int64")
    wide["difference"] = wide.nvml_used - sum(wide[part].fillna(0) for part in parts)
    return wide.reset_index().sort_values("ts_ns")
