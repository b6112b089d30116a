//! Contexts and what goes with them; shared memory whose references close exactly.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::collections::BTreeSet;

use agent_tests::{
    agent::{Agent, Traced},
    logs::{Block, Logged, blocks, true_blocks},
    machine,
    sim::truth,
};
use ledger::account::state::State;

/// What the account holds after the number of calls that the program has made.
fn held_after(logged: &Logged, proc_id: i64, contexts: usize) -> BTreeSet<Block> {
    let (mut state, mut seen) = (State::new(), 0);
    let events = logged.events().unwrap();
    for event in events.iter().filter(|event| event.api != "exit") {
        seen += usize::from(event.op == "ctx");
        if seen > contexts {
            break;
        }
        state.apply(event);
    }
    blocks(&state, proc_id)
}

fn steps(program: &mut Traced, count: usize) -> Vec<BTreeSet<Block>> {
    let first = program.until_ready().unwrap();
    let rest = (1..count).map(|_| program.step("").unwrap());
    let stages: Vec<_> = [first].into_iter().chain(rest).collect();
    stages.iter().map(|lines| true_blocks(&truth::live(lines))).collect()
}

#[test]
fn destroying_releasing_and_resetting_contexts_frees_what_was_in_them() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = Agent::new(&device).start("ctx", &[]).unwrap();
    let stages = steps(&mut program, 7);
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(recorded.pid().unwrap()).unwrap();
    // Calls about contexts up to each stage: two made; one destroyed; two retained, one released;
    // a reset, one retained; two released; two retained, a reset by the older function, one retained,
    // one released; one released.
    for (stage, contexts) in stages.iter().zip([2, 3, 6, 8, 10, 15, 16]) {
        let held = held_after(&logged, process.proc_id, contexts);
        assert_eq!(&held, stage, "after {contexts} calls about contexts");
    }
    let events = logged.events().unwrap();
    let implicit: Vec<_> = events
        .iter()
        .filter(|event| event.implicit && event.api != "exit")
        .map(|event| (&*event.api, &*event.level, event.delta_bytes >> 20))
        .collect();
    let by = |api: &str| {
        let mut freed: Vec<_> = implicit.iter().filter(|row| row.0 == api).collect();
        freed.sort_unstable();
        freed.iter().map(|row| (row.1, row.2)).collect::<Vec<_>>()
    };
    assert_eq!(by("cuCtxDestroy_v2"), [("device", -10), ("host", -3)]);
    assert_eq!(by("cuDevicePrimaryCtxReset_v2"), [("device", -14)]);
    assert_eq!(by("cuDevicePrimaryCtxReset"), [("device", -18)]);
    assert_eq!(by("cuDevicePrimaryCtxRelease"), [("device", -20), ("device", -14)]);
    assert_eq!(implicit.len(), 6);
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn memory_that_two_processes_share_is_counted_once_and_closes_exactly() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = Agent::new(&device).start("vmm_nccl", &["6"]).unwrap();
    let shared = truth::live(&program.until_ready().unwrap());
    program.step("").unwrap();
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let events = logged.events().unwrap();
    let pids: BTreeSet<u32> = shared.iter().map(|block| block.pid).collect();
    assert_eq!(pids.len(), 2);
    for pid in pids {
        let process = logged.process(pid).unwrap();
        let own: Vec<_> = events.iter().filter(|event| event.pid == pid as i32).collect();
        // Before the first teardown it holds its own buffers and the other's, as imports.
        let mut state = State::new();
        let retained = own.iter().position(|event| event.op == "retain").unwrap();
        own[..retained].iter().for_each(|event| state.apply(event));
        let mine: Vec<_> = shared.iter().filter(|block| block.pid == pid).cloned().collect();
        assert_eq!(blocks(&state, process.proc_id), true_blocks(&mine));

        let line = recorded
            .lines
            .iter()
            .rev()
            .find(|line| line.starts_with("REFS ") && truth::field(line, "pid") == Some(pid));
        let counted = |name: &str| truth::field::<usize>(line.unwrap(), name).unwrap();
        let rows = |api: &str| own.iter().filter(|event| event.api == api).count();
        assert_eq!(rows("cuMemCreate"), counted("created"));
        assert_eq!(rows("cuMemImportFromShareableHandle"), counted("imported"));
        assert_eq!(rows("cuMemRetainAllocationHandle"), counted("retained"));
        assert_eq!(rows("cuMemRelease"), counted("released"));
        // Nothing is left for the end of the process, and every sum is 0.
        assert!(own.iter().all(|event| !event.implicit));
        for level in ["device", "imported", "virtual"] {
            let sum: i64 = own.iter().filter(|e| e.level == level).map(|e| e.delta_bytes).sum();
            assert_eq!(sum, 0, "{level}");
        }
    }
    assert_eq!(logged.losses().unwrap(), [].into());
}
