//! What our programs cost, so that the agent can tell what they cost a process: `agent_common::cost`.

use agent_common::cost::{Cost, PARTS, Part, is_timed};
use aya_ebpf::{helpers::bpf_ktime_get_boot_ns, macros::map, maps::Array};

use crate::lose::add;

/// Sums over all processes.
#[map]
static COSTS: Array<Cost> = Array::with_max_entries(PARTS, 0);

/// Ends a run that began at this moment.
#[inline(always)]
pub(crate) fn ran(part: Part, began_ns: u64) {
    if is_timed(began_ns) {
        time(part, began_ns);
    }
}

#[inline(never)]
fn time(part: Part, began_ns: u64) {
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_boot_ns() };
    let Some(cost) = COSTS.get_ptr_mut(part as u32) else { return };
    // SAFETY: a map value, valid until the program returns; others write to it by `add` alone.
    let cost = unsafe { &mut *cost };
    add(&raw mut cost.runs, 1);
    add(&raw mut cost.ns, now_ns - began_ns);
}
