//! Contexts on devices that a process does not use.

use std::cmp::Reverse;

use serde::Serialize;

use super::leak::{Confidence, share_is_at};
use crate::{
    call::Level,
    report::{
        collect::{ContextFacts, Contexts, Place},
        model::{Model, Process, Share},
        names,
        stacks::Stacks,
        units::show_bytes,
    },
};

/// A process that had more than this on a device used it on purpose.
const STRAY_BYTES: i64 = 64 << 20;
/// So did one that had more than one of this many parts of what it had on its main device.
const STRAY_PART: i64 = 4;
/// A process may give its contexts back at its end.
const CLEAN_UP_NS: i64 = 2_000_000_000;

/// A process holds a context on a device that is not its main one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Context {
    /// The process.
    pub pid: i32,
    /// Its key in the log's tables.
    pub proc_id: String,
    /// Its rank.
    pub rank: Option<i32>,
    /// UUID of the device with the context; `null` where not known.
    pub gpu_uuid: Option<String>,
    /// NVML's number of it.
    pub nvml_index: Option<i32>,
    /// UUID of the device that the process uses.
    pub main_gpu_uuid: Option<String>,
    /// What NVML charges to the process there, at its last reading.
    pub bytes: Option<i64>,
    /// Where the context was created, as `file:line function`.
    pub site: Option<String>,
    /// Stack of that, a key into the log's tables; `0`: none taken.
    pub stack_id: String,
    /// When it was created.
    pub created_ns: i64,
    /// How sure this is.
    pub confidence: Confidence,
    /// Why.
    pub confidence_reason: String,
    /// What to do.
    pub remedy: String,
    /// In words.
    pub sentence: String,
}

impl Context {
    /// All of them, most bytes first.
    pub(super) fn check(model: &Model, contexts: &Contexts, stacks: &Stacks) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for process in &model.processes {
            let Some(main) = main_share(process) else { continue };
            let own = contexts.range((process.proc_id, i64::MIN)..=(process.proc_id, i64::MAX));
            let mut told: Vec<&Place> = Vec::new();
            for (_, context) in own.filter(|(_, context)| is_held(process, context)) {
                if let Some(share) = stray(process, main, context)
                    && !told.contains(&&context.place)
                {
                    told.push(&context.place);
                    found.push(finding(model, process, (main, share), context, stacks));
                }
            }
        }
        found.sort_by_key(|context| (Reverse(context.bytes), context.rank, context.pid));
        found
    }
}

/// Until the end, or until the process gave everything back just before it.
fn is_held(process: &Process, context: &ContextFacts) -> bool {
    context.gone_ns.is_none_or(|gone_ns| {
        process.end_ns.is_some_and(|end_ns| end_ns.saturating_sub(gone_ns) <= CLEAN_UP_NS)
    })
}

/// Where its tensors are, else most of its device memory: bytes that it is known to have allocated.
fn main_share(process: &Process) -> Option<&Share> {
    let tensors = |share: &Share| share.torch.and_then(|torch| torch.peak_allocated_bytes);
    let weight = |share: &Share| (tensors(share).unwrap_or(0), allocated(share));
    process.shares.iter().filter(|share| weight(share) > (0, 0)).max_by_key(|share| weight(share))
}

/// The most that it allocated on a device.
fn allocated(share: &Share) -> i64 {
    let peak = |level| share.level(level).map_or(0, |usage| usage.peak_bytes);
    let torch = share.torch.and_then(|torch| torch.peak_reserved_bytes.max(torch.reserved_bytes));
    peak(Level::Device).saturating_add(peak(Level::Pool)).max(torch.unwrap_or(0))
}

/// The share of the context's device, if that is not where the process works.
fn stray<'a>(process: &'a Process, main: &Share, context: &ContextFacts) -> Option<&'a Share> {
    let share = process.shares.iter().find(|share| share_is_at(share, &context.place))?;
    let bytes = allocated(share);
    let used = bytes > STRAY_BYTES.min(allocated(main) / STRAY_PART);
    let managed = share.level(Level::Managed).is_some();
    (!std::ptr::eq(share, main) && !used && !managed).then_some(share)
}

fn finding(
    model: &Model,
    process: &Process,
    (main, share): (&Share, &Share),
    context: &ContextFacts,
    stacks: &Stacks,
) -> Context {
    let late = process.late;
    let (confidence, reason) = if late {
        (
            Confidence::Medium,
            "the process ran before the recording: what it used there is not known",
        )
    } else {
        (Confidence::High, "it allocated elsewhere, and next to nothing here")
    };
    let gpu = names::device_of(model, share);
    let bytes = share.nvml_used.map(|reading| reading.bytes);
    let site = stacks.site(context.stack_id).filter(|site| !site.is_empty());
    let held = if process.end_ns.is_some() { "held" } else { "holds" };
    let charged = bytes.map(|bytes| format!(" ({})", show_bytes(bytes))).unwrap_or_default();
    let at = site.map(|site| format!(", created at {}", names::printable(site)));
    let sentence = format!(
        "{} {held} a context on {gpu}{charged}{} while it works on {}.",
        names::ranked(model, process),
        at.unwrap_or_default(),
        names::device_of(model, main),
    );
    Context {
        pid: process.pid,
        proc_id: process.proc_id.to_string(),
        rank: process.rank,
        gpu_uuid: share.gpu_uuid.clone(),
        nvml_index: share.nvml_index,
        main_gpu_uuid: main.gpu_uuid.clone(),
        bytes,
        site: site.map(str::to_owned),
        stack_id: context.stack_id.to_string(),
        created_ns: context.created_ns,
        confidence,
        confidence_reason: reason.to_owned(),
        remedy:
            "Give the process its own device only (CUDA_VISIBLE_DEVICES), or choose the device \
                 before the first CUDA call: torch.cuda.set_device, map_location of torch.load."
                .to_owned(),
        sentence,
    }
}
