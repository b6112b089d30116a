//! Parts of a sum as rows of the log.

use super::{Cache, Moment, Sum};
use crate::{
    call::{Level, ProcId},
    rows::BreakdownRow,
};

/// Categories that add up to `nvml_used`, in the order in which they are read.
pub const PARTS: [&str; 13] = [
    "tensors",
    "reusable",
    "returnable",
    "graph_pools",
    "cached",
    "library",
    "pools",
    "context",
    "modules",
    "rounding",
    "before_attach",
    "not_traced",
    "unexplained",
];

/// Categories of a device as a whole, which add up to `device_used`.
pub const DEVICE_PARTS: [&str; 3] = ["processes", "unlisted", "unexplained"];

/// Writes rows of one moment.
struct Writer<'a> {
    proc_id: i64,
    gpu_uuid: &'a str,
    ts_ns: i64,
    rows: Vec<BreakdownRow>,
}

impl Writer<'_> {
    fn add(&mut self, category: &str, bytes: i64, estimated: bool) -> &mut BreakdownRow {
        self.rows.push(BreakdownRow {
            ts_ns: self.ts_ns,
            proc_id: self.proc_id,
            gpu_uuid: self.gpu_uuid.to_owned(),
            category: category.to_owned(),
            bytes,
            estimated,
            ..BreakdownRow::default()
        });
        let last = self.rows.len() - 1;
        &mut self.rows[last]
    }
}

/// The rows of a process on a device.
pub(super) fn rows(
    proc_id: ProcId,
    gpu_uuid: &str,
    moment: &Moment,
    sum: &Sum,
) -> Vec<BreakdownRow> {
    let rows = Vec::with_capacity(24);
    let mut out = Writer { proc_id: proc_id.0, gpu_uuid, ts_ns: moment.ts_ns, rows };
    if let Some(used) = moment.nvml_used {
        out.add("nvml_used", used, false);
    }
    if let Some(cache) = &sum.cache {
        cache_rows(&mut out, moment, cache);
    }
    for (library, bytes) in &moment.holding.libraries {
        out.add("library", *bytes, false).library.clone_from(library);
    }
    let pools = moment.pools.floor_bytes + sum.rest.pools;
    if pools != 0 {
        out.add("pools", pools, true);
    }
    out.add("rounding", moment.holding.rounding_bytes, true);
    if moment.nvml_used.is_some() {
        rest_rows(&mut out, moment, sum);
    }
    beside_rows(&mut out, moment);
    out.rows
}

fn cache_rows(out: &mut Writer<'_>, moment: &Moment, cache: &Cache) {
    let Some(tensors) = cache.tensors else {
        out.add("cached", cache.bytes, false);
        return;
    };
    out.add("tensors", tensors, false);
    let free = cache.bytes - tensors;
    let Some(split) = moment.holding.split.filter(|_| !cache.late) else {
        out.add("cached", free, false);
        return;
    };
    let returnable = split.returnable_bytes.min(free);
    let graph_pools = split.graph_pools_bytes.min(free - returnable);
    let reusable = out.add("reusable", free - returnable - graph_pools, false);
    reusable.pinned_by_blocks = Some(split.pinned_by_blocks);
    reusable.pinned_by_stack_id = split.pinned_by_stack_id;
    out.add("returnable", returnable, true);
    if graph_pools != 0 {
        out.add("graph_pools", graph_pools, false);
    }
}

fn rest_rows(out: &mut Writer<'_>, moment: &Moment, sum: &Sum) {
    let rest = &sum.rest;
    if let Some(context) = rest.context {
        out.add("context", context, true);
    }
    out.add("modules", rest.code, true);
    if let Some(before) = sum.before_attach {
        out.add("before_attach", before, true);
    }
    let depends = sum.before_attach.is_some()
        || moment.pools.floor_bytes != 0
        || moment.holding.rounding_bytes != 0
        || rest.context.unwrap_or(0) != 0
        || rest.code != 0;
    out.add("unexplained", rest.unexplained, depends);
}

fn beside_rows(out: &mut Writer<'_>, moment: &Moment) {
    let levels = [
        ("live_device", Level::Device),
        ("live_pool", Level::Pool),
        ("live_managed", Level::Managed),
        ("live_host", Level::Host),
        ("live_imported", Level::Imported),
    ];
    for (category, level) in levels {
        out.add(category, moment.live[level as usize], false);
    }
    if let Some(torch) = moment.torch {
        out.add("torch_allocated", torch.allocated_bytes, false);
        out.add("torch_reserved", torch.reserved_bytes, false);
    }
}

/// The rows of a process of which NVML alone tells.
pub fn whole(proc_id: ProcId, gpu_uuid: &str, ts_ns: i64, bytes: i64) -> Vec<BreakdownRow> {
    let mut out = Writer { proc_id: proc_id.0, gpu_uuid, ts_ns, rows: Vec::with_capacity(2) };
    out.add("nvml_used", bytes, false);
    out.add("not_traced", bytes, false);
    out.rows
}

/// A device at one moment, as NVML tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMoment {
    /// When, nanoseconds since the epoch.
    pub ts_ns: i64,
    /// Memory in use, without what the driver reserves.
    pub used_bytes: i64,
    /// What it charges to the processes that it lists.
    pub listed_bytes: i64,
    /// Live device memory of traced processes that it does not list.
    pub unlisted_bytes: i64,
    /// What the driver reserves for itself, beside `used_bytes`.
    pub reserved_bytes: Option<i64>,
}

impl DeviceMoment {
    /// The rows of the device: `processes`, `unlisted` and `unexplained` add up to `device_used`.
    pub fn rows(&self, gpu_uuid: &str) -> Vec<BreakdownRow> {
        let rows = Vec::with_capacity(5);
        let mut out = Writer { proc_id: 0, gpu_uuid, ts_ns: self.ts_ns, rows };
        out.add("device_used", self.used_bytes, false);
        out.add("processes", self.listed_bytes, false);
        if self.unlisted_bytes != 0 {
            out.add("unlisted", self.unlisted_bytes, true);
        }
        let rest = self.used_bytes - self.listed_bytes - self.unlisted_bytes;
        out.add("unexplained", rest, self.unlisted_bytes != 0);
        if let Some(reserved) = self.reserved_bytes {
            out.add("driver_reserved", reserved, false);
        }
        out.rows
    }
}
