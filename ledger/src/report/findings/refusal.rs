//! Allocations that the driver, or PyTorch, refused for lack of memory.

use std::{cmp::Reverse, collections::BTreeMap};

use serde::Serialize;

use super::Found;
use crate::{
    report::{
        clock::Clock,
        collect::{RefusalFacts, RefusalKey},
        model::{Breakdown, Model, Process, Share},
        names,
        stacks::Stacks,
        units::{show_bytes, show_count},
    },
    rows::{BreakdownRow, EventRow, OomRow},
};

/// Why there was not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// More than the device has.
    TooLarge,
    /// Pinned host memory, not the device's.
    HostMemory,
    /// Addresses, not memory.
    AddressSpace,
    /// The process's memory had grown until then.
    Growth,
    /// PyTorch's cache had as much free, in pieces that are too small.
    Fragmentation,
    /// PyTorch's cache could have given as much back.
    Cache,
    /// Without the memory of other processes it would have fitted.
    OtherProcesses,
    /// What the process held left no room.
    Full,
}

/// What a process held at that moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// Process id on the host.
    pub pid: i32,
    /// Its key in the log's tables.
    pub proc_id: String,
    /// Its rank.
    pub rank: Option<i32>,
    /// Short name.
    pub name: String,
    /// By part; what only NVML tells is as of its last reading.
    pub breakdown: Breakdown,
}

/// What the process had done before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Before {
    /// When.
    pub ts_ns: i64,
    /// Function.
    pub api: String,
    /// Change of its memory.
    pub delta_bytes: i64,
    /// Kind of memory.
    pub level: String,
    /// Where it was allocated, where that is known.
    pub site: Option<String>,
}

/// Requests of one function in one process that were refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The process.
    pub pid: i32,
    /// Its key in the log's tables.
    pub proc_id: String,
    /// Its rank.
    pub rank: Option<i32>,
    /// UUID of the device; `null` where not known.
    pub gpu_uuid: Option<String>,
    /// NVML's number of it.
    pub nvml_index: Option<i32>,
    /// Function that refused; `c10`: PyTorch's own report.
    pub api: String,
    /// How often.
    pub count: u64,
    /// When first.
    pub first_ns: i64,
    /// When last. What follows is of that time.
    pub last_ns: i64,
    /// Bytes asked for.
    pub size_bytes: Option<i64>,
    /// Memory of the device that was in use, by NVML's reading before.
    pub device_used_bytes: Option<i64>,
    /// Memory of the device in all.
    pub device_total_bytes: Option<i64>,
    /// Device memory that the process itself held.
    pub process_live_bytes: Option<i64>,
    /// PyTorch's allocated bytes.
    pub torch_allocated_bytes: Option<i64>,
    /// PyTorch's reserved bytes.
    pub torch_reserved_bytes: Option<i64>,
    /// The request could have fitted on an empty device; `null` where that is not known.
    pub could_ever_fit: Option<bool>,
    /// Where it was asked for, `file:line function`.
    pub site: Option<String>,
    /// What there was not enough of: device, host, `address_space`.
    pub memory: Option<String>,
    /// How it ended: retried (the next try went well), raised, refused; `null` where not known.
    pub outcome: Option<String>,
    /// Why, as far as the log tells.
    pub cause: Option<Cause>,
    /// Memory of other processes on the device.
    pub others_bytes: Option<i64>,
    /// Who held what on the device, most first.
    pub holders: Vec<Holder>,
    /// What the process had done before, oldest first.
    pub before: Vec<Before>,
    /// In words.
    pub sentence: String,
}

impl Refusal {
    /// All refusals, latest first, impossible requests last. `growing`: keys of processes whose
    /// memory grew until the end.
    pub(super) fn check(model: &Model, found: &Found<'_>, growing: &[String]) -> Vec<Self> {
        let refusals: &BTreeMap<RefusalKey, RefusalFacts> = found.refusals;
        let mut found: Vec<Self> = refusals
            .iter()
            .map(|(key, facts)| refusal(model, found.stacks, growing, (key, facts)))
            .collect();
        found.sort_by_key(|refusal| {
            let impossible = refusal.could_ever_fit == Some(false);
            (refusal.went_well(), impossible, Reverse(refusal.last_ns), refusal.pid)
        });
        found
    }

    /// The program got its memory after all.
    pub fn went_well(&self) -> bool {
        self.outcome.as_deref() == Some("retried")
    }

    pub(super) fn tag(&self) -> &'static str {
        if self.went_well() { "RETRY" } else { "OOM" }
    }

    /// What the process itself held.
    fn own(&self) -> Option<&Breakdown> {
        let own = self.holders.iter().find(|holder| holder.proc_id == self.proc_id);
        own.map(|holder| &holder.breakdown)
    }

    /// Free bytes of the device: NVML's reading is from before, the account is of that moment.
    fn free_bytes(&self) -> Option<i64> {
        let (total, used) = self.device_total_bytes.zip(self.device_used_bytes)?;
        let held = self.holders.iter().map(|holder| holder.breakdown.nvml_used_bytes);
        let held = held.fold(0, i64::saturating_add);
        Some(total.saturating_sub(used.max(held)).max(0))
    }
}

fn refusal(
    model: &Model,
    stacks: &Stacks,
    growing: &[String],
    (key, facts): (&RefusalKey, &RefusalFacts),
) -> Refusal {
    let last = &facts.last;
    let process = model.processes.iter().find(|process| process.proc_id == key.proc_id);
    let uuid = last.gpu_uuid.as_deref();
    let device = model.devices.iter().find(|device| Some(device.gpu_uuid.as_str()) == uuid);
    let total = last.device_total_bytes.or(device.and_then(|device| device.total_bytes));
    let on_device = last.memory.as_deref().is_none_or(|memory| memory == "device");
    let mut refusal = Refusal {
        pid: process.map_or(0, |process| process.pid),
        proc_id: key.proc_id.to_string(),
        rank: process.and_then(|process| process.rank),
        gpu_uuid: last.gpu_uuid.clone(),
        nvml_index: last.nvml_index.or(device.and_then(|device| device.nvml_index)),
        api: key.api.clone(),
        count: facts.count,
        first_ns: facts.first_ns,
        last_ns: last.ts_ns,
        size_bytes: last.size_bytes,
        device_used_bytes: last.device_used_bytes,
        device_total_bytes: total,
        process_live_bytes: last.process_live_bytes,
        torch_allocated_bytes: last.torch_allocated_bytes,
        torch_reserved_bytes: last.torch_reserved_bytes,
        could_ever_fit: last
            .size_bytes
            .zip(total)
            .filter(|_| on_device)
            .map(|(size, total)| size <= total),
        site: stacks.site(last.stack_id).map(str::to_owned),
        memory: last.memory.clone(),
        outcome: last.outcome.clone(),
        cause: None,
        others_bytes: last.others_bytes,
        holders: holders(model, stacks, &facts.held),
        before: facts.before.iter().map(|row| before(row, stacks)).collect(),
        sentence: String::new(),
    };
    let grew = facts.grew || growing.contains(&refusal.proc_id);
    refusal.cause = cause(&refusal, grew);
    refusal.sentence = sentence(model, process, last, &refusal);
    refusal
}

/// Who held what at that moment, most first.
fn holders(model: &Model, stacks: &Stacks, rows: &[BreakdownRow]) -> Vec<Holder> {
    let mut by_process: BTreeMap<i64, Vec<BreakdownRow>> = BTreeMap::new();
    for row in rows {
        by_process.entry(row.proc_id).or_default().push(row.clone());
    }
    let mut holders: Vec<Holder> = by_process
        .into_iter()
        .filter_map(|(proc_id, rows)| {
            let breakdown = Breakdown::of(&rows, stacks)?;
            let process = model.processes.iter().find(|process| process.proc_id == proc_id);
            Some(Holder {
                pid: process.map_or(0, |process| process.pid),
                proc_id: proc_id.to_string(),
                rank: process.and_then(|process| process.rank),
                name: process.map(|process| process.name.clone()).unwrap_or_default(),
                breakdown,
            })
        })
        .collect();
    holders.sort_by_key(|holder| (Reverse(holder.breakdown.nvml_used_bytes), holder.pid));
    holders
}

fn before(row: &EventRow, stacks: &Stacks) -> Before {
    Before {
        ts_ns: row.ts_ns,
        api: row.api.to_string(),
        delta_bytes: row.delta_bytes,
        level: row.level.to_string(),
        site: stacks.site(row.stack_id).map(str::to_owned),
    }
}

/// Why there was not enough, the most certain reason first.
fn cause(refusal: &Refusal, grows: bool) -> Option<Cause> {
    match refusal.memory.as_deref() {
        Some("host") => return Some(Cause::HostMemory),
        Some("address_space") => return Some(Cause::AddressSpace),
        _ => {}
    }
    if refusal.could_ever_fit == Some(false) {
        return Some(Cause::TooLarge);
    }
    if grows {
        return Some(Cause::Growth);
    }
    let size = refusal.size_bytes?;
    let part = |category: &str| refusal.own().and_then(|own| own.bytes(category)).unwrap_or(0);
    let torch = refusal.torch_reserved_bytes.zip(refusal.torch_allocated_bytes);
    let cached = torch.map_or(0, |(reserved, allocated)| reserved - allocated);
    if refusal.api == "c10" && cached >= size {
        return Some(Cause::Fragmentation);
    }
    let free = refusal.free_bytes()?;
    let missing = size.saturating_sub(free);
    if missing > 0 && part("returnable") >= missing {
        return Some(Cause::Cache);
    }
    let others = refusal.others_bytes.unwrap_or(0);
    if missing > 0 && others >= missing {
        return Some(Cause::OtherProcesses);
    }
    (missing > 0).then_some(Cause::Full)
}

fn sentence(model: &Model, process: Option<&Process>, row: &OomRow, refusal: &Refusal) -> String {
    let clock = Clock::new(model.start_ns);
    let who = process.map_or("a process".to_owned(), |process| names::process(model, process));
    let size = row.size_bytes.map_or("memory".to_owned(), show_bytes);
    let by = match row.api.as_str() {
        "c10" => "PyTorch".to_owned(),
        api => names::printable(api),
    };
    let at_site = refusal.site.as_deref().map(|site| format!(" ({})", names::printable(site)));
    let by = by + &at_site.unwrap_or_default();
    let when = clock.time(row.ts_ns);
    let times = match refusal.count {
        1 => format!("at {when}"),
        count => format!(
            "{} times from {} to {when}, at last",
            show_count(count),
            clock.time(refusal.first_ns)
        ),
    };
    let refused = match refusal.count {
        1 => format!("{who} was refused {size} by {by} {times}"),
        _ => format!("{who} was refused memory by {by} {times} {size}"),
    };
    if refusal.went_well() {
        return format!("{refused}, and had it at the next try.");
    }
    let because = because(model, refusal).map(|because| format!(" {because}"));
    format!("{refused}: {}.{}", why(model, row, refusal), because.unwrap_or_default())
}

/// What the device held then, and whether the request could have fitted.
fn why(model: &Model, row: &OomRow, refusal: &Refusal) -> String {
    match refusal.cause {
        Some(Cause::HostMemory) => return "that is memory of the host, not of a GPU".to_owned(),
        Some(Cause::AddressSpace) => return "that is address space, not memory".to_owned(),
        _ => {}
    }
    let share =
        Share { gpu_uuid: row.gpu_uuid.clone(), nvml_index: row.nvml_index, ..Share::default() };
    let gpu = names::device_of(model, &share);
    let Some(total) = refusal.device_total_bytes else {
        return format!("what {gpu} held then, and whether it could have fitted, is not known");
    };
    if refusal.could_ever_fit == Some(false) {
        return format!("that could never fit on {gpu}, which has {}", show_bytes(total));
    }
    let held = match (row.process_live_bytes, row.torch_allocated_bytes, row.torch_reserved_bytes) {
        (Some(live), Some(allocated), Some(reserved)) => format!(
            "; the process held {}, of which PyTorch's tensors used {} of {} reserved",
            show_bytes(live),
            show_bytes(allocated),
            show_bytes(reserved)
        ),
        (Some(live), ..) => format!("; the process itself held {}", show_bytes(live)),
        _ => String::new(),
    };
    let Some(free) = refusal.free_bytes() else {
        return format!("what {gpu} held then is not known{held}");
    };
    let then = format!("{gpu} had {} of {} free", show_bytes(free), show_bytes(total));
    if row.size_bytes.is_some_and(|size| size <= free) {
        let reasons = "that reading is older than the request, the free memory is in pieces, or \
                       the process is limited to less";
        return format!("although {then} by NVML's last reading ({reasons}){held}");
    }
    let by = if refusal.holders.is_empty() { " by NVML's last reading" } else { "" };
    format!("{then}{by}{held}")
}

/// The reason in words, where the figures do not say it already.
fn because(model: &Model, refusal: &Refusal) -> Option<String> {
    let torch = refusal.torch_reserved_bytes.zip(refusal.torch_allocated_bytes);
    let cached = torch.map_or(0, |(reserved, allocated)| reserved - allocated);
    Some(match refusal.cause? {
        Cause::Growth => "Its memory had grown steadily until then.".to_owned(),
        Cause::Fragmentation => format!(
            "{} were free in PyTorch's cache, in no piece that large: it is fragmented; expandable \
             segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) or fewer sizes help.",
            show_bytes(cached)
        ),
        Cause::Cache => {
            let own = refusal.own().and_then(|own| own.bytes("returnable")).unwrap_or(0);
            format!("PyTorch could have given {} back (torch.cuda.empty_cache()).", show_bytes(own))
        }
        Cause::OtherProcesses => format!(
            "Without the {} of other processes{} it would have fitted.",
            show_bytes(refusal.others_bytes.unwrap_or(0)),
            largest_other(model, refusal)
        ),
        Cause::TooLarge | Cause::HostMemory | Cause::AddressSpace | Cause::Full => return None,
    })
}

/// ` (most of it pid 7711 (serve.py), 8.6 GiB)`.
fn largest_other(model: &Model, refusal: &Refusal) -> String {
    let other = refusal.holders.iter().find(|holder| holder.proc_id != refusal.proc_id);
    let named = other.and_then(|other| {
        let of = model.processes.iter().find(|of| of.proc_id.to_string() == other.proc_id)?;
        let held = show_bytes(other.breakdown.nvml_used_bytes);
        Some(format!(" (most of it {}, {held})", names::process(model, of)))
    });
    named.unwrap_or_default()
}
