//! The command line: what `run` passes through, exit codes, privacy.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use agent_tests::{
    agent::{Agent, signal, vramscope},
    logs::Logged,
    machine,
    sim::SimDevice,
    wait::eventually,
};
use ledger::{log::TABLES, rows};
use rustix::process::Signal;

fn run(device: &SimDevice, words: &[&str]) -> Output {
    let mut command = Agent::new(device).command("run");
    command.arg("--").args(words).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_programs_exit_code_is_runs_own() {
    let Some(device) = machine::gpus().unwrap() else { return };
    for (script, code) in [("exit 0", 0), ("exit 42", 42), ("kill -TERM $$", 128 + 15)] {
        let output = run(&device, &["sh", "-c", script]);
        assert_eq!(output.status.code(), Some(code), "{script}: {}", text(&output.stderr));
        let said = text(&output.stderr);
        assert!(said.contains("no process called CUDA's driver library"), "{script}: {said}");
    }
}

#[test]
fn a_signal_to_run_reaches_the_program() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = Agent::new(&device).start("hold", &[]).unwrap();
    program.until_ready().unwrap();
    signal(program.agent_pid(), Signal::TERM).unwrap();
    thread::sleep(Duration::from_millis(300));
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(128 + 15));
    let process = recorded.open().unwrap().process(recorded.pid().unwrap()).unwrap();
    assert_eq!(process.exit_code, Some(128 + 15));
}

#[test]
fn the_program_has_the_callers_folder_environment_and_streams() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut command = Agent::new(&device).command("run");
    let script =
        "read line; echo \"$line $PWD $VRAMSCOPE_TEST_VARIABLE\"; echo aside >&2; ls /proc/self/fd";
    command.args(["--", "sh", "-c", script]).current_dir(folder.path());
    let plain = Command::new("sh").args(["-c", "ls /proc/self/fd"]).output().unwrap();
    command.env("VRAMSCOPE_TEST_VARIABLE", "seen");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"hello\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let folder = folder.path().canonicalize().unwrap();
    // No descriptor of the agent leaks into it, and the agent writes nothing to its stdout.
    let descriptors = text(&plain.stdout);
    let wanted = format!("hello {} seen\n{descriptors}", folder.display());
    assert_eq!(text(&output.stdout), wanted);
    assert!(text(&output.stderr).contains("aside\n"));
}

const NOBODY: &str = "65534";

#[test]
fn under_sudo_the_program_and_the_log_are_the_users() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device).env("SUDO_UID", NOBODY).env("SUDO_GID", NOBODY);
    let mut command = agent.command("run");
    let hold = device.program("hold").get_program().to_owned();
    let script = "id -u; id -g; id -G; grep Cap /proc/self/status | grep -v CapBnd; exec \"$0\"";
    command.args(["--", "sh", "-c", script]).arg(hold);
    let mut program = agent.trace(command).unwrap();
    let lines = program.until_ready().unwrap();
    assert_eq!(lines[..3], [NOBODY, NOBODY, NOBODY]);
    for line in lines.iter().filter(|line| line.starts_with("Cap")) {
        assert!(line.ends_with("\t0000000000000000"), "capabilities are left: {line}");
    }
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(recorded.pid().unwrap()).unwrap();
    assert_eq!(process.uid, Some(65534));
    assert!(!logged.events().unwrap().is_empty());
    assert_private(&recorded.log, 65534);
}

#[test]
fn a_log_is_for_its_owner_only() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let recorded = Agent::new(&device).run("hold", &[]).unwrap();
    assert_private(&recorded.log, 0);
}

#[test]
fn a_log_is_for_its_owner_only_whatever_the_umask_and_while_it_grows() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device);
    let open_to_all = |plain: &Command| {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 000; exec \"$0\" \"$@\""]);
        command.arg(plain.get_program()).args(plain.get_args());
        command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    };
    let mut program =
        agent.trace(open_to_all(&agent.run_command("threads", &["2", "9000"]))).unwrap();
    program.until_ready().unwrap();
    let log = program.log().to_owned();
    let journal = log.join("journal");
    eventually("the journal grows", || {
        fs::read_dir(&journal).is_ok_and(|mut files| files.any(|_| true))
    });
    assert_private(&log, 0);
    program.finish().unwrap();
    assert_private(&log, 0);
    // What a killed agent leaves, and what is sealed of it.
    let killed = agent.recording(open_to_all(&agent.command("record"))).unwrap();
    eventually("the journal grows", || fs::read_dir(&journal).unwrap().any(|_| true));
    killed.kill().unwrap();
    assert!(fs::read_dir(&journal).unwrap().any(|_| true), "nothing was left");
    assert_private(&log, 0);
    let mut recover = Command::new(agent_tests::agent::binary());
    recover.arg("recover").arg(&log);
    assert!(open_to_all(&recover).output().unwrap().status.success());
    assert_private(&log, 0);
}

/// Everything in the log belongs to the user, and nobody else may read it.
fn assert_private(path: &Path, uid: u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (uid, uid), "{}", path.display());
    let mode = metadata.permissions().mode() & 0o777;
    if metadata.is_dir() {
        assert_eq!(mode, 0o700, "{}", path.display());
        for entry in fs::read_dir(path).unwrap() {
            assert_private(&entry.unwrap().path(), uid);
        }
    } else {
        assert_eq!(mode, 0o600, "{}", path.display());
    }
}

#[test]
fn work_that_happens_elsewhere_is_refused_with_a_hint() {
    let output = vramscope(&["run", "--", "docker", "run", "image"].map(AsRef::as_ref)).unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("docker") && said.contains("vramscope attach"), "{said}");
}

#[test]
fn a_program_that_cannot_be_started_ends_as_in_a_shell() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let output = run(&device, &["/nonexistent/program"]);
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("/nonexistent/program"), "{}", text(&output.stderr));
    let plain = device.folder().join("plain");
    fs::write(&plain, "no program").unwrap();
    let output = run(&device, &[plain.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(126), "{}", text(&output.stderr));
}

#[test]
fn a_pid_that_is_nobodys_is_a_precondition() {
    let Some(device) = machine::gpus().unwrap() else { return };
    // Larger than any pid that this kernel hands out.
    let output = Agent::new(&device).command("attach").arg("4194305").output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said = text(&output.stderr);
    assert!(said.contains("there is no process 4194305"), "{said}");
    assert!(!device.folder().join("log").exists(), "a log was left behind");
}

#[test]
fn where_ebpf_is_not_permitted_the_program_is_not_run() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mark = device.folder().join("it-ran");
    let agent = Agent::new(&device);
    let mut run = agent.command("run");
    run.arg("--").arg("touch").arg(&mark);
    let mut doctor = Command::new(agent_tests::agent::binary());
    doctor.arg("doctor");
    for (command, words) in [(run, "see `vramscope doctor`"), (doctor, "missing: CAP_BPF")] {
        let mut without = Command::new("setpriv");
        without.args(["--bounding-set", "-bpf,-perfmon,-sys_admin"]);
        without.arg(command.get_program()).args(command.get_args());
        without.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = without.output().unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains(words), "{said}");
    }
    assert!(!mark.exists());
}

#[test]
fn a_recording_in_which_nothing_was_traced_says_so() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut command = Agent::new(&device).command("attach");
    let mut idle = Command::new("sleep").arg("60").spawn().unwrap();
    let output = command.arg(idle.id().to_string()).args(["--duration", "300ms"]).output();
    idle.kill().unwrap();
    idle.wait().unwrap();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("no process called"), "{}", text(&output.stderr));
}

#[test]
fn a_report_of_nothing_is_an_error_that_names_it() {
    let output = vramscope(&["report".as_ref(), "/nonexistent/log".as_ref()]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/nonexistent/log"), "{}", text(&output.stderr));
    let empty = tempfile::tempdir().unwrap();
    let output = vramscope(&["report".as_ref(), empty.path().as_os_str()]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("no log of vramscope is there"), "{said}");
}

/// Every row of every table, as text, and the files beside the tables.
fn all_text(logged: &Logged, folder: &Path) -> String {
    let mut text = String::new();
    let mut tables = 0;
    macro_rules! add {
        ($($row:ident),*) => {$(
            tables += 1;
            for row in logged.rows::<rows::$row>().unwrap() {
                text.push_str(&format!("{row:?}\n"));
            }
        )*};
    }
    add!(
        EventRow,
        SiteUsageRow,
        BreakdownRow,
        LiveRow,
        DeviceSampleRow,
        ProcessSampleRow,
        HostSampleRow,
        ProcessRow,
        ProcessLibRow,
        DeviceRow,
        StackRow,
        FrameRow,
        OomRow,
        AnnotationRow,
        LossRow
    );
    assert_eq!(tables, TABLES.len(), "a table is not looked through");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            text.push_str(&String::from_utf8_lossy(&fs::read(path).unwrap()));
        }
    }
    text
}

#[test]
fn secrets_of_command_lines_and_environments_stay_out_of_the_log() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(500);
    let agent = |log: &str| {
        let agent = Agent::new(&device).log(&device.folder().join(log));
        agent.env("RANK", "3").env("API_TOKEN", "planted-in-the-environment")
    };
    let secrets = [
        "--password=planted-in-argv",
        "--token=planted-too",
        "PASSWORD=planted-as-well",
        "--api-key",
        "planted-apart",
    ];
    let args = [&["1048576", "1", "0", "0"][..], &secrets].concat();
    let recorded = agent("redacted").run("hold", &args).unwrap();
    let logged = recorded.open().unwrap();
    let all = all_text(&logged, &recorded.log);
    assert!(!all.contains("planted") && !all.contains("API_TOKEN"), "{all}");
    let process = logged.process(recorded.pid().unwrap()).unwrap();
    assert_eq!(process.rank, Some(3), "an allow-listed variable was not read");
    assert!(process.command.unwrap().contains("hold"));

    let recorded = agent("whole").options(&["--full-commands"]).run("hold", &args).unwrap();
    let all = all_text(&recorded.open().unwrap(), &recorded.log);
    for secret in secrets {
        assert!(all.contains(secret), "asked for, and not there: {secret}");
    }
    assert!(!all.contains("planted-in-the-environment"));
}
