//! vramscope's kernel half: records raw facts, interprets nothing.
//!
//! A few programs by argument shape. What to copy of a call comes with the probe's attach cookie
//! (`agent_common::cookie`), so no traced function has a name here.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![feature(asm_experimental_arch)]
#![allow(internal_features, reason = "the atomic add is an intrinsic on this target")]
#![allow(
    clippy::inline_always,
    reason = "older verifiers want these small helpers in one flat program"
)]
#![allow(clippy::needless_pass_by_value, reason = "the signature that aya's macros call")]
#![allow(missing_docs, reason = "the programs' names are their interface; each has its comment")]

mod backward;
mod call;
mod code;
mod cost;
mod emit;
mod enter;
mod hash;
mod life;
mod lose;
mod note;
mod opaque;
mod python;
mod quota;
mod regs;
mod runtime;
mod sites;
mod stack;
mod structure;
mod task;
mod tensor;
mod thread;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
