//! A made-up clock and made-up GPUs.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{Clock, Gpu, GpuReader, Memory, ProcessMemory, Utilization};

/// Time that stands still unless told.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeClock(Arc<AtomicU64>);

impl FakeClock {
    pub(crate) fn set(&self, ns: u64) {
        self.0.store(ns, Relaxed);
    }

    fn pass(&self, ns: u64) {
        self.0.fetch_add(ns, Relaxed);
    }
}

impl Clock for FakeClock {
    fn monotonic_ns(&self) -> u64 {
        self.0.load(Relaxed)
    }

    fn epoch_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.monotonic_ns() as i64
    }
}

#[derive(Debug, Default)]
struct State {
    used: BTreeMap<usize, Option<u64>>,
    processes: BTreeMap<usize, Vec<ProcessMemory>>,
    hidden: bool,
    memory_ns: u64,
    sensor_ns: u64,
    memory_calls: u64,
}

/// GPUs that say what they are told to say, each call taking its time of the fake clock.
#[derive(Debug)]
pub(crate) struct FakeReader {
    gpus: Vec<Gpu>,
    clock: FakeClock,
    state: Mutex<State>,
}

impl FakeReader {
    pub(crate) fn new(count: usize, clock: &FakeClock) -> Self {
        Self::of((0..count).map(|index| gpu(index as i32)).collect(), clock)
    }

    /// One GPU with two MIG instances.
    pub(crate) fn with_mig(clock: &FakeClock) -> Self {
        Self::of(vec![gpu(0), mig(0, 0), mig(0, 1)], clock)
    }

    fn of(gpus: Vec<Gpu>, clock: &FakeClock) -> Self {
        let state = State { memory_ns: 100_000, sensor_ns: 50_000, ..State::default() };
        Self { gpus, clock: clock.clone(), state: Mutex::new(state) }
    }

    fn state<T>(&self, with: impl FnOnce(&mut State) -> T) -> T {
        with(&mut self.state.lock().unwrap())
    }

    pub(crate) fn set_used(&self, slot: usize, bytes: Option<u64>) {
        self.state(|state| state.used.insert(slot, bytes));
    }

    pub(crate) fn set_processes(&self, slot: usize, processes: &[(u32, Option<u64>)]) {
        let list = processes.iter().map(|&(pid, used_bytes)| ProcessMemory { pid, used_bytes });
        self.state(|state| state.processes.insert(slot, list.collect()));
    }

    /// Makes every figure "not available".
    pub(crate) fn hide_all(&self) {
        self.state(|state| state.hidden = true);
    }

    pub(crate) fn set_memory_ns(&self, ns: u64) {
        self.state(|state| state.memory_ns = ns);
    }

    pub(crate) fn set_sensor_ns(&self, ns: u64) {
        self.state(|state| state.sensor_ns = ns);
    }

    pub(crate) fn memory_calls(&self) -> u64 {
        self.state(|state| state.memory_calls)
    }

    fn sensor<T>(&self, value: T) -> Option<T> {
        let (ns, hidden) = self.state(|state| (state.sensor_ns, state.hidden));
        self.clock.pass(ns);
        (!hidden).then_some(value)
    }
}

/// A GPU as NVML would describe it.
pub(crate) fn gpu(index: i32) -> Gpu {
    Gpu {
        nvml_index: index,
        uuid: format!("GPU-{index}"),
        model: Some("NVIDIA H200".to_owned()),
        total_bytes: Some(1000),
        pci_bus_id: Some(format!("00000000:{:02X}:00.0", index * 16 + 15)),
        minor: Some(index as u32),
        ..Gpu::default()
    }
}

/// A MIG instance of `gpu(parent)`.
pub(crate) fn mig(parent: i32, index: u32) -> Gpu {
    Gpu {
        mig_index: Some(index),
        uuid: format!("MIG-{parent}-{index}"),
        mig_parent_uuid: Some(format!("GPU-{parent}")),
        ..gpu(parent)
    }
}

impl GpuReader for FakeReader {
    fn devices(&self) -> &[Gpu] {
        &self.gpus
    }

    fn memory(&self, slot: usize) -> Option<Memory> {
        let (ns, hidden, used) = self.state(|state| {
            state.memory_calls += 1;
            (state.memory_ns, state.hidden, state.used.get(&slot).copied().unwrap_or(Some(0)))
        });
        self.clock.pass(ns);
        let shown = |bytes| if hidden { None } else { Some(bytes) };
        Some(Memory {
            used_bytes: used,
            free_bytes: shown(1),
            total_bytes: shown(1000),
            reserved_bytes: shown(2),
        })
    }

    fn processes(&self, slot: usize) -> Option<Vec<ProcessMemory>> {
        self.clock.pass(100_000);
        self.state(|state| {
            let list = state.processes.get(&slot).cloned().unwrap_or_default();
            (!state.hidden).then_some(list)
        })
    }

    fn utilization(&self, _slot: usize) -> Option<Utilization> {
        self.sensor(Utilization { gpu_percent: 50, memory_percent: 20 })
    }

    fn temperature(&self, _slot: usize) -> Option<u32> {
        self.sensor(40)
    }

    fn power(&self, _slot: usize) -> Option<u32> {
        self.sensor(300_000)
    }
}
