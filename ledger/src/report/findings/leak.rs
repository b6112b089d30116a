//! Live bytes of one place of allocation that grow until the end.

use std::cmp::Reverse;

use serde::Serialize;

use crate::{
    call::Level,
    report::{
        clock::Clock,
        collect::Place,
        model::{Model, Of, Process, Share},
        names,
        suspects::Suspect,
        units::{counted, show_bytes, show_count, show_duration, show_rate},
        words,
    },
};

/// Growth below this leaves a doubt: caches of small things grow for long.
const PLAIN_BYTES: i64 = 16 << 20;
/// Windows of a rise from which on its length leaves no doubt.
const PLAIN_WINDOWS: usize = 16;

/// How sure a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// Nothing speaks against it.
    High,
    /// One thing that would confirm it is not known.
    Medium,
    /// Something speaks against it, or records are missing.
    Low,
}

/// What one place allocated grows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leak {
    /// The process.
    pub pid: i32,
    /// Its key in the log's tables.
    pub proc_id: String,
    /// Its rank.
    pub rank: Option<i32>,
    /// UUID of the device; `null` where not known, and for pinned host memory.
    pub gpu_uuid: Option<String>,
    /// NVML's number of it.
    pub nvml_index: Option<i32>,
    /// Kind of memory.
    pub level: Level,
    /// Where it was allocated, as `file:line function`; `null` where the stack was not written.
    pub site: Option<String>,
    /// The stack of that site that holds most, a key into the log's tables.
    pub stack_id: String,
    /// The nearest caller in the user's own code, at another line.
    pub called_from: Option<String>,
    /// Robust rate of this place.
    pub bytes_per_second: f64,
    /// Rate of all that grows in the process at this level.
    pub process_bytes_per_second: f64,
    /// Share of this place in that, percent.
    pub share_percent: f64,
    /// Rate by backward passes, where the growth was judged by them.
    pub bytes_per_pass: Option<f64>,
    /// Blocks that stay of each backward pass.
    pub blocks_per_pass: Option<f64>,
    /// Begin of the growth, warm-up left out.
    pub since_ns: i64,
    /// Its end.
    pub until_ns: i64,
    /// What was held at the begin and never came back.
    pub from_bytes: i64,
    /// The same at the end.
    pub to_bytes: i64,
    /// Blocks alive at the end.
    pub live_count: Option<i64>,
    /// When the oldest of them was allocated.
    pub oldest_ns: Option<i64>,
    /// Calls of the process are missing, so it may have grown less.
    pub account_has_losses: bool,
    /// How sure this is.
    pub confidence: Confidence,
    /// Why.
    pub confidence_reason: String,
    /// What to do.
    pub remedy: String,
    /// In words.
    pub sentence: String,
}

impl Leak {
    /// The word in front of the sentence.
    pub(super) fn tag(&self) -> &'static str {
        if self.confidence == Confidence::Low { "LEAK?" } else { "LEAK" }
    }

    /// All places that leak, fastest first.
    pub(super) fn check(model: &Model, suspects: &[Suspect]) -> Vec<Self> {
        let mut leaks: Vec<Self> = Vec::new();
        for process in &model.processes {
            let own: Vec<&Suspect> =
                suspects.iter().filter(|s| s.proc_id == process.proc_id).collect();
            for suspect in &own {
                let share = share_of(process, suspect);
                if !is_explained(share, suspect, &own) {
                    leaks.push(leak(model, process, share, suspect, &own));
                }
            }
        }
        leaks.sort_by(|a, b| {
            let key = |leak: &Self| (leak.confidence == Confidence::Low, Reverse(rate(leak)));
            key(a).cmp(&key(b)).then_with(|| a.site.cmp(&b.site))
        });
        leaks
    }

    /// It tells of what `of` would tell of the whole process, most of it.
    pub(super) fn covers(&self, process: &Process, share: &Share, of: Of) -> bool {
        let level = match of {
            Of::Tensors => Level::Tensor,
            // Tensors that grow make the cache grow.
            Of::TorchReserved => return self.is_of(process, share) && self.level == Level::Tensor,
            // Without PyTorch's own figures its segments cannot be told from other memory.
            Of::Device if share.torch.is_some_and(|torch| torch.reserved_bytes.is_none()) => {
                let told = [Level::Tensor, Level::Device].contains(&self.level);
                return self.is_of(process, share) && told;
            }
            Of::Device => Level::Device,
            Of::Pool => Level::Pool,
            Of::Managed => Level::Managed,
            Of::Host => return self.is_process(process) && self.level == Level::Host,
        };
        self.is_of(process, share) && self.level == level
    }

    fn is_process(&self, process: &Process) -> bool {
        self.proc_id == process.proc_id.to_string()
    }

    fn is_of(&self, process: &Process, share: &Share) -> bool {
        self.is_process(process) && self.gpu_uuid == share.gpu_uuid
    }
}

fn rate(leak: &Leak) -> i64 {
    leak.bytes_per_second as i64
}

fn share_of<'a>(process: &'a Process, suspect: &Suspect) -> Option<&'a Share> {
    process.shares.iter().find(|share| share_is_at(share, &suspect.place))
}

/// Whether a share is of this place.
pub(super) fn share_is_at(share: &Share, place: &Place) -> bool {
    match place {
        Place::Gpu(uuid) => share.gpu_uuid.as_ref() == Some(uuid),
        Place::Ordinal(ordinal) => share.gpu_uuid.is_none() && share.cuda_ordinal == Some(*ordinal),
        Place::Unknown => share.gpu_uuid.is_none() && share.cuda_ordinal.is_none(),
    }
}

/// Segments of PyTorch's allocator: its tensors, or the growth of its cache, tell of them. Where
/// the frames do not show the allocator, its own figure does.
fn is_explained(share: Option<&Share>, suspect: &Suspect, own: &[&Suspect]) -> bool {
    if suspect.level != Level::Device {
        return false;
    }
    if suspect.torch_allocator {
        return true;
    }
    let reserved = share.and_then(|share| share.trend(Of::TorchReserved));
    let reserved = reserved.map_or(0.0, |trend| trend.bytes_per_second.max(0.0));
    let here = |other: &&&Suspect| {
        other.level == Level::Device
            && other.place == suspect.place
            && !std::ptr::eq(**other, suspect)
    };
    // What is known to be the allocator's, and what is larger than this, comes first.
    let first: f64 = own
        .iter()
        .filter(here)
        .filter(|other| other.torch_allocator || other.bytes_per_second > suspect.bytes_per_second)
        .map(|other| other.bytes_per_second)
        .sum();
    reserved - first >= suspect.bytes_per_second / 2.0
}

fn leak(
    model: &Model,
    process: &Process,
    share: Option<&Share>,
    suspect: &Suspect,
    own: &[&Suspect],
) -> Leak {
    let same = |other: &&&Suspect| other.level == suspect.level && other.place == suspect.place;
    let together: f64 = own.iter().filter(same).map(|other| other.bytes_per_second).sum();
    let whole = of(suspect.level).and_then(|of| share?.trend(of)).filter(|trend| trend.grows);
    let whole = whole.map_or(together, |trend| trend.bytes_per_second.max(together));
    let account_has_losses = model
        .losses
        .iter()
        .any(|loss| loss.affects_account && loss.proc_id.is_none_or(|of| of == process.proc_id));
    let (confidence, reason) = confidence(suspect, account_has_losses);
    let gpu_uuid = match &suspect.place {
        Place::Gpu(uuid) => Some(uuid.clone()),
        _ => None,
    };
    let mut leak = Leak {
        pid: process.pid,
        proc_id: process.proc_id.to_string(),
        rank: process.rank,
        gpu_uuid,
        nvml_index: share.and_then(|share| share.nvml_index),
        level: suspect.level,
        site: suspect.site.clone(),
        stack_id: suspect.stack_id.to_string(),
        called_from: suspect.called_from.clone(),
        bytes_per_second: suspect.bytes_per_second,
        process_bytes_per_second: whole,
        share_percent: (suspect.bytes_per_second / whole * 100.0).min(100.0),
        bytes_per_pass: suspect.bytes_per_pass,
        blocks_per_pass: suspect.blocks_per_pass,
        since_ns: suspect.since_ns,
        until_ns: suspect.until_ns,
        from_bytes: suspect.from_bytes,
        to_bytes: suspect.to_bytes,
        live_count: suspect.live_count,
        oldest_ns: suspect.oldest_ns,
        account_has_losses,
        confidence,
        confidence_reason: reason.to_owned(),
        remedy: remedy(suspect),
        sentence: String::new(),
    };
    leak.sentence = sentence(model, process, share, &leak);
    leak
}

const fn of(level: Level) -> Option<Of> {
    match level {
        Level::Tensor => Some(Of::Tensors),
        Level::Device => Some(Of::Device),
        Level::Pool => Some(Of::Pool),
        Level::Managed => Some(Of::Managed),
        Level::Host => Some(Of::Host),
        Level::Virtual | Level::Imported => None,
    }
}

fn confidence(suspect: &Suspect, account_has_losses: bool) -> (Confidence, &'static str) {
    if account_has_losses {
        return (
            Confidence::Low,
            "calls of the process are missing: a lost free looks like a leak",
        );
    }
    if suspect.windows < PLAIN_WINDOWS {
        return (Confidence::Medium, "it was seen to grow for a short time only");
    }
    match suspect.count_rises {
        None => return (Confidence::Medium, "how many blocks are alive is not known"),
        Some(false) => {
            return (Confidence::Medium, "the number of blocks stays: they become larger");
        }
        Some(true) => {}
    }
    if suspect.grown() < PLAIN_BYTES {
        return (Confidence::Medium, "it has not grown by much yet");
    }
    if suspect.site.is_none() {
        return (Confidence::Medium, "its stack is not in the log");
    }
    (Confidence::High, "bytes and blocks rose steadily until the end, and nothing was lost")
}

fn remedy(suspect: &Suspect) -> String {
    let site = suspect.site.as_deref().unwrap_or("that place");
    match suspect.level {
        Level::Tensor => format!(
            "See who keeps what {site} allocates: a list that is appended to, a sum of losses with \
             their graphs, an attribute. `vramscope report LOG --who` prints how to ask the process."
        ),
        Level::Host => format!("Free what {site} pins, or pin once and use it again."),
        _ => format!("Free what {site} allocates when it is done with."),
    }
}

/// `rank 3 (pid 4824) grows 412.0 MiB/min since 13:58:10; 96 % allocated at model.py:87 forward
/// (called from train.py:41 main), 3 blocks a backward pass, 1,204 alive, oldest 6 min 2 s.`
fn sentence(model: &Model, process: &Process, share: Option<&Share>, leak: &Leak) -> String {
    let clock = Clock::new(model.start_ns);
    let ended = process.end_ns.is_some();
    let who = names::ranked(model, process);
    let grows = if ended { "grew" } else { "grows" };
    let kind = match leak.level {
        Level::Tensor => String::new(),
        Level::Device => " of device memory".to_owned(),
        level => format!(" of {}", words::memory(level)),
    };
    let several = process.shares.iter().filter(|share| share.has_device_memory()).count() > 1;
    let place = match share.filter(|_| several && leak.level != Level::Host) {
        Some(share) => format!(" on {}", names::device_of(model, share)),
        None => String::new(),
    };
    let outside = share.is_some_and(|share| share.torch.is_some()) && leak.level == Level::Device;
    let outside = if outside { " outside PyTorch" } else { "" };
    let until = if ended { " until its end" } else { "" };
    let mut text = format!(
        "{who} {grows} {}{kind}{place}{outside} since {}{until}; {:.0} % allocated at {}",
        show_rate(leak.process_bytes_per_second),
        clock.time(leak.since_ns),
        leak.share_percent,
        leak.site.as_deref().map_or("a place whose stack is not in the log".to_owned(), |site| {
            names::printable(site)
        }),
    );
    text.extend(leak.called_from.iter().map(|caller| format!(" (called from {caller})")));
    for part in facts(leak) {
        text.extend([", ", &part]);
    }
    text.push('.');
    match leak.confidence {
        Confidence::High => {}
        Confidence::Medium => text.extend([format!(" Not certain: {}.", leak.confidence_reason)]),
        Confidence::Low => text.extend([format!(" In doubt: {}.", leak.confidence_reason)]),
    }
    text
}

/// Blocks a pass, blocks alive, age of the oldest: what is known of them.
fn facts(leak: &Leak) -> Vec<String> {
    let per_pass = leak.blocks_per_pass.filter(|blocks| *blocks > 0.0).map(|blocks| {
        let (many, few) = (blocks.round() as u64, (1.0 / blocks).round() as u64);
        match few {
            0 | 1 => format!("{} a backward pass", counted(many.max(1), "block", "blocks")),
            few => format!("1 block every {} backward passes", show_count(few)),
        }
    });
    let alive = leak.live_count.and_then(|count| u64::try_from(count).ok());
    let alive = alive.map(|count| format!("{} alive", show_count(count)));
    let oldest = leak.oldest_ns.map(|ns| leak.until_ns.saturating_sub(ns)).filter(|age| *age > 0);
    let oldest = oldest.map(|age| format!("oldest {}", show_duration(age)));
    let held = leak.live_count.is_none().then(|| format!("{} held", show_bytes(leak.to_bytes)));
    [per_pass, alive, held, oldest].into_iter().flatten().collect()
}
