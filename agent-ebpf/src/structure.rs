//! Structures behind pointers, or passed by value: the words that a row wants of them.

use agent_common::{
    call::{EXTRA_WORDS, Structure, WORDS},
    cookie::MAX_ROWS,
};
use aya_ebpf::{
    helpers::bpf_probe_read_user,
    macros::map,
    maps::{Array, HashMap},
};
use core::ffi::c_void;

use crate::call::PendingKey;

/// By row; the agent fills it in before any probe is attached.
#[map]
static STRUCTURES: Array<Structure> = Array::with_max_entries(MAX_ROWS as u32, 0);

/// What calls in flight were given. Not in the entry of the call, which most calls of most programs
/// would carry for nothing.
#[map]
static PENDING_STRUCTURES: HashMap<PendingKey, [u64; EXTRA_WORDS]> =
    HashMap::with_max_entries(8192, 0);

/// Copies what the caller filled in; false where it could not be read.
#[inline(always)]
pub(crate) fn given(
    ctx: *mut c_void,
    row: u8,
    words: &[u64; WORDS],
    extra: &mut [u64; EXTRA_WORDS],
) -> bool {
    let Some(structure) = STRUCTURES.get(u32::from(row)) else { return false };
    let address = match structure.by_value {
        0 => word(words, structure.arg),
        _ => by_value(ctx, words, structure.arg),
    };
    copy(structure, address, extra)
}

/// Keeps what is [`given`] until the call returns; false where it could not be read or kept.
#[inline(always)]
pub(crate) fn keep(ctx: *mut c_void, key: PendingKey, row: u8, words: &[u64; WORDS]) -> bool {
    let mut extra = [0; EXTRA_WORDS];
    given(ctx, row, words, &mut extra) && PENDING_STRUCTURES.insert(key, extra, 0).is_ok()
}

/// Hands back what [`keep`] kept.
#[inline(always)]
pub(crate) fn take(key: PendingKey, extra: &mut [u64; EXTRA_WORDS]) {
    if let Some(kept) = PENDING_STRUCTURES.get_ptr(key) {
        // SAFETY: a map value, valid until the program returns; only this thread touches its key.
        *extra = unsafe { *kept };
        forget(key);
    }
}

/// Drops what [`keep`] kept.
#[inline(always)]
pub(crate) fn forget(key: PendingKey) {
    PENDING_STRUCTURES.remove(key).unwrap_or_default();
}

/// Copies what the function filled in; false where it could not be read.
#[inline(always)]
pub(crate) fn read(row: u8, words: &[u64; WORDS], extra: &mut [u64; EXTRA_WORDS]) -> bool {
    let Some(structure) = STRUCTURES.get(u32::from(row)) else { return false };
    copy(structure, word(words, structure.arg), extra)
}

#[inline(always)]
fn copy(structure: &Structure, address: u64, extra: &mut [u64; EXTRA_WORDS]) -> bool {
    let mut whole = true;
    for (n, word) in extra.iter_mut().enumerate() {
        if n >= usize::from(structure.words) {
            break;
        }
        let at = address.wrapping_add(u64::from(structure.offsets[n]));
        // SAFETY: the helper checks the address and fails instead of faulting.
        match unsafe { bpf_probe_read_user(at as *const u64) } {
            Ok(value) => *word = value,
            Err(_) => whole = false,
        }
    }
    whole
}

#[inline(always)]
fn word(words: &[u64; WORDS], index: u8) -> u64 {
    words.get(usize::from(index)).copied().unwrap_or(0)
}

/// Where a structure passed by value lies: above the return address (System V ABI for x86-64,
/// class MEMORY; none of the traced functions has a second argument there).
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn by_value(ctx: *mut c_void, _words: &[u64; WORDS], _arg: u8) -> u64 {
    crate::regs::read(ctx).sp.wrapping_add(8)
}

/// Where a structure passed by value lies: behind a pointer in its argument's register (AAPCS64,
/// composites above 16 bytes).
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
fn by_value(_ctx: *mut c_void, words: &[u64; WORDS], arg: u8) -> u64 {
    word(words, arg)
}
