//! Where a process's memory on a device went, at one moment, held against NVML's figure.

mod holding;
mod residual;
mod rows;
mod split;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use self::residual::{Parts, Residual, Rest};
pub use self::{
    holding::{Holding, TORCH_CACHE},
    rows::{DEVICE_PARTS, DeviceMoment, PARTS, whole},
    split::{Split, Tensor},
};
use crate::{
    account::state::PoolUse,
    call::{Level, ProcId},
    rows::{BreakdownRow, EventRow},
};

/// What `PyTorch` says of its allocator on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Torch {
    /// What its tensors hold, bytes.
    pub allocated_bytes: i64,
    /// What its allocator holds.
    pub reserved_bytes: i64,
}

/// What is known of a process on a device at one moment. Take NVML's figure and the account's so
/// that the account's device bytes were equal before and after the NVML call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// When NVML was asked, nanoseconds since the epoch.
    pub ts_ns: i64,
    /// How long it took.
    pub read_ns: i64,
    /// What NVML charges to the process; `None` where it says "not available".
    pub nvml_used: Option<i64>,
    /// What NVML charged when the agent attached; `None` for a process seen from its start.
    pub baseline: Option<i64>,
    /// Device memory by owner.
    pub holding: Holding,
    /// Stream-ordered pools.
    pub pools: PoolUse,
    /// Live bytes by level, as [`Level::ALL`] has them.
    pub live: [i64; Level::ALL.len()],
    /// `PyTorch`'s totals, where it was heard.
    pub torch: Option<Torch>,
}

/// Makes breakdowns; remembers per process and device what no single moment tells.
#[derive(Debug, Default)]
pub struct Breakdown {
    courses: HashMap<(ProcId, String), Course>,
    /// The smallest context seen on each device.
    bare: HashMap<String, i64>,
}

/// One process on one device, over time.
#[derive(Debug, Default)]
struct Course {
    before_attach: Option<i64>,
    residual: Residual,
}

/// The parts of NVML's figure, bytes. They add up to it.
#[derive(Debug, Default)]
struct Sum {
    /// `PyTorch`'s cache, if there is one.
    cache: Option<Cache>,
    /// From before attach, without `PyTorch`'s part.
    before_attach: Option<i64>,
    rest: Parts,
}

/// `PyTorch`'s cache.
#[derive(Debug, Default)]
struct Cache {
    /// All of it.
    bytes: i64,
    /// Of that, live blocks; `None`: it was not heard.
    tensors: Option<i64>,
    /// Some of its segments are from before attach.
    late: bool,
}

impl Breakdown {
    /// Nothing remembered yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in an event: contexts and code take memory of a size that no call tells. Where the
    /// device is not known it may be any that the process uses.
    pub fn note(&mut self, row: &EventRow) {
        if row.op != "ctx" && row.op != "module" {
            return;
        }
        let proc_id = ProcId(row.proc_id);
        if let Some(uuid) = &row.gpu_uuid {
            let key = (proc_id, uuid.clone());
            self.courses.entry(key).or_default().residual.note(row);
        } else {
            let its = self.courses.iter_mut().filter(|((of, _), _)| *of == proc_id);
            its.for_each(|(_, course)| course.residual.note(row));
        }
    }

    /// The rows of one moment. The parts (see [`BreakdownRow::category`]) add up to `nvml_used`
    /// exactly; the others stand beside it. Without NVML's figure there is no sum and nothing that
    /// is told from it: they are not known.
    ///
    /// `before_attach` is what NVML showed at attach, less what later readings prove gone: an upper
    /// bound that never rises. `unexplained` may be negative and is never cut off.
    pub fn rows(
        &mut self,
        proc_id: ProcId,
        gpu_uuid: &str,
        mut moment: Moment,
    ) -> Vec<BreakdownRow> {
        let course = self.courses.entry((proc_id, gpu_uuid.to_owned())).or_default();
        let older = older_cache(&mut moment);
        let mut sum = Sum::default();
        let mut cached = older;
        if let Some(used) = moment.nvml_used {
            let known = known(&moment);
            let before = course.bound(moment.baseline, used - known);
            cached = before.map_or(0, |bytes| older.min(bytes));
            sum.before_attach = before.map(|bytes| bytes - cached);
            let rest = Rest {
                ts_ns: moment.ts_ns,
                end_ns: moment.ts_ns + moment.read_ns,
                bytes: used - known - before.unwrap_or(0),
                late: moment.baseline.is_some(),
                pools: moment.pools,
            };
            let mut bare = self.bare.get(gpu_uuid).copied();
            sum.rest = course.residual.parts(rest, &mut bare);
            self.bare.extend(bare.map(|bytes| (gpu_uuid.to_owned(), bytes)));
        }
        sum.cache = cache(&moment, cached);
        rows::rows(proc_id, gpu_uuid, &moment, &sum)
    }

    /// The rows of a moment at which NVML was not asked: blocks as they are, what only NVML tells as
    /// it was last. Everything that depends on it, the sum too, is marked estimated. Empty where NVML
    /// never told anything of the process.
    pub fn snapshot(
        &self,
        proc_id: ProcId,
        gpu_uuid: &str,
        mut moment: Moment,
    ) -> Vec<BreakdownRow> {
        let Some(course) = self.courses.get(&(proc_id, gpu_uuid.to_owned())) else {
            return Vec::new();
        };
        let Some(rest) = course.residual.last() else { return Vec::new() };
        let older = older_cache(&mut moment);
        let before = course.before_attach;
        let cached = before.map_or(0, |bytes| older.min(bytes));
        let shown = [rest.context.unwrap_or(0), rest.code, rest.pools, rest.unexplained];
        let used = known(&moment) + before.unwrap_or(0) + shown.iter().sum::<i64>();
        moment.nvml_used = Some(used);
        let before_attach = before.map(|bytes| bytes - cached);
        let sum = Sum { cache: cache(&moment, cached), before_attach, rest };
        let mut rows = rows::rows(proc_id, gpu_uuid, &moment, &sum);
        for row in &mut rows {
            row.estimated |= row.category == "nvml_used" || row.category == "unexplained";
        }
        rows
    }

    /// Forgets a process that ended.
    pub fn forget(&mut self, proc_id: ProcId) {
        self.courses.retain(|(of, _), _| *of != proc_id);
    }
}

/// What `PyTorch` reserved before the process was attached to. Of a process that is seen from its
/// start, what it has beyond its known segments is among the blocks of unknown owners.
fn older_cache(moment: &mut Moment) -> i64 {
    let reserved = moment.torch.map_or(0, |torch| torch.reserved_bytes);
    let missing = reserved - moment.holding.segments_bytes;
    if moment.baseline.is_some() {
        return missing.max(0);
    }
    moment.holding.adopt(missing);
    0
}

/// What calls tell of.
fn known(moment: &Moment) -> i64 {
    moment.holding.bytes() + moment.holding.rounding_bytes + moment.pools.floor_bytes
}

/// `PyTorch`'s cache, `older` bytes of which are from before attach.
fn cache(moment: &Moment, older: i64) -> Option<Cache> {
    let bytes = moment.holding.segments_bytes + older;
    (bytes > 0 || moment.torch.is_some()).then(|| Cache {
        bytes,
        tensors: moment.torch.map(|torch| torch.allocated_bytes.min(bytes)),
        late: older > 0,
    })
}

impl Course {
    /// Most that can still be from before attach. `not_known`: what NVML charges beyond all that was
    /// seen to be allocated.
    fn bound(&mut self, baseline: Option<i64>, not_known: i64) -> Option<i64> {
        let possible = baseline?.min(not_known.max(0));
        let bound = self.before_attach.get_or_insert(possible);
        *bound = possible.min(*bound);
        Some(*bound)
    }
}
