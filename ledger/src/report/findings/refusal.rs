//! Allocations that the driver, or PyTorch, refused for lack of memory.

use std::{cmp::Reverse, collections::BTreeMap};

use serde::Serialize;

use crate::{
    report::{
        clock::Clock,
        collect::{RefusalFacts, RefusalKey},
        model::{Model, Process, Share},
        names,
        units::{show_bytes, show_count},
    },
    rows::OomRow,
};

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
    /// In words.
    pub sentence: String,
}

impl Refusal {
    /// All refusals, latest first, impossible requests last.
    pub(super) fn check(model: &Model, refusals: &BTreeMap<RefusalKey, RefusalFacts>) -> Vec<Self> {
        let mut found: Vec<Self> =
            refusals.iter().map(|(key, facts)| refusal(model, key, facts)).collect();
        found.sort_by_key(|refusal| {
            (refusal.could_ever_fit == Some(false), Reverse(refusal.last_ns), refusal.pid)
        });
        found
    }
}

fn refusal(model: &Model, key: &RefusalKey, facts: &RefusalFacts) -> Refusal {
    let last = &facts.last;
    let process = model.processes.iter().find(|process| process.proc_id == key.proc_id);
    let uuid = last.gpu_uuid.as_deref();
    let device = model.devices.iter().find(|device| Some(device.gpu_uuid.as_str()) == uuid);
    let total = last.device_total_bytes.or(device.and_then(|device| device.total_bytes));
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
        could_ever_fit: last.size_bytes.zip(total).map(|(size, total)| size <= total),
        sentence: String::new(),
    };
    refusal.sentence = sentence(model, process, last, &refusal);
    refusal
}

fn sentence(model: &Model, process: Option<&Process>, row: &OomRow, refusal: &Refusal) -> String {
    let clock = Clock::new(model.start_ns);
    let who = process.map_or("a process".to_owned(), |process| names::process(model, process));
    let size = row.size_bytes.map_or("memory".to_owned(), show_bytes);
    let by = match row.api.as_str() {
        "c10" => "PyTorch".to_owned(),
        api => names::printable(api),
    };
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
    format!("{refused}: {}.", why(model, row, refusal))
}

/// What the device held then, and whether the request could have fitted.
fn why(model: &Model, row: &OomRow, refusal: &Refusal) -> String {
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
    let Some(used) = row.device_used_bytes else {
        return format!("what {gpu} held then is not known{held}");
    };
    let free = total.saturating_sub(used).max(0);
    let then = format!("{gpu} had {} of {} free", show_bytes(free), show_bytes(total));
    if row.size_bytes.is_some_and(|size| size <= free) {
        let reasons = "that reading is older than the request, the free memory is in pieces, or \
                       the process is limited to less";
        return format!("although {then} by NVML's last reading ({reasons}){held}");
    }
    format!("{then} by NVML's last reading{held}")
}
