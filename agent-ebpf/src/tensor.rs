//! `PyTorch`'s allocator reports, folded into totals: no ring record for what a map can hold.

use agent_common::{
    call::{EXTRA_WORDS, FLAG_WIDE, KIND_CALL, NO_ROW, RawCall, WIDE_LEN},
    life::TOTALS_ONLY,
    loss::Loss,
    tensor::{Block, TensorKey, TensorTotals, detail},
};
use aya_ebpf::{
    EbpfContext as _, bindings::BPF_NOEXIST, macros::map, maps::HashMap, programs::ProbeContext,
};

use zerocopy::IntoBytes as _;

use crate::{
    emit,
    enter::{Wanted, cookie},
    life::note_process,
    lose::lose,
    sites,
};

/// How much is wanted, `detail::*`. The agent writes it before the programs are loaded.
#[unsafe(no_mangle)]
static TENSOR_DETAIL: u32 = detail::TOTALS;

fn detail() -> u32 {
    // SAFETY: a valid static that nobody writes while the program is loaded. Volatile, or the
    // compiler would fold the value above into the program.
    unsafe { core::ptr::read_volatile(&raw const TENSOR_DETAIL) }
}

/// Totals per process and device; the agent removes a process's entries after its end.
#[map]
static TENSORS: HashMap<TensorKey, TensorTotals> = HashMap::with_max_entries(16384, 0);

const DEVICE_TYPE_CUDA: u64 = 1; // c10/core/DeviceType.h

/// `reportMemoryUsageToProfiler(ptr, signed size, allocated, reserved, device)`: entry only, since
/// a return probe on C++ that can throw aborts the process.
///
/// This adds the block to the totals.
#[inline(always)]
pub(crate) fn begin(ctx: &ProbeContext, ids: u64, now_ns: u64) -> Wanted {
    let (device, ordinal) = device_of(ctx);
    if device != DEVICE_TYPE_CUDA {
        return Wanted::Nothing;
    }
    let tgid = (ids >> 32) as u32;
    let flags = note_process(tgid);
    if let Some(totals) = totals_of(TensorKey { tgid, ordinal }) {
        update(totals, ctx, now_ns);
    } else {
        lose(tgid, Loss::TensorTableFull);
    }
    if detail() == detail::TOTALS || flags & TOTALS_ONLY != 0 {
        Wanted::Nothing
    } else if size_of_block(ctx) >= 0 {
        Wanted::Stack
    } else {
        Wanted::Call
    }
}

/// Counts the block at its site, and tells of it where every block is wanted.
#[inline(never)]
pub(crate) fn end(ctx: &ProbeContext, ids: u64, now_ns: u64, key: u64) {
    let tgid = (ids >> 32) as u32;
    let (_, ordinal) = device_of(ctx);
    let addr: u64 = ctx.arg(0).unwrap_or(0);
    let size = size_of_block(ctx);
    if size >= 0 {
        let (size_bytes, since_ns) = (size as u64, now_ns);
        let block = Block { key, size_bytes, since_ns, ordinal: u64::from(ordinal) };
        sites::allocated(tgid, ordinal, addr, &block);
    } else {
        sites::freed(tgid, ordinal, addr, now_ns);
    }
    if detail() == detail::EVENTS {
        tell(ctx, ids, now_ns, key);
    }
}

/// The device's type and number.
#[inline(always)]
fn device_of(ctx: &ProbeContext) -> (u64, u32) {
    let device: u64 = ctx.arg(4).unwrap_or(0);
    (device & 0xff, (device >> 8 & 0xff) as u32)
}

/// Negative where it comes back.
#[inline(always)]
fn size_of_block(ctx: &ProbeContext) -> i64 {
    ctx.arg(1).unwrap_or(0)
}

#[inline(never)]
fn tell(ctx: &ProbeContext, ids: u64, now_ns: u64, stack_key: u64) {
    let record = RawCall {
        kind: KIND_CALL,
        flags: FLAG_WIDE,
        row: cookie(ctx.as_ptr()).row,
        runtime_row: NO_ROW,
        result: 0,
        tgid: (ids >> 32) as u32,
        tid: ids as u32,
        enter_ns: now_ns,
        exit_ns: now_ns,
        stack_key,
        words: [ctx.arg(0).unwrap_or(0), ctx.arg(1).unwrap_or(0), ctx.arg(2).unwrap_or(0)],
        wide_words: [ctx.arg(3).unwrap_or(0), ctx.arg(4).unwrap_or(0), 0],
        extra: [0; EXTRA_WORDS],
    };
    if let Err(reason) = emit::call(&record.as_bytes()[..WIDE_LEN], now_ns) {
        lose((ids >> 32) as u32, reason);
    }
}

#[inline(never)]
fn totals_of(key: TensorKey) -> Option<*mut TensorTotals> {
    if let Some(totals) = TENSORS.get_ptr_mut(key) {
        return Some(totals);
    }
    let empty = TensorTotals {
        version: 0,
        last_ns: 0,
        allocated_bytes: 0,
        reserved_bytes: 0,
        peak_allocated_bytes: 0,
        peak_reserved_bytes: 0,
        allocs: 0,
        frees: 0,
        alloc_bytes: 0,
        freed_bytes: 0,
    };
    // Fails when full or when another CPU was first; the look-up tells which.
    TENSORS.insert(key, empty, u64::from(BPF_NOEXIST)).unwrap_or_default();
    TENSORS.get_ptr_mut(key)
}

#[inline(always)]
fn update(totals: *mut TensorTotals, ctx: &ProbeContext, now_ns: u64) {
    let size = size_of_block(ctx);
    let allocated: u64 = ctx.arg(2).unwrap_or(0);
    let reserved: u64 = ctx.arg(3).unwrap_or(0);
    // SAFETY: a map value, valid until the program returns; PyTorch's lock keeps other writers of
    // this device out, and readers go by `version`.
    let totals = unsafe { &mut *totals };
    let version = totals.version;
    set(&mut totals.version, version + 1);
    if size >= 0 {
        totals.allocs += 1;
        totals.alloc_bytes += size as u64;
    } else {
        totals.frees += 1;
        totals.freed_bytes += (-size) as u64;
    }
    totals.allocated_bytes = allocated;
    totals.reserved_bytes = reserved;
    if allocated > totals.peak_allocated_bytes {
        totals.peak_allocated_bytes = allocated;
    }
    if reserved > totals.peak_reserved_bytes {
        totals.peak_reserved_bytes = reserved;
    }
    totals.last_ns = now_ns;
    set(&mut totals.version, version + 2);
}

/// A store that the compiler may not move or merge.
#[inline(always)]
pub(crate) fn set(place: &mut u64, value: u64) {
    // SAFETY: a valid, aligned reference.
    unsafe { core::ptr::write_volatile(place, value) };
}
