//! `PyTorch`'s blocks by the place that allocated them: added up in the kernel, no record a block.

use agent_common::{
    loss::Loss,
    tensor::{Block, BlockKey, SiteKey, SiteTotals, epoch_of},
};
use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    macros::map,
    maps::HashMap,
};

use crate::lose::lose;

/// Live blocks. Never evicted: a full table is a counted loss.
#[map]
static BLOCKS: HashMap<BlockKey, Block> = HashMap::with_max_entries(1 << 20, BPF_F_NO_PREALLOC);
/// Sums by process, device and stack.
#[map]
static SITES: HashMap<SiteKey, SiteTotals> = HashMap::with_max_entries(1 << 17, BPF_F_NO_PREALLOC);

/// A block was handed out.
#[inline(never)]
pub(crate) fn allocated(tgid: u32, ordinal: u32, addr: u64, block: &Block) {
    let key = BlockKey { tgid: u64::from(tgid), addr };
    if BLOCKS.insert(key, block, u64::from(BPF_NOEXIST)).is_err() && !replace(key, ordinal, block) {
        lose(tgid, Loss::BlockTableFull);
        return;
    }
    add(tgid, ordinal, block, block.since_ns, 1);
}

/// Puts a block in the place of one whose free went by unseen; false where there is none.
#[inline(never)]
fn replace(key: BlockKey, ordinal: u32, block: &Block) -> bool {
    let Some(old) = BLOCKS.get_ptr_mut(key) else { return false };
    // SAFETY: a map value, valid until the program returns; `PyTorch`'s lock keeps others out.
    let old = unsafe { core::mem::replace(&mut *old, *block) };
    let tgid = key.tgid as u32;
    add(tgid, ordinal, &old, block.since_ns, -1);
    lose(tgid, Loss::TensorFreeMissed);
    true
}

/// A block came back. One that is not in the table is from before the agent came.
#[inline(never)]
pub(crate) fn freed(tgid: u32, ordinal: u32, addr: u64, now_ns: u64) {
    let key = BlockKey { tgid: u64::from(tgid), addr };
    let Some(block) = BLOCKS.get_ptr(key) else { return };
    // SAFETY: a map value, valid until the program returns.
    let block = unsafe { *block };
    BLOCKS.remove(key).unwrap_or_default();
    add(tgid, ordinal, &block, now_ns, -1);
}

/// Adds a block to its site's sums, or takes it out. `PyTorch` reports a device's blocks one at a
/// time, under its allocator's lock.
#[inline(always)]
fn add(tgid: u32, ordinal: u32, block: &Block, now_ns: u64, sign: i64) {
    let key = SiteKey { tgid, ordinal, key: block.key };
    let Some(totals) = totals_of(key) else {
        lose(tgid, Loss::SiteTableFull);
        return;
    };
    // SAFETY: a map value, valid until the program returns; readers go by `version`.
    let totals = unsafe { &mut *totals };
    let version = totals.version;
    super::tensor::set(&mut totals.version, version + 1);
    turn_epoch(totals, now_ns);
    totals.live_bytes += sign * block.size_bytes as i64;
    totals.live_count += sign;
    if sign > 0 {
        totals.allocs += 1;
        totals.allocated_bytes += block.size_bytes;
    } else {
        totals.frees += 1;
        totals.freed_bytes += block.size_bytes;
        if totals.live_bytes < totals.floor_bytes {
            totals.floor_bytes = totals.live_bytes;
        }
    }
    super::tensor::set(&mut totals.version, version + 2);
}

/// A new epoch begins with what is alive.
#[inline(always)]
fn turn_epoch(totals: &mut SiteTotals, now_ns: u64) {
    let epoch = epoch_of(now_ns);
    if totals.epoch == epoch {
        return;
    }
    // Where nothing happened in between, what was alive is the floor of the epoch before.
    let adjacent = totals.epoch + 1 == epoch;
    totals.last_floor_bytes = if adjacent { totals.floor_bytes } else { totals.live_bytes };
    totals.epoch = epoch;
    totals.floor_bytes = totals.live_bytes;
}

#[inline(always)]
fn totals_of(key: SiteKey) -> Option<*mut SiteTotals> {
    if let Some(totals) = SITES.get_ptr_mut(key) {
        return Some(totals);
    }
    // Fails when full or when another CPU was first; the look-up tells which.
    SITES.insert(key, SiteTotals::NONE, u64::from(BPF_NOEXIST)).unwrap_or_default();
    SITES.get_ptr_mut(key)
}
