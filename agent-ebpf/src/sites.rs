//! `PyTorch`'s blocks by the place that allocated them: added up in the kernel, no record a block.

use agent_common::{
    loss::Loss,
    tensor::{Block, BlockKey, SiteKey, SiteTotals, epoch_of},
};
use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    helpers::bpf_ktime_get_boot_ns,
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
    if let Some(old) = BLOCKS.get_ptr(key) {
        // Its free went by unseen.
        // SAFETY: a map value, valid until the program returns.
        let old = unsafe { *old };
        add(tgid, ordinal, &old, -1);
        lose(tgid, Loss::TensorFreeMissed);
    }
    if BLOCKS.insert(key, block, 0).is_err() {
        lose(tgid, Loss::BlockTableFull);
        return;
    }
    add(tgid, ordinal, block, 1);
}

/// A block came back. One that is not in the table is from before the agent came.
#[inline(never)]
pub(crate) fn freed(tgid: u32, ordinal: u32, addr: u64) {
    let key = BlockKey { tgid: u64::from(tgid), addr };
    let Some(block) = BLOCKS.get_ptr(key) else { return };
    // SAFETY: a map value, valid until the program returns.
    let block = unsafe { *block };
    BLOCKS.remove(key).unwrap_or_default();
    add(tgid, ordinal, &block, -1);
}

/// Adds a block to its site's sums, or takes it out. `PyTorch` reports a device's blocks one at a
/// time, under its allocator's lock.
#[inline(always)]
fn add(tgid: u32, ordinal: u32, block: &Block, sign: i64) {
    let key = SiteKey { tgid, ordinal, key: block.key };
    let Some(totals) = totals_of(key) else {
        lose(tgid, Loss::SiteTableFull);
        return;
    };
    // SAFETY: a map value, valid until the program returns; readers go by `version`.
    let totals = unsafe { &mut *totals };
    let version = totals.version;
    super::tensor::set(&mut totals.version, version + 1);
    turn_epoch(totals);
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
fn turn_epoch(totals: &mut SiteTotals) {
    // SAFETY: a helper without arguments.
    let epoch = epoch_of(unsafe { bpf_ktime_get_boot_ns() });
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
