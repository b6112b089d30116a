//! Refused requests, and what was held then.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{collections::BTreeMap, thread, time::Duration};

use agent_tests::{
    agent::Agent,
    logs::Logged,
    machine,
    sim::{SimDevice, truth},
    wait::eventually,
};
use ledger::{
    account::breakdown::PARTS,
    rows::{AnnotationRow, BreakdownRow, DeviceSampleRow, OomRow, ProcessSampleRow, StackRow},
};

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

const MIB: i64 = 1 << 20;

/// What a run of `layers` on a small GPU was refused, after these orders.
struct Refused {
    logged: Logged,
    report: String,
    ooms: Vec<OomRow>,
    pid: u32,
}

fn refused(device: &SimDevice, orders: &[String]) -> Refused {
    let mut program = Agent::new(device).start("layers", &["0"]).unwrap();
    program.until_ready().unwrap();
    let pid = program.pid().unwrap();
    // A reading of NVML tells what the context takes.
    let log = program.log().to_owned();
    eventually("its context is in the log", || {
        let rows = Logged::open(&log).and_then(|logged| logged.rows::<BreakdownRow>());
        rows.is_ok_and(|rows| rows.iter().any(|row| row.category == "context"))
    });
    for order in orders {
        program.step(order).unwrap();
    }
    thread::sleep(Duration::from_millis(1500)); // in which it could have tried again
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into());
    let ooms = logged.rows::<OomRow>().unwrap();
    Refused { logged, report: recorded.report().unwrap(), ooms, pid }
}

impl Refused {
    /// The report in one line: it is wrapped where it is wide.
    fn says(&self, words: &str) {
        let text = self.report.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(words), "no {words:?} in\n{}", self.report);
    }

    /// What a process held at the moment of a refusal; the parts must add up.
    fn held(&self, oom: &OomRow, pid: u32) -> BTreeMap<String, i64> {
        let proc_id = self.logged.process(pid).unwrap().proc_id;
        let rows = self.logged.rows::<BreakdownRow>().unwrap();
        let its = rows.iter().filter(|row| row.ts_ns == oom.ts_ns && row.proc_id == proc_id);
        let parts: BTreeMap<String, i64> =
            its.map(|row| (row.category.clone(), row.bytes)).filter(|part| part.1 != 0).collect();
        let sum = PARTS.iter().filter_map(|part| parts.get(*part)).sum::<i64>();
        assert_eq!(parts.get("nvml_used"), Some(&sum), "{parts:?}");
        parts
    }
}

fn small() -> Option<SimDevice> {
    let device = machine::gpus().unwrap()?;
    Some(device.memory_mib(1000).context_mib(100).init_ms(200))
}

fn words(orders: &[&str]) -> Vec<String> {
    orders.iter().map(|order| (*order).to_owned()).collect()
}

#[test]
fn what_there_was_not_enough_of_is_told() {
    let Some(device) = small() else { return };
    let huge = i64::MAX / 4 * 3;
    let orders = [
        "own 209715200".to_owned(),
        format!("refused-own {}", 1_i64 << 42),
        format!("refused-host {huge}"),
        format!("refused-addresses {}", 1_i64 << 60),
        "refused-own 838860800".to_owned(),
    ];
    let refused = refused(&device, &orders);
    let told: Vec<_> = refused
        .ooms
        .iter()
        .map(|oom| (oom.memory.as_deref().unwrap(), oom.outcome.as_deref().unwrap()))
        .collect();
    let refusals = ["device", "host", "address_space", "device"].map(|memory| (memory, "refused"));
    assert_eq!(told, refusals);
    let last = refused.ooms.last().unwrap();
    let held = refused.held(last, refused.pid);
    assert_eq!((held["library"], held["context"]), (200 * MIB, 100 * MIB));
    refused.says("that could never fit on GPU 0");
    refused.says("that is memory of the host, not of a GPU");
    refused.says("that is address space, not memory");
    refused.says("was refused 800.0 MiB by cuMemAlloc_v2 (layers.c:");
    refused.says("layers 300.0 MiB: layers 200.0 · context 100.0");
    refused.says("before it");
    refused.says("+200.0 MiB cuMemAlloc_v2 layers.c:");
}

#[test]
fn a_refusal_after_which_the_cache_was_given_back_went_well() {
    let Some(device) = small() else { return };
    let orders =
        ["torch 419430400", "untorch 0", "own 314572800", "torch 471859200"].map(str::to_owned);
    let refused = refused(&device, &orders);
    let [oom] = &refused.ooms[..] else { panic!("{:?}", refused.ooms) };
    assert_eq!((oom.outcome.as_deref(), oom.size_bytes), (Some("retried"), Some(450 * MIB)));
    let held = refused.held(oom, refused.pid);
    // By the time of the look PyTorch had gone on: how much of the cache was in use is not known.
    assert_eq!((held["cached"], held.get("tensors")), (400 * MIB, None));
    refused.says("RETRY pid");
    refused.says("and had it at the next try.");
    assert!(!refused.report.contains("OOM  "), "{}", refused.report);
}

#[test]
fn a_cache_in_pieces_is_told_as_that() {
    let Some(device) = small() else { return };
    // 40 segments of 20 MiB with four blocks each, of which one stays.
    let mut orders: Vec<String> = vec!["torch 5242880".to_owned(); 160];
    orders.extend((0..160).filter(|n| n % 4 != 0).map(|n| format!("untorch {n}")));
    orders.push("refused-torch 209715200".to_owned());
    let refused = refused(&device, &orders);
    let last = refused.ooms.last().unwrap();
    assert_eq!((last.api.as_str(), last.outcome.as_deref()), ("c10", Some("raised")));
    let held = refused.held(last, refused.pid);
    assert_eq!((held["tensors"], held["cached"]), (200 * MIB, 600 * MIB));
    let raised = |oom: &&OomRow| oom.outcome.as_deref() == Some("raised");
    assert_eq!(refused.ooms.iter().filter(raised).count(), 3, "{:?}", refused.ooms);
    refused.says("was refused 200.0 MiB by PyTorch (layers.c:");
    refused
        .says("600.0 MiB were free in PyTorch's cache, in no piece that large: it is fragmented");
    assert_eq!(refused.report.matches("OOM  ").count(), 1, "{}", refused.report);
}

#[test]
fn memory_that_grew_until_it_was_refused_is_told_as_that() {
    let Some(device) = small() else { return };
    let mut program = Agent::new(&device).start("layers", &["0"]).unwrap();
    program.until_ready().unwrap();
    for _ in 0..28 {
        program.step("own 31457280").unwrap();
        thread::sleep(Duration::from_millis(500));
    }
    program.step("refused-own 104857600").unwrap();
    thread::sleep(Duration::from_millis(1500));
    let recorded = program.finish().unwrap();
    let report = recorded.report().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(report.contains("Its memory had grown steadily until then."), "{report}");
}

#[test]
fn memory_of_another_process_is_named() {
    let Some(device) = small() else { return };
    let mut other = device.start("hold", &["524288000", "1", "0"]).unwrap();
    other.until_ready().unwrap();
    let orders = words(&["own 104857600", "refused-own 314572800"]);
    let refused = refused(&device, &orders);
    let last = refused.ooms.last().unwrap();
    assert_eq!(last.others_bytes, Some(600 * MIB));
    let held = refused.held(last, other.pid());
    assert_eq!(held["not_traced"], 600 * MIB);
    let process = refused.logged.process(other.pid()).unwrap();
    assert_eq!((process.detail.as_str(), process.from_start), ("not traced", false));
    assert!(process.command.unwrap().ends_with("hold"));
    let name = format!("(most of it pid {} (hold), 600.0 MiB) it would have fitted.", other.pid());
    refused.says(&name);
    refused.says("hold 600.0 MiB: not traced 600.0");
    assert!(other.finish().unwrap().1.success());
}

#[test]
fn memory_of_a_process_that_is_gone_is_told() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(200).set("SIM_NVML_VANISHED", "3999999:64");
    let mut program = Agent::new(&device).start("layers", &["0"]).unwrap();
    program.until_ready().unwrap();
    let log = program.log().to_owned();
    let told = |kind: &str| {
        let rows = Logged::open(&log).and_then(|logged| logged.rows::<AnnotationRow>());
        rows.unwrap_or_default().into_iter().find(|row| row.kind == kind)
    };
    eventually("it is told", || told("after_death").is_some());
    let note = told("after_death").unwrap();
    assert!(note.text.starts_with("pid 3999999 holds 64.0 MiB on GPU 0: there is no"), "{note:?}");
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let samples = logged.rows::<ProcessSampleRow>().unwrap();
    let its = samples.iter().filter(|row| row.pid == 3_999_999);
    assert!(its.clone().count() >= 1);
    assert!(its.clone().all(|row| row.state.as_deref() == Some("gone")));
    assert!(recorded.report().unwrap().contains("pid 3999999"));
}
