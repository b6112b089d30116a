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

/// What a row of `events` says: function, kind, level, bytes, change of live bytes.
type Said = (String, String, String, Option<i64>, i64);

/// A `CALL` line of `every_row`.
struct Call {
    api: String,
    op: String,
    level: String,
    addr: u64,
    size_bytes: i64,
    result: i32,
}

fn calls(lines: &[String]) -> Vec<Call> {
    let calls = lines.iter().filter_map(|line| {
        let api = line.strip_prefix("CALL ")?.split(' ').next()?.to_owned();
        let addr: String = truth::field(line, "addr")?;
        Some(Call {
            api,
            op: truth::field(line, "op")?,
            level: truth::field(line, "level")?,
            addr: u64::from_str_radix(addr.strip_prefix("0x")?, 16).ok()?,
            size_bytes: truth::field(line, "size")?,
            result: truth::field(line, "rc")?,
        })
    });
    calls.collect()
}

/// The rows that a call must give. `imported` is the handle of another process's memory.
fn expected(call: &Call, imported: u64) -> Vec<Said> {
    let said = |op: &str, level: &str, size_bytes, delta_bytes| {
        (call.api.clone(), op.to_owned(), level.to_owned(), size_bytes, delta_bytes)
    };
    let size = (call.size_bytes > 0).then_some(call.size_bytes);
    match (call.api.as_str(), call.op.as_str()) {
        // The map was the last thing that kept the memory.
        ("cuMemUnmap", _) => {
            vec![said("unmap", "virtual", size, 0), said("free", "device", size, -call.size_bytes)]
        }
        ("cuMemRetainAllocationHandle", _) => {
            vec![said("retain", "virtual", Some(4 * MIB), 0)]
        }
        // Memory of another process, which was never mapped here: its size is not known.
        ("cuMemImportFromShareableHandle", _) => vec![said("import", "imported", None, 0)],
        ("cuMemRelease", "-") if call.addr == imported => {
            vec![said("free", "imported", None, 0)]
        }
        // A reference less, and the memory stays.
        ("cuMemRelease", "-") => vec![said("free", "virtual", Some(4 * MIB), 0)],
        ("cuMemAddressFree", _) => vec![said("free", "virtual", size, -call.size_bytes)],
        // Pools are no rows of the table yet: only their blocks are seen.
        (_, "-" | "pool") => vec![],
        (_, "ctx") => vec![said("ctx", "device", None, 0)],
        // What it was is known only where it is in the books.
        ("cuMemFreeAsync", "fail") => vec![said("fail", "device", None, 0)],
        (_, op @ ("alloc" | "reserve")) => vec![said(op, &call.level, size, call.size_bytes)],
        (_, op @ "free") => vec![said(op, &call.level, size, -call.size_bytes)],
        (_, op) => vec![said(op, &call.level, size, 0)],
    }
}

fn said(event: &EventRow) -> Said {
    let EventRow { api, op, level, size_bytes, delta_bytes, .. } = event;
    (api.to_string(), op.to_string(), level.to_string(), *size_bytes, *delta_bytes)
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
    let import = calls.iter().find(|call| call.op == "import").unwrap();
    let wanted: Vec<Said> = calls.iter().flat_map(|call| expected(call, import.addr)).collect();
    let events = called(&recorded);
    let found: Vec<Said> = events.iter().map(said).collect();
    for (number, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        assert_eq!(found, wanted, "row {number}");
    }
    assert_eq!(found.len(), wanted.len());

    // Addresses and results, of the calls that give one row.
    let single = calls.iter().filter(|call| expected(call, import.addr).len() == 1);
    let rows = events.iter().filter(|event| event.api != "cuMemUnmap");
    for (call, event) in single.zip(rows) {
        assert_eq!(event.result, call.result, "{event:?}");
        if matches!(call.op.as_str(), "alloc" | "free" | "reserve" | "import" | "export" | "map") {
            assert_eq!(event.addr as u64, call.addr, "{event:?}");
        }
        assert!(event.duration_ns >= 0 && event.tid == recorded.pid().unwrap() as i32);
    }
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
    let called: BTreeSet<String> = calls(&lines).into_iter().map(|call| call.api).collect();
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
