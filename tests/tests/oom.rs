//! Refused requests, and what was held then.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{thread, time::Duration};

use agent_tests::{agent::Agent, logs::Logged, machine, sim::truth, wait::eventually};
use ledger::rows::{DeviceSampleRow, OomRow, StackRow};

/// What the program asks for in vain.
const REFUSED: i64 = 1 << 42;

#[test]
fn pytorch_reports_what_it_refuses_with_its_own_totals() {
    let Some(device) = machine::gpus().unwrap().map(|device| device.init_ms(120)) else { return };
    let mut program = Agent::new(&device).start("torch_like", &["12", "1"]).unwrap();
    program.until_ready().unwrap();
    eventually("NVML was asked", || {
        let rows = Logged::open(program.log()).and_then(|logged| logged.rows::<DeviceSampleRow>());
        rows.is_ok_and(|rows| rows.len() >= 2)
    });
    let refused = program.step("").unwrap();
    thread::sleep(Duration::from_millis(300)); // in which the agent unwinds what it met
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into());

    let ooms = logged.rows::<OomRow>().unwrap();
    let apis: Vec<&str> = ooms.iter().map(|row| row.api.as_str()).collect();
    assert_eq!(apis, ["cuMemAlloc_v2", "cuMemAlloc_v2", "c10"]);
    assert!(ooms.is_sorted_by_key(|row| row.ts_ns), "{ooms:?}");
    let (pid, told) = (recorded.pid().unwrap(), ooms.last().unwrap());
    let totals = refused.iter().find(|line| line.starts_with("TORCH ")).unwrap();
    let total = |name: &str| truth::field::<i64>(totals, name);
    assert_eq!(told.size_bytes, Some(REFUSED));
    assert_eq!(told.torch_allocated_bytes, total("allocated"));
    // The cache was given back before, in vain.
    assert_eq!(told.torch_reserved_bytes, total("reserved"));
    assert_eq!(told.process_live_bytes, told.torch_reserved_bytes);
    assert_eq!((told.proc_id, told.tid), (logged.process(pid).unwrap().proc_id, pid as i32));
    let gpu = &device.smi().unwrap().gpus[1];
    assert_eq!((told.nvml_index, told.gpu_uuid.as_ref()), (Some(1), Some(&gpu.uuid)));
    assert!(told.device_used_bytes.is_some() && told.device_total_bytes.is_some(), "{told:?}");

    let stacks = logged.rows::<StackRow>().unwrap();
    let stack = stacks.iter().find(|stack| stack.stack_id == told.stack_id).unwrap();
    assert!(stack.site.starts_with("torch_like.c:"), "{}", stack.site);
    let leaf = stack.folded.split(';').next_back().unwrap();
    assert!(leaf.starts_with("c10::reportOutOfMemoryToProfiler"), "{leaf}");

    // It moves no bytes: what the driver refused is the event.
    assert!(logged.events().unwrap().iter().all(|event| event.api != "c10"));
}
