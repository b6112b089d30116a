//! Threads: frees from elsewhere, and addresses that go to the next thread at once.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use agent_tests::{
    agent::{Agent, Recorded},
    logs::{blocks, true_blocks},
    machine,
};

/// Calls of these functions in the log. Rows that no call made (`reused`, `exit`) are not among
/// them.
fn calls(recorded: &Recorded, names: &[&str]) -> u64 {
    let mut count = 0;
    let logged = recorded.open().unwrap();
    logged.each_event(|event| count += u64::from(names.contains(&&*event.api))).unwrap();
    count
}

/// All was seen, and what is live is what the program says.
fn assert_exact(recorded: &Recorded, names: &[&str]) {
    let logged = recorded.open().unwrap();
    let made = recorded.made().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into(), "{}", recorded.said);
    assert_eq!(calls(recorded, names), made.allocs + made.frees + made.failed);
    let process = logged.process(recorded.pid().unwrap()).unwrap();
    let state = logged.before_exit().unwrap();
    assert_eq!(blocks(&state, process.proc_id), true_blocks(&recorded.live()));
    let ended = logged.at_end().unwrap();
    assert!(blocks(&ended, process.proc_id).is_empty());
}

const SYNC: [&str; 2] = ["cuMemAlloc_v2", "cuMemFree_v2"];
const ASYNC: [&str; 2] = ["cuMemAllocAsync", "cuMemFreeAsync"];

#[test]
fn a_block_that_another_thread_frees_is_gone() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let recorded = Agent::new(&device).run("free_other_thread", &[]).unwrap();
    assert_exact(&recorded, &SYNC);
    let events = recorded.open().unwrap().events().unwrap();
    let pid = recorded.pid().unwrap() as i32;
    let frees: Vec<_> = events.iter().filter(|event| event.api == "cuMemFree_v2").collect();
    assert_eq!(frees.len(), 4);
    for free in frees {
        assert_eq!(free.tid, pid);
        let alloc = events.iter().find(|e| e.alloc_id == free.alloc_id && e.op == "alloc").unwrap();
        assert_ne!(alloc.tid, pid);
        assert_eq!(alloc.delta_bytes, -free.delta_bytes);
    }
}

#[test]
fn sixty_four_threads_race_for_one_address_and_the_account_is_exact() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device).options(&["--ring-size", "256MiB"]);
    let recorded = agent.run("threads", &["64", "20000"]).unwrap();
    assert_exact(&recorded, &SYNC);
}

#[test]
fn frees_that_linger_after_their_address_was_given_away_are_paired_by_their_entry() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.set("SIM_FREE_LINGER_US", "200");
    let recorded = Agent::new(&device).run("threads", &["16", "500", "sync", "3"]).unwrap();
    assert_exact(&recorded, &SYNC);
}

#[test]
fn stream_ordered_blocks_race_as_well() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.set("SIM_FREE_LINGER_US", "100");
    let recorded = Agent::new(&device).run("threads", &["16", "500", "async", "2"]).unwrap();
    assert_exact(&recorded, &ASYNC);
}
