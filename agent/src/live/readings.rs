//! NVML's figures, each held against the account of the same moment.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use ledger::{
    call::{Level, ProcId},
    rows::{DeviceSampleRow, ProcessSampleRow},
};

use super::{
    books::Books,
    breakdown::{TorchNow, TorchReader},
    bystanders::state_of,
    polled::Polled,
    stacks::Stacks,
};
use crate::{
    host::Stat,
    nvml::{ProcessReading, Sample},
};

/// Readings that wait for the account to reach their time.
const MAX_WAITING: usize = 4096;

/// One device's processes at one moment.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    /// When the call began.
    pub ts_ns: i64,
    /// How long it took.
    pub read_ns: i64,
    /// The device.
    pub gpu_uuid: String,
    /// Its processes; `None` where NVML does not say.
    pub processes: Option<Vec<ProcessReading>>,
    /// Bytes in use on the device and reserved by its driver, where these were the same before and
    /// after.
    pub device_bytes: Option<(u64, Option<u64>)>,
    /// `PyTorch`'s allocators right after it.
    pub torch: Arc<TorchNow>,
}

/// What is known of devices, baselines and libraries.
#[derive(Debug, Default)]
pub(super) struct Readings {
    waiting: BTreeMap<(i64, String), Reading>,
    devices: HashMap<String, DeviceSampleRow>,
    baselines: HashMap<(ProcId, String), i64>,
    /// Late processes: whether NVML listed them on each device in its first reading.
    listed: HashMap<ProcId, HashMap<String, bool>>,
    probes: HashMap<String, (i32, i32)>,
    torch: TorchReader,
    /// NVML's last list of each device.
    lists: HashMap<String, Vec<ProcessReading>>,
}

impl Readings {
    /// The oldest reading that ended before `until_ns`.
    pub(super) fn next_before(&mut self, until_ns: i64) -> Option<Reading> {
        let first = self.waiting.first_entry()?;
        let reading = first.get();
        (reading.ts_ns + reading.read_ns <= until_ns).then(|| first.remove())
    }

    /// Used bytes of a device by its last sample, and those that programs can have in all.
    pub(super) fn device(&self, uuid: &str) -> Option<(Option<i64>, Option<i64>)> {
        let row = self.devices.get(uuid)?;
        let usable = row.total_bytes.map(|total| total - row.reserved_bytes.unwrap_or(0));
        Some((row.used_bytes, usable))
    }

    /// What NVML charged to a process when it was attached to; `None` for one seen from its start.
    pub(super) fn baseline(&self, proc_id: ProcId, uuid: &str) -> Option<i64> {
        self.baselines.get(&(proc_id, uuid.to_owned())).copied()
    }

    /// `PyTorch`'s allocators as they are now.
    pub(super) fn torch_now(&mut self, polled: &Polled, stacks: &Stacks) -> Arc<TorchNow> {
        self.torch.now(polled, stacks)
    }

    fn keep_list(&mut self, uuid: &str, processes: &[ProcessReading]) {
        self.lists.insert(uuid.to_owned(), processes.to_vec());
    }

    /// The processes of NVML's last list of a device.
    pub(super) fn listed_on(&self, uuid: &str) -> Option<&[ProcessReading]> {
        self.lists.get(uuid).map(Vec::as_slice)
    }

    fn listed_pids(&self) -> HashSet<u32> {
        self.lists.values().flatten().map(|process| process.pid).collect()
    }

    /// A library was probed.
    pub(super) fn attached(&mut self, path: &str, probes: i32, available: i32) {
        self.probes.insert(path.to_owned(), (probes, available));
    }

    /// Functions probed and functions of the table in a library.
    pub(super) fn probes_of(&self, path: &str) -> Option<(i32, i32)> {
        self.probes.get(path).copied()
    }

    /// Forgets an ended process.
    pub(super) fn forget(&mut self, proc_id: ProcId) {
        self.baselines.retain(|(of, _), _| *of != proc_id);
        self.listed.remove(&proc_id);
    }
}

impl Books {
    /// Takes a sample in.
    pub(super) fn sample(&mut self, sample: Sample) {
        match sample {
            Sample::Device(row) => {
                self.readings.devices.insert(row.gpu_uuid.clone(), row.clone());
                self.add(row);
            }
            Sample::Note(row) => self.add(row),
            Sample::Processes { slot, ts_ns, read_ns, device_bytes, readings } => {
                let Some(gpu) = self.opening.devices.gpus().get(slot) else { return };
                let gpu_uuid = gpu.uuid.clone();
                if self.readings.waiting.len() < MAX_WAITING {
                    let torch = self.readings.torch_now(&self.polled, &self.stacks);
                    let key = (ts_ns, gpu_uuid.clone());
                    let reading = Reading {
                        ts_ns,
                        read_ns,
                        gpu_uuid,
                        processes: readings,
                        device_bytes,
                        torch,
                    };
                    self.readings.waiting.insert(key, reading);
                } else {
                    self.lost(None, "reading_dropped", 1, None);
                }
            }
        }
    }

    /// Live device-level bytes of every process on a device.
    pub(super) fn live_device(&self, gpu_uuid: &str) -> HashMap<i64, i64> {
        self.state
            .processes()
            .map(|(proc_id, _)| (proc_id, self.live_on(proc_id, gpu_uuid, Level::Device)))
            .collect()
    }

    pub(super) fn live_on(&self, proc_id: i64, gpu_uuid: &str, level: Level) -> i64 {
        let devices = self.state.process(proc_id).map(ledger::account::state::Process::devices);
        devices
            .unwrap_or_default()
            .iter()
            .filter(|device| device.gpu_uuid.as_deref() == Some(gpu_uuid))
            .map(|device| device.usage(level).live_bytes)
            .sum()
    }

    /// Writes what a reading tells. It counts for the breakdown only where the account's device
    /// bytes were equal before and after NVML's call.
    pub(super) fn reading(
        &mut self,
        reading: &Reading,
        before: &HashMap<i64, i64>,
        after: &HashMap<i64, i64>,
    ) {
        let Some(processes) = reading.processes.as_deref() else { return };
        self.set_baselines(reading, processes, after);
        self.write_device(reading, processes);
        self.readings.keep_list(&reading.gpu_uuid, processes);
        self.bystanders.keep(&self.readings.listed_pids());
        for process in processes {
            let stat = self.opening.host.stat(process.pid);
            let Some(proc_id) = self.whose(process.pid, reading.ts_ns) else {
                self.bystander(reading, process, stat.as_ref());
                continue;
            };
            self.look_after(process, proc_id, stat.as_ref());
            let steady = before.get(&proc_id.0) == after.get(&proc_id.0);
            let live = after.get(&proc_id.0).copied().unwrap_or(0);
            let live = steady.then_some(live);
            self.write_sample(reading, process, proc_id, (stat.as_ref(), live));
            if steady {
                self.write_breakdown(reading, process, proc_id);
            }
        }
    }

    /// The traced process of a pid. A process that was met by NVML first is introduced: it has memory
    /// on a device, and what it did for that was not seen.
    fn whose(&mut self, pid: u32, ts_ns: i64) -> Option<ProcId> {
        let boot_ns = (ts_ns - self.opening.anchor.offset_ns()) as u64;
        let life = self.lives.at(pid, boot_ns).filter(|life| life.ended_ns.is_none());
        let life = match life {
            Some(life) => life,
            None if self.opening.host_wide => {
                let start_ns = self.opening.host.start_boot_ns(pid)?;
                self.lives.begin(pid, start_ns)
            }
            None => return None,
        };
        let proc_id = life.proc_id;
        if life.row.is_none() {
            // What it holds is one sum, as of a process that was attached to.
            life.late = true;
            let began_before = life.start_ns < self.opening.opened_ns;
            self.announce(pid, proc_id);
            if !began_before {
                self.lost(Some(pid), "start_not_seen", 1, None);
            }
        }
        Some(proc_id)
    }

    /// What NVML charges to late processes at the first reading is what they held before, and what
    /// was allocated since.
    fn set_baselines(
        &mut self,
        reading: &Reading,
        processes: &[ProcessReading],
        live: &HashMap<i64, i64>,
    ) {
        let late: Vec<(ProcId, u32)> = self
            .lives
            .running()
            .filter(|life| life.late)
            .map(|life| (life.proc_id, life.tgid))
            .collect();
        for (proc_id, tgid) in late {
            let listed = processes.iter().find(|process| process.pid == tgid);
            self.note_listed(proc_id, &reading.gpu_uuid, listed.is_some());
            let used = match listed {
                Some(process) => process.used_bytes,
                None => Some(0),
            };
            if let Some(used) = used {
                let since = live.get(&proc_id.0).copied().unwrap_or(0);
                let key = (proc_id, reading.gpu_uuid.clone());
                let before = (used as i64 - since).max(0);
                self.readings.baselines.entry(key).or_insert(before);
            }
        }
    }

    /// A process has memory on every device on which it has a context. Where NVML lists it on one
    /// device only, its contexts from before attach, which no call tells of, are there.
    fn note_listed(&mut self, proc_id: ProcId, gpu_uuid: &str, is_listed: bool) {
        let devices = self.readings.listed.entry(proc_id).or_default();
        if devices.contains_key(gpu_uuid) {
            return;
        }
        devices.insert(gpu_uuid.to_owned(), is_listed);
        let mut on = devices.iter().filter(|(_, listed)| **listed).map(|(uuid, _)| uuid);
        let complete = devices.len() == self.opening.devices.gpus().len();
        let (Some(only), None, true) = (on.next(), on.next(), complete) else { return };
        if let Some(ordinal) = self.opening.devices.ordinal_of(proc_id, only) {
            self.ledger.set_device_before_attach(proc_id, ordinal);
        }
    }

    fn write_sample(
        &mut self,
        reading: &Reading,
        process: &ProcessReading,
        proc_id: ProcId,
        (stat, live_device_bytes): (Option<&Stat>, Option<i64>),
    ) {
        self.add(ProcessSampleRow {
            ts_ns: reading.ts_ns,
            proc_id: proc_id.0,
            pid: process.pid as i32,
            nvml_index: Some(process.nvml_index),
            gpu_uuid: Some(reading.gpu_uuid.clone()),
            nvml_used_bytes: process.used_bytes.map(|bytes| bytes as i64),
            live_device_bytes,
            cpu_ns: stat.map(|stat| stat.usage.cpu_ns),
            rss_bytes: stat.map(|stat| stat.usage.rss_bytes),
            state: Some(state_of(stat)),
            ..ProcessSampleRow::default()
        });
    }
}
