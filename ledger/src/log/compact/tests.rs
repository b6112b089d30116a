use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    sync::Arc,
};

use arrow::array::RecordBatch;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use proptest::prelude::*;

use super::*;
use crate::{
    log::{Log, Options, Row, RunInfo, TABLES, Writer, manifest::tests::info, recover, testing::*},
    report::Model,
    rows::*,
};

const SECOND: i64 = 1_000_000_000;

/// Options that seal a file every `rows` rows.
fn small(rows: u64) -> Options {
    Options { batch_rows: rows as usize, max_file_rows: rows, ..Options::default() }
}

/// All runs here are of another host than this one.
fn everywhere() -> Compaction {
    Compaction { other_hosts: true, ..Compaction::default() }
}

/// A run of 100 events in files of ten, with a checkpoint after each.
fn run_of(dir: &Path, host: &str) -> Run8 {
    run_of_files(dir, host, 10)
}

/// A run with so many files.
fn run_of_files(dir: &Path, host: &str, files: i64) -> Run8 {
    let mut writer = Writer::create(dir, &info(host), small(10)).unwrap();
    for first in (1..files * 10).step_by(10) {
        push_events(&mut writer, first..first + 10);
        let seq = first + 9;
        let rows = (0..first % 4).map(|id| LiveRow { alloc_id: id, seq, ..Default::default() });
        writer.checkpoint(seq, rows);
        writer.push(&StackRow { stack_id: first, ..Default::default() });
        writer.tick(START + seq * SECOND);
    }
    let run = writer.run8();
    writer.finish(START + 200 * SECOND).unwrap();
    run
}

/// Paths below a directory, relative to it, files only.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            let inside = self::files(&entry.path());
            files.extend(inside.into_iter().map(|path| Path::new(&entry.file_name()).join(path)));
        } else {
            files.push(entry.file_name().into());
        }
    }
    files.sort();
    files
}

/// Rows of a table as readers see them that open whatever lies in its directory.
fn rows_for_readers(dir: &Path, table: &str) -> usize {
    let table = dir.join(table);
    let rows = files(&table).into_iter().map(|path| {
        let file = fs::File::open(table.join(path)).unwrap();
        let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
        reader.metadata().file_metadata().num_rows() as usize
    });
    rows.sum()
}

/// Rows of every table, sorted, so that sets of rows can be compared.
type Rows = BTreeMap<&'static str, Vec<String>>;

fn collect<R: Row>(log: &Log, all: &mut Rows) {
    let mut rows: Vec<String> = log.rows::<R>().map(|row| format!("{:?}", row.unwrap())).collect();
    rows.sort_unstable();
    all.insert(R::TABLE.name, rows);
}

fn rows(dir: &Path) -> Rows {
    let log = Log::open(&[dir.to_owned()]).unwrap();
    let mut all = Rows::new();
    collect::<EventRow>(&log, &mut all);
    collect::<SiteUsageRow>(&log, &mut all);
    collect::<BreakdownRow>(&log, &mut all);
    collect::<LiveRow>(&log, &mut all);
    collect::<DeviceSampleRow>(&log, &mut all);
    collect::<ProcessSampleRow>(&log, &mut all);
    collect::<HostSampleRow>(&log, &mut all);
    collect::<ProcessRow>(&log, &mut all);
    collect::<ProcessLibRow>(&log, &mut all);
    collect::<DeviceRow>(&log, &mut all);
    collect::<StackRow>(&log, &mut all);
    collect::<FrameRow>(&log, &mut all);
    collect::<OomRow>(&log, &mut all);
    collect::<AnnotationRow>(&log, &mut all);
    collect::<LossRow>(&log, &mut all);
    assert_eq!(all.len(), TABLES.len());
    all
}

/// (run, seq, allocations) of each checkpoint.
fn checkpoints(dir: &Path) -> Vec<(Run8, i64, Vec<i64>)> {
    let log = Log::open(&[dir.to_owned()]).unwrap();
    let checkpoints = log.checkpoints();
    let ids = |c| log.checkpoint_rows(c).map(|row| row.unwrap().alloc_id).collect();
    checkpoints.iter().map(|c| (c.run, c.seq, ids(c))).collect()
}

fn report(dir: &Path) -> String {
    Model::read(&[dir.to_owned()]).unwrap().text(false)
}

#[test]
fn many_files_become_one_a_table_and_nothing_else_changes() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let runs = [run_of(dir, "host-a"), run_of(dir, "host-b")];
    let (before, told, live) = (rows(dir), report(dir), checkpoints(dir));
    let compacted = compact(dir, everywhere()).unwrap();
    assert_eq!((&compacted.left, &compacted.waiting), (&vec![], &BTreeMap::new()));
    let events = compacted.tables["events"];
    assert_eq!((events.files_before, events.files_after, events.rows), (20, 2, 200));
    let bytes = files(&dir.join("events")).into_iter().map(|path| {
        let name = path.to_str().unwrap();
        if name.contains("-000000.") {
            return 0;
        }
        fs::metadata(dir.join("events").join(path)).unwrap().len()
    });
    assert_eq!(events.bytes_after, Some(bytes.sum()));
    assert!(events.bytes_before > events.bytes_after.unwrap());

    assert_eq!(rows(dir), before);
    assert_eq!(report(dir), told);
    assert_eq!(checkpoints(dir), live);
    assert_eq!(live.iter().filter(|(.., ids)| ids.is_empty()).count(), 0);
    for table in TABLES {
        let names: Vec<String> = files(&dir.join(table.name))
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        let merged = !["live", "events", "stacks"].contains(&table.name);
        assert_eq!(names.len(), if merged { 2 } else { 4 }, "{names:?}");
        assert!(
            runs.iter().all(|run| names.contains(&format!("{}-{run}-000000.parquet", table.name)))
        );
    }
    let left = |area| files(&dir.join(area)).len();
    assert_eq!((left("staging"), left("journal")), (0, 0));
    assert_eq!(compact(dir, everywhere()).unwrap(), Compacted::default(), "nothing is left to do");
}

#[test]
fn events_that_came_late_are_in_order_in_the_merged_file() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), small(2));
    for seq in [1, 2, 4, 5, 3, 7, 6, 8] {
        writer.push(&event(seq));
    }
    writer.tick(START + SECOND);
    writer.finish(START + SECOND).unwrap();
    compact(temp.path(), everywhere()).unwrap();
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let seqs: Vec<i64> = log.rows::<EventRow>().map(|row| row.unwrap().seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(log.gaps().unwrap(), []);
}

#[test]
fn a_large_run_is_in_order_beyond_the_window() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), small(40_000));
    let late = |seq: i64| if seq % 1_000 == 0 { seq + 700 } else { seq };
    let mut seqs: Vec<i64> = (1..=150_000).collect();
    seqs.sort_by_key(|&seq| late(seq));
    for seq in seqs {
        writer.push(&event(seq));
    }
    writer.finish(START + SECOND).unwrap();
    compact(temp.path(), everywhere()).unwrap();
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let seqs = log.rows::<EventRow>().map(|row| row.unwrap().seq);
    assert!(seqs.eq(1..=150_000));
}

#[test]
fn files_grow_to_the_target_and_not_beyond() {
    let temp = tempfile::tempdir().unwrap();
    run_of(temp.path(), "host-a");
    let size = fs::metadata(
        temp.path()
            .join("events/date=2026-11-30")
            .join(files(&temp.path().join("events/date=2026-11-30"))[1].clone()),
    );
    let target_bytes = size.unwrap().len() * 4;
    let compacted = compact(temp.path(), Compaction { target_bytes, ..everywhere() }).unwrap();
    let events = compacted.tables["events"];
    assert!((3..=5).contains(&events.files_after), "{events:?}");
    let large = files(&temp.path().join("events"));
    for path in large {
        let bytes = fs::metadata(temp.path().join("events").join(path)).unwrap().len();
        assert!(bytes <= target_bytes, "{bytes} > {target_bytes}");
    }
}

#[test]
fn a_dry_run_tells_the_same_and_changes_nothing() {
    let temp = tempfile::tempdir().unwrap();
    run_of(temp.path(), "host-a");
    let before = files(temp.path());
    let would = compact(temp.path(), Compaction { dry_run: true, ..everywhere() }).unwrap();
    assert_eq!(files(temp.path()), before);
    let mut did = compact(temp.path(), everywhere()).unwrap();
    did.tables.values_mut().for_each(|merged| merged.bytes_after = None);
    assert_eq!(would, did);
}

#[test]
fn runs_that_are_written_or_not_sealed_or_of_another_host_are_left_alone() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let other = run_of(dir, "host-elsewhere");
    let mut dead = Writer::create(dir, &RunInfo { pid: 2, ..info(&here) }, small(10)).unwrap();
    push_events(&mut dead, 1..=25);
    dead.tick(START + SECOND);
    let dead_run = dead.run8();
    drop(dead);
    let mut live = Writer::create(dir, &RunInfo { pid: 3, ..info(&here) }, small(10)).unwrap();
    push_events(&mut live, 1..=40);
    let before = files(dir);
    let compacted = compact(dir, Compaction::default()).unwrap();
    assert_eq!(compacted.tables, BTreeMap::new());
    let why = |run| compacted.waiting[&run].as_str();
    assert!(why(other).contains("--other-hosts"), "{}", why(other));
    assert!(why(dead_run).contains("vramscope recover"), "{}", why(dead_run));
    assert!(why(live.run8()).contains("still going on"), "{}", why(live.run8()));
    assert_eq!(files(dir), before);

    recover(dir, false).unwrap();
    let compacted = compact(dir, Compaction::default()).unwrap();
    // What was recovered lies in the day on which its journal was written last: today.
    assert_eq!(compacted.tables["events"].files_before, 2);
    // The recorder goes on as if nothing had been.
    push_events(&mut live, 41..=50);
    live.finish(START + 2 * SECOND).unwrap();
    assert_eq!(rows(dir)["events"].len(), 100 + 25 + 50);
}

#[test]
fn foreign_and_damaged_files_are_named_and_stay() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let run = run_of(dir, "host-a");
    let day = dir.join("events/date=2026-11-30");
    let name = |number: u32| format!("events-{run}-{number:06}.parquet");
    let whole = fs::read(day.join(name(3))).unwrap();
    fs::write(day.join(name(3)), &whole[..whole.len() / 2]).unwrap();
    fs::write(day.join("notes.txt"), "mine").unwrap();
    fs::create_dir(day.join("folder")).unwrap();
    fs::write(day.join("folder/inside"), "mine too").unwrap();
    symlink("/etc/passwd", day.join("link.parquet")).unwrap();
    fs::copy(day.join(name(1)), dir.join("events").join(name(77))).unwrap();
    let before = rows_left(dir);
    let compacted = compact(dir, everywhere()).unwrap();
    let left: Vec<String> =
        compacted.left.iter().map(|(path, why)| format!("{}: {why}", path.display())).collect();
    for (file, why) in [
        (format!("date=2026-11-30/{}", name(3)), "cut off"),
        ("date=2026-11-30/notes.txt".to_owned(), "its name is not"),
        ("date=2026-11-30/link.parquet".to_owned(), "its name is not"),
        (name(77), "does not lie in a date= directory"),
    ] {
        let told = left.iter().any(|line| line.contains(&file) && line.contains(why));
        assert!(told, "{file} {why}: {left:#?}");
    }
    assert_eq!(rows_left(dir), before);
    assert_eq!(fs::read(day.join("notes.txt")).unwrap(), b"mine");
    assert_eq!(fs::read(day.join("folder/inside")).unwrap(), b"mine too");
    assert_eq!(fs::read(day.join(name(3))).unwrap().len(), whole.len() / 2);
    assert!(fs::symlink_metadata(day.join("link.parquet")).unwrap().is_symlink());
    assert_eq!(files(&dir.join("staging")).len(), 0);
}

/// Rows of events, without the errors.
fn rows_left(dir: &Path) -> Vec<i64> {
    let log = Log::open(&[dir.to_owned()]).unwrap();
    let mut seqs: Vec<i64> = log.rows::<EventRow>().flatten().map(|row| row.seq).collect();
    seqs.sort_unstable();
    seqs
}

#[test]
fn a_file_with_columns_that_are_not_known_is_left_so_that_none_is_lost() {
    let temp = tempfile::tempdir().unwrap();
    let run = run_of(temp.path(), "host-a");
    let day = temp.path().join("events/date=2026-11-30");
    let newer = day.join(format!("events-{run}-000004.parquet"));
    rewrite(&newer, |batch| {
        let column = Arc::clone(batch.column_by_name("seq").unwrap());
        let schema = batch.schema();
        let columns = schema.fields().iter().map(|field| field.name().clone());
        let columns = columns.zip(batch.columns().iter().cloned()).chain([("new".into(), column)]);
        RecordBatch::try_from_iter(columns).unwrap()
    });
    // An older one gets what it does not have: NULL.
    let older = day.join(format!("events-{run}-000007.parquet"));
    rewrite(&older, |batch| {
        let at = batch.schema().index_of("gpu_uuid").unwrap();
        let others: Vec<usize> = (0..batch.num_columns()).filter(|&column| column != at).collect();
        batch.project(&others).unwrap()
    });
    let before = rows(temp.path());
    let bytes = fs::read(&newer).unwrap();
    let compacted = compact(temp.path(), everywhere()).unwrap();
    let [(path, why)] = &compacted.left[..] else { panic!("{:?}", compacted.left) };
    assert!(newer.ends_with(path) && why.contains("column new"), "{why}");
    assert_eq!(fs::read(&newer).unwrap(), bytes);
    // What lies before it and what lies after it are not mixed.
    assert_eq!(
        (compacted.tables["events"].files_before, compacted.tables["events"].files_after),
        (9, 2)
    );
    assert_eq!(rows(temp.path()), before);
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let seqs = log.rows::<EventRow>().map(|row| row.unwrap().seq);
    assert!(seqs.eq(1..=100));
}

#[test]
fn merged_files_keep_owner_mode_and_age() {
    let temp = tempfile::tempdir().unwrap();
    let run = run_of(temp.path(), "host-a");
    let day = temp.path().join("events/date=2026-11-30");
    let is_root = rustix::process::geteuid().is_root();
    let path = |number: u32| day.join(format!("events-{run}-{number:06}.parquet"));
    for number in 1..=10 {
        // Two kinds of access: they are not mixed.
        let mode = if number <= 5 { 0o600 } else { 0o640 };
        fs::set_permissions(path(number), fs::Permissions::from_mode(mode)).unwrap();
        if is_root {
            std::os::unix::fs::chown(path(number), Some(4_711), Some(4_712)).unwrap();
        }
    }
    fs::set_permissions(&day, fs::Permissions::from_mode(0o750)).unwrap();
    let age =
        fs::metadata(path(5)).unwrap().modified().unwrap() - std::time::Duration::from_hours(9);
    fs::File::options().write(true).open(path(5)).unwrap().set_modified(age).unwrap();
    compact(temp.path(), everywhere()).unwrap();
    let meta = |number| fs::metadata(path(number)).unwrap();
    assert_eq!((meta(1).mode() & 0o7777, meta(6).mode() & 0o7777), (0o600, 0o640));
    assert_eq!(meta(1).modified().unwrap(), age);
    assert_eq!(fs::metadata(&day).unwrap().mode() & 0o7777, 0o750);
    if is_root {
        assert_eq!((meta(1).uid(), meta(6).gid()), (4_711, 4_712));
    }
    assert_eq!(rows_for_readers(temp.path(), "events"), 100);
}

#[test]
fn one_compaction_at_a_time() {
    let temp = tempfile::tempdir().unwrap();
    run_of(temp.path(), "host-a");
    let dir = LogDir::open(temp.path(), None).unwrap();
    let held = dir.lock_compaction().unwrap();
    let error = compact(temp.path(), everywhere()).unwrap_err().to_string();
    assert!(error.contains("being compacted"), "{error}");
    drop(held);
    compact(temp.path(), everywhere()).unwrap();
}

/// Stops after the step `last`, as a crash does; whether it got that far.
fn crash_after(dir: &Path, last: usize, one_by_one: bool) -> bool {
    let mut step = 0;
    let mut after_each = || {
        step += 1;
        if step > last { Err(LogError::content(Path::new("crash"), "here")) } else { Ok(()) }
    };
    let mut how = How { one_by_one, after_each: Some(&mut after_each), crashed: false };
    compact_as(dir, everywhere(), &mut how).is_err()
}

#[test]
fn a_crash_at_any_step_shows_no_row_twice_and_loses_none() {
    for one_by_one in [false, true] {
        let mut crashes = 0;
        for step in 0.. {
            let temp = tempfile::tempdir().unwrap();
            let dir = temp.path();
            run_of_files(dir, "host-a", 3);
            fs::write(dir.join("events/date=2026-11-30/notes.txt"), "mine").unwrap();
            let (before, live) = (rows(dir), checkpoints(dir));
            if !crash_after(dir, step, one_by_one) {
                break;
            }
            crashes += 1;
            fs::remove_file(dir.join("events/date=2026-11-30/notes.txt")).ok();
            for (table, rows) in &before {
                let seen = rows_for_readers(dir, table);
                // Between two renames a day is not there; it is never there twice.
                let missing = one_by_one && seen == 0;
                assert!(seen == rows.len() || missing, "{table} after step {step}: {seen}");
                if seen != rows.len() {
                    let log = Log::open(&[dir.to_owned()]).unwrap();
                    let [problem] = log.problems() else { panic!("{:?}", log.problems()) };
                    assert!(problem.message.contains("vramscope recover"), "{problem:?}");
                    assert_eq!(problem.misses, Some(*table));
                }
            }
            if step % 2 == 0 {
                recover(dir, true).unwrap();
                assert_eq!(rows(dir), before, "after step {step}, recovered");
            }
            compact(dir, everywhere()).unwrap();
            assert_eq!(rows(dir), before, "after step {step}");
            assert_eq!(checkpoints(dir), live);
            assert_eq!(files(&dir.join("staging")).len(), 0);
            assert_eq!(fs::read_dir(dir.join("staging")).unwrap().count(), 0);
        }
        assert!(crashes > 15, "{crashes} steps");
    }
}

#[test]
fn a_file_that_a_recorder_seals_meanwhile_is_neither_lost_nor_merged() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    run_of(dir, "host-a");
    let live = Writer::create(dir, &RunInfo { pid: 9, ..info("host-a") }, small(10)).unwrap();
    let mut live = Some(live);
    let run = live.as_ref().unwrap().run8();
    let day = dir.join("events/date=2026-11-30");
    let old = fs::File::open(&day).unwrap();
    let mut step = 0;
    let mut after_each = || {
        step += 1;
        // Once in the directory before the exchange, and, as a recorder that had it open, after.
        if let Some(writer) = live.as_mut() {
            push_events(writer, step * 10 + 1..step * 10 + 11);
        }
        let late = format!("events-{run}-{:06}.parquet", 900 + step);
        let target = format!("events-{run}-000001.parquet");
        let linked = rustix::fs::linkat(
            rustix::fs::CWD,
            day.join(target),
            &old,
            late,
            rustix::fs::AtFlags::empty(),
        );
        // The directory is gone once it is swept.
        linked.ok();
        Ok(())
    };
    let mut how = How { after_each: Some(&mut after_each), ..How::default() };
    compact_as(dir, everywhere(), &mut how).unwrap();
    live.take().unwrap().finish(START + SECOND).unwrap();
    let log = Log::open(&[dir.to_owned()]).unwrap();
    assert_eq!(log.problems(), []);
    let late = files(&day).iter().filter(|path| path.to_str().unwrap().contains("-0009")).count();
    assert!(late >= 5, "{:?}", files(&day));
    let events = log.events().map(|event| event.unwrap()).filter(|event| event.run != run);
    assert_eq!(events.count(), 100);
    assert_eq!(files(&dir.join("staging")).len(), 0);
}

#[test]
fn a_full_disk_leaves_the_files_as_they_were() {
    let temp = tempfile::tempdir().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(temp.path(), 4 << 20) else { return };
    let dir = temp.path().join("log");
    let mut writer = create(&dir, small(5_000));
    push_events(&mut writer, 1..=100_000);
    writer.finish(START + SECOND).unwrap();
    let before = rows_for_readers(&dir, "events");
    let free = LogDir::open(&dir, None).unwrap().free_bytes().unwrap() as usize;
    fs::write(temp.path().join("ballast"), vec![1; free - (8 << 10)]).unwrap();
    let compacted = compact(&dir, everywhere()).unwrap();
    let (path, why) = &compacted.left[0];
    assert_eq!(path, Path::new("events/date=2026-11-30"));
    assert!(why.contains("disk is full"), "{why}");
    assert_eq!(rows_for_readers(&dir, "events"), before);
    fs::remove_file(temp.path().join("ballast")).unwrap();
    assert_eq!(compact(&dir, everywhere()).unwrap().tables["events"].files_after, 1);
    assert_eq!(rows_for_readers(&dir, "events"), before);
}

fn push_random<R: Row>(writer: &mut Writer, random: &mut Random, count: usize) {
    for row in random.rows::<R>(count) {
        writer.push(&row);
    }
}

/// A run with rows of every table and type, sealed every few rows, ticks anywhere.
fn random_run(dir: &Path, pid: u32, random: &mut Random) {
    let rows = 3 + random.next() % 9;
    let mut writer = Writer::create(dir, &RunInfo { pid, ..info("host-r") }, small(rows)).unwrap();
    let mut now = START + (random.next() % 100_000) as i64 * SECOND;
    for _ in 0..2 + random.next() % 5 {
        let mut count = || random.next() as usize % 12;
        let counts: Vec<usize> = (0..TABLES.len()).map(|_| count()).collect();
        push_random::<EventRow>(&mut writer, random, counts[0]);
        push_random::<SiteUsageRow>(&mut writer, random, counts[1]);
        push_random::<BreakdownRow>(&mut writer, random, counts[2]);
        push_random::<DeviceSampleRow>(&mut writer, random, counts[3]);
        push_random::<ProcessSampleRow>(&mut writer, random, counts[4]);
        push_random::<HostSampleRow>(&mut writer, random, counts[5]);
        push_random::<ProcessRow>(&mut writer, random, counts[6]);
        push_random::<ProcessLibRow>(&mut writer, random, counts[7]);
        push_random::<DeviceRow>(&mut writer, random, counts[8]);
        push_random::<StackRow>(&mut writer, random, counts[9]);
        push_random::<FrameRow>(&mut writer, random, counts[10]);
        push_random::<OomRow>(&mut writer, random, counts[11]);
        push_random::<AnnotationRow>(&mut writer, random, counts[12]);
        push_random::<LossRow>(&mut writer, random, counts[13]);
        let seq = random.next() as i64 >> 1;
        let live = random.rows::<LiveRow>(counts[14]).into_iter();
        writer.checkpoint(seq, live.map(|row| LiveRow { seq, ..row }));
        now += (random.next() % 40_000) as i64 * SECOND;
        writer.tick(now);
    }
    writer.finish(now).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn every_row_of_every_table_is_there_once_after_as_before(
        seed in 1..u64::MAX,
        target_bytes in prop_oneof![Just(TARGET_BYTES), 10_000_u64..60_000],
    ) {
        let temp = tempfile::tempdir().unwrap();
        let random = &mut Random(seed);
        for pid in 0..=(seed % 3) as u32 {
            random_run(temp.path(), pid, random);
        }
        let (before, live) = (rows(temp.path()), checkpoints(temp.path()));
        let log = Log::open(&[temp.path().to_owned()]).unwrap();
        let gaps = log.gaps().unwrap();
        let compacted = compact(temp.path(), Compaction { target_bytes, ..everywhere() }).unwrap();
        prop_assert_eq!(&compacted.left, &vec![]);
        prop_assert_eq!(rows(temp.path()), before);
        prop_assert_eq!(checkpoints(temp.path()), live);
        let log = Log::open(&[temp.path().to_owned()]).unwrap();
        prop_assert_eq!(log.gaps().unwrap(), gaps);
    }
}
