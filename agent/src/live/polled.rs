//! What the kernel half only counts: losses and `PyTorch` totals, looked at four times a second.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use agent_common::{
    loss::{LOSSES, Loss},
    tensor::{Block, BlockKey, SiteKey, SiteTotals, TensorKey, TensorTotals},
};
use ledger::{
    call::Level,
    rows::{LossRow, ProcessSampleRow, SiteUsageRow},
};

use super::{books::Books, lives::Lives, sites::Sites};
use crate::{
    clock::{self, Anchor},
    kernel::{Counters, ProcessLoss},
};

/// The counters and what they were.
pub(super) struct Polled {
    counters: Counters,
    losses: HashMap<(u32, &'static str), u64>,
    unattributed: HashMap<&'static str, u64>,
    totals: HashMap<(u32, u32), TensorTotals>,
    pub(super) sites: Sites,
    /// Processes whose totals are not kept any more.
    stopped: HashSet<u32>,
    /// Ended processes whose blocks are still in the kernel's table, with when they ended.
    ended: HashMap<u32, u64>,
    swept: Instant,
    last_ns: i64,
    containers_ns: i64,
}

impl Polled {
    /// Nothing seen yet.
    pub(super) fn new(counters: Counters) -> Self {
        Self {
            counters,
            losses: HashMap::new(),
            unattributed: HashMap::new(),
            totals: HashMap::new(),
            sites: Sites::default(),
            stopped: HashSet::new(),
            ended: HashMap::new(),
            swept: Instant::now(),
            last_ns: clock::epoch_ns(),
            containers_ns: 0,
        }
    }

    /// Rows for what was lost since the last time.
    pub(super) fn losses(&mut self, lives: &mut Lives, anchor: Anchor) -> Vec<LossRow> {
        self.counters.tell_diagnostics();
        let now_ns = clock::epoch_ns();
        let window_start_ns = std::mem::replace(&mut self.last_ns, now_ns);
        let mut rows: Vec<LossRow> = Vec::new();
        let boot_ns = (now_ns - anchor.offset_ns()) as u64;
        // Before the counts of each process: what is lost meanwhile must not look like nobody's,
        // or it would be counted a second time once its process's count is read.
        let totals = self.counters.loss_totals().ok();
        for ProcessLoss { tgid, reason, count } in self.counters.losses() {
            let before = self.losses.insert((tgid, reason.as_str()), count).unwrap_or(0);
            if count > before {
                rows.push(LossRow {
                    ts_ns: now_ns,
                    window_start_ns,
                    proc_id: lives.at(tgid, boot_ns).map(|life| life.proc_id.0),
                    pid: Some(tgid as i32),
                    reason: reason.as_str().to_owned(),
                    count: (count - before) as i64,
                    bytes: None,
                });
            }
        }
        if let Some(totals) = totals {
            rows.extend(self.unattributed(&totals, now_ns, window_start_ns));
        }
        rows
    }

    /// Losses for whose process the kernel had no room: the totals less what was attributed.
    fn unattributed(
        &mut self,
        totals: &[u64; LOSSES],
        now_ns: i64,
        window_start_ns: i64,
    ) -> Vec<LossRow> {
        let mut rows = Vec::new();
        for (reason, &total) in Loss::ALL.iter().zip(totals) {
            let reason = reason.as_str();
            let attributed: u64 = self
                .losses
                .iter()
                .filter(|((_, of), _)| *of == reason)
                .map(|(_, count)| *count)
                .sum();
            let seen = self.unattributed.entry(reason).or_default();
            let rest = total.saturating_sub(attributed);
            if rest > *seen {
                rows.push(LossRow {
                    ts_ns: now_ns,
                    window_start_ns,
                    proc_id: None,
                    pid: None,
                    reason: reason.to_owned(),
                    count: (rest - *seen) as i64,
                    bytes: None,
                });
                *seen = rest;
            }
        }
        rows
    }

    /// Sums of `PyTorch`'s blocks by process, device and stack key.
    pub(super) fn site_totals(&self) -> Vec<(SiteKey, SiteTotals)> {
        self.counters.sites()
    }

    /// `PyTorch`'s totals, by process and device, as they are now.
    pub(super) fn tensor_totals(&self) -> HashMap<TensorKey, TensorTotals> {
        self.counters.tensors().into_iter().collect()
    }

    /// A process's totals are not kept any more.
    pub(super) fn has_stopped(&self, tgid: u32) -> bool {
        self.stopped.contains(&tgid)
    }

    /// Something of that kind was lost of a process.
    pub(super) fn has_lost(&self, tgid: u32, loss: Loss) -> bool {
        self.losses.contains_key(&(tgid, loss.as_str()))
    }

    /// `PyTorch`'s live blocks.
    pub(super) fn blocks(&self) -> Vec<(BlockKey, Block)> {
        self.counters.blocks()
    }

    /// Takes ended processes' blocks out of the kernel's table: seldom, since all of it is gone
    /// through.
    pub(super) fn sweep(&mut self) {
        if self.ended.is_empty() || self.swept.elapsed() < SWEEP {
            return;
        }
        self.swept = Instant::now();
        self.counters.sweep_blocks(&std::mem::take(&mut self.ended));
    }

    /// Of each process with any: calls that were lost, and blocks of `PyTorch` that came or went.
    pub(super) fn hits(&self) -> HashMap<u32, (u64, u64)> {
        let mut hits: HashMap<u32, (u64, u64)> = HashMap::new();
        let calls = [Loss::RingFull, Loss::QuotaExceeded, Loss::PendingFull].map(Loss::as_str);
        for ((tgid, _), count) in self.losses.iter().filter(|((_, of), _)| calls.contains(of)) {
            hits.entry(*tgid).or_default().0 += count;
        }
        for ((tgid, _), totals) in &self.totals {
            hits.entry(*tgid).or_default().1 += totals.allocs + totals.frees;
        }
        hits
    }

    /// Of a process's blocks no more than the totals is kept from here on.
    pub(super) fn stop_sites(&mut self, tgid: u32, now_ns: u64) {
        self.sites.stopped.insert(tgid);
        self.ended.insert(tgid, now_ns);
    }

    /// Nor are its totals from here on.
    pub(super) fn stop_totals(&mut self, tgid: u32) {
        self.stopped.insert(tgid);
    }

    /// `PyTorch`'s last known totals of a process on a device.
    pub(super) fn totals_of(&self, tgid: u32, ordinal: Option<i32>) -> Option<TensorTotals> {
        let ordinal = u32::try_from(ordinal?).ok().filter(|_| !self.stopped.contains(&tgid))?;
        self.totals.get(&(tgid, ordinal)).copied()
    }

    /// Totals that changed since the last time.
    fn changed(&mut self, only: Option<u32>) -> Vec<(TensorKey, TensorTotals)> {
        let mut changed = Vec::new();
        for (key, totals) in self.counters.tensors() {
            if only.is_some_and(|tgid| tgid != key.tgid) {
                continue;
            }
            let before = self.totals.insert((key.tgid, key.ordinal), totals);
            if before.is_none_or(|before| before.version != totals.version) {
                changed.push((key, totals));
            }
        }
        changed
    }

    /// Drops an ended process's counters, here and in the kernel. Its losses stay counted.
    pub(super) fn forget(&mut self, tgid: u32, ended_ns: u64) {
        self.counters.forget(tgid);
        self.sites.forget(tgid);
        self.stopped.remove(&tgid);
        self.ended.insert(tgid, ended_ns);
        self.totals.retain(|(of, _), _| *of != tgid);
        // The kernel's totals keep these, so they must not turn up as somebody else's.
        for ((_, reason), count) in self.losses.extract_if(|(of, _), _| *of == tgid) {
            *self.unattributed.entry(reason).or_default() += count;
        }
    }
}

/// Time between sweeps of the table of blocks.
const SWEEP: Duration = Duration::from_secs(5);
/// Pace of container samples.
const CONTAINERS_NS: i64 = 1_000_000_000;

impl Books {
    /// Writes, once a second, what each container with a traced process uses and may use.
    pub(super) fn write_containers(&mut self) {
        let now_ns = clock::epoch_ns();
        if now_ns - self.polled.containers_ns < CONTAINERS_NS {
            return;
        }
        self.polled.containers_ns = now_ns;
        let mut seen = HashSet::new();
        let inside: Vec<u32> = self
            .lives
            .running()
            .filter(|life| {
                let id = life.row.as_ref().and_then(|row| row.container_id.as_ref());
                id.is_some_and(|id| seen.insert(id.clone()))
            })
            .map(|life| life.tgid)
            .collect();
        for tgid in inside {
            let host = &self.opening.host;
            let sample = host.cgroup(tgid).and_then(|of| host.container_sample(tgid, &of));
            if let Some(mut row) = sample {
                row.ts_ns = now_ns;
                self.add(row);
            }
        }
    }

    /// Writes `PyTorch`'s totals where they changed: of one process, or of all.
    pub(super) fn write_totals(&mut self, only: Option<u32>) {
        for (key, totals) in self.polled.changed(only) {
            let Some(life) = self.lives.at(key.tgid, totals.last_ns) else { continue };
            let life_id = life.proc_id;
            let (proc_id, ordinal) = (life_id.0, key.ordinal as i32);
            let ts_ns = self.opening.anchor.epoch(totals.last_ns);
            let (nvml_index, gpu_uuid) = self.gpu_of(life_id, key.ordinal);
            self.add(usage_row(&totals, ts_ns, proc_id, nvml_index, gpu_uuid.clone(), ordinal));
            self.add(ProcessSampleRow {
                ts_ns,
                proc_id,
                pid: key.tgid as i32,
                nvml_index,
                gpu_uuid,
                torch_allocated_bytes: Some(totals.allocated_bytes as i64),
                torch_reserved_bytes: Some(totals.reserved_bytes as i64),
                torch_peak_allocated_bytes: Some(totals.peak_allocated_bytes as i64),
                torch_peak_reserved_bytes: Some(totals.peak_reserved_bytes as i64),
                ..ProcessSampleRow::default()
            });
        }
    }
}

fn usage_row(
    totals: &TensorTotals,
    ts_ns: i64,
    proc_id: i64,
    nvml_index: Option<i32>,
    gpu_uuid: Option<String>,
    ordinal: i32,
) -> SiteUsageRow {
    let live = totals.allocated_bytes as i64;
    // Known only where every block since the first was seen.
    let complete = totals.alloc_bytes.wrapping_sub(totals.freed_bytes) == totals.allocated_bytes;
    SiteUsageRow {
        ts_ns,
        proc_id,
        nvml_index,
        gpu_uuid,
        cuda_ordinal: Some(ordinal),
        level: Level::Tensor.as_str().to_owned(),
        stack_id: 0,
        live_bytes: live,
        floor_bytes: None,
        live_count: complete.then(|| totals.allocs as i64 - totals.frees as i64),
        allocated_bytes: totals.alloc_bytes as i64,
        freed_bytes: totals.freed_bytes as i64,
        allocs: totals.allocs as i64,
        frees: totals.frees as i64,
        backward_pass: None,
    }
}
