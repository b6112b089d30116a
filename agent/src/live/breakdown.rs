//! Breakdowns of what NVML shows: what is known of a moment, gathered.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_common::{
    loss::Loss,
    tensor::{TensorKey, TensorTotals},
};
use ledger::{
    account::breakdown::{DeviceMoment, Holding, Moment, Tensor, Torch},
    call::{Level, ProcId},
};

use super::{books::Books, polled::Polled, readings::Reading, stacks::Stacks};
use crate::nvml::ProcessReading;

/// One reading of `PyTorch`'s blocks serves the readings of all devices.
const FRESH: Duration = Duration::from_millis(20);
/// The reading of all blocks takes at most one part in so many of the time.
const REST: u32 = 20;

/// `PyTorch`'s allocators as they were when NVML had answered.
#[derive(Debug, Default)]
pub(super) struct TorchNow {
    totals: HashMap<TensorKey, TensorTotals>,
    /// Live blocks in order of address; `None`: they were not read.
    blocks: Option<HashMap<TensorKey, Vec<Tensor>>>,
}

/// When blocks were read, and may be read again.
#[derive(Debug, Default)]
pub(super) struct TorchReader {
    latest: Option<(Instant, Arc<TorchNow>)>,
    rests_until: Option<Instant>,
}

impl TorchReader {
    /// `PyTorch`'s allocators as they are now.
    pub(super) fn now(&mut self, polled: &Polled, stacks: &Stacks) -> Arc<TorchNow> {
        if let Some((at, now)) = &self.latest
            && at.elapsed() < FRESH
        {
            return Arc::clone(now);
        }
        let begin = Instant::now();
        let totals = polled.tensor_totals();
        let rests = self.rests_until.is_some_and(|until| begin < until);
        let blocks = (!rests && !totals.is_empty()).then(|| blocks(polled, stacks));
        if blocks.is_some() {
            self.rests_until = Some(begin + begin.elapsed() * REST);
        }
        let now = Arc::new(TorchNow { totals, blocks });
        self.latest = Some((begin, Arc::clone(&now)));
        now
    }
}

fn blocks(polled: &Polled, stacks: &Stacks) -> HashMap<TensorKey, Vec<Tensor>> {
    let mut blocks: HashMap<TensorKey, Vec<Tensor>> = HashMap::new();
    for (at, block) in polled.blocks() {
        let key = TensorKey { tgid: at.tgid as u32, ordinal: block.ordinal as u32 };
        blocks.entry(key).or_default().push(Tensor {
            addr: at.addr,
            size_bytes: block.size_bytes,
            stack_id: stacks.id_of(key.tgid, block.key).unwrap_or(0),
        });
    }
    for tensors in blocks.values_mut() {
        tensors.sort_unstable_by_key(|tensor| tensor.addr);
    }
    blocks
}

impl TorchNow {
    /// The same, with what a process says of itself on a device at that moment; which of its blocks
    /// were alive then is not known any more.
    pub(super) fn said(
        &self,
        (tgid, ordinal): (u32, u32),
        allocated_bytes: i64,
        reserved_bytes: i64,
    ) -> Arc<Self> {
        let mut totals = self.totals.clone();
        let its = totals.entry(TensorKey { tgid, ordinal }).or_default();
        its.allocated_bytes = allocated_bytes as u64;
        its.reserved_bytes = reserved_bytes as u64;
        // It has given back all that it could before it gave up.
        Arc::new(Self { totals, blocks: None })
    }

    /// The same, without those that have handed out or taken back blocks since a moment: of that
    /// moment nothing is known of them.
    pub(super) fn as_of(&self, boot_ns: u64) -> Arc<Self> {
        let still =
            |key: &TensorKey| self.totals.get(key).is_some_and(|totals| totals.last_ns <= boot_ns);
        let totals = self.totals.iter().filter(|(key, _)| still(key));
        let totals = totals.map(|(key, totals)| (*key, *totals)).collect();
        let blocks = self.blocks.as_ref().map(|blocks| {
            let blocks = blocks.iter().filter(|(key, _)| still(key));
            blocks.map(|(key, tensors)| (*key, tensors.clone())).collect()
        });
        Arc::new(Self { totals, blocks })
    }

    fn totals(&self, key: TensorKey) -> Option<Torch> {
        self.totals.get(&key).map(|totals| Torch {
            allocated_bytes: totals.allocated_bytes as i64,
            reserved_bytes: totals.reserved_bytes as i64,
        })
    }

    /// All live blocks; `None` where some may be missing.
    fn tensors(&self, key: TensorKey) -> Option<&[Tensor]> {
        let totals = self.totals.get(&key)?;
        // Some are from before attach.
        let all = totals.alloc_bytes.wrapping_sub(totals.freed_bytes) == totals.allocated_bytes;
        let blocks = self.blocks.as_ref().filter(|_| all)?;
        Some(blocks.get(&key).map(Vec::as_slice).unwrap_or_default())
    }
}

impl Books {
    /// Writes where a process's memory on a device was.
    pub(super) fn write_breakdown(
        &mut self,
        reading: &Reading,
        process: &ProcessReading,
        proc_id: ProcId,
    ) {
        if self.brake.is_blind(process.pid) {
            return;
        }
        let moment = self.moment(reading, process, proc_id);
        for row in self.breakdown.rows(proc_id, &reading.gpu_uuid, moment) {
            self.add(row);
        }
    }

    /// What is known of a process on a device at the moment of a reading.
    pub(super) fn moment(
        &self,
        reading: &Reading,
        process: &ProcessReading,
        proc_id: ProcId,
    ) -> Moment {
        let uuid = reading.gpu_uuid.as_str();
        let ordinal = self.opening.devices.ordinal_of(proc_id, uuid);
        let key = ordinal.map(|ordinal| TensorKey { tgid: process.pid, ordinal: ordinal as u32 });
        let told_apart = self.tells_blocks_apart(process.pid);
        let tensors = key.and_then(|key| reading.torch.tensors(key)).filter(|_| told_apart);
        let key = key.filter(|key| !self.polled.has_stopped(key.tgid));
        let mut moment = Moment {
            ts_ns: reading.ts_ns,
            read_ns: reading.read_ns,
            nvml_used: process.used_bytes.map(|bytes| bytes as i64),
            baseline: self.readings.baseline(proc_id, uuid),
            torch: key.and_then(|key| reading.torch.totals(key)),
            ..Moment::default()
        };
        let Some(state) = self.state.process(proc_id.0) else { return moment };
        let on = |(_, device): &(usize, &ledger::account::state::Device)| {
            device.gpu_uuid.as_deref() == Some(uuid)
        };
        let mut devices = Vec::new();
        for (index, device) in state.devices().iter().enumerate().filter(on) {
            devices.push(index);
            moment.pools = moment.pools.plus(device.pools());
            for level in Level::ALL {
                moment.live[level as usize] += device.usage(level).live_bytes;
            }
        }
        let library_of = |stack_id| self.stacks.library_of(stack_id);
        moment.holding = Holding::of(state, &devices, library_of, tensors);
        moment
    }

    /// Each block of the process's cache is known, by address.
    fn tells_blocks_apart(&self, tgid: u32) -> bool {
        let stopped = self.polled.sites.stopped.contains(&tgid);
        self.opening.sites && !stopped && !self.polled.has_lost(tgid, Loss::BlockTableFull)
    }

    /// Writes what a device holds in all, where NVML says it of all its processes.
    pub(super) fn write_device(&mut self, reading: &Reading, processes: &[ProcessReading]) {
        let Some((used, reserved)) = reading.device_bytes else { return };
        let listed: Option<u64> = processes.iter().map(|process| process.used_bytes).sum();
        let Some(listed) = listed else { return };
        let unlisted = self.unlisted_bytes(&reading.gpu_uuid, processes);
        let moment = DeviceMoment {
            ts_ns: reading.ts_ns,
            used_bytes: used as i64,
            listed_bytes: listed as i64,
            unlisted_bytes: unlisted,
            reserved_bytes: reserved.map(|bytes| bytes as i64),
        };
        for row in moment.rows(&reading.gpu_uuid) {
            self.add(row);
        }
    }

    /// Device memory of running processes that NVML does not list.
    fn unlisted_bytes(&self, uuid: &str, processes: &[ProcessReading]) -> i64 {
        let is_listed = |pid: u32| processes.iter().any(|process| process.pid == pid);
        let missing = self.lives.running().filter(|life| !is_listed(life.tgid));
        missing.map(|life| self.live_on(life.proc_id.0, uuid, Level::Device)).sum()
    }
}
