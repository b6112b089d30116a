//! Contexts on devices that a process does not use.

use std::cmp::Reverse;

use serde::Serialize;

use super::leak::{Confidence, share_is_at};
use crate::{
    call::Level,
    report::{
        clock::Clock,
        collect::{ContextFacts, Contexts, Place},
        model::{Model, Process, Share},
        names,
        stacks::Stacks,
        units::show_bytes,
    },
};

/// A process that has more than this on a device uses it on purpose.
const STRAY_BYTES: i64 = 64 << 20;
/// So does one that has more than one of this many parts of what it had on its main device.
const STRAY_PART: i64 = 4;
/// What stays where nothing was allocated for so long, and for most of the work, is not worked with.
const IDLE_NS: i64 = 10_000_000_000;
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
    /// What `PyTorch`'s allocator reserves there, at its last report.
    pub reserved_bytes: Option<i64>,
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
                if let Some(stray) = stray(process, main, context)
                    && !told.contains(&&context.place)
                {
                    told.push(&context.place);
                    found.push(finding(model, process, &stray, context, stacks));
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

/// Where it works with tensors, more than a few, or has most of them; else most of its device
/// memory: bytes that it is known to have allocated.
fn main_share(process: &Process) -> Option<&Share> {
    let weight = |share: &Share| {
        let peak = share.torch.and_then(|torch| torch.peak_allocated_bytes).unwrap_or(0);
        let works = share.work.is_some_and(|work| work.is_work() && work.peak_bytes > STRAY_BYTES);
        let held = share.work.map_or(peak, |work| work.held_bytes);
        (works, held, peak, allocated(share))
    };
    let used = |share: &&Share| weight(share) > (false, 0, 0, 0);
    process.shares.iter().filter(used).max_by_key(|share| weight(share))
}

/// The most that it allocated on a device.
fn allocated(share: &Share) -> i64 {
    taken(share).max(reserved(share))
}

/// The most that it took from the driver.
fn taken(share: &Share) -> i64 {
    let peak = |level| share.level(level).map_or(0, |usage| usage.peak_bytes);
    peak(Level::Device).saturating_add(peak(Level::Pool))
}

/// The most that `PyTorch` reserved.
fn reserved(share: &Share) -> i64 {
    let torch = share.torch.and_then(|torch| torch.peak_reserved_bytes.max(torch.reserved_bytes));
    torch.unwrap_or(0)
}

/// A context where the process does not work.
struct Stray<'a> {
    /// Where it works.
    main: &'a Share,
    /// Where the context is.
    share: &'a Share,
    why: Why,
}

/// Why a context counts as stray.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// Next to nothing was ever allocated there.
    Bare,
    /// What was loaded there is mostly gone.
    Loaded,
    /// What was loaded there stays, and nothing else happens.
    Kept,
}

/// The context's device, if that is not where the process works.
fn stray<'a>(process: &'a Process, main: &'a Share, context: &ContextFacts) -> Option<Stray<'a>> {
    let share = process.shares.iter().find(|share| share_is_at(share, &context.place))?;
    if std::ptr::eq(share, main) || share.level(Level::Managed).is_some() {
        return None;
    }
    let little = STRAY_BYTES.min(allocated(main) / STRAY_PART);
    let why = if allocated(share) <= little {
        Why::Bare
    } else if process.late || taken(share) - reserved(share) > little {
        // What it did before, or does without PyTorch, is not known well enough.
        return None;
    } else {
        loaded(share, main, context, little)?
    };
    Some(Stray { main, share, why })
}

/// A checkpoint that was loaded onto the wrong device: at once, while the work goes on elsewhere.
fn loaded(share: &Share, main: &Share, context: &ContextFacts, little: i64) -> Option<Why> {
    let (here, there) = share.work.zip(main.work)?;
    let idle_ns = there.last_ns.saturating_sub(here.last_ns);
    if !here.is_load() || idle_ns <= 0 {
        return None;
    }
    if here.held_bytes <= little {
        return Some(Why::Loaded);
    }
    let most = there.last_ns.saturating_sub(context.created_ns) / 2;
    let kept = there.is_work() && here.held_bytes <= there.peak_bytes;
    (kept && idle_ns >= IDLE_NS.max(most)).then_some(Why::Kept)
}

/// `546.0 MiB, 28.0 MiB of it reserved by PyTorch`, as far as it is known.
fn size(share: &Share, clock: Clock) -> String {
    let torch = share.torch.and_then(|torch| Some((torch.reserved_bytes?, torch.ts_ns)));
    let torch = torch.filter(|(bytes, _)| *bytes > 0).map(|(bytes, ns)| (show_bytes(bytes), ns));
    let Some(used) = share.nvml_used else {
        return at_least(share, torch.map(|(reserved, _)| reserved));
    };
    let bytes = show_bytes(used.bytes);
    match torch {
        None => bytes,
        Some((reserved, ns)) if used.ts_ns >= ns => {
            format!("{bytes}, {reserved} of it reserved by PyTorch")
        }
        Some((reserved, _)) => {
            let at = clock.time(used.ts_ns);
            format!("{bytes} at {at}; at last PyTorch reserves {reserved} there")
        }
    }
}

/// What is known of its size without a reading.
fn at_least(share: &Share, reserved: Option<String>) -> String {
    let live = share.level(Level::Device).map_or(0, |usage| usage.live_bytes);
    let unknown = if share.nvml_unavailable {
        "NVML does not tell more"
    } else {
        "no reading of NVML shows it"
    };
    match reserved {
        Some(bytes) => format!("more than {bytes}, which PyTorch reserves there; {unknown}"),
        None if live > 0 => {
            format!("more than {}, which it allocated there; {unknown}", show_bytes(live))
        }
        None => format!("size not known: {unknown}"),
    }
}

/// How sure a finding is, and why.
fn confidence(process: &Process, why: Why) -> (Confidence, &'static str) {
    if process.late {
        let reason = "the process ran before the recording: what it used there is not known";
        return (Confidence::Medium, reason);
    }
    match why {
        Why::Bare => (Confidence::High, "it allocated elsewhere, and next to nothing here"),
        Why::Loaded => {
            (Confidence::High, "it works elsewhere; what was loaded here is mostly gone")
        }
        Why::Kept => (
            Confidence::Medium,
            "it works elsewhere; what was loaded here stays, which may be meant",
        ),
    }
}

fn finding(
    model: &Model,
    process: &Process,
    stray: &Stray<'_>,
    context: &ContextFacts,
    stacks: &Stacks,
) -> Context {
    let Stray { main, share, why } = *stray;
    let (confidence, reason) = confidence(process, why);
    let clock = Clock::new(model.start_ns);
    let gpu = names::device_of(model, share);
    let bytes = share.nvml_used.map(|reading| reading.bytes);
    let site = stacks.site(context.stack_id).filter(|site| !site.is_empty());
    let held = if process.end_ns.is_some() { "held" } else { "holds" };
    let charged = size(share, clock);
    let at = site.map(|site| format!(", created at {}", names::printable(site)));
    let sentence = format!(
        "{} {held} a context on {gpu} ({charged}){} while it works on {}.{}",
        names::ranked(model, process),
        at.unwrap_or_default(),
        names::device_of(model, main),
        stays(share, why, clock),
    );
    Context {
        pid: process.pid,
        proc_id: process.proc_id.to_string(),
        rank: process.rank,
        gpu_uuid: share.gpu_uuid.clone(),
        nvml_index: share.nvml_index,
        main_gpu_uuid: main.gpu_uuid.clone(),
        bytes,
        reserved_bytes: share.torch.and_then(|torch| torch.reserved_bytes),
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

/// What stays there, where that is why.
fn stays(share: &Share, why: Why, clock: Clock) -> String {
    match share.work.filter(|_| why == Why::Kept) {
        Some(work) => format!(
            " {} of tensors stay there since {}, and nothing was allocated there since.",
            show_bytes(work.held_bytes),
            clock.time(work.last_ns)
        ),
        None => String::new(),
    }
}
