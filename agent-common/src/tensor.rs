//! `PyTorch`'s own totals, kept in the kernel per process and device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Key: one device of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TensorKey {
    /// Process.
    pub tgid: u32,
    /// CUDA ordinal as `PyTorch` numbers it.
    pub ordinal: u32,
}

/// Totals after the last block, and since the first one seen. One device's events come one at a
/// time (`PyTorch` reports them under that device's allocator lock), so no update is lost.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TensorTotals {
    /// Odd while an update is under way, so that a reader can tell a torn copy.
    pub version: u64,
    /// When the last block came or went, nanoseconds of `CLOCK_BOOTTIME`.
    pub last_ns: u64,
    /// `torch.cuda.memory_allocated()`.
    pub allocated_bytes: u64,
    /// `torch.cuda.memory_reserved()`.
    pub reserved_bytes: u64,
    /// Highest `allocated_bytes` seen.
    pub peak_allocated_bytes: u64,
    /// Highest `reserved_bytes` seen.
    pub peak_reserved_bytes: u64,
    /// Blocks handed out.
    pub allocs: u64,
    /// Blocks taken back.
    pub frees: u64,
    /// Bytes handed out.
    pub alloc_bytes: u64,
    /// Bytes taken back.
    pub freed_bytes: u64,
}
