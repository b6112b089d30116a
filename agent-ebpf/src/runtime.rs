//! Functions of the CUDA runtime: labels for the driver calls that they make.
//!
//! A driver call lies in a runtime call if that one has not returned and its frame is further up the
//! same thread's stack. The outermost runtime function is the one that the program called.

use agent_common::call::NO_ROW;
use aya_ebpf::{macros::map, maps::HashMap};
use core::ffi::c_void;

use crate::regs;

#[derive(Clone, Copy)]
#[repr(C)]
struct Around {
    /// Stack pointer at its entry.
    sp: u64,
    row: u64,
}

/// Runtime calls in flight, by thread. One that finds no room labels nothing.
#[map]
static RUNTIME: HashMap<u64, Around> = HashMap::with_max_entries(16384, 0);

/// The agent sets it where labels are recorded: without, no driver call asks for one.
#[unsafe(no_mangle)]
static RUNTIME_LABELS: u32 = 0;

fn labels() -> bool {
    // SAFETY: a valid static that nobody writes while the program is loaded. Volatile, or the
    // compiler would fold the value above into the program.
    unsafe { core::ptr::read_volatile(&raw const RUNTIME_LABELS) != 0 }
}

fn of_thread(ids: u64) -> Option<Around> {
    // SAFETY: a map value, valid until the program returns; only this thread touches its key.
    RUNTIME.get_ptr(ids).map(|around| unsafe { *around })
}

/// Entry of a runtime function.
#[inline(always)]
pub(crate) fn enter(ctx: *mut c_void, ids: u64, row: u8) {
    let sp = regs::read(ctx).sp;
    if of_thread(ids).is_some_and(|outer| outer.sp > sp) {
        return;
    }
    // A thread without a label in a full table loses a label, not an event.
    RUNTIME.insert(ids, Around { sp, row: u64::from(row) }, 0).unwrap_or_default();
}

/// Its return: the stack pointer is back where it was, or above the return address that it stood on.
#[inline(always)]
pub(crate) fn leave(ctx: *mut c_void, ids: u64) {
    if of_thread(ids).is_some_and(|around| around.sp <= regs::read(ctx).sp) {
        forget(ids);
    }
}

/// Row of the runtime function around a driver call.
#[inline(always)]
pub(crate) fn around(ctx: *mut c_void, ids: u64) -> u8 {
    if !labels() {
        return NO_ROW;
    }
    match of_thread(ids) {
        Some(around) if around.sp > regs::read(ctx).sp => around.row as u8,
        _ => NO_ROW,
    }
}

/// The thread or its program ended.
pub(crate) fn forget(ids: u64) {
    RUNTIME.remove(ids).unwrap_or_default();
}
