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

/// Key of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlockKey {
    /// Process.
    pub tgid: u64,
    /// Its address.
    pub addr: u64,
}

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Block {
    /// Key of the stack that allocated it; 0 = none taken.
    pub key: u64,
    /// Its size, as `PyTorch` rounds it.
    pub size_bytes: u64,
    /// When it was handed out, nanoseconds of `CLOCK_BOOTTIME`.
    pub since_ns: u64,
    /// The device's number in the process.
    pub ordinal: u64,
}

/// Key of a site's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SiteKey {
    /// Process.
    pub tgid: u32,
    /// The device's number in the process.
    pub ordinal: u32,
    /// Key of the stack.
    pub key: u64,
}

/// Sums over the blocks of one stack.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SiteTotals {
    /// Odd while an update is under way, so that a reader can tell a torn copy.
    pub version: u64,
    /// Bytes alive.
    pub live_bytes: i64,
    /// Blocks alive.
    pub live_count: i64,
    /// Blocks handed out.
    pub allocs: u64,
    /// Bytes handed out.
    pub allocated_bytes: u64,
    /// Blocks taken back.
    pub frees: u64,
    /// Bytes taken back.
    pub freed_bytes: u64,
    /// The latest epoch ([`epoch_of`]) in which a block came or went.
    pub epoch: u64,
    /// Lowest `live_bytes` of that epoch.
    pub floor_bytes: i64,
    /// Lowest `live_bytes` of the epoch before that one.
    pub last_floor_bytes: i64,
}

/// Number of the epoch of about a second that a moment of `CLOCK_BOOTTIME` lies in.
pub const fn epoch_of(boot_ns: u64) -> u64 {
    boot_ns >> 30
}

impl SiteTotals {
    /// Before the first block.
    pub const NONE: Self = Self {
        version: 0,
        live_bytes: 0,
        live_count: 0,
        allocs: 0,
        allocated_bytes: 0,
        frees: 0,
        freed_bytes: 0,
        epoch: 0,
        floor_bytes: 0,
        last_floor_bytes: 0,
    };

    /// Lowest `live_bytes` in the second before a moment. What is sampled once a second misses how
    /// much comes back in between: only what stays is in the floor.
    pub fn floor_at(&self, boot_ns: u64) -> i64 {
        match epoch_of(boot_ns).saturating_sub(self.epoch) {
            // The epoch has just begun: the one before tells of most of the second.
            0 => self.floor_bytes.min(self.last_floor_bytes),
            1 => self.floor_bytes,
            _ => self.live_bytes,
        }
    }
}

/// How much is recorded of tensors.
pub mod detail {
    /// Sums of a process and device.
    pub const TOTALS: u32 = 0;
    /// Sums by stack as well.
    pub const SITES: u32 = 1;
    /// Every block as well.
    pub const EVENTS: u32 = 2;
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
