//! Clocks: the kernel half stamps with `CLOCK_BOOTTIME`, the log tells epoch time.
//!
//! The wall clock is read once a process, to learn how far apart the two are; from then on every
//! time of the log is boot time plus that distance. So a wall clock that somebody steps (an NTP
//! client, an administrator, a virtual machine that was resumed) reorders nothing: times of one
//! recording only rise, those that the kernel took and those of the agent alike. [`Watch`] notices
//! the step, which is told in the log.

use std::sync::OnceLock;

use rustix::time::{ClockId, clock_gettime};

fn clock_ns(id: ClockId) -> i64 {
    let time = clock_gettime(id);
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

/// Nanoseconds since boot, suspend included (`CLOCK_BOOTTIME`).
pub fn boot_ns() -> u64 {
    clock_ns(ClockId::Boottime) as u64
}

/// Now, as the log tells it: nanoseconds since the epoch by the wall clock as it was when this
/// process first asked. Never goes back.
pub fn epoch_ns() -> i64 {
    Anchor::of_process().epoch(boot_ns())
}

/// The offset between the two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    offset_ns: i64,
}

impl Anchor {
    /// The one that all times of this process go by.
    pub fn of_process() -> Self {
        static ANCHOR: OnceLock<Anchor> = OnceLock::new();
        *ANCHOR.get_or_init(Self::measure)
    }

    /// Measures the offset as it is now: of several readings, the one in the narrowest bracket.
    fn measure() -> Self {
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

/// A step of the wall clock below this is not told; measuring the offset is off by less.
const STEP_NS: i64 = 10_000_000;

/// Looks whether somebody steps the wall clock. A clock that is slewed drags boot time along, so
/// that their distance changes by steps only.
#[derive(Debug)]
pub struct Watch {
    offset_ns: i64,
}

/// The wall clock was stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// By how much, nanoseconds; forward if above 0.
    pub by_ns: i64,
    /// How far it is now ahead of the log's times, nanoseconds.
    pub ahead_ns: i64,
}

impl Watch {
    /// Watches from an offset on.
    pub fn new(anchor: Anchor) -> Self {
        Self { offset_ns: anchor.offset_ns }
    }

    /// Compares the clocks; a step is told once.
    pub fn look(&mut self) -> Option<Step> {
        self.compare(Anchor::of_process(), Anchor::measure())
    }

    fn compare(&mut self, log: Anchor, now: Anchor) -> Option<Step> {
        let by_ns = now.offset_ns.saturating_sub(self.offset_ns);
        if by_ns.saturating_abs() < STEP_NS {
            return None;
        }
        self.offset_ns = now.offset_ns;
        Some(Step { by_ns, ahead_ns: now.offset_ns.saturating_sub(log.offset_ns) })
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = |ns: i64| ns.unsigned_abs() as f64 / 1e9;
        let way = |ns: i64, ahead, behind| if ns > 0 { ahead } else { behind };
        write!(
            f,
            "the wall clock was set {} by {:.3} s; times in this log go on as before",
            way(self.by_ns, "forward", "back"),
            seconds(self.by_ns),
        )?;
        if self.ahead_ns.saturating_abs() < STEP_NS {
            return write!(f, ", which is what it shows again");
        }
        write!(
            f,
            ": it is {:.3} s {} them now",
            seconds(self.ahead_ns),
            way(self.ahead_ns, "ahead of", "behind"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000_000_000;

    #[test]
    fn a_boot_time_stamp_becomes_the_same_moment() {
        let anchor = Anchor::of_process();
        let difference = anchor.epoch(boot_ns()) - clock_ns(ClockId::Realtime);
        assert!(difference.abs() < 50_000_000, "{difference} ns apart");
        assert_eq!(Anchor::of_process(), anchor, "measured once");
    }

    #[test]
    fn steps_are_noticed_once_and_noise_is_not() {
        let start = Anchor { offset_ns: 5 * HOUR };
        let mut watch = Watch::new(start);
        let mut see = |offset_ns| watch.compare(start, Anchor { offset_ns });
        let step = |by_ns, ahead_ns| Some(Step { by_ns, ahead_ns });
        assert_eq!(see(5 * HOUR), None);
        assert_eq!(see(5 * HOUR + STEP_NS - 1), None);
        assert_eq!(see(5 * HOUR - STEP_NS + 1), None);
        assert_eq!(see(6 * HOUR), step(HOUR, HOUR));
        assert_eq!(see(6 * HOUR + 1_000), None);
        assert_eq!(see(4 * HOUR), step(-2 * HOUR, -HOUR));
        assert_eq!(see(5 * HOUR), step(HOUR, 0));
        assert_eq!(see(i64::MIN), step(i64::MIN, i64::MIN));
    }

    #[test]
    fn a_step_is_told_with_its_direction_and_where_the_clock_is_now() {
        let told = |by_ns, ahead_ns| Step { by_ns, ahead_ns }.to_string();
        assert_eq!(
            told(HOUR, HOUR),
            "the wall clock was set forward by 3600.000 s; times in this log go on as before: it is \
             3600.000 s ahead of them now"
        );
        assert_eq!(
            told(-HOUR / 2, -HOUR / 2),
            "the wall clock was set back by 1800.000 s; times in this log go on as before: it is \
             1800.000 s behind them now"
        );
        assert!(told(-HOUR, 0).ends_with("as before, which is what it shows again"));
    }
}
