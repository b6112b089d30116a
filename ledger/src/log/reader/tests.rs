use std::{fs, path::PathBuf};

use proptest::prelude::*;

use super::*;
use crate::{
    log::{Options, TABLES, Writer, manifest::tests::info, testing::*},
    rows::*,
};

const SECOND: i64 = 1_000_000_000;

fn open(dir: &Path) -> Log {
    Log::open(&[dir.to_owned()]).unwrap()
}

/// A finished log of 30 events in 3 files, and the paths of these.
fn three_files(dir: &Path) -> Vec<PathBuf> {
    let mut writer = create(dir, Options { max_file_rows: 10, ..Options::default() });
    for first in [1, 11, 21] {
        push_events(&mut writer, first..first + 10);
        writer.tick(START + first * SECOND);
    }
    let run = writer.run8();
    writer.finish(START + 40 * SECOND).unwrap();
    let day = dir.join("events/date=2026-11-30");
    (1..=3).map(|number| day.join(format!("events-{run}-{number:06}.parquet"))).collect()
}

/// Writes rows of one type, half of them sealed and half in the journal, and reads them back.
fn round_trip<R: Row + PartialEq>(random: &mut Random, count: usize) {
    let temp = tempfile::tempdir().unwrap();
    let options =
        Options { batch_rows: 7, max_file_rows: 1 + count as u64 / 2, ..Default::default() };
    let mut writer = create(temp.path(), options);
    let rows: Vec<R> = random.rows(count);
    for row in &rows {
        writer.push(row);
    }
    writer.tick(START + SECOND);
    let log = open(temp.path());
    assert_eq!(log.problems(), []);
    assert_eq!(log.row_count(R::TABLE.name), count as u64);
    assert_eq!(log.rows::<R>().map(Result::unwrap).collect::<Vec<_>>(), rows);
    let batches = log.batches(R::TABLE.name).map(|batch| batch.unwrap().1);
    let expected = R::TABLE.arrow_schema();
    let mut seen = 0;
    for batch in batches {
        assert_eq!(batch.schema().fields(), expected.fields());
        seen += batch.num_rows();
    }
    assert_eq!(seen, count);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn every_table_survives_a_round_trip(seed in 1..u64::MAX, count in 1usize..60) {
        let random = &mut Random(seed);
        round_trip::<EventRow>(random, count);
        round_trip::<SiteUsageRow>(random, count);
        round_trip::<BreakdownRow>(random, count);
        round_trip::<LiveRow>(random, count);
        round_trip::<DeviceSampleRow>(random, count);
        round_trip::<ProcessSampleRow>(random, count);
        round_trip::<HostSampleRow>(random, count);
        round_trip::<ProcessRow>(random, count);
        round_trip::<ProcessLibRow>(random, count);
        round_trip::<DeviceRow>(random, count);
        round_trip::<StackRow>(random, count);
        round_trip::<FrameRow>(random, count);
        round_trip::<OomRow>(random, count);
        round_trip::<AnnotationRow>(random, count);
        round_trip::<LossRow>(random, count);
    }
}

#[test]
fn foreign_and_broken_files_are_named_and_left_out() {
    let temp = tempfile::tempdir().unwrap();
    let files = three_files(temp.path());
    let day = files[0].parent().unwrap();
    let whole = fs::read(&files[0]).unwrap();
    let named = |number: u32| {
        let name = files[0].file_name().unwrap().to_str().unwrap();
        day.join(name.replace("000001", &format!("{number:06}")))
    };
    fs::write(named(90), &whole[..whole.len() - 1]).unwrap();
    fs::write(named(91), b"").unwrap();
    let mut damaged = whole.clone();
    let footer = damaged.len() - 60;
    damaged[footer..footer + 40].fill(0xee);
    fs::write(named(92), &damaged).unwrap();
    fs::copy(temp.path().join("manifest-x.json"), named(93)).unwrap_err();
    std::os::unix::fs::symlink(&files[0], named(94)).unwrap();
    fs::write(day.join("notes.txt"), "mine").unwrap();
    let frames = fs::read_dir(temp.path().join("frames/date=2026-11-30")).unwrap().next().unwrap();
    fs::copy(frames.unwrap().path(), named(95)).unwrap();
    fs::write(temp.path().join("manifest-00000000.json"), "{").unwrap();
    fs::write(temp.path().join("journal/core.1"), "x").unwrap();

    let log = open(temp.path());
    assert_eq!(log.events().flatten().count(), 30);
    let mut problems: Vec<(String, ProblemKind)> = log
        .problems()
        .iter()
        .map(|p| (p.path.file_name().unwrap().to_str().unwrap().to_owned(), p.kind))
        .collect();
    problems.sort_by(|a, b| a.0.cmp(&b.0));
    let name = |number| named(number).file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(
        problems,
        [
            ("core.1".to_owned(), ProblemKind::Foreign),
            (name(90), ProblemKind::Truncated),
            (name(91), ProblemKind::Truncated),
            (name(92), ProblemKind::Unreadable),
            (name(94), ProblemKind::Unreadable),
            (name(95), ProblemKind::Foreign),
            ("manifest-00000000.json".to_owned(), ProblemKind::Unreadable),
            ("notes.txt".to_owned(), ProblemKind::Foreign),
        ]
    );
}

#[test]
fn a_file_damaged_inside_costs_its_rows_only() {
    let temp = tempfile::tempdir().unwrap();
    let files = three_files(temp.path());
    let mut bytes = fs::read(&files[1]).unwrap();
    bytes[4..900].fill(0xff);
    fs::write(&files[1], bytes).unwrap();
    let log = open(temp.path());
    let (good, bad): (Vec<_>, Vec<_>) = log.events().partition(Result::is_ok);
    assert_eq!((good.len(), bad.len()), (20, 1));
    let message = bad[0].as_ref().unwrap_err().to_string();
    assert!(message.contains("000002.parquet"), "{message}");
}

#[test]
fn damage_anywhere_is_never_a_panic() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let temp = tempfile::tempdir().unwrap();
    let files = three_files(temp.path());
    let whole = fs::read(&files[2]).unwrap();
    let random = &mut Random(7);
    for _ in 0..300 {
        let mut bytes = whole.clone();
        let (at, flip) = (random.next() as usize % bytes.len(), random.next() as u8 | 1);
        bytes[at] ^= flip;
        fs::write(&files[2], bytes).unwrap();
        let log = open(temp.path());
        assert!(log.events().flatten().count() >= 20);
    }
    std::panic::set_hook(hook);
}

#[test]
fn a_directory_without_a_log_says_what_to_do() {
    let temp = tempfile::tempdir().unwrap();
    let error = Log::open(&[temp.path().to_owned()]).unwrap_err().to_string();
    assert!(error.contains("name the directory that holds events/"), "{error}");
    let error = Log::open(&[temp.path().join("no")]).unwrap_err().to_string();
    assert!(error.contains("list directory"), "{error}");
}

#[test]
fn deleted_files_are_gaps() {
    let temp = tempfile::tempdir().unwrap();
    let files = three_files(temp.path());
    assert_eq!(open(temp.path()).gaps().unwrap(), []);
    fs::remove_file(&files[1]).unwrap();
    let log = open(temp.path());
    let run = log.manifests()[0].run8().unwrap();
    assert_eq!(log.gaps().unwrap(), [Gap { run, first: 11, last: 20 }]);
    assert_eq!(log.events().flatten().count(), 20);
    fs::remove_file(&files[0]).unwrap();
    assert_eq!(open(temp.path()).gaps().unwrap(), [Gap { run, first: 1, last: 20 }]);
}

#[test]
fn a_late_free_is_read_in_its_place_across_files() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer =
        create(temp.path(), Options { batch_rows: 2, max_file_rows: 2, ..Default::default() });
    for seq in [1, 2, 4, 5, 3, 7, 6] {
        writer.push(&event(seq));
    }
    writer.tick(START + SECOND);
    let log = open(temp.path());
    let seqs: Vec<i64> = log.events().map(|event| event.unwrap().event.seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(log.gaps().unwrap(), []);
    drop(writer);
}

#[test]
fn a_gap_inside_a_running_log_is_found_in_its_journal() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options::default());
    for seq in [1, 2, 5] {
        writer.push(&event(seq));
    }
    writer.tick(START + SECOND);
    let gaps = open(temp.path()).gaps().unwrap();
    assert_eq!(gaps, [Gap { run: writer.run8(), first: 3, last: 4 }]);
}

#[test]
fn two_runs_in_one_directory_are_told_apart_and_merged_by_time() {
    let temp = tempfile::tempdir().unwrap();
    let mut runs: Vec<Writer> = ["host-a", "host-b"]
        .iter()
        .map(|host| Writer::create(temp.path(), &info(host), Options::default()).unwrap())
        .collect();
    for seq in 1..=100 {
        for (offset, writer) in runs.iter_mut().enumerate() {
            writer.push(&EventRow { ts_ns: START + seq * 10 + offset as i64 * 5, ..event(seq) });
        }
    }
    let names: Vec<Run8> = runs.iter().map(Writer::run8).collect();
    for mut writer in runs {
        writer.tick(START + SECOND);
        writer.finish(START + 2 * SECOND).unwrap();
    }
    let log = open(temp.path());
    assert_eq!((log.problems().len(), log.manifests().len()), (0, 2));
    let events: Vec<RunEvent> = log.events().map(Result::unwrap).collect();
    assert!(events.is_sorted_by_key(|event| event.event.ts_ns));
    for run in names {
        let of_run = events.iter().filter(|event| event.run == run);
        assert!(of_run.map(|event| event.event.seq).eq(1..=100));
    }
}

#[test]
fn the_same_files_in_two_places_are_read_once() {
    let temp = tempfile::tempdir().unwrap();
    let (first, second) = (temp.path().join("a"), temp.path().join("b"));
    three_files(&first);
    copy_tree(&first, &second);
    let log = Log::open(&[first, second]).unwrap();
    assert_eq!(log.row_count("events"), 30);
    assert!(log.problems().iter().all(|problem| problem.kind == ProblemKind::Duplicate));
    assert_eq!(log.manifests().len(), 1);
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn a_torn_journal_is_read_up_to_its_tear_and_named() {
    let temp = tempfile::tempdir().unwrap();
    let mut writer = create(temp.path(), Options { batch_rows: 10, ..Default::default() });
    push_events(&mut writer, 1..=20);
    let journal = temp.path().join(format!("journal/events-{}-000001.arrows", writer.run8()));
    drop(writer);
    let bytes = fs::read(&journal).unwrap();
    fs::write(&journal, &bytes[..bytes.len() - 3]).unwrap();
    let log = open(temp.path());
    assert_eq!(log.events().flatten().count(), 10);
    assert_eq!(log.problems().len(), 1);
    assert_eq!(log.problems()[0].kind, ProblemKind::TornJournal);
}

#[test]
fn a_file_of_a_newer_schema_is_left_out_with_the_reason() {
    let temp = tempfile::tempdir().unwrap();
    let files = three_files(temp.path());
    // Thrift holds the text as it is, so that another digit of the same length fits.
    let bytes = fs::read(&files[0]).unwrap();
    let key = b"vramscope.schema_version";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    let digit = at + bytes[at..].iter().position(|&byte| byte == b'1').unwrap();
    let mut newer = bytes;
    newer[digit] = b'9';
    fs::write(&files[0], newer).unwrap();
    let log = open(temp.path());
    let [problem] = log.problems() else { panic!("{:?}", log.problems()) };
    assert_eq!(problem.kind, ProblemKind::Newer);
    assert!(problem.message.contains("schema version is 9"), "{}", problem.message);
}

#[test]
fn every_table_has_a_name_for_its_batches() {
    let temp = tempfile::tempdir().unwrap();
    three_files(temp.path());
    let log = open(temp.path());
    for table in TABLES {
        assert!(log.batches(table.name).all(|batch| batch.is_ok()));
    }
    assert_eq!(log.batches("passwords").count(), 0);
}
