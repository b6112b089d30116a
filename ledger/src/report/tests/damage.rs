//! Every kind of damage to a file of every table: the file is named, the rest is read, and nothing
//! is claimed to be well that cannot be known.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{
    from_log::writer,
    scene::{GIB, Scene},
};
use crate::{
    log::{Log, ProblemKind, TABLES},
    report::{Finding, Model},
};

/// A job that is well, and its log.
fn healthy(dir: &Path) -> Model {
    let mut scene = Scene::new(40);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.1, 30 * GIB);
    scene.exit(7, 30.0, 0);
    let mut writer = writer(dir, &scene);
    scene.sorted_events().iter().for_each(|row| writer.push(row));
    writer.finish(scene.manifest().end_ns.unwrap()).unwrap();
    read(dir)
}

fn read(dir: &Path) -> Model {
    Model::read(&[dir.to_owned()]).unwrap()
}

/// The last file of a table.
fn file_of(dir: &Path, table: &str) -> PathBuf {
    let days = fs::read_dir(dir.join(table)).unwrap().flatten();
    let files = days.flat_map(|day| fs::read_dir(day.path()).unwrap().flatten());
    files.map(|file| file.path()).max().unwrap()
}

fn well(model: &Model) -> bool {
    model
        .findings
        .iter()
        .any(|finding| matches!(finding, Finding::Nothing(_) if finding.tag() == "OK"))
}

/// A file with a metadata text replaced by one of the same length: Thrift holds it as it is.
fn with_text(bytes: &[u8], after: &str, from: u8, to: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let key = bytes.windows(after.len()).rposition(|window| window == after.as_bytes()).unwrap();
    let at = key + after.len();
    let at = at + bytes[at..].iter().position(|&byte| byte == from).unwrap();
    bytes[at] = to;
    bytes
}

type Damage = (&'static str, ProblemKind, &'static str, fn(&Path, &[u8]));

/// What is done to a file, what kind of problem it is, and a part of what is said of it.
const DAMAGE: &[Damage] = &[
    ("cut by a byte", ProblemKind::Truncated, "cut off", |path, whole| {
        fs::write(path, &whole[..whole.len() - 1]).unwrap();
    }),
    ("cut in half", ProblemKind::Truncated, "cut off", |path, whole| {
        fs::write(path, &whole[..whole.len() / 2]).unwrap();
    }),
    ("empty", ProblemKind::Truncated, "cut off", |path, _| fs::write(path, b"").unwrap()),
    ("zeros", ProblemKind::Truncated, "cut off", |path, whole| {
        fs::write(path, vec![0; whole.len()]).unwrap();
    }),
    ("text", ProblemKind::Truncated, "does not end as a Parquet file", |path, _| {
        fs::write(path, "ts,seq,proc_id\n1,2,3\n").unwrap();
    }),
    ("footer of noise", ProblemKind::Unreadable, "footer", |path, whole| {
        let mut bytes = whole.to_vec();
        let end = bytes.len();
        bytes[end - 100..end - 8].fill(0xee);
        fs::write(path, bytes).unwrap();
    }),
    ("footer longer than the file", ProblemKind::Unreadable, "footer", |path, whole| {
        let mut bytes = whole.to_vec();
        let end = bytes.len();
        bytes[end - 8..end - 4].copy_from_slice(&u32::MAX.to_le_bytes());
        fs::write(path, bytes).unwrap();
    }),
    ("of a newer schema", ProblemKind::Newer, "schema version is 9", |path, whole| {
        fs::write(path, with_text(whole, "vramscope.schema_version", b'1', b'9')).unwrap();
    }),
    ("without a table", ProblemKind::Foreign, "not one that vramscope wrote", |path, whole| {
        fs::write(path, with_text(whole, "vramscope.tabl", b'e', b'x')).unwrap();
    }),
    ("a directory", ProblemKind::Unreadable, "not a regular file", |path, _| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    }),
    ("a link", ProblemKind::Unreadable, "symbolic link", |path, whole| {
        let elsewhere = path.ancestors().nth(3).unwrap().join("elsewhere");
        fs::write(&elsewhere, whole).unwrap();
        fs::remove_file(path).unwrap();
        symlink(elsewhere, path).unwrap();
    }),
    ("a pipe", ProblemKind::Unreadable, "not a regular file", |path, _| {
        fs::remove_file(path).unwrap();
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR, 0).unwrap();
    }),
];

#[test]
fn any_damage_to_a_file_of_any_table_is_named_and_nothing_is_called_well_over_it() {
    let samples = [
        "breakdown",
        "device_samples",
        "process_samples",
        "host_samples",
        "process_libs",
        "devices",
    ];
    let temp = tempfile::tempdir().unwrap();
    let before = healthy(temp.path());
    assert!(well(&before), "{}", before.text(false));
    for table in TABLES {
        let path = file_of(temp.path(), table.name);
        let whole = fs::read(&path).unwrap();
        for (what, kind, words, damage) in DAMAGE {
            let what = format!("{} {what}", table.name);
            damage(&path, &whole);
            let log = Log::open(&[temp.path().to_owned()]).unwrap();
            let [problem] = log.problems() else { panic!("{what}: {:?}", log.problems()) };
            assert_eq!((problem.kind, problem.misses), (*kind, Some(table.name)), "{what}");
            let model = read(temp.path());
            let text = model.text(false);
            let told = model.problems.iter().any(|told| told.contains(path.to_str().unwrap()));
            assert!(told && model.problems[0].contains(words), "{what}: {:?}", model.problems);
            assert!(text.contains(path.file_name().unwrap().to_str().unwrap()), "{what}: {text}");
            let is_sample = samples.contains(&table.name);
            assert_eq!(well(&model), is_sample, "{what}: {text}");
            let reason = if is_sample { "samples_not_read" } else { "files_not_read" };
            let counts: Vec<_> = model.losses.iter().filter(|loss| loss.reason == reason).collect();
            assert_eq!(counts.len(), 1, "{what}: {:?}", model.losses);
            assert_eq!(counts[0].count, 1, "{what}");
            if path.is_dir() {
                fs::remove_dir(&path).unwrap();
            } else {
                fs::remove_file(&path).unwrap();
            }
            fs::write(&path, &whole).unwrap();
        }
    }
    assert_eq!(read(temp.path()), before, "the damage is undone");
}

#[test]
fn pages_of_noise_are_named_when_they_are_read() {
    let temp = tempfile::tempdir().unwrap();
    healthy(temp.path());
    for table in ["events", "processes"] {
        let path = file_of(temp.path(), table);
        let whole = fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        bytes[4..whole.len() / 3].fill(0xff);
        fs::write(&path, bytes).unwrap();
        let model = read(temp.path());
        let [problem] = &model.problems[..] else { panic!("{table}: {:?}", model.problems) };
        assert!(problem.contains(path.to_str().unwrap()), "{problem}");
        assert!(!well(&model), "{}", model.text(false));
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn files_that_are_nobodys_rows_cost_nothing() {
    let temp = tempfile::tempdir().unwrap();
    healthy(temp.path());
    fs::write(temp.path().join("events/date=2026-11-30/notes.txt"), "mine").unwrap_or_else(|_| {
        let day = file_of(temp.path(), "events");
        fs::write(day.with_file_name("notes.txt"), "mine").unwrap();
    });
    let model = read(temp.path());
    assert!(model.problems[0].contains("notes.txt"), "{:?}", model.problems);
    assert!(well(&model) && model.losses.is_empty(), "{}", model.text(false));
}

#[test]
fn a_table_that_cannot_be_listed_is_a_loss() {
    let temp = tempfile::tempdir().unwrap();
    healthy(temp.path());
    fs::remove_dir_all(temp.path().join("events")).unwrap();
    fs::write(temp.path().join("events"), "no directory").unwrap();
    let model = read(temp.path());
    assert!(model.problems[0].contains("events"), "{:?}", model.problems);
    assert!(model.losses.iter().any(|loss| loss.reason == "files_not_read"), "{:?}", model.losses);
}

#[test]
fn a_log_of_garbage_is_an_error_that_names_a_file() {
    let temp = tempfile::tempdir().unwrap();
    healthy(temp.path());
    for table in TABLES {
        let days = fs::read_dir(temp.path().join(table.name)).unwrap().flatten();
        for file in days.flat_map(|day| fs::read_dir(day.path()).unwrap().flatten()) {
            fs::write(file.path(), "garbage").unwrap();
        }
    }
    let error = Model::read(&[temp.path().to_owned()]).unwrap_err().to_string();
    assert!(error.contains("nothing in it can be read"), "{error}");
    assert!(error.contains(".parquet: it does not end as a Parquet file does"), "{error}");
}
