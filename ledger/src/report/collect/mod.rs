//! One pass over the tables: keeps, per process and device, what a report needs, and no rows.

mod contexts;
mod deleted;
mod facts;
mod refusals;
mod sites;

use std::collections::{BTreeMap, HashMap, HashSet};

use self::sites::{Told, Total, When};
pub(super) use self::{
    contexts::{ContextFacts, Contexts},
    deleted::{Begin, Deleted},
    facts::{
        DeviceFacts, Figure, LossFacts, Place, PlaceFacts, ProcessFacts, RefusalFacts, RefusalKey,
        Span,
    },
    refusals::Refusals,
    sites::{Holder, PASS, SiteBook, SiteCourse, SiteId},
};
use super::stacks::Stacks;
use crate::{
    account::state::{Device, State},
    call::Level,
    log::{Manifest, Run8},
    rows::{
        AnnotationRow, BreakdownRow, DeviceRow, DeviceSampleRow, EventRow, LiveRow, LossRow,
        OomRow, ProcessRow, ProcessSampleRow, SiteUsageRow,
    },
};

/// Warnings that are kept; the rest is counted.
const MAX_WARNINGS: usize = 50;

/// The pass.
#[derive(Debug, Default)]
pub(super) struct Collector {
    pub(super) manifests: Vec<Manifest>,
    /// The state of each run: `alloc_id` counts within one.
    pub(super) states: Vec<(Run8, State, Span)>,
    pub(super) processes: BTreeMap<i64, ProcessFacts>,
    pub(super) devices: BTreeMap<String, DeviceFacts>,
    pub(super) refusals: Refusals,
    pub(super) losses: BTreeMap<(String, Option<i64>), LossFacts>,
    pub(super) warnings: Vec<AnnotationRow>,
    pub(super) more_warnings: u64,
    pub(super) deleted: Deleted,
    pub(super) problems: Vec<String>,
    pub(super) events: u64,
    pub(super) span: Span,
    pub(super) stacks: Stacks,
    pub(super) sites: SiteBook,
    pub(super) contexts: Contexts,
    /// When the oldest block of a stack was allocated that the end of its process freed.
    pub(super) oldest: HashMap<(Holder, i64), i64>,
    /// Processes whose tensors are told by site: single tensor events say the same again.
    pub(super) by_site: HashSet<i64>,
}

impl Collector {
    pub(super) fn manifest(&mut self, manifest: &Manifest) {
        for ns in [Some(manifest.start_ns), manifest.end_ns].into_iter().flatten() {
            // A run whose manifest was lost starts at 0.
            if ns > 0 {
                self.span.see(ns);
            }
        }
        self.manifests.push(manifest.clone());
    }

    fn facts(&mut self, proc_id: i64, ts_ns: i64) -> &mut ProcessFacts {
        self.span.see(ts_ns);
        let facts = self.processes.entry(proc_id).or_default();
        facts.seen.see(ts_ns);
        facts
    }

    /// The latest row of a process holds, but what one row knows and a later one does not, stays.
    pub(super) fn process(&mut self, row: ProcessRow) {
        let facts = self.facts(row.proc_id, row.ts_ns);
        facts.pid = row.pid;
        if facts.row.as_ref().is_none_or(|known| known.ts_ns <= row.ts_ns) {
            facts.row = Some(row);
        }
    }

    pub(super) fn device(&mut self, row: DeviceRow) {
        self.span.see(row.ts_ns);
        let facts = self.devices.entry(row.gpu_uuid.clone()).or_default();
        facts.nvml_index = Some(row.nvml_index);
        facts.total_bytes = row.total_bytes.or(facts.total_bytes);
        facts.row = Some(row);
    }

    pub(super) fn device_sample(&mut self, row: &DeviceSampleRow) {
        self.span.see(row.ts_ns);
        if !self.devices.contains_key(&row.gpu_uuid) {
            self.devices.insert(row.gpu_uuid.clone(), DeviceFacts::default());
        }
        let Some(facts) = self.devices.get_mut(&row.gpu_uuid) else { return };
        facts.nvml_index = Some(row.nvml_index);
        facts.total_bytes = row.total_bytes.or(facts.total_bytes);
        facts.reserved_bytes = row.reserved_bytes.or(facts.reserved_bytes);
        if let Some(used) = row.used_bytes {
            facts.used.see(row.ts_ns, used);
        }
    }

    pub(super) fn process_sample(&mut self, row: &ProcessSampleRow) {
        let facts = self.facts(row.proc_id, row.ts_ns);
        facts.pid = row.pid;
        let torch = [row.torch_allocated_bytes, row.torch_reserved_bytes];
        if row.gpu_uuid.is_none() && torch == [None, None] {
            return; // About the host side of the process.
        }
        let place = facts.place(row.gpu_uuid.as_deref(), None);
        match row.nvml_used_bytes {
            Some(used) => place.nvml.see(row.ts_ns, used),
            None if torch == [None, None] => place.nvml_unavailable = true,
            None => {}
        }
        if let Some(allocated) = row.torch_allocated_bytes {
            place.allocated.see(row.ts_ns, allocated);
        }
        if let Some(reserved) = row.torch_reserved_bytes {
            place.reserved.see(row.ts_ns, reserved);
            place.torch_reserved.see(row.ts_ns, reserved);
        }
        if row.torch_peak_allocated_bytes > place.peak_allocated {
            place.peak_allocated = row.torch_peak_allocated_bytes;
            place.peak_allocated_ns = Some(row.ts_ns);
        }
        place.peak_reserved = place.peak_reserved.max(row.torch_peak_reserved_bytes);
    }

    pub(super) fn site_usage(&mut self, row: &SiteUsageRow) {
        if row.level != Level::Tensor.as_str() {
            return;
        }
        let when = When { ns: row.ts_ns, pass: row.backward_pass };
        self.sites.pass(row.proc_id, when);
        if row.stack_id != 0 {
            return self.site(row, when);
        }
        let (uuid, ordinal) = (row.gpu_uuid.as_deref(), row.cuda_ordinal);
        let holder = self.sites.holder(row.proc_id, Level::Tensor, uuid, ordinal);
        let total = Total { bytes: row.live_bytes, allocs: Some(row.allocs) };
        self.sites.totals.insert(holder, total);
        let facts = self.facts(row.proc_id, row.ts_ns);
        let place = facts.place(row.gpu_uuid.as_deref(), row.cuda_ordinal);
        place.allocated.see(row.ts_ns, row.live_bytes);
        place.tensors.see(row.ts_ns, row.live_bytes);
        place.handed.see(row.ts_ns, row.live_bytes, row.allocated_bytes);
    }

    fn site(&mut self, row: &SiteUsageRow, when: When) {
        self.span.see(row.ts_ns);
        self.by_site.insert(row.proc_id);
        let (uuid, ordinal) = (row.gpu_uuid.as_deref(), row.cuda_ordinal);
        self.facts(row.proc_id, row.ts_ns).place(uuid, ordinal);
        let holder = self.sites.holder(row.proc_id, Level::Tensor, uuid, ordinal);
        let told = Told {
            bytes: row.live_bytes,
            floor: row.floor_bytes,
            count: row.live_count,
            allocated_bytes: row.allocated_bytes,
            allocs: row.allocs,
        };
        self.sites.set(&self.stacks, (holder, row.stack_id), when, told);
    }

    /// Keeps the rows of the last moment before the end of the process, which must be known.
    pub(super) fn breakdown(&mut self, row: BreakdownRow) {
        if self.refusals.held(&row) {
            return;
        }
        if row.proc_id == 0 {
            self.span.see(row.ts_ns);
            let facts = self.devices.entry(row.gpu_uuid.clone()).or_default();
            return keep_latest(&mut facts.breakdown, row);
        }
        let facts = self.facts(row.proc_id, row.ts_ns);
        if facts.end_ns().is_none_or(|end_ns| row.ts_ns <= end_ns) {
            keep_latest(&mut facts.place(Some(&row.gpu_uuid), None).breakdown, row);
        }
    }

    pub(super) fn oom(&mut self, row: OomRow) {
        self.facts(row.proc_id, row.ts_ns);
        let total = row.device_total_bytes.or_else(|| {
            let device = self.devices.get(row.gpu_uuid.as_deref()?)?;
            device.total_bytes
        });
        self.refusals.see(row, total);
    }

    pub(super) fn annotation(&mut self, row: AnnotationRow) {
        self.span.see(row.ts_ns);
        match (row.kind.as_str(), row.proc_id) {
            ("late_attach", Some(proc_id)) => self.facts(proc_id, row.ts_ns).late = true,
            ("warning" | "clock" | "brake" | "after_death", _)
                if self.warnings.len() < MAX_WARNINGS =>
            {
                self.warnings.push(row);
            }
            ("warning" | "clock" | "brake" | "after_death", _) => self.more_warnings += 1,
            ("deleted", _) => self.deleted.see(&row),
            _ => {}
        }
    }

    pub(super) fn loss(&mut self, row: &LossRow) {
        self.span.see(row.ts_ns);
        let facts = self.losses.entry((row.reason.clone(), row.proc_id)).or_default();
        facts.pid = row.pid.or(facts.pid);
        facts.count = facts.count.saturating_add(row.count);
        if let Some(bytes) = row.bytes {
            facts.bytes = Some(facts.bytes.unwrap_or(0).saturating_add(bytes));
        }
        facts.window.see(row.window_start_ns.min(row.ts_ns));
        facts.window.see(row.ts_ns);
    }

    /// Begins a run's state with a checkpoint, where its first events are gone.
    pub(super) fn start_from(&mut self, run: Run8, row: &LiveRow) {
        self.facts(row.proc_id, row.ts_ns).run = Some(run);
        let index = self.state_of(run);
        self.states[index].1.start_from(row);
    }

    fn state_of(&mut self, run: Run8) -> usize {
        self.states.iter().position(|(of, ..)| *of == run).unwrap_or_else(|| {
            self.states.push((run, State::new(), Span::default()));
            self.states.len() - 1
        })
    }

    pub(super) fn event(&mut self, run: Run8, row: &EventRow) {
        self.events += 1;
        let index = self.state_of(run);
        self.refusals.event(row, &self.states[index].1);
        self.states[index].2.see(row.ts_ns);
        if row.implicit {
            self.tear_down(index, row);
        }
        match row.op.as_ref() {
            "fail" => self.failure(row),
            "ctx" => {
                let (uuid, ordinal) = (row.gpu_uuid.as_deref(), row.cuda_ordinal);
                self.facts(row.proc_id, row.ts_ns).place(uuid, ordinal);
                contexts::see(&mut self.contexts, row);
            }
            _ => self.site_event(index, row),
        }
        if let Some(level) = course_level(&row.level)
            && row.delta_bytes != 0
            && !row.implicit
        {
            let facts = self.facts(row.proc_id, row.ts_ns);
            // A course must not begin under the process's number and go on under the UUID.
            let uuid = row.gpu_uuid.as_deref().filter(|_| row.cuda_ordinal.is_none());
            let place = facts.place(uuid, row.cuda_ordinal);
            let course = place.courses.entry(level).or_default();
            course.see(row.ts_ns, course.bytes.saturating_add(row.delta_bytes));
        }
        self.states[index].1.apply(row);
    }

    /// Changes what a stack holds. The end of a process frees all, which says nothing of leaks.
    fn site_event(&mut self, index: usize, row: &EventRow) {
        let Some(level) = Level::parse(&row.level) else { return };
        let when = When { ns: row.ts_ns, pass: row.backward_pass };
        self.sites.pass(row.proc_id, when);
        if matches!(level, Level::Virtual | Level::Imported) || row.delta_bytes == 0 {
            return;
        }
        if level == Level::Tensor && self.by_site.contains(&row.proc_id) {
            return;
        }
        let is_alloc = row.op == "alloc";
        let (uuid, ordinal) = (row.gpu_uuid.as_deref(), row.cuda_ordinal);
        let key = (self.sites.holder(row.proc_id, level, uuid, ordinal), row.stack_id);
        let of_end = row.implicit && matches!(row.api.as_ref(), "exit" | "exec");
        if !of_end {
            let total = self.sites.totals.entry(key.0).or_default();
            total.bytes = total.bytes.saturating_add(row.delta_bytes);
        }
        if row.stack_id == 0 {
            self.sites.without_stack += u64::from(is_alloc && level != Level::Tensor);
            return;
        }
        if of_end {
            let process = self.states[index].1.process(row.proc_id);
            if let Some(live) = process.and_then(|process| process.allocation(row.alloc_id)) {
                let oldest = self.oldest.entry(key).or_insert(live.ts_ns);
                *oldest = live.ts_ns.min(*oldest);
            }
            return;
        }
        let count = i64::from(is_alloc) - i64::from(row.op == "free");
        self.sites.change(&self.stacks, key, when, (row.delta_bytes, count));
    }

    fn failure(&mut self, row: &EventRow) {
        let facts = self.facts(row.proc_id, row.ts_ns);
        facts.pid = row.pid;
        let failure = facts.failures.entry((row.api.to_string(), row.result)).or_default();
        failure.count += 1;
        failure.last_ns = failure.last_ns.max(row.ts_ns);
    }

    /// Remembers the device as it is before the first of the frees that nobody called. Where the
    /// program allocates again, the next such free finds it changed and it is remembered anew.
    fn tear_down(&mut self, index: usize, row: &EventRow) {
        if row.api == "reused" {
            return; // A free that was not seen, not an end.
        }
        let Some(process) = self.states[index].1.process(row.proc_id) else { return };
        let Some(live) = process.allocation(row.alloc_id) else { return };
        let Some(device) = process.devices().get(live.device) else { return };
        let facts = self.processes.entry(row.proc_id).or_default();
        let known = facts.teardown.get(&live.device);
        if known.is_none_or(|(known, _)| allocs(known) != allocs(device)) {
            facts.teardown.insert(live.device, (device.clone(), row.ts_ns));
        }
    }
}

fn keep_latest(rows: &mut Vec<BreakdownRow>, row: BreakdownRow) {
    let ts_ns = rows.first().map_or(i64::MIN, |first| first.ts_ns);
    if row.ts_ns > ts_ns {
        rows.clear();
    }
    if row.ts_ns >= ts_ns {
        rows.push(row);
    }
}

/// Allocations ever made on a device.
pub(super) fn allocs(device: &Device) -> u64 {
    Level::ALL.iter().map(|level| device.usage(*level).allocs).sum()
}

fn course_level(level: &str) -> Option<Level> {
    match level {
        "pool" => Some(Level::Pool),
        "managed" => Some(Level::Managed),
        "host" => Some(Level::Host),
        _ => None,
    }
}
