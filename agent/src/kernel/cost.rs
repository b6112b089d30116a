//! What a hit costs the process that meets it: the trap into the kernel, and our programs, which time
//! one of 64 runs themselves.

use agent_common::cost::{Cost, PARTS, Part};
use aya::maps::{Array, MapData};

use super::trap::Trap;

/// Samples that make a figure.
const ENOUGH: u64 = 32;
/// Figures for as long as there are no samples, nanoseconds: those of `docs/measured.md`.
const USUAL_NS: [f64; PARTS as usize] = [600.0, 400.0, 1200.0, 180.0];

/// Nanoseconds a hit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HitCost {
    trap: Trap,
    parts_ns: [f64; PARTS as usize],
}

impl Default for HitCost {
    fn default() -> Self {
        Self { trap: Trap::default(), parts_ns: USUAL_NS }
    }
}

impl HitCost {
    /// A call of the driver: entry and return.
    pub fn call_ns(&self) -> f64 {
        self.trap.entry_ns + self.part(Part::Entry) + self.trap.return_ns + self.part(Part::Return)
    }

    /// A block of `PyTorch` that comes or goes, told apart by its stack.
    pub fn block_ns(&self) -> f64 {
        self.trap.entry_ns + self.part(Part::Block)
    }

    /// The same, added to the totals only.
    pub fn totals_ns(&self) -> f64 {
        self.trap.entry_ns + self.part(Part::Totals)
    }

    fn part(&self, part: Part) -> f64 {
        self.parts_ns.get(part as usize).copied().unwrap_or_default()
    }

    /// Takes in what was sampled between two readings.
    fn learn(&mut self, before: &[Cost; PARTS as usize], now: &[Cost; PARTS as usize]) {
        for ((ns, before), now) in self.parts_ns.iter_mut().zip(before).zip(now) {
            let runs = now.runs.saturating_sub(before.runs);
            if runs >= ENOUGH {
                *ns = now.ns.saturating_sub(before.ns) as f64 / runs as f64;
            }
        }
    }
}

/// Keeps the figures up to date.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct CostMeter {
    costs: Array<MapData, [u64; 2]>,
    /// As of the latest figures.
    seen: [Cost; PARTS as usize],
    hit: HitCost,
}

impl CostMeter {
    pub(super) fn new(costs: Array<MapData, [u64; 2]>, trap: Trap) -> Self {
        Self { costs, seen: Default::default(), hit: HitCost { trap, ..HitCost::default() } }
    }

    /// The figures now: over what was sampled since the last time, as far as that was enough.
    pub fn now(&mut self) -> HitCost {
        let mut now = self.seen;
        for (part, cost) in (0..PARTS).zip(&mut now) {
            if let Ok(words) = self.costs.get(&part, 0) {
                *cost = zerocopy::transmute!(words);
            }
        }
        self.hit.learn(&self.seen, &now);
        for (seen, now) in self.seen.iter_mut().zip(now) {
            // What was too little is not thrown away.
            if now.runs - seen.runs >= ENOUGH {
                *seen = now;
            }
        }
        self.hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_come_from_enough_samples_only() {
        let mut hit = HitCost::default();
        let before = [Cost { runs: 10, ns: 1000 }; PARTS as usize];
        let mut now = before;
        now[Part::Entry as usize] = Cost { runs: 110, ns: 1000 + 100 * 700 };
        now[Part::Return as usize] = Cost { runs: 11, ns: 1_000_000 };
        hit.learn(&before, &now);
        // Whole nanoseconds, 550 of them for each trap.
        let figures = [hit.call_ns(), hit.block_ns(), hit.totals_ns()].map(|ns| ns as u64);
        assert_eq!(figures, [550 + 700 + 550 + 400, 550 + 1200, 550 + 180]);
    }
}
