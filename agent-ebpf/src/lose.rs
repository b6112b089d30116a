//! Loss counters: every way to fail is counted, per process where there is room.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use agent_common::loss::{LOSSES, Loss, LossKey};
use aya_ebpf::{
    bindings::BPF_NOEXIST,
    macros::map,
    maps::{Array, HashMap},
};

/// Totals by reason; never full.
#[map]
static LOSS_TOTALS: Array<u64> = Array::with_max_entries(LOSSES as u32, 0);
/// Counts by process and reason, as far as there is room.
#[map]
static LOSS_COUNTS: HashMap<LossKey, u64> = HashMap::with_max_entries(8192, 0);

/// Counts one lost thing of process `tgid`; true for the process's first of this kind. Atomic:
/// probes are preemptible and run on every CPU.
pub(crate) fn lose(tgid: u32, reason: Loss) -> bool {
    // The process before the total: what is in the total alone counts as nobody's.
    let first = lose_of_process(LossKey { tgid, reason: reason as u32 });
    if let Some(total) = LOSS_TOTALS.get_ptr_mut(reason as u32) {
        add(total, 1);
    }
    first
}

#[inline(always)]
fn lose_of_process(key: LossKey) -> bool {
    if let Some(count) = LOSS_COUNTS.get_ptr_mut(key) {
        add(count, 1);
        return false;
    }
    let first = LOSS_COUNTS.insert(key, 1u64, u64::from(BPF_NOEXIST)).is_ok();
    if !first && let Some(count) = LOSS_COUNTS.get_ptr_mut(key) {
        // Another CPU was first.
        add(count, 1);
    }
    first
}

/// Adds to a counter. Atomic.
#[inline(always)]
pub(crate) fn add(counter: *mut u64, more: u64) {
    // The library's atomics hide `fetch_add` on this target, whose one atomic instruction this is.
    // SAFETY: a map value, valid and aligned until the program returns.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, more) };
}
