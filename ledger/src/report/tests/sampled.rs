//! Places of allocation as a recorder samples them: a row about once a second with the floor that
//! the kernel half kept meanwhile, many backward passes apart.

use super::{
    jobs::PID,
    scene::{Scene, at, tensors},
};
use crate::rows::SiteUsageRow;

/// What the kernel half calls a second.
const EPOCH_NS: i64 = 1 << 30;
/// Between two rows.
const POLL_NS: i64 = 1_013_000_000;

/// A place, as its sums stand.
#[derive(Clone, Debug, Default)]
struct Sums {
    live: (i64, i64),
    made: (i64, i64),
    epoch: i64,
    floor: i64,
    last_floor: i64,
}

impl Sums {
    /// Blocks of a size come, or go where `blocks` is negative.
    fn add(&mut self, ns: i64, blocks: i64, size: i64) {
        let epoch = ns / EPOCH_NS;
        if epoch != self.epoch {
            let adjacent = self.epoch + 1 == epoch;
            self.last_floor = if adjacent { self.floor } else { self.live.1 };
            (self.epoch, self.floor) = (epoch, self.live.1);
        }
        self.live = (self.live.0 + blocks, self.live.1 + blocks * size);
        if blocks > 0 {
            self.made = (self.made.0 + blocks, self.made.1 + blocks * size);
        }
        self.floor = self.floor.min(self.live.1);
    }

    fn floor_at(&self, ns: i64) -> i64 {
        match ns / EPOCH_NS - self.epoch {
            0 => self.floor.min(self.last_floor),
            1 => self.floor,
            _ => self.live.1,
        }
    }
}

/// One place that a training loop allocates from.
#[derive(Clone, Debug)]
pub(super) struct Loop {
    pub(super) seconds: f64,
    pub(super) passes_per_second: f64,
    /// Where in the recorder's second, and in the kernel's, the loop begins: 0.0 to 1.0 each.
    pub(super) phases: (f64, f64),
    pub(super) size: i64,
}

impl Loop {
    /// The log of a process that ends with its loop. `blocks`: what the place holds after a pass.
    pub(super) fn scene(&self, site: &str, mut blocks: impl FnMut(i64) -> Vec<i64>) -> Scene {
        let mut scene = Scene::new(self.seconds as i64 + 5);
        scene.process(PID, "python3 train.py").rank = Some(1);
        let stack = scene.stack(&["cuMemAlloc_v2", site, "train.py:41 main"]);
        let (mut sums, mut held, mut told) = (Sums::default(), 0, 0);
        let begin_ns = (self.phases.1 * EPOCH_NS as f64) as i64;
        let mut poll_ns = begin_ns + (self.phases.0 * POLL_NS as f64) as i64;
        for pass in 0..(self.seconds * self.passes_per_second) as i64 {
            let ns = begin_ns + (pass as f64 / self.passes_per_second * 1e9) as i64;
            while poll_ns < ns {
                if told != sums.made.0 {
                    let ns = at(poll_ns as f64 / 1e9);
                    tell(&mut scene, (ns, pass), stack, &sums, sums.floor_at(poll_ns));
                }
                (told, poll_ns) = (sums.made.0, poll_ns + POLL_NS);
            }
            for wanted in blocks(pass) {
                sums.add(ns, wanted - held, self.size);
                held = wanted;
            }
        }
        let end = self.seconds + self.phases.1 + 1.0;
        sums.add((end * 1e9) as i64, -held, self.size);
        tell(
            &mut scene,
            (at(end), (self.seconds * self.passes_per_second) as i64),
            stack,
            &sums,
            0,
        );
        scene.exit(PID, end, 0);
        scene
    }
}

/// The rows of one moment, of the place and of all there is.
fn tell(scene: &mut Scene, (ns, pass): (i64, i64), stack: i64, sums: &Sums, floor: i64) {
    let row = |stack_id, floor_bytes| SiteUsageRow {
        stack_id,
        live_bytes: sums.live.1,
        floor_bytes,
        live_count: Some(sums.live.0),
        allocated_bytes: sums.made.1,
        freed_bytes: sums.made.1 - sums.live.1,
        allocs: sums.made.0,
        frees: sums.made.0 - sums.live.0,
        backward_pass: Some(pass).filter(|_| stack_id != 0),
        ..tensors(PID, 1, ns)
    };
    scene.site_usage.push(row(stack, Some(floor)));
    scene.site_usage.push(row(0, None));
    scene.said(PID, 1, ns, sums.live.1, sums.live.1);
}
