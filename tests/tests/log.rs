//! The log under stress: old files deleted, files merged while the merging is killed, disks that
//! fill and empty, files that nobody may read.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use agent_tests::{
    agent::{Agent, binary, vramscope},
    disk::Disk,
    logs::Logged,
    machine,
    sim::truth,
    wait::eventually,
};
use ledger::{
    log::{ClockAnchor, LOG_WRITE_FAILED, Log, Options, RunInfo, Writer},
    report::Model,
    rows::{AnnotationRow, EventRow, LossRow, StackRow},
};

const SECOND_NS: i64 = 1_000_000_000;
const START_NS: i64 = 1_796_000_000 * SECOND_NS;

/// A finished recording of this host with `files` files of ten events.
fn small_files(dir: &Path, files: i64) {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let info = RunInfo {
        host,
        boot_id: "boot".to_owned(),
        pid: 4711,
        clock: ClockAnchor { boot_ns: 0, wall_ns: START_NS },
        tool_version: "0.1.0".to_owned(),
        command: Vec::new(),
    };
    let options = Options { batch_rows: 10, max_file_rows: 10, ..Options::default() };
    let mut writer = Writer::create(dir, &info, options).unwrap();
    for seq in 1..=files * 10 {
        writer.push(&EventRow {
            seq,
            ts_ns: START_NS + seq,
            op: "alloc".into(),
            level: "device".into(),
            alloc_id: seq,
            addr: seq << 21,
            size_bytes: Some(512),
            delta_bytes: 512,
            ..EventRow::default()
        });
        writer.push(&StackRow { stack_id: seq, ..StackRow::default() });
    }
    writer.finish(START_NS + SECOND_NS).unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

fn report(dir: &Path) -> String {
    let output = vramscope(&["report".as_ref(), dir.as_os_str()]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// Files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

#[test]
fn compact_tells_what_it_merges_and_reports_say_the_same_as_before() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("log");
    small_files(&dir, 30);
    let before = report(&dir);
    let compact = |option: &[&str]| {
        let mut command = Command::new(binary());
        let output = command.arg("compact").args(option).arg(&dir).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    let would = compact(&["--dry-run"]);
    assert!(would.contains("events: 30 files, ") && would.contains("-> 1; 300 rows"), "{would}");
    assert_eq!(files(&dir.join("events")).len(), 31, "a dry run changes nothing");
    let did = compact(&[]);
    assert!(did.contains("events: 30 files, ") && did.contains("; 300 rows as before"), "{did}");
    assert!(did.contains("in all: 60 files, "), "{did}");
    assert_eq!(files(&dir.join("events")).len(), 2);
    assert_eq!(report(&dir), before);
    assert!(compact(&[]).contains("nothing to compact"));
}

#[test]
fn compact_as_root_leaves_the_files_with_their_owner() {
    if !rustix::process::geteuid().is_root() {
        return machine::skip(&machine::Obstacle::of_the_machine("not root: files have one owner"));
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("log");
    small_files(&dir, 5);
    let all =
        || files(&dir).into_iter().chain([dir.clone(), dir.join("events"), dir.join("staging")]);
    for path in all() {
        chown(path, Some(4_321), Some(4_322)).unwrap();
    }
    for day in fs::read_dir(dir.join("events")).unwrap().flatten() {
        chown(day.path(), Some(4_321), Some(4_322)).unwrap();
    }
    vramscope(&["compact".as_ref(), dir.as_os_str()]).unwrap();
    let days = fs::read_dir(dir.join("events")).unwrap().flatten().map(|day| day.path());
    for path in all().chain(days) {
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (4_321, 4_322), "{}", path.display());
        let mode = if meta.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(meta.mode() & 0o777, mode, "{}", path.display());
    }
}

#[test]
fn a_compaction_that_is_killed_shows_no_row_twice_and_loses_none() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("log");
    let mut interrupted = 0;
    for round in 0..30 {
        if !dir.exists() {
            small_files(&dir, 40);
        }
        let mut child = Command::new(binary()).arg("compact").arg(&dir).spawn().unwrap();
        thread::sleep(Duration::from_millis(2 + round * 3));
        child.kill().ok();
        interrupted += u32::from(!child.wait().unwrap().success());
        let log = Log::open(std::slice::from_ref(&dir)).unwrap();
        assert_eq!(log.problems(), [], "round {round}");
        for table in ["events", "stacks"] {
            assert_eq!(log.row_count(table), 400, "{table} in round {round}");
        }
        let seqs = log.events().map(|event| event.unwrap().event.seq);
        assert!(seqs.eq(1..=400), "round {round}");
        // What is merged already has little left to interrupt.
        if files(&dir.join("events")).len() < 5 {
            fs::remove_dir_all(&dir).unwrap();
        }
    }
    assert!(interrupted > 3, "{interrupted} of the kills fell into a compaction");
    if !dir.exists() {
        small_files(&dir, 40);
    }
    let output = vramscope(&["compact".as_ref(), dir.as_os_str()]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(fs::read_dir(dir.join("staging")).unwrap().count(), 0);
    let log = Log::open(std::slice::from_ref(&dir)).unwrap();
    assert_eq!(log.row_count("events"), 400);
}

#[test]
fn a_log_of_garbage_is_an_error_with_exit_code_1() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("log");
    small_files(&dir, 2);
    for path in files(&dir) {
        fs::write(path, "garbage").unwrap();
    }
    for verb in ["report", "stacks"] {
        let output = vramscope(&[verb.as_ref(), dir.as_os_str()]).unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{verb}: {said}");
        assert!(said.contains("nothing in it can be read"), "{verb}: {said}");
    }
    let output = vramscope(&["schema".as_ref(), "--check".as_ref(), dir.as_os_str()]).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
}

#[test]
fn the_check_against_the_schema_names_the_file_that_does_not_fit() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("log");
    small_files(&dir, 3);
    let check = || vramscope(&["schema".as_ref(), "--check".as_ref(), dir.as_os_str()]).unwrap();
    let well = check();
    assert!(well.status.success() && said(&well).contains(" 0 do not fit"), "{}", said(&well));
    let events = files(&dir.join("events"));
    // A file of another table under the name of this one.
    fs::copy(&files(&dir.join("stacks"))[1], &events[2]).unwrap();
    let wrong = check();
    let said = said(&wrong);
    assert_eq!(wrong.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("wrong {}", events[2].display())), "{said}");
    assert!(said.contains("belongs to table stacks, not events"), "{said}");
}

#[test]
fn files_that_the_reader_may_not_read_are_named_and_the_rest_is_read() {
    if !rustix::process::geteuid().is_root() {
        return machine::skip(&machine::Obstacle::of_the_machine(
            "not root: can't be another user",
        ));
    }
    let temp = tempfile::tempdir().unwrap();
    fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let dir = temp.path().join("log");
    small_files(&dir, 3);
    let open_to_all = |path: &Path| {
        let mode = if path.is_dir() { 0o755 } else { 0o644 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let mut folders = vec![dir.clone()];
    while let Some(folder) = folders.pop() {
        open_to_all(&folder);
        folders.extend(
            fs::read_dir(&folder).unwrap().flatten().map(|e| e.path()).filter(|p| p.is_dir()),
        );
    }
    for path in files(&dir) {
        open_to_all(&path);
    }
    let closed = files(&dir.join("events"))[1].clone();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(dir.join("losses"), fs::Permissions::from_mode(0o700)).unwrap();
    // A copy of the binary that anybody may run.
    let program = temp.path().join("vramscope");
    fs::copy(binary(), &program).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    let output = command.arg(program).arg("report").arg(&dir).output().unwrap();
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    for path in [closed, dir.join("losses")] {
        assert!(said.contains(&path.display().to_string()), "{said}");
    }
    assert!(said.contains("Permission denied"), "{said}");
    assert!(said.contains("files of the log could not be read"), "{said}");
}

#[test]
fn a_disk_that_was_full_for_a_while_costs_what_is_counted_and_the_recording_goes_on() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let disk = Disk::new(&device, "size=24m").unwrap();
    let log = disk.folder().join("log");
    let agent = Agent::new(&device).log(&log);
    let mut program = agent.start("hold", &["1048576", "2"]).unwrap();
    program.until_ready().unwrap();
    let count = || Logged::open(&log).map_or(0, |log| log.events().unwrap().len());
    eventually("the first events are written", || count() > 2);
    let filler = disk.fill().unwrap();
    eventually("the agent says that the disk is full", || {
        program.step("alloc 1048576").unwrap();
        fs::read_to_string(device.folder().join("agent.stderr"))
            .unwrap()
            .contains("No space left on device")
    });
    for _ in 0..50 {
        program.step("alloc 1048576").unwrap();
    }
    fs::remove_file(filler).unwrap();
    eventually("the agent says that it goes on", || {
        program.step("alloc 1048576").unwrap();
        fs::read_to_string(device.folder().join("agent.stderr"))
            .unwrap()
            .contains("the log is written again")
    });
    program.step("alloc 7340032").unwrap();
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);

    let logged = recorded.open().unwrap();
    assert_eq!(files(&log.join("journal")).len(), 0);
    let events = logged.events().unwrap();
    assert!(
        events.iter().any(|event| event.size_bytes == Some(7_340_032)),
        "nothing after the gap"
    );
    let gaps = Log::open(std::slice::from_ref(&log)).unwrap().gaps().unwrap();
    let missing: i64 = gaps.iter().map(|gap| gap.last - gap.first + 1).sum();
    let last = events.last().unwrap().seq;
    assert_eq!(events.len() as i64 + missing, last, "seen + missing = made");
    let rows_lost: i64 = logged
        .rows::<LossRow>()
        .unwrap()
        .iter()
        .filter(|loss| loss.reason == LOG_WRITE_FAILED)
        .map(|loss| loss.count)
        .sum();
    assert!(rows_lost >= missing, "{rows_lost} rows lost, {missing} events missing");
    let told = logged.rows::<AnnotationRow>().unwrap();
    assert!(told.iter().any(|row| row.text.contains("the log could not be written")), "{told:?}");
    let problems = Log::open(std::slice::from_ref(&log)).unwrap().problems().to_vec();
    assert_eq!(problems, []);
}

#[test]
fn a_report_is_right_after_old_files_were_deleted() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device).options(&["--max-disk", "800KiB"]);
    let mut program = agent.start("threads", &["4", "40000", "sync", "3"]).unwrap();
    program.until_ready().unwrap();
    let recorded = program.finish().unwrap();
    let held = recorded.live();
    assert_eq!(held.len(), 12, "{:?}", recorded.lines);
    let made = truth::made(&recorded.lines).unwrap();
    let logged = recorded.open().unwrap();
    let events = logged.events().unwrap();
    assert!((events.len() as u64) < made.allocs + made.frees, "nothing was deleted");
    let rows = logged.rows::<AnnotationRow>().unwrap();
    assert!(rows.iter().any(|row| row.kind == "deleted"), "{rows:?}");

    let model = Model::read(std::slice::from_ref(&recorded.log)).unwrap();
    let process =
        model.processes.iter().find(|process| process.pid as u32 == recorded.pid().unwrap());
    let shares = &process.unwrap().shares;
    let told = shares.iter().flat_map(|share| &share.never_freed_totals);
    let told: i64 =
        told.filter(|total| total.level.as_str() == "device").map(|total| total.bytes).sum();
    let truth: u64 = held.iter().map(|block| block.size_bytes).sum();
    assert_eq!(told, truth as i64, "{}", model.text(false));
    assert!(!model.losses.iter().any(|loss| loss.affects_account), "{:?}", model.losses);
    let text = recorded.report().unwrap();
    assert!(text.contains("--max-disk deleted"), "{text}");
    assert!(text.contains("its account begins here"), "{text}");
    let bytes: u64 =
        files(&recorded.log).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes <= 800 << 10, "{bytes} bytes");
}
