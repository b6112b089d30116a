//! Backward passes: who called autograd, for what its own threads allocate.

use agent_common::{
    call::{EXTRA_WORDS, FLAG_WIDE, KIND_NOTE, NO_ROW, RawCall, WIDE_LEN},
    loss::Loss,
};
use aya_ebpf::{EbpfContext as _, macros::map, maps::HashMap, programs::ProbeContext};
use zerocopy::IntoBytes as _;

use crate::{
    emit,
    enter::{Wanted, cookie},
    life::note_process,
    lose::lose,
    thread,
};

/// The latest backward pass of a process.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pass {
    /// Counted from 1.
    number: u64,
    /// Key of the stack that called it.
    key: u64,
}

#[map]
static PASSES: HashMap<u32, Pass> = HashMap::with_max_entries(16384, 0);

/// Key of the stack that called the latest backward pass; 0 = none.
#[inline(always)]
pub(crate) fn caller(tgid: u32) -> u64 {
    // SAFETY: a map value, valid until the program returns.
    PASSES.get_ptr(tgid).map_or(0, |pass| unsafe { (*pass).key })
}

/// The program is gone.
pub(crate) fn forget(tgid: u32) {
    if PASSES.get_ptr(tgid).is_some() {
        PASSES.remove(tgid).unwrap_or_default();
    }
}

/// Entry of autograd's execute. Entry only: it is C++ that can throw. Autograd's own threads call
/// it too, for passes within a pass: those are the same pass.
#[inline(always)]
pub(crate) fn begin(ids: u64) -> Wanted {
    note_process((ids >> 32) as u32);
    let stays_out = thread::current(ids).is_none_or(|thread| thread.autograd == 1);
    if stays_out { Wanted::Nothing } else { Wanted::Stack }
}

/// Counts the pass, and tells of it.
#[inline(never)]
pub(crate) fn end(ctx: &ProbeContext, ids: u64, enter_ns: u64, key: u64) {
    let tgid = (ids >> 32) as u32;
    // SAFETY: a map value, valid until the program returns.
    let last = PASSES.get_ptr(tgid).map_or(0, |pass| unsafe { (*pass).number });
    let pass = Pass { number: last + 1, key };
    if PASSES.insert(tgid, pass, 0).is_err() {
        lose(tgid, Loss::ProcessTableFull);
        return;
    }
    let record = RawCall {
        kind: KIND_NOTE,
        flags: FLAG_WIDE,
        row: cookie(ctx.as_ptr()).row,
        runtime_row: NO_ROW,
        result: 0,
        tgid,
        tid: ids as u32,
        enter_ns,
        exit_ns: 0,
        stack_key: key,
        words: [pass.number, 0, 0],
        wide_words: [0; 3],
        extra: [0; EXTRA_WORDS],
    };
    if !emit::life(&record.as_bytes()[..WIDE_LEN]) {
        lose(tgid, Loss::LifeRingFull);
    }
}
