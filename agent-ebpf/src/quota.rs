//! What one user may add to a ring that fills up: `agent_common::quota`.

use agent_common::quota::{Quota, window_of};
use aya_ebpf::{
    bindings::{BPF_NOEXIST, BPF_RB_AVAIL_DATA},
    helpers::bpf_get_current_uid_gid,
    macros::map,
    maps::{Array, HashMap, RingBuf},
};

/// The limits; the agent sets them while several users' processes are recorded.
#[map]
static QUOTA: Array<Quota> = Array::with_max_entries(1, 0);

#[derive(Clone, Copy)]
#[repr(C)]
struct Used {
    window: u64,
    bytes: u64,
}

/// What each user added in its latest window. One that finds no room is not limited.
#[map]
static USERS: HashMap<u32, Used> = HashMap::with_max_entries(4096, 0);

/// Whether the user of this process has used up its share of the ring. Costs a look-up as long as
/// the ring is less than half full, or one user is alone.
#[inline(always)]
pub(crate) fn used_up(ring: &RingBuf, bytes: usize, now_ns: u64) -> bool {
    let Some(&quota) = QUOTA.get(0) else { return false };
    if quota.user_bytes == 0 || ring.query(u64::from(BPF_RB_AVAIL_DATA)) < quota.free_until_bytes {
        return false;
    }
    charge(bytes as u64, window_of(now_ns)) > quota.user_bytes
}

/// What the user has added in the window, with this. Two CPUs may miscount by some calls: it is a
/// bound, no account.
#[inline(never)]
fn charge(bytes: u64, window: u64) -> u64 {
    let uid = bpf_get_current_uid_gid() as u32;
    let Some(used) = used_by(uid) else { return 0 };
    // SAFETY: a map value, valid until the program returns.
    let used = unsafe { &mut *used };
    if used.window != window {
        *used = Used { window, bytes: 0 };
    }
    used.bytes += bytes;
    used.bytes
}

#[inline(always)]
fn used_by(uid: u32) -> Option<*mut Used> {
    if let Some(used) = USERS.get_ptr_mut(uid) {
        return Some(used);
    }
    // Fails when full or when another CPU was first; the look-up tells which.
    let fresh = Used { window: 0, bytes: 0 };
    USERS.insert(uid, fresh, u64::from(BPF_NOEXIST)).unwrap_or_default();
    USERS.get_ptr_mut(uid)
}
