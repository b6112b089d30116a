//! Calls: arguments at entry, results at return, paired by (thread, row).

use agent_common::{
    call::{
        EXTRA_WORDS, FLAG_EXTRA, FLAG_OUT_FAULT, FLAG_STRUCT_FAULT, FLAG_WIDE, KIND_CALL,
        NARROW_LEN, RawCall, WIDE_LEN, WORDS,
    },
    cookie::{Cookie, Kind, SLOTS, When},
    cost::Part,
    loss::Loss,
    scope::{ANYBODY, NOBODY},
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_NOEXIST,
    helpers::{bpf_get_current_pid_tgid, bpf_ktime_get_boot_ns, bpf_probe_read_user},
    macros::{map, uretprobe},
    maps::{Array, HashMap},
    programs::{ProbeContext, RetProbeContext},
};
use aya_log_ebpf::warn;
use zerocopy::IntoBytes as _;

use crate::{
    cost, emit,
    enter::{Wanted, cookie},
    life::note_process,
    lose::lose,
    runtime, structure,
};

const EEXIST: i32 = 17; // include/uapi/asm-generic/errno-base.h

/// A call in flight. Keyed by thread alone, a call inside another would lose the outer one.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PendingKey {
    ids: u64,
    row: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Pending {
    enter_ns: u64,
    stack_key: u64,
    words: [u64; WORDS],
    /// `FLAG_*`, and the runtime function's row in bits 8 to 15.
    flags: u64,
}

/// Calls in flight. Not an LRU map: an eviction would corrupt the account silently.
#[map]
static PENDING: HashMap<PendingKey, Pending> = HashMap::with_max_entries(32768, 0);

/// Whose calls an attachment reports, by its cookies' slot: `agent_common::scope`. Nobody's until all
/// probes are in place, since a return may be probed whose entry is not: such calls are from before
/// the attachment, and no loss.
#[map]
static ARMED: Array<u32> = Array::with_max_entries(SLOTS, 0);

/// Whether the probe is there for this process. Kernels before the multi links keep entries of
/// others away, but at the return they run every program of the function, whosever it is.
#[inline(always)]
fn armed(cookie: Cookie, tgid: u32) -> bool {
    let whose = ARMED.get(u32::from(cookie.slot)).copied().unwrap_or(NOBODY);
    whose == tgid || whose == ANYBODY
}

/// Drops the thread's entry of `row`; true if there was one.
#[inline(always)]
pub(crate) fn forget(ids: u64, row: u8) -> bool {
    let key = PendingKey { ids, row: u64::from(row) };
    let pending = PENDING.remove(key).is_ok();
    if pending {
        structure::forget(key);
    }
    pending
}

fn now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_boot_ns() }
}

/// What the function was called with.
#[inline(always)]
pub(crate) fn arguments(ctx: &ProbeContext) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (n, word) in words.iter_mut().enumerate() {
        *word = ctx.arg(n).unwrap_or(0);
    }
    words
}

/// Entry of a function whose calls are told of one by one.
#[inline(always)]
pub(crate) fn begin(ctx: &ProbeContext, ids: u64) -> Wanted {
    let cookie = cookie(ctx.as_ptr());
    let tgid = (ids >> 32) as u32;
    if !armed(cookie, tgid) {
        return Wanted::Nothing;
    }
    note_process(tgid);
    if cookie.stack { Wanted::Stack } else { Wanted::Call }
}

/// Keeps the call until it returns.
#[inline(never)]
pub(crate) fn end(ctx: &ProbeContext, ids: u64, stack_key: u64) {
    let cookie = cookie(ctx.as_ptr());
    let tgid = (ids >> 32) as u32;
    let mut pending = Pending {
        enter_ns: 0,
        stack_key,
        words: arguments(ctx),
        flags: u64::from(runtime::around(ctx.as_ptr(), ids)) << 8,
    };
    let key = PendingKey { ids, row: u64::from(cookie.row) };
    if cookie.structure == Some(When::Entry)
        && !structure::keep(ctx.as_ptr(), key, cookie.row, &pending.words)
    {
        pending.flags |= u64::from(FLAG_STRUCT_FAULT);
        lose(tgid, Loss::StructFault);
    }
    // The last thing before the function runs: its effect lies between this and the exit time.
    pending.enter_ns = now_ns();
    if let Err(error) = PENDING.insert(key, pending, u64::from(BPF_NOEXIST)) {
        if error == -EEXIST && PENDING.insert(key, pending, 0).is_ok() {
            lose(tgid, Loss::PendingOverwritten);
        } else if lose(tgid, Loss::PendingFull) {
            warn!(ctx, "no room for a call in flight of process {}", tgid);
        }
    }
}

/// Return of a traced function.
#[uretprobe]
pub(crate) fn call_exit(ctx: RetProbeContext) -> u32 {
    let exit_ns = now_ns();
    let cookie = cookie(ctx.as_ptr());
    let ids = bpf_get_current_pid_tgid();
    if cookie.kind == Kind::Runtime {
        runtime::leave(ctx.as_ptr(), ids);
        return 0;
    }
    let tgid = (ids >> 32) as u32;
    if !armed(cookie, tgid) {
        return 0;
    }
    let key = PendingKey { ids, row: u64::from(cookie.row) };
    let Some(pending) = PENDING.get_ptr(key) else {
        if !cookie.harmless {
            lose(tgid, Loss::ExitWithoutEnter);
        }
        return 0;
    };
    // SAFETY: a map value, valid until the program returns; only this thread touches its key.
    let mut pending = unsafe { *pending };
    PENDING.remove(key).unwrap_or_default();
    let result = ctx.ret::<i64>() as i32;
    let mut extra = [0; EXTRA_WORDS];
    if cookie.structure == Some(When::Entry) {
        structure::take(key, &mut extra);
    }
    if result == 0 {
        read_results(&mut pending, &mut extra, cookie, tgid);
    }
    let record = RawCall {
        kind: KIND_CALL,
        flags: pending.flags as u8 | parts(cookie),
        row: cookie.row,
        runtime_row: (pending.flags >> 8) as u8,
        result,
        tgid,
        tid: ids as u32,
        enter_ns: pending.enter_ns,
        exit_ns,
        stack_key: pending.stack_key,
        words: [pending.words[0], pending.words[1], pending.words[2]],
        wide_words: [pending.words[3], pending.words[4], pending.words[5]],
        extra,
    };
    send(&record, result != 0);
    cost::ran(Part::Return, exit_ns);
    0
}

/// Replaces the out-pointers by what they point to. After a failure they hold the caller's garbage.
#[inline(always)]
fn read_results(pending: &mut Pending, extra: &mut [u64; EXTRA_WORDS], cookie: Cookie, tgid: u32) {
    let mut faults = false;
    if cookie.structure == Some(When::Exit) {
        faults = !structure::read(cookie.row, &pending.words, extra);
    }
    for (n, word) in pending.words.iter_mut().enumerate() {
        if cookie.outs >> n & 1 == 1 {
            // SAFETY: the helper checks the address and fails instead of faulting.
            match unsafe { bpf_probe_read_user(*word as *const u64) } {
                Ok(value) => *word = value,
                Err(_) => faults = true,
            }
        }
    }
    if faults {
        pending.flags |= u64::from(FLAG_OUT_FAULT);
        lose(tgid, Loss::OutFault);
    }
}

/// Which parts of a record a row needs, `FLAG_*`.
#[inline(always)]
pub(crate) fn parts(cookie: Cookie) -> u8 {
    let wide = if cookie.wide { FLAG_WIDE } else { 0 };
    let extra = if cookie.structure.is_some() { FLAG_WIDE | FLAG_EXTRA } else { 0 };
    wide | extra
}

/// Sends the parts that its flags name. `is_rare`: failures, and notes, are what a post-mortem needs
/// most, and few: where the ring is full they may use the reserved one.
#[inline(never)]
pub(crate) fn send(record: &RawCall, is_rare: bool) {
    let bytes = record.as_bytes();
    let sent = match record.flags & (FLAG_WIDE | FLAG_EXTRA) {
        0 => emit::call(&bytes[..NARROW_LEN], record.exit_ns),
        FLAG_WIDE => emit::call(&bytes[..WIDE_LEN], record.exit_ns),
        _ => emit::call(bytes, record.exit_ns),
    };
    let Err(reason) = sent else { return };
    if !is_rare || reason == Loss::QuotaExceeded || !emit::life(bytes) {
        lose(record.tgid, reason);
    }
}
