//! Numbers that the compiler knows nothing of.
//!
//! It makes branches of arithmetic where it sees that a number is one of two, and this machine has
//! no other way to choose. The verifier then goes through both sides of each turn of a loop, and in
//! each through all that comes after.

use core::arch::asm;

/// The same number.
#[inline(always)]
pub(crate) fn opaque(mut number: u64) -> u64 {
    // One instruction, since two places in the source must not have the same one.
    // SAFETY: it moves a register to itself.
    unsafe { asm!("{0} = {0}", inout(reg) number, options(pure, nomem, nostack, preserves_flags)) };
    number
}

/// All ones for a number below 0, else 0.
#[inline(always)]
pub(crate) fn sign(number: u64) -> u64 {
    opaque((opaque(number) as i64 >> 63) as u64)
}
