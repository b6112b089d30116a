-- Views on a vramscope log for DuckDB 1.2 or newer.
--
--   duckdb -cmd "SET VARIABLE vramscope_log = '/path/to/log'" -init views.sql
--
-- or, inside DuckDB, `SET VARIABLE vramscope_log = '...'` and `.read views.sql`. Without the variable
-- the log is the current directory. Every table of the log is a view of its own name with one
-- more column, `run`: `seq` and `alloc_id` count within a run. What lies in the journal (the last
-- minute of a running log) is not seen here.

CREATE OR REPLACE MACRO vramscope_files(name) AS
    coalesce(getvariable('vramscope_log'), '.') || '/' || name || '/**/*.parquet';
CREATE OR REPLACE MACRO vramscope_run(path) AS
    regexp_extract(path, '-([0-9a-f]{8})-[0-9]+\.parquet$', 1);

CREATE OR REPLACE VIEW events AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('events'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW site_usage AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('site_usage'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW breakdown AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('breakdown'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW live AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('live'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW device_samples AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('device_samples'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW process_samples AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('process_samples'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW host_samples AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('host_samples'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW process_libs AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('process_libs'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW devices AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('devices'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW oom AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('oom'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW annotations AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('annotations'), union_by_name = true, filename = true);
CREATE OR REPLACE VIEW losses AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('losses'), union_by_name = true, filename = true);

-- What is written again when more is known: the latest row holds. Stacks and frames are content
-- hashes, equal in all runs.
CREATE OR REPLACE VIEW processes AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('processes'), union_by_name = true, filename = true)
    QUALIFY row_number() OVER (PARTITION BY run, proc_id ORDER BY ts_ns DESC) = 1;
CREATE OR REPLACE VIEW stacks AS SELECT * EXCLUDE (filename), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('stacks'), union_by_name = true, filename = true)
    QUALIFY row_number() OVER (PARTITION BY stack_id ORDER BY first_seen_ns DESC) = 1;
CREATE OR REPLACE VIEW frames AS
    SELECT * EXCLUDE (filename, file_row_number), vramscope_run(filename) AS run
    FROM read_parquet(vramscope_files('frames'), union_by_name = true, filename = true,
        file_row_number = true)
    QUALIFY row_number() OVER (
        PARTITION BY frame_id ORDER BY filename DESC, file_row_number DESC
    ) = 1;

-- Checkpoints of the live set, empty ones too: a file's metadata says which events they follow, several
-- of them where `vramscope compact` merged files.
CREATE OR REPLACE VIEW checkpoints AS
    SELECT vramscope_run(decode(file_name::BLOB)) AS run,
        unnest(string_split(decode(value), ','))::BIGINT AS seq
    FROM parquet_kv_metadata(vramscope_files('live'))
    WHERE decode(key) = 'vramscope.checkpoint_seq';

-- Where the account of a run begins: with its first event, or, where `--max-disk` deleted that,
-- after the first checkpoint from which all events are still there.
CREATE OR REPLACE VIEW account_starts AS
    WITH firsts AS (SELECT run, min(seq) AS first_seq FROM events GROUP BY run)
    SELECT run, first_seq,
        CASE WHEN first_seq > 1 THEN
            (SELECT min(c.seq) FROM checkpoints c
             WHERE c.run = firsts.run AND c.seq >= firsts.first_seq - 1)
        END AS checkpoint_seq
    FROM firsts;

-- Changes of live bytes: events, and the live set of the checkpoint for runs that begin late.
CREATE OR REPLACE VIEW account AS
    SELECT e.run, e.seq, e.ts, e.proc_id, e.level, e.gpu_uuid, e.alloc_id, e.stack_id, e.addr,
        e.delta_bytes, e.implicit
    FROM events e JOIN account_starts s USING (run)
    WHERE e.seq > coalesce(s.checkpoint_seq, -1) AND e.delta_bytes <> 0
    UNION ALL BY NAME
    SELECT l.run, l.seq, make_timestamp(l.alloc_ts_ns // 1000) AT TIME ZONE 'UTC' AS ts,
        l.proc_id, l.level, l.gpu_uuid, l.alloc_id, l.stack_id, l.addr,
        coalesce(l.size_bytes, 0) AS delta_bytes, false AS implicit
    FROM live l JOIN account_starts s ON s.run = l.run AND s.checkpoint_seq = l.seq;

-- What was alive at a moment: SELECT * FROM live_at(TIMESTAMPTZ '2026-11-30 12:00:00+00').
CREATE OR REPLACE MACRO live_at(t) AS TABLE
    SELECT run, proc_id, level, gpu_uuid, alloc_id, min(ts) AS since, any_value(stack_id) AS stack_id,
        arg_min(addr, seq) AS addr, sum(delta_bytes)::BIGINT AS bytes
    FROM account
    WHERE ts <= t
    GROUP BY run, proc_id, level, gpu_uuid, alloc_id
    HAVING sum(delta_bytes) > 0;

-- What a program never freed by a call, by place of allocation. What is alive because the program
-- still runs is in it too: compare two moments with live_at, or wait for the end. Look at `losses`
-- first: a free that was not seen looks like a leak.
CREATE OR REPLACE VIEW leaks AS
    WITH unfreed AS (
        SELECT run, proc_id, level, gpu_uuid, alloc_id, any_value(stack_id) AS stack_id,
            sum(delta_bytes)::BIGINT AS bytes
        FROM account
        WHERE NOT implicit
        GROUP BY run, proc_id, level, gpu_uuid, alloc_id
        HAVING sum(delta_bytes) > 0
    ), sums AS (
        SELECT run, proc_id, level, gpu_uuid, stack_id, count(*) AS blocks, sum(bytes)::BIGINT AS bytes
        FROM unfreed
        GROUP BY run, proc_id, level, gpu_uuid, stack_id
    )
    SELECT sums.*, stacks.site, stacks.folded
    FROM sums LEFT JOIN stacks USING (stack_id)
    ORDER BY bytes DESC;

-- Highest and last live bytes of a process on a device, by level; levels are never added up.
CREATE OR REPLACE VIEW peak AS
    WITH running AS (
        SELECT run, proc_id, level, gpu_uuid, ts, seq,
            sum(delta_bytes) OVER (
                PARTITION BY run, proc_id, level, gpu_uuid ORDER BY seq
                RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
            )::BIGINT AS bytes
        FROM account
    )
    SELECT run, proc_id, level, gpu_uuid, max(bytes) AS peak_bytes, arg_max(ts, bytes) AS peak_ts,
        arg_max(bytes, seq) AS live_bytes
    FROM running
    GROUP BY run, proc_id, level, gpu_uuid;

-- Ranks of a job side by side: who holds more than the others?
CREATE OR REPLACE VIEW ranks AS
    SELECT p.job, p.rank, p.host, p.pid, p.comm, peak.gpu_uuid,
        max(live_bytes) FILTER (level = 'device') AS device_live_bytes,
        max(peak_bytes) FILTER (level = 'device') AS device_peak_bytes,
        max(live_bytes) FILTER (level = 'tensor') AS tensor_live_bytes,
        max(peak_bytes) FILTER (level = 'tensor') AS tensor_peak_bytes
    FROM peak JOIN processes p USING (run, proc_id)
    GROUP BY p.run, p.proc_id, p.job, p.rank, p.host, p.pid, p.comm, peak.gpu_uuid
    ORDER BY p.job, p.rank, peak.gpu_uuid;

-- The latest breakdown of each process and device, a category a row, largest first.
CREATE OR REPLACE VIEW breakdown_latest AS
    SELECT run, proc_id, gpu_uuid, ts, category, library, bytes, estimated
    FROM breakdown
    QUALIFY ts_ns = max(ts_ns) OVER (PARTITION BY run, proc_id, gpu_uuid)
    ORDER BY run, proc_id, gpu_uuid, bytes DESC;
