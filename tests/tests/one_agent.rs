//! One agent a host, and the file that switches all of them off.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

mod entries;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use agent_tests::{
    agent::{Agent, Recorder},
    logs::{blocks, true_blocks},
    machine,
    sim::{Running, SimDevice},
};
use ledger::rows::AnnotationRow;

/// An agent with a log of its own.
fn agent<'a>(device: &'a SimDevice, log: &str) -> Agent<'a> {
    Agent::new(device).log(&device.folder().join(log))
}

fn holding(device: &SimDevice) -> Running {
    let mut hold = device.start("hold", &["1048576", "1"]).unwrap();
    hold.until_ready().unwrap();
    hold
}

/// The command ends with "another one runs", and names it.
fn refused(command: &Command, first: &Recorder, log: &Path) {
    let output = ended(command);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    let named = [format!("pid {}", first.pid()), log.display().to_string()];
    for words in named {
        assert!(text.contains(&words), "no {words:?} in: {text}");
    }
}

/// What becomes of a command that should not start to record; one that does is ended.
fn ended(command: &Command) -> Output {
    let mut limited = Command::new("timeout");
    limited.args(["--signal=INT", "20"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn beside_a_recorder_of_the_host_nothing_else_starts() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut hold = holding(&device);
    let first = agent(&device, "first").record().unwrap();
    let log = device.folder().join("first");
    let second = agent(&device, "second");
    refused(&second.command("record"), &first, &log);
    let mut attach = second.command("attach");
    attach.arg(hold.pid().to_string());
    refused(&attach, &first, &log);
    let mark = device.folder().join("started");
    let mut run = second.command("run");
    run.arg("--").arg("touch").arg(&mark);
    refused(&run, &first, &log);
    assert!(!mark.exists(), "the program was started, unrecorded");
    assert!(!device.folder().join("second").exists(), "a log was begun");
    // The first one goes on.
    hold.step("alloc 2097152").unwrap();
    let events = first.stop().unwrap().open().unwrap().events().unwrap();
    assert!(events.iter().any(|event| event.delta_bytes == 2_097_152));
}

#[test]
fn an_agent_in_another_container_is_seen() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let first = agent(&device, "first").record().unwrap();
    let log = device.folder().join("first");
    let plain = agent(&device, "second").command("record");
    for spaces in [&["--mount", "--net", "--ipc", "--uts"][..], &["--mount", "--pid", "--fork"]] {
        let mut command = Command::new("unshare");
        command.args(spaces).arg(plain.get_program()).args(plain.get_args());
        command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        refused(&command, &first, &log);
    }
    first.stop().unwrap();
}

#[test]
fn a_killed_agent_blocks_nobody() {
    let Some(device) = machine::gpus().unwrap() else { return };
    agent(&device, "first").record().unwrap().kill().unwrap();
    agent(&device, "second").record().unwrap().stop().unwrap();
}

#[test]
fn a_users_map_of_the_same_name_blocks_nobody() {
    let Some(device) = machine::gpus().unwrap() else { return };
    // BPF_MAP_CREATE with the name of the sign, by a process that then is no root's any more.
    let script = "import ctypes, os, struct, sys\n\
                  attr = struct.pack('=IIIIIII16s60x', 2, 4, 8192, 1, 0, 0, 0, b'vramscope_agent')\n\
                  libc = ctypes.CDLL(None, use_errno=True)\n\
                  fd = libc.syscall(321, 0, attr, len(attr))\n\
                  assert fd >= 0, os.strerror(ctypes.get_errno())\n\
                  os.setuid(65534)\n\
                  print('READY', flush=True)\n\
                  sys.stdin.read()";
    if std::env::consts::ARCH != "x86_64" {
        return println!("SKIP the number of bpf(2) is known for x86-64 only");
    }
    let mut python = Command::new("python3");
    python.args(["-c", script]);
    let mut user = Running::start(python).unwrap();
    user.until_ready().unwrap();
    agent(&device, "first").record().unwrap().stop().unwrap();
    user.kill().unwrap();
}

#[test]
fn programs_that_have_nothing_to_do_with_each_other_run_at_once() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let (first, second) = (agent(&device, "first"), agent(&device, "second"));
    let mut one = first.start("hold", &["1048576", "3"]).unwrap();
    one.until_ready().unwrap();
    let mut other = second.start("hold", &["2097152", "2"]).unwrap();
    other.until_ready().unwrap();
    one.step("alloc 4194304").unwrap();
    other.step("alloc 8388608").unwrap();

    // One that is recorded already is not recorded twice.
    let (pid, log) = (one.pid().unwrap(), device.folder().join("first"));
    let third = agent(&device, "third");
    let mut attach = third.command("attach");
    attach.arg(pid.to_string());
    let output = ended(&attach);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains(&log.display().to_string()), "{text}");
    let output = ended(&third.command("record"));
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));

    for recorded in [one.finish().unwrap(), other.finish().unwrap()] {
        let logged = recorded.open().unwrap();
        let process = logged.process(recorded.pid().unwrap()).unwrap();
        let held = blocks(&logged.before_exit().unwrap(), process.proc_id);
        let live: Vec<_> = recorded.live();
        let last = live.len() - held.len();
        assert_eq!(held, true_blocks(&live[last..]));
        assert_eq!(logged.losses().unwrap(), [].into());
    }
}

#[test]
fn the_stop_file_ends_a_recording_of_the_host() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut hold = holding(&device);
    let recording = agent(&device, "log").record().unwrap();
    hold.step("alloc 2097152").unwrap();
    assert!(entries::patched(&device, hold.pid()).unwrap() > 0, "no probe was in place");
    let stop = device.folder().join("stop");
    fs::write(&stop, "").unwrap();
    let recorded = recording.wait().unwrap();
    assert_eq!(recorded.status.code(), Some(3), "{}", recorded.said);
    assert!(recorded.said.contains(&stop.display().to_string()), "{}", recorded.said);
    assert_eq!(entries::patched(&device, hold.pid()).unwrap(), 0);
    hold.step("alloc 4194304").unwrap();
    let logged = recorded.open().unwrap();
    let sizes: Vec<i64> = logged.events().unwrap().iter().map(|event| event.delta_bytes).collect();
    assert_eq!(sizes, [2_097_152]);
    assert_eq!(logged.defects().unwrap(), Vec::<String>::new());
    let notes = logged.rows::<AnnotationRow>().unwrap();
    let told = |note: &AnnotationRow| note.kind == "warning" && note.text.contains("stop file");
    assert!(notes.iter().any(told), "{notes:?}");
    assert!(recorded.report().unwrap().contains("stop file"));

    // While it is there nothing starts.
    let mark = device.folder().join("started");
    let mut run = agent(&device, "other").command("run");
    run.arg("--").arg("touch").arg(&mark);
    let output = ended(&run);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains(&stop.display().to_string()) && text.contains("remove"), "{text}");
    assert!(!mark.exists() && !device.folder().join("other").exists());
    fs::remove_file(&stop).unwrap();
    agent(&device, "other").record().unwrap().stop().unwrap();
}

#[test]
fn the_stop_file_lets_the_program_of_run_go_on() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = agent(&device, "log").start("hold", &["1048576", "1"]).unwrap();
    program.until_ready().unwrap();
    let stop = device.folder().join("stop");
    fs::write(&stop, "").unwrap();
    program.wait_for("next: vramscope report").unwrap();
    assert_eq!(entries::patched(&device, program.pid().unwrap()).unwrap(), 0);
    program.step("alloc 2097152").unwrap();
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);
    assert!(recorded.said.contains(&stop.display().to_string()), "{}", recorded.said);
    let events = recorded.open().unwrap().events().unwrap();
    assert!(events.iter().any(|event| event.delta_bytes == 1_048_576));
    assert!(!events.iter().any(|event| event.delta_bytes == 2_097_152));
}
