//! Agents that are killed, disks that are full, folders that can't be written: the program goes on
//! and what was written stays readable.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

mod entries;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{PipeReader, PipeWriter, Read as _, Write as _},
    os::unix::fs::{FileExt as _, symlink},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use agent_tests::{
    agent::{Agent, signal, vramscope},
    disk::Disk,
    logs::Logged,
    machine,
    sim::{SimDevice, truth},
    wait::eventually,
};
use rustix::process::Signal;

const SECOND_NS: i64 = 1_000_000_000;

fn now_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as i64
}

#[test]
fn a_killed_agent_leaves_the_program_unharmed_and_its_log_readable() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.set("SIM_FREE_LINGER_US", "100");
    let recording = Agent::new(&device).record().unwrap();
    let log = device.folder().join("log");
    // Some seconds of calls, for the kill to fall into.
    let mut program = device.start("burst", &["60000"]).unwrap();
    thread::sleep(Duration::from_millis(2500));
    assert!(
        entries::patched(&device, program.pid()).unwrap() > 0,
        "no probe was in place: the test shows nothing"
    );
    let killed_ns = now_ns();
    recording.kill().unwrap();
    eventually("the probes are gone", || entries::patched(&device, program.pid()).unwrap() == 0);
    let lines = program.until_ready().unwrap();
    assert_eq!(truth::made(&lines).unwrap().frees, 60000);
    program.go("").unwrap();
    let (pid, (_, status)) = (program.pid(), program.finish().unwrap());
    assert!(status.success());

    let count = |logged: &Logged| logged.rows::<ledger::rows::EventRow>().unwrap().len();
    let crashed = Logged::open(&log).unwrap();
    let mut last_ns = 0;
    crashed.each_event(|event| last_ns = last_ns.max(event.ts_ns)).unwrap();
    let unread = killed_ns - last_ns;
    assert!(unread < SECOND_NS, "the last {unread} ns before the kill are not in the log");
    let events = count(&crashed);
    assert!(events > 1000, "{events}");
    let report = agent_tests::agent::report(&log).unwrap();
    assert!(report.contains(&format!("{pid}")), "{report}");

    let recovered = vramscope(&["recover".as_ref(), log.as_ref()]).unwrap();
    let said = String::from_utf8_lossy(&recovered.stdout).into_owned();
    assert!(recovered.status.success() && said.contains("sealed "), "{said}");
    let sealed = Logged::open(&log).unwrap();
    assert_eq!(count(&sealed), events);
    assert_eq!(sealed.defects().unwrap(), Vec::<String>::new());
    let again = vramscope(&["recover".as_ref(), log.as_ref()]).unwrap();
    assert!(String::from_utf8_lossy(&again.stdout).contains("nothing to recover"));
}

#[test]
fn a_call_that_is_under_way_when_the_agent_is_killed_returns() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut idle = device.start("hold", &[]).unwrap();
    idle.until_ready().unwrap();
    let recording = Agent::new(&device).record().unwrap();
    // In cuInit for a while: its return address is the kernel's trampoline's then.
    let slow = device.init_ms(3000);
    let mut program = slow.start("hold", &["1048576", "2"]).unwrap();
    let maps = format!("/proc/{}/maps", program.pid());
    eventually("a return is pending", || fs::read_to_string(&maps).unwrap().contains("[uprobes]"));
    recording.kill().unwrap();
    eventually("the probes are gone", || entries::patched(&slow, program.pid()).unwrap() == 0);
    let lines = program.until_ready().unwrap();
    assert_eq!(truth::live(&lines).len(), 2);
    program.step("free").unwrap();
    assert!(program.finish().unwrap().1.success());
}

/// A child that does not outlive the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail where it is gone already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Whether a process catches the signal.
fn catches(pid: u32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|caught| u64::from_str_radix(caught.trim(), 16).ok());
    caught.is_some_and(|caught| caught >> (signal.as_raw() - 1) & 1 == 1)
}

/// A pipe that takes no byte before it is read from.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let bytes = rustix::pipe::fcntl_getpipe_size(&writer).unwrap();
    writer.write_all(&vec![b'.'; bytes]).unwrap();
    (reader, writer)
}

#[test]
fn a_recording_that_is_ended_as_soon_as_it_says_that_it_began_is_sealed() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let log = device.folder().join("log");
    // It hangs in its first word until somebody reads it: must be able to end by then.
    let (mut reader, writer) = full_pipe();
    let mut command = Agent::new(&device).command("record");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
    let mut agent = Killed(command.spawn().unwrap());
    drop(command);
    let pid = agent.0.id();
    eventually("Ctrl-C is caught before it says that it records", || catches(pid, Signal::INT));
    signal(pid, Signal::INT).unwrap();
    let mut said = String::new();
    reader.read_to_string(&mut said).unwrap();
    let (said, status) = (said.trim_start_matches('.'), agent.0.wait().unwrap());
    assert!(said.starts_with("vramscope: recording "), "{said}");
    // It has nothing to show, and says that by its exit code too.
    assert!(said.contains("0 events of 0 process(es)"), "{status}: {said}");
    assert_eq!(Logged::open(&log).unwrap().defects().unwrap(), Vec::<String>::new());
}

#[test]
fn a_program_of_run_goes_on_when_the_agent_is_killed() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.set("SIM_FREE_LINGER_US", "100");
    let mut program = Agent::new(&device).start("burst", &["30000"]).unwrap();
    thread::sleep(Duration::from_secs(2));
    signal(program.agent_pid(), Signal::KILL).unwrap();
    let lines = program.until_ready().unwrap();
    assert_eq!(truth::made(&lines).unwrap().frees, 30000);
}

/// The sealed files of the table of events, with their contents.
fn sealed(log: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let days = fs::read_dir(log.join("events")).into_iter().flatten().flatten();
    let files = days.flat_map(|day| fs::read_dir(day.path()).into_iter().flatten().flatten());
    files.map(|file| (file.path(), fs::read(file.path()).unwrap_or_default())).collect()
}

#[test]
fn a_full_disk_costs_rows_and_says_so_and_harms_nobody() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let disk = Disk::new(&device, "size=16m").unwrap();
    let log = disk.folder().join("log");
    // A small limit makes small files, so that some are sealed by then.
    let agent = Agent::new(&device).log(&log).options(&["--max-disk", "8MiB"]);
    let mut program = agent.start("threads", &["8", "4000"]).unwrap();
    let lines = program.until_ready().unwrap();
    assert_eq!(truth::made(&lines).unwrap().allocs, 32000);
    eventually("files are sealed", || sealed(&log).len() >= 2);
    // The rest of the disk is somebody else's.
    let filler = File::create(disk.folder().join("filler")).unwrap();
    let mut at = 0;
    while filler.write_all_at(&[1; 4096], at).is_ok() {
        at += 4096;
    }
    let before = sealed(&log);
    thread::sleep(Duration::from_millis(500));
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "the program's own code: {}", recorded.said);
    let told = recorded.said.contains("No space left on device");
    assert!(told, "not a word of the full disk: {}", recorded.said);

    let after = sealed(&log);
    for (path, bytes) in &before {
        assert_eq!(after.get(path), Some(bytes), "{}", path.display());
    }
    let logged = Logged::open(&log).unwrap();
    assert!(logged.events().unwrap().len() > 1_000);
    let defects = logged.defects().unwrap();
    assert!(!defects.iter().any(|defect| defect.contains(".parquet")), "{defects:?}");
    assert!(recorded.report().is_ok());
}

#[test]
fn a_folder_that_vanishes_is_told_of_and_the_program_goes_on() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device);
    let mut program = agent.start("hold", &["1048576", "2"]).unwrap();
    program.until_ready().unwrap();
    fs::remove_dir_all(program.log()).unwrap();
    for _ in 0..5 {
        program.step("alloc 2097152").unwrap();
        thread::sleep(Duration::from_millis(200));
    }
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);
    let log = recorded.log.display().to_string();
    let told = recorded.said.lines().any(|line| {
        line.contains(&log) && (line.contains("No such file") || line.contains("removed"))
    });
    assert!(told, "not a word of the lost folder: {}", recorded.said);
}

/// `run` with this log ends with an error that has the words, and starts no program.
fn refused(device: &SimDevice, log: &Path, words: &[&str]) {
    let mark = device.folder().join("started");
    let mut command = Agent::new(device).log(log).command("run");
    let output = command.arg("--").arg("touch").arg(&mark).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(!mark.exists(), "the program was started although the log can't be");
    for words in words {
        assert!(said.contains(words), "no {words:?} in: {said}");
    }
}

#[test]
fn a_folder_that_is_no_place_for_a_log_is_refused_before_the_program_starts() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let (real, link) = (device.folder().join("real"), device.folder().join("link"));
    fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    refused(&device, &link, &["symbolic link", &link.display().to_string()]);

    let file = device.folder().join("file");
    fs::write(&file, "x").unwrap();
    refused(&device, &file, &["not a directory", &file.display().to_string()]);

    let disk = Disk::new(&device, "size=1m,ro").unwrap();
    let log = disk.folder().join("log");
    refused(&device, &log, &["Read-only file system", &log.display().to_string()]);
}

#[test]
fn a_disk_that_is_full_from_the_start_is_refused() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let disk = Disk::new(&device, "size=8k").unwrap();
    fs::write(disk.folder().join("filler"), [1; 4096]).ok();
    refused(&device, &disk.folder().join("log"), &["No space left on device"]);
}
