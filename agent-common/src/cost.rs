//! What the programs of probes cost, sampled by themselves.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What ran, as an index into the map `COSTS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Part {
    /// Entry of a call.
    Entry = 0,
    /// Return of a call.
    Return = 1,
    /// A block of `PyTorch` told apart by its stack.
    Block = 2,
    /// A block of `PyTorch` added to the totals only.
    Totals = 3,
}

/// Number of parts.
pub const PARTS: u32 = 4;

/// Sums over the samples of a part.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Cost {
    /// Runs that were timed.
    pub runs: u64,
    /// Nanoseconds that they took.
    pub ns: u64,
}

/// Whether the run that began at this moment is timed: one of 64. The clock's low bits are as good as
/// random here.
pub const fn is_timed(boot_ns: u64) -> bool {
    boot_ns.is_multiple_of(64)
}
