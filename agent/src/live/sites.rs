//! `PyTorch`'s blocks by the place that allocated them, read from the kernel half once a second.

use std::collections::{HashMap, HashSet};

use agent_common::tensor::{Block, BlockKey, SiteKey, SiteTotals};
use ledger::{
    call::{Level, ProcId},
    rows::{LiveRow, SiteUsageRow, StackRow},
};

use super::books::Books;
use crate::clock;

/// `stack_id` of blocks whose stack was lost. (0 stands for the whole process.)
pub(super) const UNKNOWN_STACK: i64 = -1;
/// How long a stack may be under way.
const UNDER_WAY_NS: i64 = 2_000_000_000;
/// Pace of the rows.
const PERIOD_NS: i64 = 1_000_000_000;
/// Rows of live blocks in a checkpoint at most, the largest ones.
const LIVE_BLOCKS: usize = 100_000;

/// A place: process, device number in it, stack.
type Place = (u32, u32, i64);

/// What was written of each place.
#[derive(Debug, Default)]
pub(super) struct Sites {
    written: HashMap<Place, SiteTotals>,
    /// Keys whose stack is not known yet, with when they were met.
    unresolved: HashMap<(u32, u64), i64>,
    /// Processes whose blocks are not told apart any more.
    pub(super) stopped: HashSet<u32>,
    /// The log has a row for [`UNKNOWN_STACK`].
    unknown_told: bool,
    last_ns: i64,
}

impl Sites {
    /// Forgets an ended process.
    pub(super) fn forget(&mut self, tgid: u32) {
        self.written.retain(|(of, ..), _| *of != tgid);
        self.unresolved.retain(|(of, _), _| *of != tgid);
        self.stopped.remove(&tgid);
    }
}

impl Books {
    /// Writes places that changed, once a second.
    pub(super) fn write_sites_in_time(&mut self) {
        let now_ns = clock::epoch_ns();
        if now_ns - self.polled.sites.last_ns >= PERIOD_NS {
            self.polled.sites.last_ns = now_ns;
            self.write_sites(None);
        }
    }

    /// Writes places that changed: of one process, or of all.
    pub(super) fn write_sites(&mut self, only: Option<u32>) {
        let now_ns = clock::epoch_ns();
        let mut places = self.places(only);
        // Blocks whose stack became known have moved.
        for place in self.polled.sites.written.keys() {
            if place.2 == UNKNOWN_STACK && only.is_none_or(|tgid| tgid == place.0) {
                places.entry(*place).or_insert(SiteTotals::NONE);
            }
        }
        places.retain(|(tgid, ..), _| !self.polled.sites.stopped.contains(tgid));
        for (place, totals) in places {
            let before = self.polled.sites.written.insert(place, totals);
            if before.is_some_and(|before| before.version == totals.version) {
                continue;
            }
            if place.2 == UNKNOWN_STACK {
                self.tell_unknown(now_ns);
            }
            if let Some(row) = self.site_row(place, &totals, now_ns) {
                self.add(row);
            }
        }
    }

    /// Sums by place. Several keys can stand for one stack: it is taken on several threads, or at
    /// several depths of the native stack.
    fn places(&mut self, only: Option<u32>) -> HashMap<Place, SiteTotals> {
        let now_ns = clock::boot_ns();
        let mut places: HashMap<Place, SiteTotals> = HashMap::new();
        for (key, totals) in self.polled.site_totals() {
            if only.is_some_and(|tgid| tgid != key.tgid) {
                continue;
            }
            let stack_id = match self.stacks.id_of(key.tgid, key.key) {
                Some(stack_id) => stack_id,
                // It is most likely under way.
                None if only.is_none() && self.is_new(key, now_ns) => continue,
                None => UNKNOWN_STACK,
            };
            let sum = places.entry((key.tgid, key.ordinal, stack_id)).or_default();
            *sum = SiteTotals {
                version: sum.version.wrapping_add(totals.version),
                live_bytes: sum.live_bytes + totals.live_bytes,
                live_count: sum.live_count + totals.live_count,
                allocs: sum.allocs + totals.allocs,
                allocated_bytes: sum.allocated_bytes + totals.allocated_bytes,
                frees: sum.frees + totals.frees,
                freed_bytes: sum.freed_bytes + totals.freed_bytes,
                // The sum of floors is at most the floor of the sum.
                floor_bytes: sum.floor_bytes + totals.floor_at(now_ns),
                ..SiteTotals::NONE
            };
        }
        places
    }

    fn is_new(&mut self, key: SiteKey, now_ns: u64) -> bool {
        let unresolved = &mut self.polled.sites.unresolved;
        let first_ns = *unresolved.entry((key.tgid, key.key)).or_insert(now_ns as i64);
        now_ns as i64 - first_ns < UNDER_WAY_NS
    }

    fn tell_unknown(&mut self, now_ns: i64) {
        if !std::mem::replace(&mut self.polled.sites.unknown_told, true) {
            self.add(StackRow {
                stack_id: UNKNOWN_STACK,
                site: "(stack not known)".to_owned(),
                incomplete_reason: Some("it was not taken, or lost".to_owned()),
                first_seen_ns: now_ns,
                ..StackRow::default()
            });
        }
    }

    fn site_row(&mut self, place: Place, totals: &SiteTotals, now_ns: i64) -> Option<SiteUsageRow> {
        let (tgid, ordinal, stack_id) = place;
        let proc_id = self.process_of(tgid, now_ns)?;
        let (nvml_index, gpu_uuid) = self.gpu_of(proc_id, ordinal);
        Some(SiteUsageRow {
            ts_ns: now_ns,
            proc_id: proc_id.0,
            nvml_index,
            gpu_uuid,
            cuda_ordinal: Some(ordinal as i32),
            level: Level::Tensor.as_str().to_owned(),
            stack_id,
            live_bytes: totals.live_bytes,
            floor_bytes: Some(totals.floor_bytes),
            live_count: Some(totals.live_count),
            allocated_bytes: totals.allocated_bytes as i64,
            freed_bytes: totals.freed_bytes as i64,
            allocs: totals.allocs as i64,
            frees: totals.frees as i64,
            backward_pass: self.stacks.pass_at(proc_id.0, now_ns),
        })
    }

    fn process_of(&mut self, tgid: u32, now_ns: i64) -> Option<ProcId> {
        let boot_ns = self.opening.anchor.boot(now_ns);
        self.lives.at(tgid, boot_ns).map(|life| life.proc_id)
    }

    /// NVML's number and UUID of the device that a process calls `ordinal`, where they are known.
    pub(super) fn gpu_of(&self, proc_id: ProcId, ordinal: u32) -> (Option<i32>, Option<String>) {
        let device = self.opening.devices.of(proc_id, ordinal as i32);
        device.map(|device| (device.nvml_index, device.gpu_uuid)).unzip()
    }

    /// Live blocks of `PyTorch`, for a checkpoint; the largest ones where there are too many.
    pub(super) fn live_tensors(&mut self) -> Vec<LiveRow> {
        let now_ns = clock::epoch_ns();
        let mut blocks = self.polled.blocks();
        blocks.retain(|(key, _)| !self.polled.sites.stopped.contains(&(key.tgid as u32)));
        if blocks.len() > LIVE_BLOCKS {
            blocks.sort_by_key(|(_, block)| std::cmp::Reverse(block.size_bytes));
            let text = format!("the {LIVE_BLOCKS} largest of PyTorch's live blocks are listed");
            self.annotate(None, "warning", text, Some(blocks.len() as i64));
            blocks.truncate(LIVE_BLOCKS);
        }
        blocks.iter().filter_map(|(key, block)| self.live_tensor(*key, block, now_ns)).collect()
    }

    fn live_tensor(&mut self, key: BlockKey, block: &Block, now_ns: i64) -> Option<LiveRow> {
        let tgid = key.tgid as u32;
        let proc_id = self.process_of(tgid, now_ns)?;
        let (nvml_index, gpu_uuid) = self.gpu_of(proc_id, block.ordinal as u32);
        Some(LiveRow {
            ts_ns: now_ns,
            seq: self.ledger.seq(),
            proc_id: proc_id.0,
            alloc_id: 0,
            level: Level::Tensor.as_str().to_owned(),
            nvml_index,
            gpu_uuid,
            cuda_ordinal: Some(block.ordinal as i32),
            addr: key.addr as i64,
            size_bytes: Some(block.size_bytes as i64),
            api: "c10".to_owned(),
            stack_id: self.stacks.id_of(tgid, block.key).unwrap_or(0),
            alloc_ts_ns: self.opening.anchor.epoch(block.since_ns),
            estimated: Some(false),
        })
    }
}
