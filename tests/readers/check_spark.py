"""Reads every table of a log with Spark, in local mode: types as documented, sums as in DuckDB.

    VRAMSCOPE_FULL=1 python tests/readers/check_spark.py DIR

Only in the full run: Spark is large, and needs Java. Exit code 77 where it can't run, with the reason
on the last line.
"""

import os
import pathlib
import shutil
import sys

CANT_RUN = 77

TYPES = {
    "i64": "bigint",
    "i32": "int",
    "bool": "boolean",
    "string": "string",
    "list<i64>": "array<bigint>",
    "timestamp(us, UTC)": "timestamp",
}


def skip(reason):
    print(f"SKIP {reason}")
    sys.exit(CANT_RUN)


def session():
    if os.environ.get("VRAMSCOPE_FULL") != "1":
        skip("Spark: only with --full, which installs it")
    if not shutil.which("java"):
        skip("Spark: no java; `apt-get install openjdk-21-jre-headless`")
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        skip(f"Spark: {error}; `pip install -r tests/requirements-full.txt`")
    builder = SparkSession.builder.master("local[2]").appName("vramscope")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def read(spark, folder):
    return spark.read.option("mergeSchema", "true").parquet(str(folder))


def check_table(spark, log, table, columns):
    import duckdb

    frame = read(spark, log / table)
    types = dict(frame.dtypes)
    assert types.pop("date", None) is not None, table
    assert types == {name: TYPES[kind] for name, (kind, _) in columns.items()}, (table, types)
    files = f"'{log}/{table}/**/*.parquet'"
    expected = duckdb.sql(f"SELECT count(*) FROM read_parquet({files})").fetchall()[0][0]
    assert frame.count() == expected, (table, frame.count(), expected)
    return expected


def check_sums(spark, log):
    import duckdb

    query = "SELECT level, sum(delta_bytes), count(*), min(ts_ns), max(ts_ns), min(addr)"
    read(spark, log / "events").createOrReplaceTempView("events")
    by_spark = [tuple(row) for row in spark.sql(f"{query} FROM events GROUP BY level").collect()]
    files = f"'{log}/events/**/*.parquet'"
    by_duckdb = duckdb.sql(f"{query} FROM read_parquet({files}) GROUP BY level").fetchall()
    assert sorted(by_spark) == sorted(by_duckdb), (by_spark, by_duckdb)
    wrong = spark.sql("SELECT count(*) FROM events WHERE unix_micros(ts) <> ts_ns div 1000")
    assert wrong.collect()[0][0] == 0, "ts is not ts_ns in microseconds"


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    spark = session()
    from check_readers import documented_tables

    log = pathlib.Path(sys.argv[1]).resolve()
    for table, columns in documented_tables().items():
        check_table(spark, log, table, columns)
    check_sums(spark, log)
    print(f"Spark {spark.version}: types and sums of {len(documented_tables())} tables: ok")
    spark.stop()


if __name__ == "__main__":
    main()
