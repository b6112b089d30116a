"""Reads every table of a log with DuckDB, pandas and Polars, and runs docs/views.sql.

    cargo run -p ledger --example sample_log DIR && python tests/readers/check_readers.py DIR [SAME]

`SAME` is a log that has the same rows, in other files.

What the columns should be is read from docs/event-log.md, which a test of the ledger holds equal
to the source. Exit code 0: all readers agree with it and with each other.
"""

import pathlib
import re
import sys

import duckdb
import pandas
import polars
import pyarrow.parquet

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

# Type in the document: type in DuckDB, in pandas (pyarrow), in Polars.
TYPES = {
    "i64": ("BIGINT", "int64[pyarrow]", "Int64"),
    "i32": ("INTEGER", "int32[pyarrow]", "Int32"),
    "bool": ("BOOLEAN", "bool[pyarrow]", "Boolean"),
    "string": ("VARCHAR", "string[pyarrow]", "String"),
    "list<i64>": ("BIGINT[]", "list<element: int64>[pyarrow]", "List(Int64)"),
    "timestamp(us, UTC)": (
        "TIMESTAMP WITH TIME ZONE",
        "timestamp[us, tz=UTC][pyarrow]",
        "Datetime(time_unit='us', time_zone='UTC')",
    ),
}


def documented_tables():
    """{table: {column: (type, nullable)}} as docs/event-log.md lists them."""
    text = (DOCS / "event-log.md").read_text()
    section = text.split("<!-- tables: begin -->")[1].split("<!-- tables: end -->")[0]
    tables = {}
    for block in section.split("### `")[1:]:
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+?)( \?)? \|", block, re.MULTILINE)
        tables[block.split("`")[0]] = {name: (kind, bool(null)) for name, kind, null in rows}
    assert len(tables) == 15, sorted(tables)
    return tables


def read_duckdb(log, table):
    relation = duckdb.sql(
        f"SELECT * FROM read_parquet('{log}/{table}/**/*.parquet', union_by_name = true)"
    )
    types = dict(zip(relation.columns, map(str, relation.types)))
    return types, relation.count("*").fetchall()[0][0]


def read_pandas(log, table):
    frame = pandas.read_parquet(log / table, dtype_backend="pyarrow")
    # pyarrow names the item of a list as the file does.
    types = {name: str(kind).replace("item:", "element:") for name, kind in frame.dtypes.items()}
    return types, len(frame)


def read_polars(log, table):
    scan = polars.scan_parquet(
        log / table, hive_partitioning=True, missing_columns="insert", extra_columns="ignore"
    )
    frame = scan.collect()
    return {name: str(kind) for name, kind in frame.schema.items()}, len(frame)


def check_table(log, table, columns):
    counts = set()
    for reader, index in ((read_duckdb, 0), (read_pandas, 1), (read_polars, 2)):
        types, rows = reader(log, table)
        # `date` comes from the path.
        assert types.pop("date", None) is not None, (reader.__name__, table)
        expected = {name: TYPES[kind][index] for name, (kind, _) in columns.items()}
        assert types == expected, (reader.__name__, table, types, expected)
        counts.add(rows)
    assert len(counts) == 1, (table, counts)
    return counts.pop()


def check_files(log, table, columns):
    """Rules that every single file must keep: metadata, nullability, no exotic encoding."""
    for path in sorted((log / table).glob("date=*/*.parquet")):
        file = pyarrow.parquet.ParquetFile(path)
        metadata = file.metadata.metadata or {}
        assert metadata[b"vramscope.table"] == table.encode(), path
        assert metadata[b"vramscope.complete"] == b"true", path
        nullable = {field.name: field.nullable for field in file.schema_arrow}
        assert nullable == {name: null for name, (_, null) in columns.items()}, path
        most = 1 << 20 if b"vramscope.merged_files" in metadata else 131_072
        for group in range(file.metadata.num_row_groups):
            assert file.metadata.row_group(group).num_rows <= most, path
            for column in range(file.metadata.num_columns):
                chunk = file.metadata.row_group(group).column(column)
                assert chunk.compression == "ZSTD", path
                assert not {"BYTE_STREAM_SPLIT", "DELTA_BYTE_ARRAY"} & set(chunk.encodings), path


def check_times(log):
    wrong = duckdb.sql(
        f"SELECT count(*) FROM read_parquet('{log}/events/**/*.parquet') "
        "WHERE epoch_us(ts) <> ts_ns // 1000"
    )
    assert wrong.fetchall()[0][0] == 0, "ts is not ts_ns in microseconds"


def events_frame(log):
    frame = pandas.read_parquet(log / "events", dtype_backend="pyarrow")
    return frame.sort_values("seq")


def check_views(log):
    """The views say what a plain computation over the events says."""
    connection = duckdb.connect()
    connection.execute(f"SET VARIABLE vramscope_log = '{log}'")
    connection.execute((DOCS / "views.sql").read_text())
    assert_same_tables(connection, log)
    if list((log / "journal").glob("*.arrows")):
        # Rows that other readers cannot see yet: what they say is a part.
        print("views: figures checked only where nothing lies in the journal")
        return
    if connection.sql("SELECT count(DISTINCT run) FROM events").fetchall()[0][0] != 1:
        print("views: figures checked only for logs of one run")
        return
    events = events_frame(log)
    if events.seq.min() != 1:
        check_late_start(connection, events)
        return
    check_live(connection, events)
    check_peak(connection, events)
    check_leaks(connection, events)
    check_ranks(connection)
    check_breakdown(connection)


def assert_same_tables(connection, log):
    for table in documented_tables():
        seen = connection.sql(f"SELECT count(*) FROM {table}").fetchall()[0][0]
        files = f"'{log}/{table}/**/*.parquet'"
        all_rows = duckdb.sql(f"SELECT count(*) FROM read_parquet({files})").fetchall()[0][0]
        latest_only = table in ("processes", "stacks", "frames")
        assert seen <= all_rows if latest_only else seen == all_rows, (table, seen, all_rows)


def live_bytes(connection, moment):
    text = moment.isoformat()
    query = f"SELECT coalesce(sum(bytes), 0)::BIGINT FROM live_at(TIMESTAMPTZ '{text}')"
    return connection.sql(query).fetchall()[0][0]


def check_live(connection, events):
    for part in (0.1, 0.5, 1.0):
        moment = events.ts.iloc[int((len(events) - 1) * part)]
        expected = int(events[events.ts <= moment].delta_bytes.sum())
        assert live_bytes(connection, moment) == expected, part


def check_late_start(connection, events):
    """Old files are deleted: the first checkpoint and what followed it give every later one."""
    checkpoints = connection.sql(
        "SELECT seq, sum(size_bytes)::BIGINT FROM live GROUP BY seq ORDER BY seq"
    ).fetchall()
    covered = [(seq, held) for seq, held in checkpoints if seq >= events.seq.min() - 1]
    assert len(covered) >= 2, checkpoints
    for seq, held in covered:
        moment = events[events.seq <= seq].ts.max()
        # `ts` has microseconds: the next event may have the same.
        same = events[(events.seq > seq) & (events.ts <= moment)].delta_bytes.sum()
        assert live_bytes(connection, moment) == held + int(same), seq


def check_peak(connection, events):
    rows = connection.sql("SELECT proc_id, level, peak_bytes, live_bytes FROM peak").fetchall()
    assert rows
    for proc_id, level, peak_bytes, last in rows:
        own = events[(events.proc_id == proc_id) & (events.level == level)]
        running = own.delta_bytes.cumsum()
        assert (peak_bytes, last) == (int(running.max()), int(running.iloc[-1])), (proc_id, level)


def check_leaks(connection, events):
    called = events[~events.implicit]
    by_block = called.groupby("alloc_id").delta_bytes.sum()
    expected = int(by_block[by_block > 0].sum())
    total, unnamed = connection.sql(
        "SELECT sum(bytes)::BIGINT, count(*) FILTER (site IS NULL) FROM leaks"
    ).fetchall()[0]
    assert (total, unnamed) == (expected, 0)


def check_ranks(connection):
    rows = connection.sql("SELECT rank, tensor_live_bytes, tensor_peak_bytes FROM ranks").fetchall()
    assert [row[0] for row in rows] == sorted(row[0] for row in rows) and len(rows) >= 2, rows
    assert all(live <= peak for _, live, peak in rows), rows


def check_breakdown(connection):
    rows = connection.sql(
        "SELECT sum(bytes) FILTER (category = 'nvml_used'), "
        "sum(bytes) FILTER (category <> 'nvml_used') FROM breakdown_latest GROUP BY proc_id"
    ).fetchall()
    assert rows and all(whole == parts for whole, parts in rows), rows


def check_sums(log):
    """The readers add up the same bytes and agree on when they were."""
    files = f"'{log}/events/**/*.parquet'"
    query = "SELECT level, sum(delta_bytes)::BIGINT, count(*), min(ts_ns), max(ts_ns)"
    by_duckdb = duckdb.sql(f"{query} FROM read_parquet({files}) GROUP BY level").fetchall()
    frame = pandas.read_parquet(log / "events", dtype_backend="pyarrow").groupby("level")
    by_pandas = [
        (level, int(its.delta_bytes.sum()), len(its), int(its.ts_ns.min()), int(its.ts_ns.max()))
        for level, its in frame
    ]
    scan = polars.scan_parquet(log / "events", hive_partitioning=True).group_by("level")
    column = polars.col
    by_polars = scan.agg(
        column("delta_bytes").sum(),
        polars.len(),
        column("ts_ns").min().alias("first"),
        column("ts_ns").max().alias("last"),
    ).collect()
    assert sorted(by_duckdb) == sorted(by_pandas) == sorted(by_polars.rows()), (
        by_duckdb,
        by_pandas,
        by_polars,
    )
    assert by_duckdb, "no events"


def check_same(log, same):
    """Both logs have the same rows in every table, however they lie in files."""

    def rows(of, table):
        files = f"'{of}/{table}/**/*.parquet'"
        return f"SELECT * EXCLUDE (date) FROM read_parquet({files}, hive_partitioning = true)"

    for table in documented_tables():
        for one, other in ((log, same), (same, log)):
            query = f"{rows(one, table)} EXCEPT ALL {rows(other, table)}"
            more = duckdb.sql(f"SELECT count(*) FROM ({query})").fetchall()[0][0]
            assert more == 0, f"{table}: {more} rows of {one} are not in {other}"


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    log = pathlib.Path(sys.argv[1]).resolve()
    for table, columns in documented_tables().items():
        check_files(log, table, columns)
        rows = check_table(log, table, columns)
        print(f"{table}: {rows} rows, {len(columns)} columns, the same in DuckDB, pandas, Polars")
    check_times(log)
    check_sums(log)
    for same in sys.argv[2:]:
        check_same(log, pathlib.Path(same).resolve())
        print(f"the same rows as {same}")
    check_views(log)
    print("views.sql: ok")


if __name__ == "__main__":
    main()
