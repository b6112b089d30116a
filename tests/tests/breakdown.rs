//! The breakdown: every layer told apart, to the byte.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::collections::BTreeMap;

use agent_tests::{
    agent::{Agent, Recorder, Traced},
    logs::Logged,
    machine,
    sim::{Running, SimDevice},
    wait::eventually,
};
use ledger::{
    account::breakdown::{DEVICE_PARTS, PARTS},
    rows::{BreakdownRow, StackRow},
};

const MIB: i64 = 1 << 20;
const CONTEXT: i64 = 300 * MIB;

/// Parts by category, or by library; those of no bytes left out.
type Parts = BTreeMap<String, i64>;

fn parts(rows: &[&BreakdownRow], of: &[&str]) -> Parts {
    let mut parts = Parts::new();
    for row in rows.iter().filter(|row| of.contains(&row.category.as_str()) && row.bytes != 0) {
        let library = row.library.clone().unwrap_or_else(|| "?".to_owned());
        let is_library = row.category == "library";
        let name = if is_library { library } else { row.category.clone() };
        *parts.entry(name).or_default() += row.bytes;
    }
    parts
}

/// The latest rows of a process on a device that are from after a moment.
fn latest(rows: &[BreakdownRow], proc_id: i64, uuid: &str, after_ns: i64) -> Vec<BreakdownRow> {
    let its = || rows.iter().filter(|row| row.proc_id == proc_id && row.gpu_uuid == uuid);
    let last_ns = its().map(|row| row.ts_ns).max().filter(|ns| *ns > after_ns);
    its().filter(|row| Some(row.ts_ns) == last_ns).cloned().collect()
}

fn sum_of(rows: &[BreakdownRow], category: &str) -> Option<i64> {
    rows.iter().find(|row| row.category == category).map(|row| row.bytes)
}

fn now_ns() -> i64 {
    agent::clock::epoch_ns()
}

/// A program whose layers are followed.
struct Layers<'a> {
    device: &'a SimDevice,
    log: std::path::PathBuf,
    pid: u32,
    gpu: usize,
    expected: Parts,
}

impl<'a> Layers<'a> {
    fn new(device: &'a SimDevice, traced: &Traced, gpu: usize, expected: &[(&str, i64)]) -> Self {
        let pid = traced.pid().unwrap();
        let (log, expected) = (traced.log().to_owned(), owned(expected));
        Self { device, log, pid, gpu, expected }
    }

    fn uuid(&self) -> String {
        self.device.smi().unwrap().gpus[self.gpu].uuid.clone()
    }

    /// What has changed; then the log must say the same, and nothing else.
    fn then(&mut self, what: &str, changes: &[(&str, i64)]) -> Vec<BreakdownRow> {
        for (part, bytes) in changes {
            let entry = self.expected.entry((*part).to_owned()).or_default();
            *entry += bytes;
            if *entry == 0 {
                self.expected.remove(*part);
            }
        }
        self.holds(what)
    }

    fn holds(&self, what: &str) -> Vec<BreakdownRow> {
        let (since_ns, uuid) = (now_ns(), self.uuid());
        let (mut seen, mut found) = (Parts::new(), Vec::new());
        let told = |seen: &mut Parts, found: &mut Vec<BreakdownRow>| {
            let logged = Logged::open(&self.log).ok()?;
            let proc_id = logged.process(self.pid).ok()?.proc_id;
            let rows = logged.rows::<BreakdownRow>().ok()?;
            *found = latest(&rows, proc_id, &uuid, since_ns);
            *seen = parts(&found.iter().collect::<Vec<_>>(), &PARTS);
            Some(*seen == self.expected)
        };
        let begin = std::time::Instant::now();
        while told(&mut seen, &mut found) != Some(true) {
            let waited = begin.elapsed().as_secs();
            assert!(waited < 30, "{what}: {seen:#?}, expected {:#?}", self.expected);
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        assert_eq!(sum_of(&found, "nvml_used"), Some(seen.values().sum::<i64>()), "{what}");
        found
    }
}

fn owned(parts: &[(&str, i64)]) -> Parts {
    parts.iter().map(|(part, bytes)| ((*part).to_owned(), *bytes)).collect()
}

fn start(device: &SimDevice, options: &[&str], env: &[(&str, &str)], gpu: &str) -> Traced {
    let mut agent = Agent::new(device).options(options);
    for (name, value) in env {
        agent = agent.env(name, value);
    }
    let mut program = agent.start("layers", &[gpu]).unwrap();
    program.until_ready().unwrap();
    program
}

#[test]
fn every_layer_is_told_apart_to_the_byte() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300).init_ms(200).set("SIM_MODULE_MIB", "6");
    let device = device.set("SIM_FUNCTION_MIB", "10");
    let mut program = start(&device, &[], &[], "0");
    let mut layers = Layers::new(&device, &program, 0, &[("context", CONTEXT)]);
    layers.holds("a context");
    let steps: [(&str, &[(&str, i64)]); 11] = [
        ("own 3145728", &[("layers", 3 * MIB), ("rounding", MIB)]),
        ("own 1000", &[("layers", 1000), ("rounding", 2 * MIB - 1000)]),
        ("myop 4194304", &[("libmyop", 4 * MIB)]),
        ("library", &[("modules", 6 * MIB)]),
        ("function", &[("modules", 10 * MIB)]),
        ("limit 72", &[("context", 64 * MIB)]),
        ("pool 4194304", &[("pools", 4 * MIB)]),
        ("managed 8388608", &[]),
        ("host 8388608", &[]),
        ("unload", &[("modules", -16 * MIB)]),
        ("context", &[("context", CONTEXT)]),
    ];
    for (order, changes) in steps {
        program.step(order).unwrap();
        layers.then(order, changes);
    }
    let rows = layers.holds("what stands beside the sum");
    assert_eq!(sum_of(&rows, "live_managed"), Some(8 * MIB));
    assert_eq!(sum_of(&rows, "live_host"), Some(8 * MIB));

    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into());
    let rows = logged.rows::<BreakdownRow>().unwrap();
    let device_rows: Vec<_> = rows.iter().filter(|row| row.proc_id == 0).collect();
    let mut moments: Vec<i64> = device_rows.iter().map(|row| row.ts_ns).collect();
    moments.dedup();
    assert!(moments.len() > 5, "{moments:?}");
    for ts_ns in moments {
        let at: Vec<_> = device_rows.iter().filter(|row| row.ts_ns == ts_ns).copied().collect();
        for uuid in device.smi().unwrap().gpus.iter().map(|gpu| gpu.uuid.as_str()) {
            let here: Vec<_> = at.iter().filter(|row| row.gpu_uuid == uuid).copied().collect();
            let used = here.iter().find(|row| row.category == "device_used");
            let Some(used) = used else { continue };
            assert_eq!(parts(&here, &DEVICE_PARTS).values().sum::<i64>(), used.bytes);
        }
    }
}

#[test]
fn pytorchs_cache_is_what_is_used_what_is_pinned_and_what_could_go() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300).init_ms(200);
    let mut program = start(&device, &[], &[], "0");
    let mut layers = Layers::new(&device, &program, 0, &[("context", CONTEXT)]);
    layers.holds("a context");
    let steps: [(&str, &[(&str, i64)]); 8] = [
        // Two blocks in a segment of 20 MiB, a third of their size is free behind them.
        ("torch 6291456", &[("tensors", 6 * MIB), ("reusable", 14 * MIB)]),
        ("torch 6291456", &[("tensors", 6 * MIB), ("reusable", -6 * MIB)]),
        // A segment of its own.
        ("torch 41943040", &[("tensors", 40 * MIB)]),
        ("untorch 2", &[("tensors", -40 * MIB), ("returnable", 40 * MIB)]),
        ("untorch 0", &[("tensors", -6 * MIB), ("reusable", 6 * MIB)]),
        ("empty_cache", &[("returnable", -40 * MIB)]),
        ("capture", &[]),
        // What is made while a graph is recorded is the graph's.
        ("torch 11534336", &[("tensors", 12 * MIB)]),
    ];
    let mut rows = Vec::new();
    for (order, changes) in steps {
        program.step(order).unwrap();
        rows = layers.then(order, changes);
    }
    program.step("captured").unwrap();
    program.step("untorch 3").unwrap();
    layers.then("a graph's pool", &[("tensors", -12 * MIB), ("graph_pools", 12 * MIB)]);

    let reusable = rows.iter().find(|row| row.category == "reusable").unwrap();
    assert_eq!(reusable.pinned_by_blocks, Some(1));
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let stacks = logged.rows::<StackRow>().unwrap();
    let pinning = reusable.pinned_by_stack_id.unwrap();
    let stack = stacks.iter().find(|stack| stack.stack_id == pinning).unwrap();
    assert!(stack.site.contains("torch"), "{stack:?}");
    assert!(stacks.iter().any(|stack| stack.library.as_deref() == Some("libc10_cuda")));
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn expandable_segments_can_go_handle_by_handle() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300).init_ms(200);
    let env = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
    let mut program = start(&device, &[], &env, "0");
    let mut layers = Layers::new(&device, &program, 0, &[("context", CONTEXT)]);
    layers.holds("a context");
    let steps: [(&str, &[(&str, i64)]); 4] = [
        ("torch 31457280", &[("tensors", 30 * MIB), ("reusable", 10 * MIB)]),
        // Ten in the second handle, and three handles more, of which the last has ten to spare.
        ("torch 62914560", &[("tensors", 60 * MIB)]),
        ("untorch 1", &[("tensors", -60 * MIB), ("returnable", 60 * MIB)]),
        ("empty_cache", &[("returnable", -60 * MIB)]),
    ];
    for (order, changes) in steps {
        program.step(order).unwrap();
        layers.then(order, changes);
    }
    program.finish().unwrap();
}

#[test]
fn what_a_pool_keeps_is_estimated_and_sharpened_by_the_program() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300).init_ms(200);
    let mut program = start(&device, &[], &[], "0");
    let mut layers = Layers::new(&device, &program, 0, &[("context", CONTEXT)]);
    layers.holds("a context");
    let steps: [(&str, &[(&str, i64)]); 6] = [
        ("keep 1073741824", &[]),
        ("pool 4194304", &[("pools", 4 * MIB)]),
        ("pool 8388608", &[("pools", 8 * MIB)]),
        ("unpool 1", &[]),
        ("trim 0", &[("pools", -8 * MIB)]),
        // A pool takes whole pages, which NVML shows.
        ("pool 1000", &[("pools", 2 * MIB)]),
    ];
    for (order, changes) in steps {
        program.step(order).unwrap();
        layers.then(order, changes);
    }
    program.step("read").unwrap();
    let rows = layers.then("what it says itself is the same", &[]);
    assert!(rows.iter().any(|row| row.category == "pools" && row.estimated));
    program.finish().unwrap();
}

#[test]
fn a_function_that_is_left_out_is_unexplained_to_the_byte() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300).init_ms(200);
    let mut program = start(&device, &["--leave-out", "cuMemAllocPitch_v2"], &[], "0");
    let mut layers = Layers::new(&device, &program, 0, &[("context", CONTEXT)]);
    layers.holds("a context");
    program.step("own 4194304").unwrap();
    layers.then("seen", &[("layers", 4 * MIB)]);
    program.step("pitch 6291456").unwrap();
    layers.then("not seen", &[("unexplained", 6 * MIB)]);
    program.step("pitch 2097152").unwrap();
    layers.then("not seen", &[("unexplained", 2 * MIB)]);
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.open().unwrap().losses().unwrap(), [("left_out".to_owned(), 1)].into());
}

#[test]
fn permuted_devices_keep_their_breakdowns_apart() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.gpus(3).context_mib(300).init_ms(200);
    let mut program = start(&device, &[], &[("CUDA_VISIBLE_DEVICES", "2,0")], "1");
    let mut layers = Layers::new(&device, &program, 0, &[("context", CONTEXT)]);
    layers.holds("a context");
    program.step("torch 41943040").unwrap();
    layers.then("ordinal 1 is GPU 0", &[("tensors", 40 * MIB)]);
    let pid = program.pid().unwrap();
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let proc_id = logged.process(pid).unwrap().proc_id;
    let rows = logged.rows::<BreakdownRow>().unwrap();
    let uuid = &device.smi().unwrap().gpus[0].uuid;
    assert!(rows.iter().filter(|row| row.proc_id == proc_id).all(|row| &row.gpu_uuid == uuid));
}

fn attach(device: &SimDevice, program: &Running) -> Recorder {
    Agent::new(device).attach(&[program.pid()]).unwrap()
}

#[test]
fn of_a_late_attach_before_is_what_was_there() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300);
    let mut program = device.start("layers", &["0"]).unwrap();
    program.until_ready().unwrap();
    for order in ["own 8388608", "torch 41943040", "torch 6291456"] {
        program.step(order).unwrap();
    }
    let recording = attach(&device, &program);
    let log = device.folder().join("log");
    let expected = owned(&[("before_attach", CONTEXT + 68 * MIB)]);
    let mut layers = Layers { device: &device, log, pid: program.pid(), gpu: 0, expected };
    layers.holds("all of it");
    // The first word of PyTorch tells what of that is its cache.
    program.step("torch 6291456").unwrap();
    let heard = [("tensors", 52 * MIB), ("cached", 8 * MIB), ("before_attach", -60 * MIB)];
    layers.then("PyTorch is heard", &heard);
    program.step("own 4194304").unwrap();
    layers.then("since then", &[("layers", 4 * MIB)]);
    program.step("untorch 0").unwrap();
    program.step("empty_cache").unwrap();
    program.step("torch 512").unwrap();
    let gone = [("tensors", 512 - 40 * MIB), ("cached", 2 * MIB - 512)];
    layers.then("what was there goes", &gone);
    recording.stop().unwrap();
    assert!(program.finish().unwrap().1.success());
}

#[test]
fn where_nvml_does_not_say_nothing_is_made_up() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(200).set("SIM_NVML_NO_PROCESSES", "1");
    let mut program = start(&device, &[], &[], "0");
    program.step("own 4194304").unwrap();
    let pid = program.pid().unwrap();
    let log = program.log().to_owned();
    eventually("what is known is told", || {
        let rows = Logged::open(&log).and_then(|logged| logged.rows::<BreakdownRow>());
        let held = |row: &BreakdownRow| row.library.as_deref() == Some("layers");
        rows.is_ok_and(|rows| rows.iter().any(held))
    });
    let logged = program.finish().unwrap().open().unwrap();
    let proc_id = logged.process(pid).unwrap().proc_id;
    let rows = logged.rows::<BreakdownRow>().unwrap();
    for row in rows.iter().filter(|row| row.proc_id == proc_id) {
        let told = ["nvml_used", "context", "modules", "before_attach", "unexplained"];
        assert!(!told.contains(&row.category.as_str()), "{row:?}");
    }
    let uuid = &device.smi().unwrap().gpus[0].uuid;
    let first_ns = rows.iter().filter(|row| row.proc_id == proc_id).map(|row| row.ts_ns).min();
    let of_device = |row: &BreakdownRow| row.proc_id == 0 && &row.gpu_uuid == uuid;
    let later = rows.iter().any(|row| of_device(row) && Some(row.ts_ns) >= first_ns);
    assert!(!later, "a device is the sum of its processes, which is not known");
}
