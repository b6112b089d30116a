//! What stream-ordered pools hold at least: their blocks, and what they are known to keep.

use std::collections::HashSet;

use crate::rows::EventRow;

/// The pools of a process on one device, as one. What a pool has taken from the device is told only
/// where the program asks for it; below its release threshold a pool gives nothing back but by
/// `cuMemPoolTrimTo`.
#[derive(Clone, Debug, Default)]
pub(super) struct PoolFloor {
    live_bytes: i64,
    kept_bytes: i64,
    /// Pools that were named; a threshold speaks for one.
    named: HashSet<i64>,
    threshold_bytes: i64,
    peak_bytes: i64,
    allocs: u64,
}

/// What is known of a process's stream-ordered pools on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// Bytes that they hold at least: live blocks, and what they are known to keep.
    pub floor_bytes: i64,
    /// Most bytes in live blocks.
    pub peak_bytes: i64,
    /// Blocks handed out.
    pub allocs: u64,
}

impl PoolUse {
    /// Of two names of one device.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            floor_bytes: self.floor_bytes.saturating_add(other.floor_bytes),
            peak_bytes: self.peak_bytes.saturating_add(other.peak_bytes),
            allocs: self.allocs + other.allocs,
        }
    }
}

impl PoolFloor {
    /// A block that was alive at a checkpoint.
    pub(super) fn start_from(&mut self, size_bytes: i64) {
        self.live_bytes = self.live_bytes.saturating_add(size_bytes);
        self.kept_bytes = self.kept_bytes.max(self.live_bytes);
    }

    /// Takes in a row of level `pool`, which is no failure.
    pub(super) fn note(&mut self, row: &EventRow) {
        self.live_bytes = self.live_bytes.saturating_add(row.delta_bytes);
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        match row.op.as_ref() {
            "alloc" => self.allocs += 1,
            "free" => self.lower(self.threshold_bytes),
            "pool" => self.named(row),
            _ => {}
        }
        self.kept_bytes = self.kept_bytes.max(self.live_bytes);
    }

    fn named(&mut self, row: &EventRow) {
        self.named.insert(row.addr);
        // What no column holds is `UINT64_MAX`, PyTorch's threshold.
        let size_bytes = row.size_bytes.unwrap_or(i64::MAX);
        match row.api.as_ref() {
            "cuMemPoolSetAttribute" => self.threshold_bytes = size_bytes,
            "cuMemPoolGetAttribute" if self.named.len() == 1 && row.size_bytes.is_some() => {
                self.kept_bytes = size_bytes;
            }
            "cuMemPoolTrimTo" => self.lower(size_bytes),
            _ => {}
        }
        if self.named.len() > 1 {
            self.threshold_bytes = 0;
        }
    }

    fn lower(&mut self, to_bytes: i64) {
        self.kept_bytes = self.kept_bytes.min(to_bytes).max(self.live_bytes);
    }

    pub(super) fn usage(&self) -> PoolUse {
        PoolUse { floor_bytes: self.kept_bytes, peak_bytes: self.peak_bytes, allocs: self.allocs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: i64 = 1 << 20;

    fn row(op: &'static str, api: &'static str, size: i64, delta: i64) -> EventRow {
        EventRow {
            op: op.into(),
            api: api.into(),
            addr: 1,
            size_bytes: Some(size * MIB),
            delta_bytes: delta * MIB,
            ..EventRow::default()
        }
    }

    fn after(rows: &[EventRow]) -> i64 {
        let mut floor = PoolFloor::default();
        for row in rows {
            floor.note(row);
        }
        floor.usage().floor_bytes / MIB
    }

    fn alloc(mib: i64) -> EventRow {
        row("alloc", "cuMemAllocAsync", mib, mib)
    }

    fn free(mib: i64) -> EventRow {
        row("free", "cuMemFreeAsync", mib, -mib)
    }

    #[test]
    fn without_a_threshold_only_live_blocks_are_sure() {
        assert_eq!(after(&[alloc(10), alloc(5), free(10)]), 5);
    }

    #[test]
    fn below_its_threshold_a_pool_keeps_what_it_has() {
        let threshold = |mib| row("pool", "cuMemPoolSetAttribute", mib, 0);
        let trim = |mib| row("pool", "cuMemPoolTrimTo", mib, 0);
        assert_eq!(after(&[threshold(1 << 40), alloc(10), free(10)]), 10);
        assert_eq!(after(&[threshold(4), alloc(10), free(10)]), 4);
        assert_eq!(after(&[threshold(1 << 40), alloc(10), free(10), trim(2)]), 2);
        assert_eq!(after(&[threshold(1 << 40), alloc(10), trim(2)]), 10);
    }

    #[test]
    fn what_the_program_reads_is_taken_for_true_until_something_is_freed() {
        let reads = row("pool", "cuMemPoolGetAttribute", 32, 0);
        assert_eq!(after(&[alloc(10), reads.clone()]), 32);
        assert_eq!(after(&[alloc(10), reads, free(10)]), 0);
    }

    #[test]
    fn a_threshold_speaks_for_one_pool() {
        let other = EventRow { addr: 2, ..row("pool", "cuMemPoolSetAttribute", 100, 0) };
        let first = row("pool", "cuMemPoolSetAttribute", 100, 0);
        assert_eq!(after(&[first, other, alloc(10), free(10)]), 0);
    }
}
