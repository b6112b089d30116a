//! Programs that run before the agent, after it, and that load the driver library late.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use agent_tests::{
    agent::Agent,
    logs::{Logged, blocks, true_blocks},
    machine,
    sim::{Running, truth},
};
use ledger::rows::BreakdownRow;

const MIB: u64 = 1 << 20;

/// Waits until the running recording has broken NVML's figure down with bytes of this category.
fn breakdown_with(log: &Path, category: &str) {
    let begin = Instant::now();
    let found = |row: &BreakdownRow| row.category == category && row.bytes > 0;
    while !Logged::open(log).unwrap().rows().unwrap().iter().any(found) {
        assert!(begin.elapsed() < Duration::from_secs(30), "no reading with {category}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn what_a_running_program_held_is_before_attach_and_what_it_allocates_is_seen() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut hold = device.start("hold", &["4194304", "3"]).unwrap();
    let before = truth::live(&hold.until_ready().unwrap());
    let nvml = device.smi().unwrap().process_bytes(0, hold.pid()).unwrap();
    let recording = Agent::new(&device).attach(&[hold.pid()]).unwrap();
    let log = device.folder().join("log");
    breakdown_with(&log, "before_attach");
    let lines = hold.step("alloc 6291456").unwrap();
    let new = truth::live(&lines).pop().unwrap();
    breakdown_with(&log, "live_device");
    hold.step("free").unwrap();
    hold.step("free").unwrap();
    let recorded = recording.stop().unwrap();

    let logged = recorded.open().unwrap();
    let process = logged.process(hold.pid()).unwrap();
    assert!(!process.from_start && process.attached_ns.is_some());
    let events = logged.events().unwrap();
    let said: Vec<_> =
        events.iter().map(|e| (&*e.op, e.addr as u64, e.delta_bytes, e.alloc_id == 0)).collect();
    let unknown = before.last().unwrap().addr;
    assert_eq!(
        said,
        [
            ("alloc", new.addr, 6_291_456, false),
            ("free", new.addr, -6_291_456, false),
            ("free", unknown, 0, true),
        ]
    );
    // No call told which device the program's context is on: NVML did.
    assert_eq!((events[0].cuda_ordinal, events[0].nvml_index), (Some(0), Some(0)));
    let rows = logged.rows::<BreakdownRow>().unwrap();
    let first_ns = rows.iter().map(|row| row.ts_ns).min().unwrap();
    let at = |ts_ns: i64, category: &str| {
        let row = rows.iter().find(|row| row.ts_ns == ts_ns && row.category == category);
        row.map(|row| row.bytes)
    };
    assert_eq!(at(first_ns, "before_attach"), Some(nvml as i64));
    assert_eq!(at(first_ns, "nvml_used"), Some(nvml as i64));
    assert_eq!(at(first_ns, "unexplained"), Some(0));
    let seen = rows.iter().find(|row| row.category == "live_device" && row.bytes > 0).unwrap();
    assert_eq!(seen.bytes, 6_291_456);
    assert_eq!(at(seen.ts_ns, "before_attach"), Some(nvml as i64));
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn a_program_that_starts_during_a_recording_is_seen_from_its_start() {
    let Some(device) = machine::gpus().unwrap() else { return };
    // Somebody uses the library already, as on any host with a GPU: it is probed from the start.
    let mut idle = device.start("hold", &["4096", "0"]).unwrap();
    idle.until_ready().unwrap();
    let recording = Agent::new(&device).record().unwrap();
    let mut hold = device.start("hold", &["4194304", "3"]).unwrap();
    let live = truth::live(&hold.until_ready().unwrap());
    let pid = hold.pid();
    hold.finish().unwrap();
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(pid).unwrap();
    assert!(process.from_start);
    let state = logged.before_exit().unwrap();
    assert_eq!(blocks(&state, process.proc_id), true_blocks(&live));
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn a_library_that_an_attached_program_opens_later_is_probed_in_time() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(500);
    let mut program = device.start("dlopen_late", &[]).unwrap();
    program.until_ready().unwrap();
    let recording = Agent::new(&device).attach(&[program.pid()]).unwrap();
    let live = truth::live(&program.step("").unwrap());
    assert_eq!(live[0].size_bytes, 48 * MIB);
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(program.pid()).unwrap();
    let state = logged.at_end().unwrap();
    assert_eq!(blocks(&state, process.proc_id), true_blocks(&live));
    let mut losses = logged.losses().unwrap();
    // cuInit, which was under way when the probes came: that it was the first call can't be told.
    losses.retain(|reason, _| !["exit_without_enter", "start_not_seen"].contains(&reason.as_str()));
    assert_eq!(losses, [].into());
}

#[test]
fn a_library_that_nobody_had_mapped_is_probed_in_time_on_the_whole_host() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(500);
    let mut program = device.start("dlopen_late", &[]).unwrap();
    program.until_ready().unwrap();
    let recording = Agent::new(&device).record().unwrap();
    let live = truth::live(&program.step("").unwrap());
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(program.pid()).unwrap();
    let state = logged.at_end().unwrap();
    assert_eq!(blocks(&state, process.proc_id), true_blocks(&live));
    let mut losses = logged.losses().unwrap();
    // cuInit, which was under way when the probes came: that it was the first call can't be told.
    losses.retain(|reason, _| !["exit_without_enter", "start_not_seen"].contains(&reason.as_str()));
    assert_eq!(losses, [].into());
}

#[test]
fn processes_that_share_a_library_have_each_their_own_calls() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut holds = [1, 2, 3].map(|_| device.start("hold", &["4096", "0"]).unwrap());
    for hold in &mut holds {
        hold.until_ready().unwrap();
    }
    let recording = Agent::new(&device).attach(&holds.each_ref().map(Running::pid)).unwrap();
    let live = holds.each_mut().map(|hold| {
        hold.step("alloc 6291456").unwrap();
        hold.step("free").unwrap();
        truth::live(&hold.step("alloc 4194304").unwrap())
    });
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into());
    assert_eq!(logged.events().unwrap().len(), 3 * 3);
    for (hold, live) in holds.iter().zip(live) {
        let process = logged.process(hold.pid()).unwrap();
        assert_eq!(blocks(&logged.at_end().unwrap(), process.proc_id), true_blocks(&live));
    }
}
