//! Clocks: the kernel half stamps with `CLOCK_BOOTTIME`, the log tells epoch time.

use rustix::time::{ClockId, clock_gettime};

fn clock_ns(id: ClockId) -> i64 {
    let time = clock_gettime(id);
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

/// Nanoseconds since boot, suspend included (`CLOCK_BOOTTIME`).
pub fn boot_ns() -> u64 {
    clock_ns(ClockId::Boottime) as u64
}

/// Nanoseconds since the epoch.
pub fn epoch_ns() -> i64 {
    clock_ns(ClockId::Realtime)
}

/// The offset between the two, taken once a run, so that a step of the wall clock cannot reorder
/// events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    offset_ns: i64,
}

impl Anchor {
    /// Measures the offset: of several readings, the one in the narrowest bracket.
    pub fn now() -> Self {
        let reading = |_| {
            let before = clock_ns(ClockId::Boottime);
            let epoch = clock_ns(ClockId::Realtime);
            let after = clock_ns(ClockId::Boottime);
            (after - before, epoch - (before + (after - before) / 2))
        };
        let best = (0..8).map(reading).min_by_key(|(width, _)| *width);
        Self { offset_ns: best.map_or(0, |(_, offset)| offset) }
    }

    /// Epoch time of a kernel time stamp.
    pub fn epoch(self, boot_ns: u64) -> i64 {
        (boot_ns as i64).saturating_add(self.offset_ns)
    }

    /// Kernel time stamp of an epoch time.
    pub fn boot(self, epoch_ns: i64) -> u64 {
        epoch_ns.saturating_sub(self.offset_ns).max(0) as u64
    }

    /// Epoch time minus boot time, nanoseconds.
    pub fn offset_ns(self) -> i64 {
        self.offset_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_time_stamp_becomes_the_same_moment() {
        let anchor = Anchor::now();
        let difference = anchor.epoch(boot_ns()) - epoch_ns();
        assert!(difference.abs() < 50_000_000, "{difference} ns apart");
    }
}
