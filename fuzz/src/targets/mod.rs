//! The targets, and the inputs that they begin with.

mod code;
mod elf;
mod lines;
mod runtime;
mod stacks;
mod texts;

use crate::limits::Cost;

/// A way to read bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// By which it is asked for.
    pub name: &'static str,
    /// Takes an input; panics where the agent's code breaks a promise.
    pub run: fn(&[u8]),
    /// Inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Bytes of an input at most.
    pub longest: usize,
    /// Bytes of memory that an input may take.
    pub memory: Cost,
    /// Nanoseconds that an input may take of a CPU (of a slow one, in a debug build).
    pub time_ns: Cost,
}

/// All of them.
pub const TARGETS: [Target; 6] =
    [stacks::TARGET, code::TARGET, lines::TARGET, runtime::TARGET, elf::TARGET, texts::TARGET];

/// The target of a name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
