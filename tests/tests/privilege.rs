//! What the agent may do while it records, and what fails without each part of it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use agent_tests::{
    agent::{Agent, Recorded, Recorder, binary, signal},
    capabilities::{Privileges, of_threads, setpriv, under},
    logs::{Logged, blocks, true_blocks},
    machine,
    sim::{Running, SimDevice, truth},
    wait::eventually,
};
use ledger::rows::{AnnotationRow, ProcessRow, StackRow};
use rustix::process::Signal;

const DAC_OVERRIDE: u64 = 1 << 1;
const DAC_READ_SEARCH: u64 = 1 << 2;
const KILL: u64 = 1 << 5;
const SYS_PTRACE: u64 = 1 << 19;
const SYS_RESOURCE: u64 = 1 << 24;
const CHECKPOINT_RESTORE: u64 = 1 << 40;
/// What every recording keeps (docs/privileges.md).
const KEPT: u64 = DAC_READ_SEARCH | SYS_PTRACE | CHECKPOINT_RESTORE;

const NOBODY: u32 = 65_534;
const AS_NOBODY: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];

/// GPUs, where this kernel has links that take no capability.
fn gpus() -> Option<SimDevice> {
    let device = machine::gpus().unwrap()?;
    if agent::kernel::has_multi_links().unwrap() {
        return Some(device.init_ms(500));
    }
    let reason = "without multi links (kernel 6.10) more is kept: each probe takes CAP_SYS_ADMIN";
    machine::skip(&machine::Obstacle::of_the_machine(reason));
    None
}

/// Every thread has these and no way to more; the log's has its own.
fn assert_reduced(pid: u32, kept: u64, of_log: u64) {
    let threads = of_threads(pid).unwrap();
    assert!(threads.iter().any(|thread| thread.thread == "log"), "{threads:?}");
    for Privileges { thread, sets } in threads {
        let wanted = if thread == "log" { of_log } else { kept };
        let told = format!("{thread}: {sets:x?}");
        assert_eq!((sets["CapPrm"], sets["CapEff"]), (wanted, wanted), "{told}");
        let others = ["CapInh", "CapBnd", "CapAmb"].map(|name| sets[name]);
        assert_eq!((others, sets["NoNewPrivs"]), ([0; 3], 1), "{told}");
    }
}

/// `hold` and the libraries, where only this user may look.
fn in_private(device: &SimDevice, uid: u32) -> Command {
    let folder = device.folder().join("private");
    fs::create_dir(&folder).unwrap();
    let hold = device.program("hold");
    let files = fs::read_dir(device.lib_dir()).unwrap().map(|entry| entry.unwrap().path());
    for from in files.chain([PathBuf::from(hold.get_program())]) {
        let to = folder.join(from.file_name().unwrap());
        fs::copy(from, &to).unwrap();
        fs::set_permissions(&to, fs::Permissions::from_mode(0o700)).unwrap();
        chown(&to, Some(uid), Some(uid)).unwrap();
    }
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&folder, Some(uid), Some(uid)).unwrap();
    let mut command = Command::new(folder.join("hold"));
    command.args(["1048576", "3"]).envs(device.env());
    command.env("LD_LIBRARY_PATH", &folder).env("RANK", "7");
    command
}

/// Starts the command as nobody.
fn as_nobody(command: &Command) -> Running {
    let mut program = Running::start(setpriv(&AS_NOBODY, command)).unwrap();
    program.until_ready().unwrap();
    program
}

/// Starts the agent where some capabilities are not to be had.
fn without(agent: &Agent<'_>, missing: &str, verb: &str) -> Recorder {
    agent.recording(setpriv(&["--bounding-set", missing], &agent.command(verb))).unwrap()
}

fn not_probed(recorded: &Recorded) -> i64 {
    let losses = recorded.open().unwrap().losses().unwrap();
    losses.get("library_not_probed").copied().unwrap_or(0)
}

#[test]
fn a_recording_keeps_what_it_needs_in_every_thread() {
    let Some(device) = gpus() else { return };
    let agent = Agent::new(&device);
    let mut hold = device.start("hold", &["1048576", "1"]).unwrap();
    hold.until_ready().unwrap();
    let pids = [hold.pid()];
    let verbs: [&dyn Fn() -> Recorder; 2] =
        [&|| agent.record().unwrap(), &|| agent.attach(&pids).unwrap()];
    for start in verbs {
        let recording = start();
        assert_reduced(recording.pid(), KEPT, 0);
        hold.step("alloc 2097152").unwrap();
        assert_reduced(recording.pid(), KEPT, 0);
        recording.stop().unwrap();
    }
    let mut program = agent.start("hold", &["1048576", "1"]).unwrap();
    program.until_ready().unwrap();
    assert_reduced(program.agent_pid(), KEPT | KILL, 0);
    program.finish().unwrap();
}

/// Soft and hard limit of open files.
fn open_files(pid: u32) -> Vec<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn the_recorder_may_open_more_files_and_the_program_as_many_as_before() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device);
    let hold = agent.run_command("hold", &["1048576", "1"]);
    let limited = under("prlimit", &["--nofile=1024:4096"], &hold);
    let mut program = agent.trace(limited).unwrap();
    program.until_ready().unwrap();
    let raised = open_files(program.agent_pid());
    let own = of_threads(std::process::id()).unwrap();
    let beyond = own.iter().all(|thread| thread.sets["CapEff"] & SYS_RESOURCE != 0);
    assert!(raised[0] == raised[1] && raised[1] >= 4096, "{raised:?}");
    assert_eq!(raised[1] > 4096, beyond, "{raised:?}: what is beyond the hard limit takes more");
    assert_eq!(open_files(program.pid().unwrap()), [1024, 4096]);
    program.finish().unwrap();
}

#[test]
fn the_recorder_of_a_users_run_keeps_as_little() {
    let Some(device) = gpus() else { return };
    let mut hold = device.start("hold", &["1048576", "1"]).unwrap();
    hold.until_ready().unwrap();
    let agent = Agent::new(&device).env("SUDO_UID", "65534").env("SUDO_GID", "65534");
    let mut command = agent.command("__agent");
    let folder = device.folder().join("log");
    fs::create_dir(&folder).unwrap();
    chown(&folder, Some(NOBODY), Some(NOBODY)).unwrap();
    command.arg("--pid").arg(hold.pid().to_string()).stderr(Stdio::null());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut recorder = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(recorder.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n", "the probes are in place");
    assert_reduced(recorder.id(), KEPT, 0);
    hold.step("alloc 2097152").unwrap();
    drop(recorder.stdin.take());
    assert!(recorder.wait().unwrap().success());
    let events = Logged::open(&folder).unwrap().events().unwrap();
    assert!(events.iter().any(|event| event.delta_bytes == 2_097_152));
}

#[test]
fn the_program_of_run_has_the_rights_of_its_caller() {
    let Some(device) = gpus() else { return };
    let script = "grep -E '^(Cap|NoNewPrivs|Seccomp)' /proc/self/status; capsh --print";
    let plain = ["sh", "-c", script];
    let launchers: [&[&str]; 3] = [
        &["--bounding-set", "-audit_control"],
        &["--bounding-set", "-net_raw", "--inh-caps", "+net_admin", "--ambient-caps", "+net_admin"],
        &["--no-new-privs"],
    ];
    for (n, launcher) in launchers.into_iter().enumerate() {
        let mut direct = Command::new(plain[0]);
        direct.args(&plain[1..]);
        let direct = setpriv(launcher, &direct).output().unwrap();
        let mut run = Agent::new(&device).log(&device.folder().join(n.to_string())).command("run");
        run.arg("--").args(plain);
        let traced = setpriv(launcher, &run).output().unwrap();
        let said = String::from_utf8_lossy(&traced.stderr).into_owned();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(text(&direct.stdout).contains("CapBnd"), "{direct:?}");
        assert_eq!(text(&traced.stdout), text(&direct.stdout), "{launcher:?}: {said}");
    }
}

#[test]
fn what_is_kept_suffices_for_everything_that_comes_later() {
    let Some(device) = gpus() else { return };
    let recording = Agent::new(&device).options(&["--max-disk", "800KiB"]).record().unwrap();
    // Rotates the log, and has old files deleted.
    let mut busy = device.start("threads", &["4", "30000", "sync", "0"]).unwrap();
    busy.until_ready().unwrap();
    busy.finish().unwrap();
    let mut hold = as_nobody(&in_private(&device, NOBODY));
    let live = truth::live(&hold.step("alloc 2097152").unwrap());
    let pid = hold.pid();
    assert_reduced(recording.pid(), KEPT, 0);
    let log = device.folder().join("log");
    let known = |what: fn(&ProcessRow) -> bool| {
        Logged::open(&log).is_ok_and(|log| log.process(pid).is_ok_and(|row| what(&row)))
    };
    eventually("it is in the log", || known(|_| true));
    hold.finish().unwrap();
    eventually("its end is in the log", || known(|row| row.end_ns.is_some()));
    let stop = device.folder().join("stop");
    fs::write(&stop, "").unwrap();
    let recorded = recording.wait().unwrap();
    assert_eq!(recorded.status.code(), Some(3), "{}", recorded.said);
    assert!(recorded.said.contains(&stop.display().to_string()), "{}", recorded.said);

    let logged = recorded.open().unwrap();
    let process = logged.process(pid).unwrap();
    assert_eq!((process.uid, process.rank, process.exit_code), (Some(65_534), Some(7), Some(0)));
    assert!(process.command.as_ref().unwrap().ends_with("private/hold"), "{process:?}");
    let account = blocks(&logged.before_exit().unwrap(), process.proc_id);
    assert_eq!(account, true_blocks(&live[live.len() - 4..]));
    let stacks = logged.rows::<StackRow>().unwrap();
    let named = |stack_id| {
        let mut found = stacks.iter().filter(|stack| stack.stack_id == stack_id);
        found.any(|stack| stack.folded.contains("main"))
    };
    let events = logged.events().unwrap();
    let own: Vec<_> =
        events.iter().filter(|e| e.proc_id == process.proc_id && e.op == "alloc").collect();
    assert!(own.len() == 4 && own.iter().all(|event| named(event.stack_id)), "{own:?} {stacks:?}");
    let notes = logged.rows::<AnnotationRow>().unwrap();
    assert!(notes.iter().any(|note| note.kind == "deleted"), "the log was not rotated: {notes:?}");
    let mut losses = logged.losses().unwrap();
    // cuInit, which was under way when the probes came: that it was the first call can't be told.
    losses.retain(|reason, _| !["exit_without_enter", "start_not_seen"].contains(&reason.as_str()));
    assert_eq!(losses, [].into(), "{}", recorded.said);
}

#[test]
fn without_a_capability_that_all_need_nothing_starts_and_it_is_named() {
    let Some(device) = gpus() else { return };
    let cases = [
        ("-sys_ptrace", "CAP_SYS_PTRACE (see what others have mapped)"),
        ("-bpf,-sys_admin", "CAP_BPF (load programs)"),
        ("-perfmon,-sys_admin", "CAP_PERFMON (attach probes)"),
    ];
    for (missing, words) in cases {
        let record = Agent::new(&device).command("record");
        let mut doctor = Command::new(binary());
        doctor.arg("doctor");
        for command in [record, doctor] {
            let output = setpriv(&["--bounding-set", missing], &command).output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            assert_eq!(output.status.code(), Some(3), "{said}");
            assert!(said.contains(words), "no {words:?} in: {said}");
        }
    }
    assert!(!device.folder().join("log").exists());
}

#[test]
fn without_dac_read_search_libraries_of_others_stay_unseen_and_that_is_told() {
    let Some(device) = gpus() else { return };
    let recording = without(&Agent::new(&device), "-dac_read_search", "record");
    assert_reduced(recording.pid(), KEPT & !DAC_READ_SEARCH, 0);
    let mut hold = as_nobody(&in_private(&device, NOBODY));
    hold.step("alloc 2097152").unwrap();
    let recorded = recording.stop().unwrap();
    assert!(recorded.said.contains("recording without CAP_DAC_READ_SEARCH"), "{}", recorded.said);
    assert_eq!(not_probed(&recorded), 1, "{}", recorded.said);
}

/// Records a program whose library was deleted before.
fn of_deleted_library(device: &SimDevice, missing: &str) -> Recorded {
    let mut hold = Running::start(in_private(device, 0)).unwrap();
    hold.until_ready().unwrap();
    fs::remove_dir_all(device.folder().join("private")).unwrap();
    let agent = Agent::new(device).log(&device.folder().join(missing));
    let recording = without(&agent, missing, "record");
    hold.step("alloc 2097152").unwrap();
    recording.stop().unwrap()
}

#[test]
fn without_checkpoint_restore_deleted_libraries_stay_unseen_and_that_is_told() {
    let Some(device) = gpus() else { return };
    let recorded = of_deleted_library(&device, "-checkpoint_restore,-sys_admin");
    assert!(recorded.said.contains("CAP_CHECKPOINT_RESTORE"), "{}", recorded.said);
    assert_eq!(not_probed(&recorded), 1, "{}", recorded.said);
    let recorded = of_deleted_library(&device, "-audit_control");
    assert_eq!(not_probed(&recorded), 0, "{}", recorded.said);
    let events = recorded.open().unwrap().events().unwrap();
    assert!(events.iter().any(|event| event.delta_bytes == 2_097_152));
}

#[test]
fn without_kill_a_signal_to_a_users_program_is_refused_and_that_is_told() {
    let Some(device) = gpus() else { return };
    let agent = Agent::new(&device).env("SUDO_UID", "65534").env("SUDO_GID", "65534");
    for (missing, passed_on) in [("-audit_control", true), ("-kill", false)] {
        let run = agent.run_command("hold", &[]);
        let mut program = agent.trace(setpriv(&["--bounding-set", missing], &run)).unwrap();
        program.until_ready().unwrap();
        signal(program.agent_pid(), Signal::TERM).unwrap();
        if !passed_on {
            program.wait_for("could not be passed on to the program").unwrap();
            program.wait_for("CAP_KILL").unwrap();
            let recorded = program.finish().unwrap();
            assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);
            continue;
        }
        eventually("the program ends", || {
            !Path::new(&format!("/proc/{}/exe", program.pid().unwrap())).exists()
        });
        let recorded = program.finish().unwrap();
        assert_eq!(recorded.status.code(), Some(128 + 15), "{}", recorded.said);
    }
}

#[test]
fn only_the_logs_thread_may_write_where_a_user_may_and_without_dac_override_it_says_so() {
    let Some(device) = gpus() else { return };
    let log = device.folder().join("log");
    fs::create_dir(&log).unwrap();
    fs::set_permissions(&log, fs::Permissions::from_mode(0o755)).unwrap();
    chown(&log, Some(NOBODY), Some(NOBODY)).unwrap();
    let record = Agent::new(&device).command("record");
    let output = setpriv(&["--bounding-set", "-dac_override"], &record).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("open the log") && said.contains("Permission denied"), "{said}");

    let recording = Agent::new(&device).record().unwrap();
    assert_reduced(recording.pid(), KEPT, DAC_OVERRIDE);
    let recorded = recording.stop().unwrap();
    assert_eq!(recorded.open().unwrap().defects().unwrap(), Vec::<String>::new());
}

#[test]
fn an_agent_needs_capabilities_and_not_to_be_root() {
    let Some(device) = gpus() else { return };
    // A binary and a folder that nobody can use.
    let program = device.folder().join("vramscope");
    fs::copy(binary(), &program).unwrap();
    let needed = "+bpf,+perfmon,+sys_ptrace,+dac_read_search,+checkpoint_restore,+setpcap";
    let options = [&AS_NOBODY[..], &["--inh-caps", needed, "--ambient-caps", needed]].concat();
    let agent = Agent::new(&device);
    let own = |verb: &str| {
        let plain = agent.command(verb);
        let mut own = Command::new(&program);
        own.args(plain.get_args());
        own.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        setpriv(&options, &own)
    };
    let mut doctor = Command::new(&program);
    doctor.args(["doctor"]);
    let output = setpriv(&options, &doctor).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("missing: CAP_SYS_ADMIN (see other agents"), "{said}");

    // Somebody has the library mapped: it is probed from the start of the recording.
    let mut idle = device.start("hold", &["4096", "0"]).unwrap();
    idle.until_ready().unwrap();
    let recording = agent.recording(own("record")).unwrap();
    assert_reduced(recording.pid(), KEPT, 0);
    // Another agent sees it all the same.
    let second = Agent::new(&device).log(&device.folder().join("second"));
    let output = second.command("record").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    // It sees root's programs.
    let mut hold = device.start("hold", &["1048576", "3"]).unwrap();
    let live = truth::live(&hold.until_ready().unwrap());
    let pid = hold.pid();
    hold.finish().unwrap();
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    let proc_id = logged.process(pid).unwrap().proc_id;
    assert_eq!(blocks(&logged.before_exit().unwrap(), proc_id), true_blocks(&live));
    assert_eq!(logged.losses().unwrap(), [].into(), "{}", recorded.said);
}

#[test]
fn an_unprivileged_doctor_names_everything_that_lacks() {
    let program = tempfile::tempdir().unwrap();
    fs::set_permissions(program.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = program.path().join("vramscope");
    fs::copy(binary(), &program).unwrap();
    if !rustix::process::geteuid().is_root() {
        return machine::skip(&machine::Obstacle::avoidable("not root: can't become nobody"));
    }
    let mut doctor = Command::new(&program);
    doctor.arg("doctor");
    let output = setpriv(&AS_NOBODY, &doctor).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    let needed = agent::privileges::NEEDED.map(|need| format!("{} ({})", need.name, need.purpose));
    assert!(said.contains(&format!("missing: {}", needed.join(", "))), "{said}");
}

#[test]
fn the_documents_name_what_is_kept_and_needed() {
    let page = include_str!("../../docs/privileges.md");
    let own = Privileges::own().unwrap();
    assert_eq!(own.sets.len(), 6, "{own:?}");
    let kept = ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_CHECKPOINT_RESTORE", "CAP_KILL"];
    let needed = agent::privileges::NEEDED.map(|need| need.name);
    for name in needed.into_iter().chain(kept).chain(["CAP_DAC_OVERRIDE"]) {
        assert!(page.contains(&format!("| `{name}` |")), "{name} has no row");
    }
}
