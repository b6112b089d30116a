//! Totals: PyTorch's own, and the sum that NVML's figure is broken down into.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{thread, time::Duration};

use agent_tests::{
    agent::Agent,
    logs::{Logged, blocks},
    machine,
    sim::truth,
    wait::eventually,
};
use ledger::{
    account::state::State,
    call::Level,
    rows::{BreakdownRow, ProcessSampleRow, SiteUsageRow},
};

const MIB: i64 = 1 << 20;

/// (allocated, reserved, peak) of a `TORCH` line.
fn torch(lines: &[String]) -> (i64, i64, i64) {
    let line = lines.iter().rev().find(|line| line.starts_with("TORCH ")).unwrap();
    let field = |name: &str| truth::field(line, name).unwrap();
    (field("allocated"), field("reserved"), field("peak"))
}

#[test]
fn pytorchs_totals_and_peaks_are_the_programs_own() {
    let Some(device) = machine::gpus().unwrap().map(|device| device.init_ms(120)) else { return };
    // As long as the real first call takes, in which libc10 is met and probed.
    let mut program = Agent::new(&device).start("torch_like", &["12", "1"]).unwrap();
    let trained = program.until_ready().unwrap();
    // Totals are looked at four times a second.
    thread::sleep(Duration::from_millis(700));
    let refused = program.step("").unwrap();
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let pid = recorded.pid().unwrap();
    let process = logged.process(pid).unwrap();
    assert_eq!(process.detail, "sites");

    let samples: Vec<_> = logged
        .rows::<ProcessSampleRow>()
        .unwrap()
        .into_iter()
        .filter(|row| row.proc_id == process.proc_id && row.torch_allocated_bytes.is_some())
        .collect();
    let said: Vec<_> = samples
        .iter()
        .map(|row| {
            let peak = row.torch_peak_allocated_bytes.unwrap();
            (row.torch_allocated_bytes.unwrap(), row.torch_reserved_bytes.unwrap(), peak)
        })
        .collect();
    assert!(said.contains(&torch(&trained)), "{said:?} lacks {:?}", torch(&trained));
    assert_eq!(samples.last().unwrap().nvml_index, Some(1));
    // The program reports no tensor after the refusal: its last report is the one before.
    assert_eq!(said.last().unwrap().0, torch(&refused).0);
    assert_eq!(said.last().unwrap().2, torch(&refused).2);
    let reserved = samples.iter().map(|row| row.torch_peak_reserved_bytes.unwrap()).max().unwrap();
    assert_eq!(reserved, said.iter().map(|row| row.1).max().unwrap());

    let usage: Vec<_> = logged.rows::<SiteUsageRow>().unwrap();
    let last =
        usage.iter().rfind(|row| row.proc_id == process.proc_id && row.stack_id == 0).unwrap();
    let made = truth::made(&trained).unwrap();
    assert_eq!((last.allocs as u64, last.frees as u64), (made.allocs, made.frees));
    assert_eq!(last.live_bytes, torch(&trained).0);
    assert_eq!(last.live_count, Some((made.allocs - made.frees) as i64));
    assert_eq!((last.level.as_str(), last.stack_id, last.cuda_ordinal), ("tensor", 0, Some(1)));
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn live_segments_are_what_pytorch_has_reserved() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = Agent::new(&device).start("torch_like", &["12"]).unwrap();
    let trained = program.until_ready().unwrap();
    let refused = program.step("").unwrap();
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(recorded.pid().unwrap()).unwrap();
    let device_bytes = |state: &State| {
        let live = blocks(state, process.proc_id);
        live.iter().filter(|block| block.0 == "device").map(|block| block.2 as i64).sum::<i64>()
    };
    let mut state = State::new();
    for event in logged.events().unwrap().iter().take_while(|event| event.op != "fail") {
        state.apply(event);
    }
    assert_eq!(device_bytes(&state), torch(&trained).1);
    assert_eq!(device_bytes(&logged.before_exit().unwrap()), torch(&refused).1);
}

#[test]
fn without_detail_no_tensor_is_recorded() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device).options(&["--detail", "off"]);
    let recorded = agent.run("torch_like", &["3"]).unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(logged.rows::<SiteUsageRow>().unwrap(), []);
    assert_eq!(logged.process(recorded.pid().unwrap()).unwrap().detail, "off");
    assert!(!logged.events().unwrap().is_empty());
}

#[test]
fn the_parts_of_the_breakdown_add_up_to_what_nvml_charges() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(300);
    // 3 MiB blocks take whole pages of 2 MiB: what is charged is more than what was asked for.
    let mut program = Agent::new(&device).start("hold", &["3145728", "10", "1"]).unwrap();
    let lines = program.until_ready().unwrap();
    let pid = program.pid().unwrap();
    let charged = device.smi().unwrap().process_bytes(1, pid).unwrap() as i64;
    let held: i64 = truth::live(&lines).iter().map(|block| block.size_bytes as i64).sum();
    assert_eq!(held, 30 * MIB);
    eventually("all of it is in the breakdown", || {
        let rows = Logged::open(program.log()).and_then(|logged| logged.rows::<BreakdownRow>());
        let whole = |row: &BreakdownRow| row.category == "live_device" && row.bytes == held;
        rows.is_ok_and(|rows| rows.iter().any(whole))
    });
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let process = logged.process(pid).unwrap();
    let mut rows = logged.rows::<BreakdownRow>().unwrap();
    rows.retain(|row| row.proc_id != 0); // Those of whole devices.
    let last_ns = rows.iter().map(|row| row.ts_ns).max().unwrap();
    let at = |category: &str| {
        let found = rows.iter().find(|row| row.ts_ns == last_ns && row.category == category);
        found.map_or(0, |row| row.bytes)
    };
    assert_eq!(at("nvml_used"), charged);
    assert_eq!(at("live_device"), held);
    assert_eq!(at("before_attach"), 0);
    assert_eq!((at("library"), at("rounding")), (held, 10 * MIB));
    assert_eq!((at("context"), at("modules"), at("unexplained")), (300 * MIB, 0, 0));
    assert!(rows.iter().all(|row| row.proc_id == process.proc_id));
    let uuid = &device.smi().unwrap().gpus[1].uuid;
    assert!(rows.iter().all(|row| &row.gpu_uuid == uuid), "{rows:?}");

    let state = logged.before_exit().unwrap();
    let state = state.process(process.proc_id).unwrap();
    assert_eq!(state.live_bytes(Level::Device), held);
    assert_eq!(state.devices()[0].nvml_index, Some(1));
}

#[test]
fn the_process_says_which_device_is_which() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.gpus(4).init_ms(500).set("SIM_CUDA_ORDER", "reverse");
    let uuids: Vec<_> =
        device.smi().unwrap().gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
    // Ordinal 1 of the GPUs 2 and 0.
    let visible = format!("{},{}", uuids[2], uuids[0]);
    let agent = Agent::new(&device).env("CUDA_VISIBLE_DEVICES", &visible);
    let mut program = agent.start("hold", &["4194304", "1", "1"]).unwrap();
    program.until_ready().unwrap();
    let pid = program.pid().unwrap();
    let smi = device.smi().unwrap();
    let charged: Vec<_> = (0..4).filter(|gpu| smi.process_bytes(*gpu, pid).is_some()).collect();
    assert_eq!(charged, [0]);
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let events = logged.events().unwrap();
    let alloc = events.iter().find(|event| event.op == "alloc").unwrap();
    assert_eq!((alloc.nvml_index, alloc.cuda_ordinal), (Some(0), Some(1)));
    assert_eq!(alloc.gpu_uuid.as_deref(), Some(&*uuids[0]));
    let process = logged.process(pid).unwrap();
    assert_eq!(process.cuda_visible_devices.as_deref(), Some(&*visible));
}

/// UUIDs of the GPUs that the process's blocks are told to be on.
fn told(logged: &Logged, pid: u32) -> Vec<Option<String>> {
    let events = logged.events().unwrap().into_iter();
    let its = events.filter(|event| event.pid == pid as i32 && event.op == "alloc");
    its.map(|event| event.gpu_uuid).collect()
}

#[test]
fn a_program_that_chooses_its_device_itself_is_put_there() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.gpus(4);
    let uuids: Vec<_> =
        device.smi().unwrap().gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
    // What it is given, what it chooses, where that is.
    let cases = [("0", "2", 2), ("3,1", "-", 0), ("1", &*uuids[3], 3), ("2", "2", 2)];
    for (given, chosen, gpu) in cases {
        let agent = Agent::new(&device).log(&device.folder().join(format!("log-{gpu}-{given}")));
        let mut program =
            agent.env("CUDA_VISIBLE_DEVICES", given).start("chooses", &[chosen]).unwrap();
        program.until_ready().unwrap();
        let pid = program.pid().unwrap();
        assert!(device.smi().unwrap().process_bytes(gpu, pid).is_some(), "{given} {chosen}");
        // A real program lives for longer than the agent needs: a context alone takes a tenth of a second.
        eventually("its first call is in the log", || {
            let process = Logged::open(program.log()).and_then(|logged| logged.process(pid));
            process.is_ok_and(|process| process.from_start)
        });
        let recorded = program.finish().unwrap();
        let logged = recorded.open().unwrap();
        assert_eq!(told(&logged, pid), [Some(uuids[gpu].clone())], "{given} {chosen}");
        let visible = (chosen != "-").then_some(chosen);
        assert_eq!(logged.process(pid).unwrap().cuda_visible_devices.as_deref(), visible);
    }
}

#[test]
fn of_a_program_that_chose_its_device_before_it_was_attached_to_none_is_told() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.gpus(4).set("CUDA_VISIBLE_DEVICES", "0");
    let [mut chose, mut kept] = ["2", "0"].map(|gpus| device.start("chooses", &[gpus]).unwrap());
    for program in [&mut chose, &mut kept] {
        program.until_ready().unwrap();
    }
    let pids = [chose.pid(), kept.pid()];
    let recording = Agent::new(&device).attach(&pids).unwrap();
    // Where its contexts from before are is known from NVML's list, which is asked once a second.
    eventually("NVML's lists of all devices are in the log", || {
        let log = device.folder().join("log");
        let rows = Logged::open(&log).and_then(|logged| logged.rows::<ProcessSampleRow>());
        let twice = |rows: &[ProcessSampleRow], pid: u32| {
            rows.iter().filter(|row| row.pid == pid as i32).count() >= 2
        };
        rows.is_ok_and(|rows| pids.iter().all(|pid| twice(&rows, *pid)))
    });
    for program in [&mut chose, &mut kept] {
        program.step("").unwrap();
    }
    // For its children, say: its own numbers stay.
    kept.step("2").unwrap();
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    let first = device.smi().unwrap().gpus[0].uuid.clone();
    assert_eq!(told(&logged, pids[0]), [None]);
    assert_eq!(told(&logged, pids[1]), [Some(first.clone()), Some(first)]);
    for program in [chose, kept] {
        assert!(program.finish().unwrap().1.success());
    }
}
