//! Process life: fork, exec, exit, kill, a pid that comes back.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::similar_names,
    reason = "tests and their helpers may panic"
)]

use std::{fs, os::unix::process::ExitStatusExt as _, thread, time::Duration};

use agent_tests::{
    agent::{Agent, Recorded, signal},
    logs::{Block, Logged, blocks, true_blocks},
    machine,
    sim::{
        Running, SimDevice,
        truth::{self, Live},
    },
    wait::eventually,
};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// GPUs on which the first call of a process takes as long as the real one, in which the agent puts
/// its probes into a process that it did not start.
fn gpus() -> Option<SimDevice> {
    machine::gpus().unwrap().map(|device| device.init_ms(500))
}

/// What a process held when it ended, by the account.
fn held(logged: &Logged, pid: u32) -> std::collections::BTreeSet<Block> {
    let process = logged.process(pid).unwrap();
    blocks(&logged.before_exit().unwrap(), process.proc_id)
}

fn of(live: &[Live], pid: u32) -> std::collections::BTreeSet<Block> {
    let own: Vec<Live> = live.iter().filter(|block| block.pid == pid).cloned().collect();
    true_blocks(&own)
}

fn child(recorded: &Recorded) -> u32 {
    let line = truth::line(&recorded.lines, "CHILD").unwrap();
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Runs `fork_child` through both of its steps.
fn forked(device: &SimDevice, mode: &str) -> (Recorded, u32, u32) {
    let mut program = Agent::new(device).start("fork_child", &[mode]).unwrap();
    program.until_ready().unwrap();
    thread::sleep(Duration::from_millis(100)); // in which the agent looks up who the child is
    program.step("").unwrap();
    let recorded = program.finish().unwrap();
    let (parent, child) = (recorded.pid().unwrap(), child(&recorded));
    (recorded, parent, child)
}

/// Implicit frees of a process add up to what it never freed.
fn assert_closed(logged: &Logged, pid: u32, bytes: u64) {
    let process = logged.process(pid).unwrap();
    let implicit: i64 = logged
        .events()
        .unwrap()
        .iter()
        .filter(|e| e.proc_id == process.proc_id && e.implicit && e.level == "device")
        .map(|e| {
            assert_eq!((&*e.op, &*e.api), ("free", "exit"));
            e.delta_bytes
        })
        .sum();
    assert_eq!(implicit, -(bytes as i64));
    assert!(process.end_ns.is_some());
    assert!(blocks(&logged.at_end().unwrap(), process.proc_id).is_empty());
}

#[test]
fn a_child_that_was_forked_before_cuda_holds_its_own() {
    let Some(device) = gpus() else { return };
    let (recorded, parent, child) = forked(&device, "before");
    let logged = recorded.open().unwrap();
    for (pid, bytes) in [(parent, 32 * MIB), (child, 24 * MIB)] {
        assert_eq!(held(&logged, pid), of(&recorded.live(), pid));
        assert_closed(&logged, pid, bytes);
    }
    assert_eq!(logged.process(child).unwrap().ppid, Some(parent as i32));
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn a_child_that_was_forked_after_cuda_owns_nothing() {
    let Some(device) = gpus() else { return };
    let (recorded, parent, child) = forked(&device, "after");
    let logged = recorded.open().unwrap();
    assert_eq!(held(&logged, parent), of(&recorded.live(), parent));
    assert_closed(&logged, parent, 32 * MIB);
    let events = logged.events().unwrap();
    // The calls are refused at once: the probes may come too late to see them.
    let mut of_child = events.iter().filter(|event| event.pid == child as i32);
    assert!(of_child.all(|event| event.op == "fail" && event.delta_bytes == 0));
    let mut losses = logged.losses().unwrap();
    losses.remove("exit_without_enter"); // the call that was under way when the probes came
    assert_eq!(losses, [].into());
}

#[test]
fn a_child_that_calls_at_once_is_seen_or_said_to_be_missed() {
    // The shortest first calls that a driver could have: the probes race them.
    for init_ms in [0, 5] {
        let Some(device) = machine::gpus().unwrap() else { return };
        seen_or_missed(&device.init_ms(init_ms));
    }
}

fn seen_or_missed(device: &SimDevice) {
    let mut program = Agent::new(device).start("fork_child", &["soon"]).unwrap();
    let lines = program.until_ready().unwrap();
    let child = truth::line(&lines, "CHILD").unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    // Where all of its calls went before, NVML tells that it holds memory: it is asked once a second.
    eventually("the child is in the log", || {
        Logged::open(program.log()).is_ok_and(|logged| logged.process(child).is_ok())
    });
    program.step("").unwrap();
    let recorded = program.finish().unwrap();
    let parent = recorded.pid().unwrap();
    let logged = recorded.open().unwrap();
    let losses = logged.losses().unwrap();
    assert_eq!(held(&logged, parent), of(&recorded.live(), parent));
    if losses.is_empty() {
        assert!(logged.process(child).unwrap().from_start);
        assert_eq!(held(&logged, child), of(&recorded.live(), child));
    } else {
        let told = ["start_not_seen", "exit_without_enter"];
        assert!(losses.keys().all(|reason| told.contains(&reason.as_str())), "{losses:?}");
    }
}

#[test]
fn a_child_that_executes_another_program_is_followed_into_it() {
    executes("exec");
}

#[test]
fn a_program_executed_by_a_thread_is_followed_into() {
    executes("thread");
}

fn executes(mode: &str) {
    let Some(device) = gpus() else { return };
    let (recorded, parent, child) = forked(&device, mode);
    let logged = recorded.open().unwrap();
    for (pid, bytes) in [(parent, 32 * MIB), (child, 24 * MIB)] {
        assert_eq!(held(&logged, pid), of(&recorded.live(), pid));
        assert_closed(&logged, pid, bytes);
    }
    let exe = logged.process(child).unwrap().exe.unwrap();
    assert!(exe.ends_with("/hold"), "{exe}");
    assert!(logged.process(child).unwrap().from_start);
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn executing_another_program_frees_what_the_first_one_held() {
    let Some(device) = gpus() else { return };
    let mut program = Agent::new(&device).start("hold", &["4194304", "2"]).unwrap();
    program.until_ready().unwrap();
    let after = program.step("exec 8388608").unwrap();
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let pid = recorded.pid().unwrap();
    assert_eq!(held(&logged, pid), true_blocks(&truth::live(&after)));
    let events = logged.events().unwrap();
    let by_exec: i64 = events.iter().filter(|e| e.api == "exec").map(|e| e.delta_bytes).sum();
    assert_eq!(by_exec, -8_388_608);
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn what_a_process_never_freed_is_implicit_at_its_exit() {
    let Some(device) = gpus() else { return };
    let mut program = Agent::new(&device).start("hold", &["3145728", "5"]).unwrap();
    program.until_ready().unwrap();
    program.step("free").unwrap();
    let recorded = program.finish().unwrap();
    let (logged, pid) = (recorded.open().unwrap(), recorded.pid().unwrap());
    assert_closed(&logged, pid, 4 * 3 * MIB);
    let process = logged.process(pid).unwrap();
    assert_eq!(process.exit_code, Some(0));
    assert!(process.from_start);
    assert!(process.start_ns.unwrap() <= process.end_ns.unwrap());
}

#[test]
fn a_killed_process_ends_in_the_account_too() {
    let Some(device) = gpus() else { return };
    let mut program = Agent::new(&device).start("hold", &["3145728", "2"]).unwrap();
    program.until_ready().unwrap();
    let pid = program.pid().unwrap();
    signal(pid, Signal::KILL).unwrap();
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(137));
    let logged = recorded.open().unwrap();
    assert_closed(&logged, pid, 2 * 3 * MIB);
    assert_eq!(logged.process(pid).unwrap().exit_code, Some(137));
}

/// Starts programs until one gets this pid.
fn start_as(device: &SimDevice, pid: u32, args: &[&str]) -> Option<Running> {
    for _ in 0..100 {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        let mut program = device.start("hold", args).unwrap();
        if program.pid() == pid {
            return Some(program);
        }
        program.kill().unwrap();
    }
    None
}

#[test]
fn a_pid_that_comes_back_is_another_process() {
    let Some(device) = gpus() else { return };
    // Somebody has the library mapped: it is probed from the start of the recording.
    let mut idle = device.start("hold", &["4096", "0"]).unwrap();
    idle.until_ready().unwrap();
    let recording = Agent::new(&device).record().unwrap();
    let mut first = device.start("hold", &["1048576", "3"]).unwrap();
    let pid = first.pid();
    first.until_ready().unwrap();
    assert!(first.finish().unwrap().1.success());
    let Some(mut second) = start_as(&device, pid, &["2097152", "2"]) else {
        let reason = "no pid can be chosen here (/proc/sys/kernel/ns_last_pid)";
        return machine::skip(&machine::Obstacle::of_the_machine(reason));
    };
    let said = second.until_ready().unwrap();
    let (_, status) = second.finish().unwrap();
    assert_eq!(status.signal(), None);
    let recorded = recording.stop().unwrap();

    let logged = recorded.open().unwrap();
    let lives = logged.lives(pid).unwrap();
    assert_eq!(lives.len(), 2, "{lives:?}");
    let state = logged.before_exit().unwrap();
    let bytes = |life: usize| -> u64 {
        blocks(&state, lives[life].proc_id).iter().map(|(_, _, bytes)| bytes).sum()
    };
    assert_eq!((bytes(0), bytes(1)), (3 * MIB, 4 * MIB));
    assert_eq!(blocks(&state, lives[1].proc_id), true_blocks(&truth::live(&said)));
    assert!(lives[0].end_ns.unwrap() <= lives[1].start_ns.unwrap() + 10_000_000);
    assert_eq!(logged.losses().unwrap(), [].into());
}
