//! The two rings. Nobody is woken per call: the agent looks every few milliseconds, and a wake-up
//! costs the traced program about as much as the whole probe.

use agent_common::loss::Loss;
use aya_ebpf::{
    bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    macros::map,
    maps::{RingBuf, ring_buf::RingBufEntry},
};

use crate::quota;

/// Calls. The agent sets the size.
#[map]
static CALLS: RingBuf = RingBuf::with_byte_size(1 << 25, 0);
/// Process life, failures and notes: small, and kept free of the flood of calls.
#[map]
static LIFE: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// Stacks and code objects: whole where they are new, so that the ring of calls stays free of them.
#[map]
pub(crate) static STACKS: RingBuf = RingBuf::with_byte_size(1 << 25, 0);

const NO_WAKEUP: u64 = BPF_RB_NO_WAKEUP as u64;

/// Sends a call, unless the ring is full or the user's share of it is used up.
pub(crate) fn call(bytes: &[u8], now_ns: u64) -> Result<(), Loss> {
    if quota::used_up(&CALLS, bytes.len(), now_ns) {
        return Err(Loss::QuotaExceeded);
    }
    CALLS.output::<[u8]>(bytes, NO_WAKEUP).or(Err(Loss::RingFull))
}

/// Sends to the reserved ring and wakes the agent: a new process or program must have its probes
/// before its first traced call. False when the ring is full.
pub(crate) fn life_at_once(bytes: &[u8]) -> bool {
    LIFE.output::<[u8]>(bytes, u64::from(BPF_RB_FORCE_WAKEUP)).is_ok()
}

/// Sends to the reserved ring; false when it is full.
pub(crate) fn life(bytes: &[u8]) -> bool {
    LIFE.output::<[u8]>(bytes, NO_WAKEUP).is_ok()
}

/// Hands a record of [`STACKS`] over.
#[inline(always)]
pub(crate) fn submit<T>(entry: RingBufEntry<T>) {
    entry.submit(NO_WAKEUP);
}
