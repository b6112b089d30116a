//! Rows of the probe table: each call is the event that it is, once.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{collections::BTreeSet, thread, time::Duration};

use agent::probes::{Library, rows_of};
use agent_tests::{
    agent::{Agent, Recorded},
    logs::{blocks, true_blocks},
    machine,
    sim::truth,
};
use ledger::rows::{EventRow, OomRow, StackRow};

const MIB: i64 = 1 << 20;
const OUT_OF_MEMORY: i32 = 2;

/// What a row of `events` says: function, kind, level, bytes, change of live bytes, result.
type Said = (String, String, String, Option<i64>, i64, i32);

/// A `CALL` line of `every_row`.
struct Call {
    said: Said,
    addr: u64,
    pid: i32,
    tid: i32,
}

fn calls(lines: &[String]) -> Vec<Call> {
    let calls = lines.iter().filter_map(|line| {
        let api = line.strip_prefix("CALL ")?.split(' ').next()?.to_owned();
        let word = |name: &str| truth::field::<String>(line, name);
        let addr = word("addr")?;
        let (op, level) = (word("op")?, word("level")?);
        let (delta, result) = (truth::field(line, "delta")?, truth::field(line, "rc")?);
        Some(Call {
            said: (api, op, level, word("size")?.parse().ok(), delta, result),
            addr: u64::from_str_radix(addr.strip_prefix("0x")?, 16).ok()?,
            pid: truth::field(line, "pid")?,
            tid: truth::field(line, "tid")?,
        })
    });
    calls.collect()
}

fn said(event: &EventRow) -> Said {
    let EventRow { api, op, level, size_bytes, delta_bytes, result, .. } = event;
    let (op, level) = (op.to_string(), level.to_string());
    (api.to_string(), op, level, *size_bytes, *delta_bytes, *result)
}

fn called(recorded: &Recorded) -> Vec<EventRow> {
    let events = recorded.open().unwrap().events().unwrap();
    events.into_iter().filter(|event| !event.implicit).collect()
}

#[test]
fn every_function_is_the_event_that_it_is() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = Agent::new(&device).start("every_row", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("").unwrap();
    let recorded = program.finish().unwrap();
    assert!(recorded.status.success(), "{recorded:?}");

    let calls = calls(&recorded.lines);
    let wanted: Vec<&Call> = calls.iter().filter(|call| call.said.1 != "-").collect();
    let events = called(&recorded);
    for (number, (event, call)) in events.iter().zip(&wanted).enumerate() {
        assert_eq!(said(event), call.said, "row {number}");
        assert_eq!(event.addr as u64, call.addr, "{event:?}");
        assert_eq!((event.pid, event.tid), (call.pid, call.tid), "{event:?}");
        assert!(event.duration_ns >= 0 && event.runtime_api.is_none(), "{event:?}");
        let has_size = event.size_bytes.is_some() && event.op != "fail";
        let is_array = event.api.contains("Array") && has_size;
        assert_eq!(event.estimated == Some(true), is_array, "{event:?}");
    }
    assert_eq!(events.len(), wanted.len());
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into());
    assert_eq!(logged.defects().unwrap(), Vec::<String>::new());
}

#[test]
fn every_row_of_the_table_is_a_function_of_the_simulated_driver_that_is_called() {
    let sim = agent_tests::sim::Sim::build().unwrap();
    let device = sim.device().unwrap();
    let mut program = device.start("every_row", &[]).unwrap();
    let mut lines = program.until_ready().unwrap();
    lines.extend(program.step("").unwrap());
    let called: BTreeSet<String> = calls(&lines).into_iter().map(|call| call.said.0).collect();
    let exported = agent::attach::elf::sites(
        std::fs::File::open(sim.lib_dir.join("libcuda.so.1")).unwrap(),
        Library::Cuda,
    );
    let exported: BTreeSet<u8> = exported.unwrap().iter().map(|site| site.row).collect();
    for (row, probe) in rows_of(Library::Cuda) {
        assert!(exported.contains(&row), "{} is not exported", probe.symbol);
        assert!(called.contains(probe.symbol), "every_row does not call {}", probe.symbol);
    }
}

#[test]
fn a_driver_call_inside_a_runtime_call_counts_once_in_either_linkage() {
    for name in ["runtime_shared", "runtime_static"] {
        let Some(device) = machine::gpus().unwrap() else { return };
        let recorded = Agent::new(&device).run(name, &[]).unwrap();
        let made = recorded.made().unwrap();
        let events = called(&recorded);
        let count = |op: &str| {
            let memory = events.iter().filter(|event| event.level != "virtual");
            memory.filter(|event| event.op == op).count() as u64
        };
        assert_eq!((count("alloc"), count("free")), (made.allocs, made.frees), "{name}");
        assert_eq!(count("fail"), made.failed, "{name}");

        let logged = recorded.open().unwrap();
        let process = logged.process(recorded.pid().unwrap()).unwrap();
        let state = logged.before_exit().unwrap();
        assert_eq!(blocks(&state, process.proc_id), true_blocks(&recorded.live()), "{name}");
    }
}

#[test]
fn the_runtimes_caller_is_the_site_in_either_linkage() {
    for name in ["runtime_shared", "runtime_static"] {
        let Some(device) = machine::gpus().unwrap() else { return };
        let mut program = Agent::new(&device).start(name, &[]).unwrap();
        program.until_ready().unwrap();
        thread::sleep(Duration::from_millis(300)); // in which the agent unwinds what it met
        let logged = program.finish().unwrap().open().unwrap();
        let sites: Vec<String> =
            logged.rows::<StackRow>().unwrap().into_iter().map(|stack| stack.site).collect();
        let of_main = |site: &String| site.starts_with("runtime.c:") && site.ends_with(" main");
        assert!(sites.len() > 5 && sites.iter().all(of_main), "{name}: {sites:?}");
    }
}

#[test]
fn failed_calls_are_events_and_never_bytes() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let recorded = Agent::new(&device).run("failed", &[]).unwrap();
    let logged = recorded.open().unwrap();
    let events = logged.events().unwrap();
    let failed: Vec<_> = events.iter().filter(|event| event.op == "fail").collect();
    assert_eq!(failed.len() as u64, recorded.made().unwrap().failed);
    for event in &failed {
        assert!(event.result != 0 && event.delta_bytes == 0 && event.alloc_id == 0, "{event:?}");
        assert!(!format!("{event:?}").contains(&0xdead_0000u64.to_string()) || event.op == "fail");
        let is_alloc = event.api.contains("Alloc");
        assert_eq!(event.size_bytes.is_some(), is_alloc, "{event:?}");
        assert!(!is_alloc || event.addr == 0, "a garbage out pointer was used: {event:?}");
    }

    let refused: Vec<_> = failed.iter().filter(|event| event.result == OUT_OF_MEMORY).collect();
    let ooms = logged.rows::<OomRow>().unwrap();
    assert_eq!(refused.len(), 7);
    assert_eq!(ooms.len(), refused.len());
    for (oom, event) in ooms.iter().zip(refused) {
        assert_eq!(oom.size_bytes, Some(1 << 50));
        assert_eq!((oom.api.as_str(), oom.ts_ns), (&*event.api, event.ts_ns));
    }
    let held = ooms.last().unwrap().process_live_bytes;
    assert_eq!(held, Some(7 * MIB));

    let process = logged.process(recorded.pid().unwrap()).unwrap();
    let state = logged.before_exit().unwrap();
    assert_eq!(blocks(&state, process.proc_id), true_blocks(&recorded.live()));
}

#[test]
fn driver_calls_carry_the_function_of_a_shared_runtime_where_labels_are_asked_for() {
    let labels = |name: &str, options: &[&str]| {
        // The runtime's functions come after the driver's, one by one before Linux 6.10.
        let device = machine::gpus().unwrap()?.init_ms(500);
        let recorded = Agent::new(&device).options(options).run(name, &[]).unwrap();
        assert_eq!(recorded.open().unwrap().losses().unwrap(), [].into(), "{name}");
        let memory = called(&recorded).into_iter().filter(|event| {
            matches!(event.op.as_ref(), "alloc" | "free" | "fail") && event.level != "virtual"
        });
        let pairs = memory.map(|event| (event.api.to_string(), event.runtime_api.clone()));
        Some(pairs.collect::<BTreeSet<_>>())
    };
    let Some(shared) = labels("runtime_shared", &["--runtime-api"]) else { return };
    let expected = [
        ("cuMemAlloc_v2", "cudaMalloc"),
        ("cuMemFree_v2", "cudaFree"),
        ("cuMemAllocPitch_v2", "cudaMallocPitch"),
        ("cuMemAllocManaged", "cudaMallocManaged"),
        ("cuMemHostAlloc", "cudaMallocHost"),
        ("cuMemHostAlloc", "cudaHostAlloc"),
        ("cuMemFreeHost", "cudaFreeHost"),
        ("cuMemHostRegister_v2", "cudaHostRegister"),
        ("cuMemHostUnregister", "cudaHostUnregister"),
        ("cuMemAllocAsync", "cudaMallocAsync"),
        ("cuMemFreeAsync", "cudaFreeAsync"),
    ];
    let expected = expected.map(|(api, label)| (api.to_owned(), Some(label.to_owned())));
    assert_eq!(shared, expected.into());

    // A runtime that is linked in has no functions that can be found; and nobody asked.
    for (name, options) in [("runtime_static", &["--runtime-api"][..]), ("runtime_shared", &[])] {
        let Some(unlabelled) = labels(name, options) else { return };
        assert!(unlabelled.len() >= 10, "{name}: {unlabelled:?}");
        assert!(unlabelled.iter().all(|(_, label)| label.is_none()), "{name}: {unlabelled:?}");
    }
}
