//! Whether a process works on a device, by what PyTorch handed out there.

use super::collect::PlaceFacts;

/// Who loads hands out at most so many times what is alive at once: copies are made on the way.
const LOADED: i64 = 3;
/// Rows in which tensors came without more of them than ever before: who loads has few of these.
const TURNS: u32 = 8;

/// What PyTorch did with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    /// Tensors that were there in most of the time since the first.
    pub(super) held_bytes: i64,
    /// Most that were there at once.
    pub(super) peak_bytes: i64,
    /// All that was ever handed out.
    pub(super) handed_bytes: i64,
    /// When the last was handed out.
    pub(super) last_ns: i64,
    /// Rows in which some were handed out in place of others.
    pub(super) turns: u32,
}

impl Work {
    /// `None` where no tensors were told of.
    pub(super) fn of(facts: &PlaceFacts, end_ns: i64) -> Option<Self> {
        let mut series = facts.tensors.series.clone();
        series.origin_ns()?;
        series.push(end_ns, facts.tensors.bytes);
        let complete = (series.buckets().len() - 1).max(1);
        let mut floors: Vec<i64> =
            series.buckets().iter().take(complete).map(|bucket| bucket.min).collect();
        let middle = floors.len() / 2;
        let (_, held, _) = floors.select_nth_unstable(middle);
        let highest = series.buckets().iter().map(|bucket| bucket.max).max().unwrap_or(0);
        Some(Self {
            held_bytes: *held,
            peak_bytes: highest.max(facts.peak_allocated.unwrap_or(0)),
            handed_bytes: facts.handed.bytes,
            last_ns: facts.handed.ns,
            turns: facts.handed.turns,
        })
    }

    /// What comes and goes is more than what is loaded once.
    pub(super) fn is_work(&self) -> bool {
        self.turns >= TURNS || self.handed_bytes > self.peak_bytes.saturating_mul(LOADED)
    }

    /// All that there ever was is known, and was loaded at most.
    pub(super) fn is_load(&self) -> bool {
        self.handed_bytes >= self.peak_bytes && !self.is_work()
    }
}
