//! Made-up training jobs: what each place of allocation holds at each moment, and the rows that a
//! recorder would have written of it.

use super::scene::{MIB, S, START, Scene, at, sample, tensors};
use crate::{
    call::Level,
    report::{Finding, Model},
    rows::{ProcessSampleRow, SiteUsageRow},
};

pub(super) const PID: i32 = 4824;

/// A different number for every seed and moment, in 0..below.
pub(super) fn noise(seed: i64, moment: i64, below: i64) -> i64 {
    let mixed = (seed * 1_000_003 + moment).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0x2545_f491_4f6c_dd1d);
    ((mixed >> 33) & 0x3fff_ffff) % below
}

/// Blocks and the size of each, at a moment of the job's seed.
type Holds = Box<dyn Fn(i64) -> (i64, i64)>;

/// A place of allocation.
pub(super) struct Site {
    name: &'static str,
    level: Level,
    holds: Holds,
    /// Bytes that it allocates and frees again each second beside what it holds.
    churn: i64,
}

/// A job.
pub(super) struct Job {
    pub(super) seconds: i64,
    /// Milliseconds of a training step; `None` without autograd.
    pub(super) step_ms: Option<i64>,
    pub(super) sites: Vec<Site>,
    /// Memory that PyTorch's allocator takes beyond what it needs, at a moment.
    pub(super) slack: fn(i64) -> i64,
    pub(super) exits: bool,
}

impl Job {
    pub(super) fn new(seconds: i64) -> Self {
        Self { seconds, step_ms: Some(700), sites: Vec::new(), slack: |_| 0, exits: false }
    }

    /// Weights and activations as every training job has them.
    pub(super) fn training(seconds: i64, seed: i64) -> Self {
        Self::new(seconds)
            .tensors("model.py:12 __init__", |_| (300, 3 * MIB))
            .tensors("model.py:87 forward", move |t| (noise(seed, t, 120), 4 * MIB))
            .tensors("train.py:60 step", move |t| (if t < 3 { 0 } else { 600 }, 3 * MIB))
    }

    pub(super) fn at(
        mut self,
        level: Level,
        name: &'static str,
        holds: impl Fn(i64) -> (i64, i64) + 'static,
    ) -> Self {
        self.sites.push(Site { name, level, holds: Box::new(holds), churn: 0 });
        self
    }

    pub(super) fn tensors(
        self,
        name: &'static str,
        holds: impl Fn(i64) -> (i64, i64) + 'static,
    ) -> Self {
        self.at(Level::Tensor, name, holds)
    }

    /// The last site allocates and frees that much each second.
    pub(super) fn churning(mut self, bytes: i64) -> Self {
        self.sites.last_mut().unwrap().churn = bytes;
        self
    }

    pub(super) fn scene(&self) -> Scene {
        let mut scene = Scene::new(self.seconds);
        scene.process(PID, "python3 train.py").rank = Some(3);
        self.tensors_of(&mut scene);
        for site in self.sites.iter().filter(|site| site.level != Level::Tensor) {
            self.blocks_of(&mut scene, site);
        }
        if self.exits {
            scene.exit(PID, self.seconds as f64 - 0.1, 0);
        }
        scene
    }

    fn pass(&self, second: i64) -> Option<i64> {
        self.step_ms.map(|ms| second * 1_000 / ms)
    }

    /// A row a second for what changed, and PyTorch's totals; its allocator takes segments.
    fn tensors_of(&self, scene: &mut Scene) {
        let sites: Vec<&Site> = self.sites.iter().filter(|s| s.level == Level::Tensor).collect();
        if sites.is_empty() {
            return;
        }
        let stacks: Vec<i64> = sites.iter().map(|site| stack(scene, site.name)).collect();
        let allocator = scene.stack(&[
            "c10::cuda::CUDACachingAllocator::malloc",
            "model.py:87 forward",
            "train.py:41 main",
        ]);
        let mut before = vec![(0, 0); sites.len()];
        let (mut made, mut reserved) = (vec![(0, 0); sites.len()], 0);
        for second in 0..self.seconds {
            let now: Vec<(i64, i64)> = sites.iter().map(|site| (site.holds)(second)).collect();
            let total: i64 = now.iter().map(|(count, size)| count * size).sum();
            for (index, (count, size)) in now.iter().enumerate() {
                if before[index] == (*count, *size) {
                    continue;
                }
                let (blocks, bytes) =
                    (count - before[index].0, count * size - before[index].0 * before[index].1);
                made[index].0 += blocks.max(0);
                made[index].1 += bytes.max(0);
                before[index] = (*count, *size);
                let mut row =
                    self.usage(second, stacks[index], (*count, count * size), made[index]);
                row.allocated_bytes += sites[index].churn * second;
                scene.site_usage.push(row);
            }
            let count = now.iter().map(|(count, _)| count).sum();
            let all = made.iter().fold((0, 0), |sum, made| (sum.0 + made.0, sum.1 + made.1));
            scene.site_usage.push(self.usage(second, 0, (count, total), all));
            let wanted = total + (self.slack)(second);
            while reserved < wanted {
                scene.alloc(PID, 1, second as f64 + 0.5, 20 * MIB);
                scene.events.last_mut().unwrap().stack_id = allocator;
                reserved += 20 * MIB;
            }
            scene.process_samples.push(ProcessSampleRow {
                torch_allocated_bytes: Some(total),
                torch_reserved_bytes: Some(reserved),
                ..sample(PID, 1, at(second as f64))
            });
        }
    }

    fn usage(
        &self,
        second: i64,
        stack_id: i64,
        (count, bytes): (i64, i64),
        (allocs, allocated): (i64, i64),
    ) -> SiteUsageRow {
        SiteUsageRow {
            stack_id,
            live_bytes: bytes,
            floor_bytes: None,
            live_count: Some(count),
            allocated_bytes: allocated,
            freed_bytes: allocated - bytes,
            allocs,
            frees: allocs - count,
            backward_pass: self.pass(second),
            ..tensors(PID, 1, START + second * S)
        }
    }

    /// Single allocations and frees, newest freed first; all anew where the size changes.
    fn blocks_of(&self, scene: &mut Scene, site: &Site) {
        let api = match site.level {
            Level::Host => "cuMemHostAlloc",
            Level::Pool => "cuMemAllocAsync",
            Level::Managed => "cuMemAllocManaged",
            _ => "cuMemAlloc_v2",
        };
        let stack_id = stack(scene, site.name);
        let mut held: Vec<(i64, i64)> = Vec::new();
        for second in 0..self.seconds {
            let (count, bytes) = (site.holds)(second);
            let keep = held.iter().take_while(|(_, of)| *of == bytes).count().min(count as usize);
            for (alloc_id, _) in held.drain(keep..) {
                scene.free(alloc_id, second as f64 + 0.2);
            }
            while (held.len() as i64) < count {
                let when = second as f64 + 0.3;
                let alloc_id = scene.alloc_at(PID, 1, when, bytes, site.level.as_str(), api);
                let row = scene.events.last_mut().unwrap();
                (row.stack_id, row.backward_pass) = (stack_id, self.pass(second));
                held.push((alloc_id, bytes));
            }
        }
    }
}

fn stack(scene: &mut Scene, name: &str) -> i64 {
    scene.stack(&["cuMemAlloc_v2", name, "train.py:41 main"])
}

/// Sites of the leaks that were found, sorted; growth of whole processes as its tag.
pub(super) fn found(model: &Model) -> Vec<String> {
    let mut found: Vec<String> = model
        .findings
        .iter()
        .filter_map(|finding| match finding {
            Finding::Leak(leak) => Some(leak.site.clone().unwrap_or_else(|| "?".to_owned())),
            Finding::Growth(_) if finding.tag() == "CACHE" => None,
            Finding::Growth(growth) => Some(format!("process: {}", growth.sentence)),
            _ => None,
        })
        .collect();
    found.sort_unstable();
    found
}
