//! Live bytes that grow until the end of the process or of the log.

use std::cmp::Reverse;

use serde::Serialize;

use super::leak::{self, Leak};
use crate::{
    call::Level,
    report::{
        clock::Clock,
        model::{Group, Model, Of, Process, Share, Trend},
        names,
        suspects::BySite,
        units::{counted, show_bytes, show_rate},
        words,
    },
};

/// Why no line of code is named.
const NO_STACKS: &str = " No stacks were recorded, so where it was allocated is not known.";

/// A process grows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Growth {
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
    /// How it grows, and what.
    pub trend: Trend,
    /// The program uses `PyTorch`, but this growth is outside of it.
    pub outside_torch: bool,
    /// Blocks that the program never freed, where the account knows them.
    pub blocks: Option<Blocks>,
    /// The log has stacks; what grows is spread over places, or has none.
    pub stacks_recorded: bool,
    /// Calls of the process are missing, so it may have grown less.
    pub account_has_losses: bool,
    /// In words.
    pub sentence: String,
}

/// Blocks that stay allocated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Blocks {
    /// Function that allocated them; `null`: several.
    pub api: Option<String>,
    /// Size of each; `null`: not all the same.
    pub size_bytes: Option<i64>,
    /// How many.
    pub count: u64,
    /// Bytes of all.
    pub bytes: i64,
    /// When the first was allocated.
    pub first_ns: i64,
}

impl Growth {
    /// The word in front of the sentence.
    pub(super) fn tag(&self) -> &'static str {
        if self.trend.of == Of::TorchReserved { "CACHE" } else { "LEAK?" }
    }

    /// Everything that grows and that no leak tells of by its site, fastest first.
    pub(super) fn check(model: &Model, leaks: &[Leak], by_site: &[BySite]) -> Vec<Self> {
        let mut growths: Vec<Self> = Vec::new();
        for process in &model.processes {
            for share in &process.shares {
                let found = growing(share).into_iter().filter(|trend| {
                    let covers = leaks.iter().filter(|leak| leak.covers(process, share, trend.of));
                    let told: f64 = covers.map(|leak| leak.bytes_per_second).sum();
                    told < trend.bytes_per_second / 2.0
                        && !by_site.iter().any(|all| tells(all, process, share, trend.of))
                });
                growths.extend(found.map(|trend| finding(model, process, share, trend)));
            }
        }
        growths.sort_by_key(|growth| Reverse(growth.trend.bytes_per_second as i64));
        growths
    }
}

/// Whether each place that makes up a trend was judged by itself.
fn tells(all: &BySite, process: &Process, share: &Share, of: Of) -> bool {
    let level = if of == Of::Tensors { Some(Level::Tensor) } else { level_of(of) };
    let here = of == Of::Host || leak::share_is_at(share, &all.place);
    all.proc_id == process.proc_id && Some(all.level) == level && here
}

/// The trends that are findings. Where `PyTorch` is used its tensors tell of the program; device
/// memory then counts only for what its allocator does not explain.
pub(super) fn growing(share: &Share) -> Vec<Trend> {
    let grows = |of: Of| share.trend(of).filter(|trend| trend.grows).copied();
    let mut found: Vec<Trend> = grows(Of::Tensors).into_iter().collect();
    if let Some(device) = grows(Of::Device) {
        let reserved = share.trend(Of::TorchReserved);
        let reserved_rate = reserved.map_or(0.0, |trend| trend.bytes_per_second.max(0.0));
        if device.bytes_per_second - reserved_rate > device.bytes_per_second / 2.0 {
            found.push(device);
        } else if found.is_empty() {
            found.extend(grows(Of::TorchReserved));
        }
    } else if found.is_empty() {
        // Segments from before the recording: the driver level does not have them.
        found.extend(grows(Of::TorchReserved));
    }
    found.extend([Of::Pool, Of::Managed, Of::Host].into_iter().filter_map(grows));
    found
}

fn finding(model: &Model, process: &Process, share: &Share, trend: Trend) -> Growth {
    let mut growth = Growth {
        pid: process.pid,
        proc_id: process.proc_id.to_string(),
        rank: process.rank,
        gpu_uuid: share.gpu_uuid.clone(),
        nvml_index: share.nvml_index,
        outside_torch: trend.of == Of::Device && share.torch.is_some(),
        stacks_recorded: model.stacks.taken > 0,
        blocks: level_of(trend.of).and_then(|level| blocks(share, level, &trend)),
        account_has_losses: model.losses.iter().any(|loss| {
            loss.affects_account && loss.proc_id.is_none_or(|of| of == process.proc_id)
        }),
        trend,
        sentence: String::new(),
    };
    growth.sentence = sentence(model, process, share, &growth);
    growth
}

fn level_of(of: Of) -> Option<Level> {
    match of {
        Of::Tensors | Of::TorchReserved => None,
        Of::Device => Some(Level::Device),
        Of::Pool => Some(Level::Pool),
        Of::Managed => Some(Level::Managed),
        Of::Host => Some(Level::Host),
    }
}

/// The largest group that still gets new blocks; where it is not most of the growth, all blocks of
/// the level together.
fn blocks(share: &Share, level: Level, trend: &Trend) -> Option<Blocks> {
    let groups: Vec<&Group> =
        share.never_freed.iter().filter(|group| group.level == level).collect();
    let late_ns = trend.until_ns - (trend.until_ns - trend.since_ns) / 3;
    let grown = trend.to_bytes - trend.from_bytes;
    let main = groups.iter().find(|group| group.last_ns >= late_ns);
    if let Some(main) = main.filter(|main| main.bytes >= grown / 2) {
        return Some(Blocks {
            api: Some(main.api.clone()),
            size_bytes: main.size_bytes,
            count: main.count,
            bytes: main.bytes,
            first_ns: main.first_ns,
        });
    }
    let total = share.never_freed_totals.iter().find(|total| total.level == level)?;
    let api = groups.first().map(|group| group.api.clone());
    Some(Blocks {
        api: api.filter(|api| groups.iter().all(|group| group.api == *api)),
        size_bytes: None,
        count: total.count,
        bytes: total.bytes,
        first_ns: groups.iter().map(|group| group.first_ns).min()?,
    })
    .filter(|blocks| blocks.bytes >= grown / 2)
}

fn sentence(model: &Model, process: &Process, share: &Share, growth: &Growth) -> String {
    let clock = Clock::new(model.start_ns);
    let ended = process.end_ns.is_some();
    let trend = &growth.trend;
    let rate = show_rate(trend.bytes_per_second);
    let (who, gpu) = (names::process(model, process), names::device_of(model, share));
    let grows = if ended { "grew" } else { "grows" };
    let until = if ended { " until its end" } else { "" };
    let outside = if growth.outside_torch { " outside PyTorch" } else { "" };
    let course = format!(
        "from {} at {} to {} at {}",
        show_bytes(trend.from_bytes),
        clock.time(trend.since_ns),
        show_bytes(trend.to_bytes),
        clock.time(trend.until_ns),
    );
    let what = match (trend.of, &growth.blocks) {
        (Of::Tensors, _) => {
            let reserved = share.torch.and_then(|torch| torch.reserved_bytes);
            let holds = reserved
                .map(|bytes| format!("; PyTorch holds {} from the driver", show_bytes(bytes)))
                .unwrap_or_default();
            format!("its PyTorch tensors went {course} and stay allocated{holds}")
        }
        (Of::TorchReserved, _) => {
            format!("PyTorch's cache went {course} while its tensors did not grow as much")
        }
        (_, Some(blocks)) => {
            let holds = if ended { "held" } else { "holds" };
            format!(
                "it {holds} {} that it never freed, the first at {}",
                described(blocks),
                clock.time(blocks.first_ns)
            )
        }
        (_, None) => format!("it went {course}"),
    };
    let kind = match trend.of {
        Of::Pool | Of::Managed | Of::Host => {
            let level = level_of(trend.of).map_or("memory", words::memory);
            format!(" of {level}")
        }
        _ => String::new(),
    };
    let place = if trend.of == Of::Host { String::new() } else { format!(" on {gpu}") };
    let doubt =
        if growth.account_has_losses { " Calls are missing, so it may be less." } else { "" };
    let no_stacks = if growth.stacks_recorded { "" } else { NO_STACKS };
    format!("{who} {grows} by {rate}{kind}{place}{outside}{until}: {what}.{no_stacks}{doubt}")
}

/// `412.0 MiB in 103 blocks of 4.0 MiB from cuMemAlloc_v2`.
fn described(blocks: &Blocks) -> String {
    let size = blocks.size_bytes.map(|size| format!(" of {}", show_bytes(size)));
    let api = blocks.api.as_ref().map(|api| format!(" from {}", names::printable(api)));
    format!(
        "{} in {}{}{}",
        show_bytes(blocks.bytes),
        counted(blocks.count, "block", "blocks"),
        size.unwrap_or_default(),
        api.unwrap_or_default(),
    )
}
