//! The native half of a stack: from the registers and the bytes of a stack that the kernel half
//! copied to frames, and from frames to names of functions.
//!
//! [`AddressSpace`] knows what a process has mapped executable; [`Modules`] keeps the files open,
//! each once for all processes, so that stacks of a process that ended, and of files that were
//! deleted, still resolve; [`Unwinder`] walks a copied stack; [`Symbolizer`] names a place in a
//! file.
//!
//! The files belong to the traced jobs, the agent runs as root: **nothing here maps a file into
//! memory.** A file that is truncated or written to while it is mapped ends the agent with SIGBUS
//! or changes bytes under a parser. Unwinding reads the records of the functions that it meets
//! (some hundred bytes each) and keeps those; symbolizing works on a private copy of a file's
//! symbols. That costs a few reads at the first sight of a function and holds a few hundred
//! kilobytes where `.eh_frame` of PyTorch's libraries would take tens of megabytes.

mod cfi;
mod expression;
mod functions;
mod image;
pub mod module;
pub mod space;
pub mod symbols;
pub mod unwind;

// The programs that the tests compile hold instructions of this architecture.
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod hostile_tests;
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod program_tests;
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod testing;

pub use self::{
    module::{Module, Modules},
    space::{AddressSpace, Place},
    symbols::{Symbol, Symbolizer},
    unwind::{End, NativeFrame, Registers, Unwinder},
};
