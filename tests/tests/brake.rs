//! What the probes may cost a process, and what one user may take of the ring.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{os::unix::process::CommandExt as _, process::Command};

use agent_tests::{
    agent::{Agent, Recorded, Traced},
    logs::Logged,
    machine,
    sim::{Running, SimDevice, truth},
};
use ledger::rows::{AnnotationRow, EventRow, LossRow, SiteUsageRow};

const BRAKED: &str = "the probes cost pid";
const ASYNC: [&str; 2] = ["cuMemAllocAsync", "cuMemFreeAsync"];

/// The moment at which a process lost detail.
fn braked_ns(logged: &Logged, proc_id: i64) -> i64 {
    let rows: Vec<AnnotationRow> = logged.rows().unwrap();
    let brakes: Vec<_> =
        rows.iter().filter(|row| row.kind == "brake" && row.proc_id == Some(proc_id)).collect();
    assert_eq!(brakes.len(), 1, "{rows:?}");
    brakes[0].ts_ns
}

/// Has the program flood until the agent brakes it.
fn flood(program: &mut Traced, order: &str) -> Vec<String> {
    for _ in 0..400 {
        let lines = program.step(order).unwrap();
        if program.said().contains(BRAKED) {
            return lines;
        }
    }
    panic!("it was not braked: {}", program.said());
}

fn of(events: &[EventRow], pid: u32, apis: &[&str]) -> Vec<(i64, i64)> {
    events
        .iter()
        .filter(|event| event.pid == pid as i32 && apis.contains(&&*event.api))
        .map(|event| (event.ts_ns, event.delta_bytes))
        .collect()
}

#[test]
fn a_flood_of_calls_loses_its_functions_and_nothing_else() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program =
        Agent::new(&device).options(&["--max-overhead", "2"]).start("flood", &[]).unwrap();
    program.until_ready().unwrap();
    let before = truth::made(&flood(&mut program, "calls 20000")).unwrap();
    let after = truth::made(&program.step("calls 1000").unwrap()).unwrap();
    assert_eq!(after.allocs, before.allocs + 1000);
    program.step("alloc 1048576").unwrap();
    program.step("host 4096").unwrap();
    let pid = program.pid().unwrap();
    let recorded = program.finish().unwrap();
    assert!(recorded.status.success(), "{}", recorded.said);

    let logged = recorded.open().unwrap();
    let process = logged.process(pid).unwrap();
    let braked_ns = braked_ns(&logged, process.proc_id);
    let events = logged.events().unwrap();
    let flooded = of(&events, pid, &ASYNC);
    assert!(flooded.iter().all(|(ts_ns, _)| *ts_ns < braked_ns), "recorded after the brake");
    let sum = |api: &[&str]| of(&events, pid, api).iter().map(|(_, bytes)| bytes).sum::<i64>();
    assert_eq!((sum(&["cuMemAlloc_v2"]), sum(&["cuMemAllocHost_v2"])), (1 << 20, 4096));
    let losses = logged.losses().unwrap();
    assert_eq!(losses.get("brake"), Some(&2), "{losses:?}");
    let seen_and_lost = flooded.len() as i64 + losses.get("ring_full").unwrap_or(&0);
    assert!(seen_and_lost <= (after.allocs + after.frees) as i64, "{losses:?}");
    let report = recorded.report().unwrap();
    let text = report.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["cuMemAllocAsync, cuMemFreeAsync are not recorded any more", "what it holds"] {
        assert!(text.contains(words), "{report}");
    }
}

#[test]
fn blocks_of_pytorch_lose_their_lines_and_keep_their_totals() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program =
        Agent::new(&device).options(&["--max-overhead", "5"]).start("flood", &[]).unwrap();
    program.until_ready().unwrap();
    flood(&mut program, "blocks 20000");
    let lines = program.step("tensor 5000").unwrap();
    let pid = program.pid().unwrap();
    let recorded = program.finish().unwrap();
    assert!(recorded.said.contains("only totals are recorded in it any more"), "{}", recorded.said);

    let logged = recorded.open().unwrap();
    let process = logged.process(pid).unwrap();
    assert_eq!(process.detail, "totals");
    let braked_ns = braked_ns(&logged, process.proc_id);
    let usage: Vec<SiteUsageRow> = logged.rows().unwrap();
    let late = |row: &&SiteUsageRow| row.stack_id != 0 && row.ts_ns > braked_ns;
    assert_eq!(usage.iter().find(late), None);
    assert!(usage.iter().any(|row| row.stack_id != 0), "there were no lines before");
    let totals = usage.iter().rfind(|row| row.stack_id == 0).unwrap();
    let said = lines.iter().rfind(|line| line.starts_with("TENSORS ")).unwrap();
    assert_eq!(totals.allocs, truth::field::<i64>(said, "made").unwrap() + 1);
    assert_eq!(totals.frees, truth::field::<i64>(said, "gone").unwrap());
    assert_eq!(totals.live_count, Some(1));
    let losses = logged.losses().unwrap();
    assert_eq!(losses, [("brake_lines".to_owned(), 1)].into());
}

/// A program that is ready for orders.
fn start(mut command: Command) -> Running {
    command.current_dir("/");
    let mut program = Running::start(command).unwrap();
    program.until_ready().unwrap();
    program
}

fn bytes_of(recorded: &Recorded, pid: u32) -> Vec<i64> {
    let events = recorded.open().unwrap().events().unwrap();
    of(&events, pid, &["cuMemAlloc_v2"]).into_iter().map(|(_, bytes)| bytes).collect()
}

#[test]
fn where_the_whole_host_is_recorded_the_other_processes_lose_nothing() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let [mut hot, mut other] = [(); 2].map(|()| start(device.program("flood")));
    let mut recording =
        Agent::new(&device).options(&["--max-overhead", "2", "-vv"]).record().unwrap();
    other.step("alloc 4096").unwrap();
    hot.step("calls 20000 4000").unwrap();
    recording.wait_for(BRAKED).unwrap();
    hot.step("calls 1000").unwrap();
    // From here on each process gets probes of its own, once it has mapped the library.
    let mut later = start(device.program("flood"));
    recording.wait_for(&format!("owner={}", later.pid())).unwrap();
    for program in [&mut hot, &mut other, &mut later] {
        program.step("alloc 8192").unwrap();
    }
    let recorded = recording.stop().unwrap();
    assert_eq!(bytes_of(&recorded, hot.pid()), [8192], "{}", recorded.said);
    assert_eq!(bytes_of(&recorded, other.pid()), [4096, 8192], "{}", recorded.said);
    assert_eq!(bytes_of(&recorded, later.pid()), [8192], "{}", recorded.said);
    let losses: Vec<LossRow> = recorded.open().unwrap().rows().unwrap();
    let of_other = losses.iter().find(|row| row.pid == Some(other.pid() as i32));
    assert_eq!(of_other, None);
    for program in [hot, other, later] {
        assert!(program.finish().unwrap().1.success());
    }
}

/// A program of another user.
fn foreign(device: &SimDevice) -> Command {
    let opened = Command::new("chmod").args(["-R", "a+rwX"]).arg(device.folder()).status();
    assert!(opened.unwrap().success());
    let mut command = device.program("flood");
    command.uid(65534).gid(65534);
    command
}

#[test]
fn a_user_who_floods_the_ring_leaves_room_for_the_others() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device);
    let small = ["--ring-size", "64KiB", "--max-overhead", "none", "--no-stacks"];
    let (mut quiet, mut loud) = (start(device.program("flood")), start(foreign(&device)));
    let recording = agent.options(&small).record().unwrap();
    for program in [&mut quiet, &mut loud] {
        program.step("alloc 4096").unwrap();
    }
    // Both users are known to the agent within a quarter of a second, and it shares the ring.
    std::thread::sleep(std::time::Duration::from_secs(1));
    loud.go("calls 20000 2000").unwrap();
    let made = 200;
    for _ in 0..made {
        quiet.step("alloc 8192").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let flooded = truth::made(&loud.until_ready().unwrap()).unwrap();
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    let losses: Vec<LossRow> = logged.rows().unwrap();
    let of_quiet = losses.iter().find(|row| row.pid == Some(quiet.pid() as i32));
    assert_eq!(of_quiet, None, "{}", recorded.said);
    assert_eq!(bytes_of(&recorded, quiet.pid()).len(), made + 1);
    let lost = |reason: &str| -> i64 {
        let its = losses.iter().filter(|row| row.pid == Some(loud.pid() as i32));
        its.filter(|row| row.reason == reason).map(|row| row.count).sum()
    };
    assert!(lost("quota_exceeded") > 0, "{losses:?}");
    let seen = of(&logged.events().unwrap(), loud.pid(), &ASYNC).len() as i64;
    let all = seen + lost("quota_exceeded") + lost("ring_full");
    assert_eq!(all, (flooded.allocs + flooded.frees) as i64, "{losses:?}");
    for program in [quiet, loud] {
        assert!(program.finish().unwrap().1.success());
    }
}
