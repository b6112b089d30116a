use super::*;
use crate::{
    log::{Compaction, Gap, Log, compact, manifest::tests::info, recover, testing::*},
    rows::{DeviceSampleRow, FrameRow, LossRow, OomRow, ProcessRow, StackRow},
};

const SECOND: i64 = 1_000_000_000;

fn files(dir: &Path, below: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir.join(below)) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .flatten()
        .flat_map(|entry| {
            let inner = format!("{below}/{}", entry.file_name().to_str().unwrap());
            if entry.path().is_dir() { files(dir, &inner) } else { vec![inner] }
        })
        .collect();
    names.sort();
    names
}

fn seqs(dir: &Path) -> Vec<i64> {
    let log = Log::open(&[dir.to_owned()]).unwrap();
    log.events().map(|event| event.unwrap().event.seq).collect()
}

#[test]
fn a_new_log_has_a_file_for_every_table_and_a_manifest() {
    let temp = tempfile::tempdir().unwrap();
    let writer = create(temp.path(), Options::default());
    for table in TABLES {
        let names = files(temp.path(), table.name);
        let run = writer.run8();
        let date = "date=2026-11-30";
        assert_eq!(names, [format!("{0}/{date}/{0}-{run}-000000.parquet", table.name)]);
    }
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    assert_eq!(log.problems(), []);
    assert_eq!(log.manifests(), [writer.manifest().clone()]);
    assert!(!log.manifests()[0].sealed);
}

#[test]
fn rows_reach_the_journal_within_the_flush_time_and_survive_a_kill() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    push_events(&mut writer, 1..=10);
    assert!(seqs(temp.path()).is_empty());
    writer.tick(START + SECOND / 4);
    assert_eq!(seqs(temp.path()), (1..=10).collect::<Vec<_>>());
    push_events(&mut writer, 11..=20);
    writer.tick(START + SECOND / 4 + 1);
    // Rows that came less than the flush time ago are what a kill may cost.
    drop(writer);
    assert_eq!(seqs(temp.path()), (1..=10).collect::<Vec<_>>());
    assert_eq!(files(temp.path(), "journal").len(), 2, "journal and lock");
}

#[test]
fn a_full_batch_goes_to_the_journal_without_a_tick() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options { batch_rows: 4, ..Options::default() });
    push_events(&mut writer, 1..=9);
    assert_eq!(seqs(temp.path()).len(), 8);
}

#[test]
fn files_are_sealed_by_age_rows_and_bytes_and_at_midnight() {
    let by_age = Options { max_file_age_ns: 60 * SECOND, ..Options::default() };
    let by_rows = Options { max_file_rows: 10, ..Options::default() };
    let by_bytes = Options { max_file_bytes: 1, ..Options::default() };
    let to_midnight = 86_400 * SECOND - START % (86_400 * SECOND);
    let only_midnight = Options { max_file_age_ns: i64::MAX, ..Options::default() };
    for (options, later, date) in [
        (by_age, 60 * SECOND + SECOND, "date=2026-11-30"),
        (by_rows, SECOND, "date=2026-11-30"),
        (by_bytes, SECOND, "date=2026-11-30"),
        (only_midnight, to_midnight, "date=2026-11-30"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let mut writer = create(temp.path(), options);
        push_events(&mut writer, 1..=10);
        let early = writer.tick(START + SECOND / 2);
        let tick = writer.tick(START + later);
        assert!(early.checkpoint_due != tick.checkpoint_due, "{options:?}");
        let name = format!("events/{date}/events-{}-000001.parquet", writer.run8());
        assert_eq!(files(temp.path(), "events").get(1), Some(&name));
        assert_eq!(files(temp.path(), "journal").len(), 1, "only the lock");
        assert_eq!(files(temp.path(), "staging"), [""; 0]);
        assert!(!writer.tick(START + later + 120 * SECOND).checkpoint_due, "nothing new");
        assert_eq!(seqs(temp.path()).len(), 10);
    }
}

#[test]
fn a_clock_that_is_set_back_delays_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    push_events(&mut writer, 1..=3);
    writer.tick(START - 3_600 * SECOND);
    assert_eq!(seqs(temp.path()).len(), 3);
}

#[test]
fn finishing_seals_everything() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    push_events(&mut writer, 1..=3);
    writer.push(&FrameRow::default());
    writer.finish(START + SECOND).unwrap();
    assert_eq!(files(temp.path(), "journal"), [""; 0]);
    assert_eq!(files(temp.path(), "staging"), [""; 0]);
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    assert_eq!((log.row_count("events"), log.row_count("frames")), (3, 1));
    assert_eq!(
        (log.manifests()[0].sealed, log.manifests()[0].end_ns),
        (true, Some(START + SECOND))
    );
}

#[test]
fn the_same_run_is_not_written_twice() {
    let temp = tempfile::tempdir().unwrap();
    let writer = create(temp.path(), Options::default());
    let error = Writer::create(temp.path(), &info("host-a"), Options::default()).unwrap_err();
    assert!(error.to_string().contains("same id"), "{error}");
    drop(writer);
}

#[test]
fn checkpoints_are_whole_and_an_empty_one_is_one_too() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options { batch_rows: 2, ..Options::default() });
    writer.checkpoint(7, (0..5).map(|id| LiveRow { alloc_id: id, seq: 7, ..Default::default() }));
    writer.checkpoint(9, []);
    writer.checkpoint(9, [LiveRow::default()]);
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let checkpoints = log.checkpoints();
    let summary: Vec<_> =
        checkpoints.iter().map(|c| (c.seq, log.checkpoint_rows(c).count())).collect();
    assert_eq!(summary, [(7, 5), (9, 0)]);
    let ids: Vec<i64> =
        log.checkpoint_rows(&checkpoints[0]).map(|row| row.unwrap().alloc_id).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4]);
}

#[test]
fn an_unfinished_parquet_file_holds_little_memory() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    let mut most = 0;
    for first in (1..400_000).step_by(4_096) {
        push_events(&mut writer, first..first + 4_096);
        most = most.max(writer.tables[EventRow::INDEX].memory());
    }
    assert!(most > 0 && most < 32 << 20, "{most} bytes");
}

#[test]
fn long_texts_do_not_pile_up_in_memory() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options { batch_rows: 64, ..Options::default() });
    let mut most = 0;
    for id in 0..20_000_u64 {
        let folded = format!("{id};").repeat(1_000);
        writer.push(&StackRow { stack_id: id as i64, folded, ..Default::default() });
        most = most.max(writer.tables[StackRow::INDEX].memory());
    }
    assert!(most < 40 << 20, "{most} bytes");
}

/// A limit that holds some files: rows in, until old ones had to go.
#[test]
fn over_the_limit_the_oldest_samples_go_and_who_is_who_stays() {
    let temp = tempfile::tempdir().unwrap();
    let limit = 600_000;
    let options = Options { max_disk_bytes: Some(limit), ..Options::default() };
    let mut writer = create(temp.path(), options);
    let mut now = START;
    let mut next = 1;
    for round in 0..40 {
        push_events(&mut writer, next..next + 1_000);
        next += 1_000;
        writer.push(&StackRow { stack_id: round, ..Default::default() });
        now += 61 * SECOND;
        writer.tick(now);
        now += SECOND;
        if writer.tick(now).checkpoint_due || round % 2 == 0 {
            writer.checkpoint(next - 1, [LiveRow { seq: next - 1, ..Default::default() }]);
        }
        writer.tick(now + 1);
        assert!(writer.disk_bytes() <= limit, "{} in round {round}", writer.disk_bytes());
    }
    writer.finish(now).unwrap();
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    assert_eq!(log.row_count("stacks"), 40);
    let gaps = log.gaps().unwrap();
    let [Gap { first: 1, last, .. }] = gaps[..] else { panic!("{gaps:?}") };
    assert_eq!(log.row_count("events"), (next - 1 - last) as u64);
    // The live set at the first event still there, or right after it, is known.
    let covering = log.checkpoints().into_iter().find(|c| c.seq >= last).unwrap();
    assert!(covering.seq <= last + 2_000, "{covering:?} after {last}");
    let before = log.checkpoints().into_iter().filter(|c| c.seq < last).count();
    assert!(before <= 1, "{before} useless checkpoints are still there");
    let said = log.rows::<AnnotationRow>().map(Result::unwrap).find(|row| row.kind == "deleted");
    assert!(said.unwrap().text.contains("events: "));
    assert!(!files(temp.path(), "events").is_empty());
}

/// Bytes before and after the end of a log of many sealed events, and of a few rows that wait.
fn bytes_at_the_end(limit: u64) -> (u64, u64) {
    let temp = tempfile::tempdir().unwrap();
    let options = Options { max_disk_bytes: Some(limit), ..Options::default() };
    let mut writer = create(temp.path(), options);
    let mut now = START;
    for round in 0..20 {
        push_events(&mut writer, round * 2_000 + 1..round * 2_000 + 2_001);
        now += 61 * SECOND;
        writer.tick(now);
        writer.checkpoint(round * 2_000 + 2_000, [LiveRow::default()]);
    }
    push_events(&mut writer, 40_001..40_004);
    writer.push(&FrameRow::default());
    writer.push(&OomRow::default());
    writer.push(&ProcessRow::default());
    writer.push(&DeviceSampleRow::default());
    writer.tick(now + SECOND);
    let before = writer.disk_bytes();
    writer.finish(now + SECOND).unwrap();
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let events: Vec<i64> = log.rows::<EventRow>().map(|row| row.unwrap().seq).collect();
    assert!(events.ends_with(&(40_001..40_004).collect::<Vec<_>>()), "the last rows stay");
    (before, bytes_below(temp.path()))
}

#[test]
fn at_the_end_too_the_limit_is_kept() {
    let (before, after) = bytes_at_the_end(1 << 40);
    assert!(after > before + 4_000, "small files are larger than their journals: {after}");
    let limit = before + 1_000;
    let (_, after) = bytes_at_the_end(limit);
    assert!(after <= limit, "{after} bytes, {limit} are allowed");
}

#[test]
fn earlier_runs_of_this_host_count_and_other_hosts_do_not() {
    let temp = tempfile::tempdir().unwrap();
    let mut sizes = Vec::new();
    for host in ["host-a", "host-b"] {
        let mut writer = Writer::create(temp.path(), &info(host), Options::default()).unwrap();
        push_events(&mut writer, 1..=5_000);
        writer.finish(START + SECOND).unwrap();
        let names = files(temp.path(), "events");
        sizes.push(names.len());
    }
    assert_eq!(sizes, [2, 4]);
    let mut again = info("host-a");
    again.pid += 1;
    let options = Options { max_disk_bytes: Some(1), ..Options::default() };
    let mut writer = Writer::create(temp.path(), &again, options).unwrap();
    writer.tick(START + SECOND);
    let left = files(temp.path(), "events");
    // Empty files stay, so that every table can be read.
    assert_eq!(left.iter().filter(|name| name.ends_with("-000001.parquet")).count(), 1);
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    assert_eq!(log.row_count("events"), 5_000, "those of host-b");
}

/// Bytes of all files below a directory.
fn bytes_below(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| {
        let is_dir = entry.file_type().unwrap().is_dir();
        if is_dir { bytes_below(&entry.path()) } else { entry.metadata().unwrap().len() }
    });
    sizes.sum()
}

/// Sets the age of all files to that of the runs here.
fn make_old(dir: &Path) {
    for name in TABLES.iter().flat_map(|table| files(dir, table.name)) {
        let file = File::options().write(true).open(dir.join(name)).unwrap();
        let age = std::time::Duration::from_nanos(START as u64 - 1);
        file.set_modified(std::time::UNIX_EPOCH + age).unwrap();
    }
}

/// A stream of events with checkpoints, for as many rounds of 62 seconds; the events made.
fn stream(writer: &mut Writer, rounds: i64, mut after_each: impl FnMut(&Writer)) -> i64 {
    let (mut now, mut next) = (START, 1);
    for _ in 0..rounds {
        for _ in 0..4 {
            push_events(writer, next..next + 1_000);
            next += 1_000;
            now += 15 * SECOND + SECOND / 2;
            if writer.tick(now).checkpoint_due {
                let live = LiveRow { ts_ns: now, seq: next - 1, ..Default::default() };
                writer.checkpoint(next - 1, [live]);
            }
            after_each(writer);
        }
    }
    next - 1
}

#[test]
fn a_limit_is_kept_on_disk_under_a_stream_of_events() {
    for limit in [700_000, 1 << 20] {
        let temp = tempfile::tempdir().unwrap();
        let options = Options { max_disk_bytes: Some(limit), ..Options::default() };
        let mut writer = create(temp.path(), options);
        let mut most = 0;
        let made = stream(&mut writer, 40, |writer| {
            let bytes = bytes_below(temp.path());
            // The manifest, and what the file that is being written holds in memory.
            assert!(bytes <= limit + 4_096, "{bytes} of {limit}");
            assert!(writer.disk_bytes() <= limit, "{}", writer.disk_bytes());
            most = most.max(bytes);
        });
        assert!(most > limit / 2, "{most}: the limit was never near");
        writer.finish(START + 86_000 * SECOND).unwrap();
        let log = Log::open(&[temp.path().to_owned()]).unwrap();
        assert!(log.row_count("events") < made as u64, "nothing was deleted");
        let rows: Vec<AnnotationRow> = log.rows().map(Result::unwrap).collect();
        assert!(
            rows.iter().any(|row| row.kind == "deleted")
                && rows.iter().all(|row| row.kind != "warning")
        );
        let told: i64 = rows.iter().filter_map(|row| row.value).sum();
        assert!(told > 0);
    }
}

#[test]
fn a_limit_that_cannot_be_kept_is_said_once_and_recording_goes_on() {
    let temp = tempfile::tempdir().unwrap();
    let options = Options { max_disk_bytes: Some(20_000), ..Options::default() };
    let mut writer = create(temp.path(), options);
    let made = stream(&mut writer, 5, |writer| assert_eq!(writer.failure(), None));
    writer.finish(START + 1_000 * SECOND).unwrap();
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let rows: Vec<AnnotationRow> = log.rows().map(Result::unwrap).collect();
    let warnings: Vec<_> = rows.iter().filter(|row| row.kind == "warning").collect();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    let said = &warning.text;
    assert!(said.contains("--max-disk 20000 is too small") && said.contains("Raise"), "{said}");
    // What is alive is still known, whatever is deleted.
    assert_eq!(log.checkpoints().last().map(|checkpoint| checkpoint.seq), Some(made));
    let report = crate::report::Model::read(&[temp.path().to_owned()]).unwrap().text(false);
    assert!(report.contains("is too small"), "{report}");
}

#[test]
fn only_files_of_this_run_and_of_dead_ones_of_this_host_are_deleted() {
    let temp = tempfile::tempdir().unwrap();
    let mut other = Writer::create(temp.path(), &info("host-b"), Options::default()).unwrap();
    stream(&mut other, 3, |_| {});
    let pid = |pid| RunInfo { pid, ..info("host-a") };
    let mut beside = Writer::create(temp.path(), &pid(1), Options::default()).unwrap();
    stream(&mut beside, 3, |_| {});
    let mut dead = Writer::create(temp.path(), &pid(2), Options::default()).unwrap();
    stream(&mut dead, 20, |_| {});
    let runs = [other.run8(), beside.run8(), dead.run8()];
    other.finish(START + 400 * SECOND).unwrap();
    dead.finish(START + 400 * SECOND).unwrap();
    let count = |run: Run8| {
        let log = Log::open(&[temp.path().to_owned()]).unwrap();
        log.events().filter(|event| event.as_ref().unwrap().run == run).count()
    };
    let before = runs.map(count);
    make_old(temp.path());
    let options = Options { max_disk_bytes: Some(400_000), ..Options::default() };
    let mut writer = Writer::create(temp.path(), &pid(3), options).unwrap();
    stream(&mut writer, 10, |_| {});
    let after = runs.map(count);
    assert_eq!(
        (after[0], after[1]),
        (before[0], before[1]),
        "another host's, and one that goes on"
    );
    assert!(after[2] < before[2], "{after:?}");
    assert!(count(writer.run8()) > 0);
    stream(&mut beside, 0, |_| {});
    beside.finish(START + 500 * SECOND).unwrap();
    writer.finish(START + 900 * SECOND).unwrap();
}

#[test]
fn files_that_were_merged_meanwhile_are_not_counted_as_deleted() {
    let temp = tempfile::tempdir().unwrap();
    let mut dead = create(temp.path(), Options::default());
    stream(&mut dead, 20, |_| {});
    dead.finish(START + 2_000 * SECOND).unwrap();
    let of_dead = |table: &str| bytes_below(&temp.path().join(table));
    make_old(temp.path());
    let again = RunInfo { pid: 1, ..info("host-a") };
    let options = Options { max_disk_bytes: Some(1 << 20), ..Options::default() };
    let mut writer = Writer::create(temp.path(), &again, options).unwrap();
    let everywhere = Compaction { other_hosts: true, ..Compaction::default() };
    let merged = compact(temp.path(), everywhere).unwrap().tables["events"];
    assert!(merged.files_before > 10, "{merged:?}");
    let before = of_dead("events") + of_dead("live");
    stream(&mut writer, 40, |_| assert!(bytes_below(temp.path()) <= (1 << 20) + 4_096));
    let run = writer.run8();
    writer.finish(START + 9_000 * SECOND).unwrap();
    let log = Log::open(&[temp.path().to_owned()]).unwrap();
    let first = log.rows::<AnnotationRow>().map(Result::unwrap).find(|row| row.kind == "deleted");
    let first = first.unwrap();
    assert!(first.text.contains("events: 1 files"), "{}", first.text);
    assert!(first.value.unwrap() as u64 <= before, "{first:?} of {before}");
    assert!(log.events().all(|event| event.unwrap().run == run), "the merged file is the oldest");
}

#[test]
fn a_link_in_place_of_a_table_stops_the_writer_not_the_program() {
    let temp = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    std::fs::remove_dir_all(temp.path().join("events")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), temp.path().join("events")).unwrap();
    push_events(&mut writer, 1..=3);
    writer.tick(START + SECOND);
    writer.tick(START + 62 * SECOND);
    assert!(writer.failure().unwrap().contains("symbolic link"), "{:?}", writer.failure());
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    // The journal still has the rows.
    assert_eq!(seqs(temp.path()), [1, 2, 3]);
    std::fs::remove_file(temp.path().join("events")).unwrap();
    assert!(writer.tick(START + 70 * SECOND).recovered);
    writer.finish(START + 80 * SECOND).unwrap();
    assert_eq!(seqs(temp.path()), [1, 2, 3]);
    assert_eq!(files(temp.path(), "journal"), [""; 0]);
}

#[test]
fn a_journal_that_cannot_be_decoded_is_left_and_does_not_stop_the_run() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    std::fs::remove_dir_all(temp.path().join("events")).unwrap();
    std::os::unix::fs::symlink("/nowhere", temp.path().join("events")).unwrap();
    push_events(&mut writer, 1..=300);
    writer.tick(START + SECOND);
    writer.tick(START + 62 * SECOND);
    assert!(writer.failure().is_some());
    let journal = temp.path().join(format!("journal/events-{}-000001.arrows", writer.run8()));
    let mut bytes = std::fs::read(&journal).unwrap();
    // Offsets of a text column that point outside its text; the framing stays whole.
    let api = bytes.windows(13).position(|window| window == b"cuMemAlloc_v2").unwrap();
    bytes[api - 200..api].fill(0x7f);
    std::fs::write(&journal, bytes).unwrap();
    std::fs::remove_file(temp.path().join("events")).unwrap();
    assert!(writer.tick(START + 70 * SECOND).recovered);
    assert_eq!(writer.failure(), None);
    let path = temp.path().to_owned();
    writer.finish(START + 80 * SECOND).unwrap();
    assert!(journal.exists());
    assert!(!Log::open(&[path]).unwrap().manifests()[0].sealed);
}

#[test]
fn a_removed_directory_is_said_counted_and_survived() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("log");
    let mut writer = create(&dir, Options { batch_rows: 10, ..Options::default() });
    push_events(&mut writer, 1..=5);
    writer.tick(START + SECOND);
    std::fs::remove_dir_all(&dir).unwrap();
    push_events(&mut writer, 6..=100);
    writer.tick(START + 2 * SECOND);
    assert!(writer.failure().unwrap().contains("removed"), "{:?}", writer.failure());
    writer.tick(START + 6 * SECOND);
    assert!(writer.failure().unwrap().contains("does not exist"), "{:?}", writer.failure());
    assert!(!dir.exists(), "who removed the directory decides when it comes back");

    std::fs::create_dir(&dir).unwrap();
    assert!(writer.tick(START + 10 * SECOND).recovered);
    assert_eq!(writer.failure(), None);
    push_events(&mut writer, 101..=105);
    let dropped: Vec<_> = writer.dropped().collect();
    // Two batches are held: the one that failed, and the one after it.
    assert_eq!(dropped, [("events", 5 + 95 - 20)]);
    writer.finish(START + 11 * SECOND).unwrap();
    let log = Log::open(std::slice::from_ref(&dir)).unwrap();
    let expected: Vec<i64> = (6..=25).chain(101..=105).collect();
    assert_eq!(seqs(&dir), expected);
    let losses: Vec<LossRow> = log.rows().map(Result::unwrap).collect();
    assert!(losses.iter().all(|loss| loss.reason == LOG_WRITE_FAILED));
    assert_eq!(losses.iter().map(|loss| loss.count).sum::<i64>(), 80);
}

#[test]
fn a_full_disk_costs_counted_rows_and_nothing_that_was_sealed() {
    let temp = tempfile::tempdir().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(temp.path(), 8 << 20) else { return };
    let dir = temp.path().join("log");
    let mut writer = create(&dir, Options { batch_rows: 1_000, ..Options::default() });
    push_events(&mut writer, 1..=2_000);
    writer.tick(START + 61 * SECOND);
    writer.tick(START + 122 * SECOND);
    assert_eq!(seqs(&dir).len(), 2_000);

    let ballast = temp.path().join("ballast");
    let free = writer.free_bytes().unwrap() as usize;
    std::fs::write(&ballast, vec![1; free - (300 << 10)]).unwrap();
    push_events(&mut writer, 2_001..=20_000);
    let message = writer.failure().expect("the disk is full").to_owned();
    assert!(message.contains("disk is full") && message.contains("--max-disk"), "{message}");
    let at_failure = seqs(&dir);
    assert!(at_failure.len() >= 2_000);
    writer.tick(START + 130 * SECOND);
    assert!(writer.failure().is_some(), "still full");

    std::fs::remove_file(&ballast).unwrap();
    let tick = writer.tick(START + 140 * SECOND);
    assert!(tick.recovered && writer.failure().is_none(), "{:?}", writer.failure());
    push_events(&mut writer, 20_001..=20_100);
    let dropped: u64 = writer.dropped().map(|(_, rows)| rows).sum();
    writer.finish(START + 150 * SECOND).unwrap();

    let log = Log::open(std::slice::from_ref(&dir)).unwrap();
    assert_eq!(log.problems(), []);
    assert_eq!(seqs(&dir).len() as u64, 20_100 - dropped, "seen + lost = made");
    let gaps = log.gaps().unwrap();
    let missing: i64 = gaps.iter().map(|gap| gap.last - gap.first + 1).sum();
    assert_eq!(missing as u64, dropped);
    let losses: Vec<LossRow> = log.rows().map(Result::unwrap).collect();
    assert_eq!((losses.len(), losses[0].count as u64), (1, dropped));
    assert_eq!(files(&dir, "journal"), [""; 0]);
}

#[test]
fn a_disk_without_room_refuses_the_run_and_says_so() {
    let temp = tempfile::tempdir().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(temp.path(), 64 << 10) else { return };
    let error = Writer::create(&temp.path().join("log"), &info("a"), Options::default());
    let message = error.unwrap_err().to_string();
    assert!(message.contains("disk is full"), "{message}");
}

#[test]
fn a_killed_run_is_sealed_by_recover_and_a_live_one_is_left_alone() {
    let temp = tempfile::tempdir().unwrap();
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut writer = Writer::create(temp.path(), &info(&here), Options::default()).unwrap();
    push_events(&mut writer, 1..=10);
    writer.tick(START + SECOND);
    let live = recover(temp.path(), false).unwrap();
    assert_eq!((live.sealed.len(), live.skipped.len()), (0, 1), "{live:?}");
    drop(writer);
    let dead = recover(temp.path(), false).unwrap();
    assert_eq!((dead.sealed.len(), dead.skipped.len()), (1, 0), "{dead:?}");
    assert_eq!(seqs(temp.path()), (1..=10).collect::<Vec<_>>());
    assert_eq!(files(temp.path(), "journal"), [""; 0]);
    assert_eq!(files(temp.path(), "staging"), [""; 0]);
    let manifests = Log::open(&[temp.path().to_owned()]).unwrap().manifests().to_vec();
    assert_eq!((manifests[0].sealed, manifests[0].end_ns), (true, None));
    assert_eq!(recover(temp.path(), false).unwrap(), crate::log::Recovered::default());
}

#[test]
fn recover_asks_before_it_touches_the_run_of_another_host() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    push_events(&mut writer, 1..=10);
    writer.tick(START + SECOND);
    drop(writer);
    assert_eq!(recover(temp.path(), false).unwrap().sealed.len(), 0);
    assert_eq!(recover(temp.path(), true).unwrap().sealed.len(), 1);
}

#[test]
fn a_kill_between_sealing_and_removing_the_journal_doubles_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    push_events(&mut writer, 1..=10);
    writer.tick(START + SECOND);
    let journal = temp.path().join(format!("journal/events-{}-000001.arrows", writer.run8()));
    let kept = std::fs::read(&journal).unwrap();
    writer.tick(START + 70 * SECOND);
    assert!(!journal.exists());
    drop(writer);
    std::fs::write(&journal, kept).unwrap();
    assert_eq!(seqs(temp.path()), (1..=10).collect::<Vec<_>>());
    let recovered = recover(temp.path(), true).unwrap();
    assert_eq!((recovered.sealed.len(), journal.exists()), (0, false), "{recovered:?}");
    assert_eq!(seqs(temp.path()), (1..=10).collect::<Vec<_>>());
}

#[test]
fn what_is_sealed_says_who_wrote_it() {
    let temp = tempfile::tempdir().unwrap();
    let writer = create(temp.path(), Options::default());
    let path = temp.path().join(&files(temp.path(), "oom")[0]);
    let file = File::open(path).unwrap();
    let reader = parquet::file::reader::SerializedFileReader::new(file).unwrap();
    let metadata = parquet::file::reader::FileReader::metadata(&reader).file_metadata();
    let value = |key: &str| {
        let pairs = metadata.key_value_metadata().unwrap();
        pairs.iter().find(|pair| pair.key == format!("vramscope.{key}")).unwrap().value.clone()
    };
    assert_eq!(value("table").as_deref(), Some("oom"));
    assert_eq!(value("host").as_deref(), Some("host-a"));
    assert_eq!(value("run_id"), Some(writer.manifest().run_id.clone()));
    assert_eq!(value("complete").as_deref(), Some("true"));
    assert_eq!(value("clock_offset_ns"), Some((START - 5_000_000_000).to_string()));
}
