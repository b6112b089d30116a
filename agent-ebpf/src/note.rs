//! Functions of which the entry is all that is probed: what they are called with tells all.

use agent_common::{
    call::{EXTRA_WORDS, FLAG_STRUCT_FAULT, KIND_CALL, NO_ROW, RawCall},
    loss::Loss,
};
use aya_ebpf::{EbpfContext as _, programs::ProbeContext};

use crate::{call, enter::cookie, lose::lose, structure};

/// Tells of the call, as one that took no time.
#[inline(never)]
pub(crate) fn end(ctx: &ProbeContext, ids: u64, now_ns: u64, stack_key: u64) {
    let cookie = cookie(ctx.as_ptr());
    let words = call::arguments(ctx);
    let mut record = RawCall {
        kind: KIND_CALL,
        flags: call::parts(cookie),
        row: cookie.row,
        runtime_row: NO_ROW,
        result: 0,
        tgid: (ids >> 32) as u32,
        tid: ids as u32,
        enter_ns: now_ns,
        exit_ns: now_ns,
        stack_key,
        words: [words[0], words[1], words[2]],
        wide_words: [words[3], words[4], words[5]],
        extra: [0; EXTRA_WORDS],
    };
    // The function has filled in nothing yet: a structure can only be one that it was given.
    if cookie.structure.is_some()
        && !structure::given(ctx.as_ptr(), cookie.row, &words, &mut record.extra)
    {
        record.flags |= FLAG_STRUCT_FAULT;
        lose(record.tgid, Loss::StructFault);
    }
    call::send(&record, true);
}
