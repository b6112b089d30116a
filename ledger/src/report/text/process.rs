//! One process on one device.

use super::{
    breakdown,
    page::{Page, Style, WIDTH, shorten},
    show_reading,
};
use crate::{
    call::Level,
    report::{
        clock::Clock,
        model::{Group, LevelUse, Model, Of, Process, Share, Trend},
        names,
        units::{counted, show_bytes, show_count},
    },
};

/// Groups that are printed.
const GROUPS: usize = 5;

/// The block of a process.
pub(super) fn block(page: &mut Page, model: &Model, clock: Clock, of: &Process, share: &Share) {
    page.line(2, Style::Bold, &title(model, clock, of));
    if let Some(command) = &of.command {
        page.line(2, Style::Dim, &shorten(&names::printable(command), WIDTH - 2));
    }
    nvml(page, clock, share);
    allocated(page, clock, share);
    torch(page, share);
    beside(page, of, share);
    growth(page, clock, share);
    held(page, clock, of, share);
}

/// `pid 4824 (17 in its container)  container 0123456789ab  rank 2 of 8  uid 1000  ended 14:04:00, exit
/// code 0`.
fn title(model: &Model, clock: Clock, process: &Process) -> String {
    // Who looks from inside knows no other number.
    let pid = match process.ns_pid.filter(|ns_pid| *ns_pid != process.pid) {
        Some(ns_pid) => format!("pid {} ({ns_pid} in its container)", process.pid),
        None => format!("pid {}", process.pid),
    };
    let host = process.host.as_ref().filter(|_| model.hosts.len() > 1);
    let rank = process.rank.map(|rank| match process.world_size {
        Some(size) => format!("rank {rank} of {size}"),
        None => format!("rank {rank}"),
    });
    let facts = [
        Some(pid),
        process.container_id.as_deref().map(|id| format!("container {}", short_id(id))),
        process.pod_uid.as_deref().map(|uid| format!("pod {}", short_uid(uid))),
        host.map(|host| format!("on {host}")),
        rank,
        process.uid.map(|uid| format!("uid {uid}")),
        Some(fate(clock, process)),
    ];
    facts.into_iter().flatten().collect::<Vec<_>>().join("  ")
}

/// A container's id as `docker ps` and `crictl ps` show it; a name is shown whole.
fn short_id(id: &str) -> String {
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let short = if is_id { id.get(..12) } else { None };
    shorten(&names::printable(short.unwrap_or(id)), 40)
}

/// The first group of a pod's UID, or as much of one without groups.
fn short_uid(uid: &str) -> String {
    let first = uid.split('-').next().unwrap_or_default();
    names::printable(first.get(..8).unwrap_or(first))
}

fn fate(clock: Clock, process: &Process) -> String {
    let Some(end_ns) = process.end_ns else { return "running when the log ends".to_owned() };
    let code = match process.exit_code {
        None => String::new(),
        Some(code) => match signal(code) {
            Some(signal) => format!(", exit code {code} ({signal})"),
            None => format!(", exit code {code}"),
        },
    };
    format!("ended {}{code}", clock.time(end_ns))
}

fn signal(exit_code: i32) -> Option<&'static str> {
    Some(match exit_code.checked_sub(128)? {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => return None,
    })
}

/// NVML's figure and its parts.
fn nvml(page: &mut Page, clock: Clock, share: &Share) {
    let peak = share.nvml_peak.map(|peak| format!("peak {}", show_reading(clock, peak)));
    let Some(parts) = &share.breakdown else {
        return page.field(4, "NVML used", Style::Plain, &breakdown::none(clock, share, peak));
    };
    let later = share.nvml_used.filter(|used| used.ts_ns > parts.ts_ns);
    let later = later.map(|used| format!("last {}", show_reading(clock, used)));
    let also: Vec<String> = [peak, later].into_iter().flatten().collect();
    breakdown::of_process(page, clock, share, parts, &also.join(", "));
}

/// The account at the end.
fn allocated(page: &mut Page, clock: Clock, share: &Share) {
    for (level, label) in [(Level::Device, "account"), (Level::Pool, "account, pools")] {
        let Some(usage) = share.level(level) else { continue };
        let text = format!(
            "{} in {} at the end, peak {} at {}; {} made, {} freed",
            show_bytes(usage.live_bytes),
            counted(usage.live_count, "block", "blocks"),
            show_bytes(usage.peak_bytes),
            clock.time(usage.peak_ns),
            show_count(usage.allocs),
            show_count(usage.frees),
        );
        page.field(4, label, Style::Plain, &text);
    }
}

fn torch(page: &mut Page, share: &Share) {
    let Some(torch) = share.torch else { return };
    let figure = |name: &str, now: Option<i64>, peak: Option<i64>| {
        let now = now.map(show_bytes)?;
        let peak = peak.map(|peak| format!(" (peak {})", show_bytes(peak)));
        Some(format!("{name} {now}{}", peak.unwrap_or_default()))
    };
    let figures = [
        figure("allocated", torch.allocated_bytes, torch.peak_allocated_bytes),
        figure("reserved", torch.reserved_bytes, torch.peak_reserved_bytes),
    ];
    let text = figures.into_iter().flatten().collect::<Vec<_>>().join(", ");
    page.field(4, "PyTorch", Style::Plain, &text);
}

/// Memory that is no part of NVML's figure, or of which that cannot be told. Pinned host memory
/// belongs to no device: it stands with the first one.
fn beside(page: &mut Page, process: &Process, share: &Share) {
    let on_first = process.shares.first().is_some_and(|first| std::ptr::eq(first, share));
    let host: Vec<&LevelUse> =
        process.shares.iter().filter_map(|share| share.level(Level::Host)).collect();
    let host = if on_first { host } else { Vec::new() };
    let sum = |of: fn(&LevelUse) -> i64| host.iter().map(|usage| of(usage)).sum::<i64>();
    let host = (sum(|usage| usage.live_bytes), sum(|usage| usage.peak_bytes));
    let of =
        |level| share.level(level).map_or((0, 0), |usage| (usage.live_bytes, usage.peak_bytes));
    let figures =
        [("managed", of(Level::Managed)), ("pinned host", host), ("imported", of(Level::Imported))];
    let figures: Vec<String> = figures
        .into_iter()
        .filter(|(_, (live, peak))| *live != 0 || *peak != 0)
        .map(|(name, (live, peak))| {
            let peak = (live != peak).then(|| format!(" (peak {})", show_bytes(peak)));
            format!("{name} {}{}", show_bytes(live), peak.unwrap_or_default())
        })
        .collect();
    if !figures.is_empty() {
        page.field(4, "beside", Style::Plain, &figures.join(", "));
    }
}

fn growth(page: &mut Page, clock: Clock, share: &Share) {
    let used = share.level(Level::Device).is_some() || share.torch.is_some();
    let Some(first) = share.trends.first() else {
        if used {
            page.field(4, "growth", Style::Plain, "not told: seen too shortly");
        }
        return;
    };
    let rates: Vec<String> = share.trends.iter().map(rate).collect();
    let tone =
        if share.trends.iter().any(|trend| trend.grows) { Style::Yellow } else { Style::Plain };
    let span = format!("{} to {}", clock.time(first.since_ns), clock.time(first.until_ns));
    page.field(4, "growth", tone, &format!("{} ({span})", rates.join(", ")));
}

/// `tensors +24.0 MiB/min`.
fn rate(trend: &Trend) -> String {
    let what = match trend.of {
        Of::Tensors => "tensors",
        Of::TorchReserved => "PyTorch's reserve",
        Of::Device => "device memory",
        Of::Pool => "pools",
        Of::Managed => "managed",
        Of::Host => "pinned host",
    };
    match (trend.bytes_per_second * 60.0) as i64 {
        0 => format!("{what} none"),
        rate if rate > 0 && trend.rises_unsteadily() => {
            format!("{what} +{}/min but not steadily until the end", show_bytes(rate))
        }
        rate if rate > 0 => format!("{what} +{}/min", show_bytes(rate)),
        rate => format!("{what} {}/min", show_bytes(rate)),
    }
}

/// What the program itself did not free. At the end of a process that is normal.
fn held(page: &mut Page, clock: Clock, process: &Process, share: &Share) {
    let total =
        share.never_freed_totals.iter().fold((0, 0), |(bytes, count): (i64, u64), total| {
            (bytes.saturating_add(total.bytes), count + total.count)
        });
    if total.1 == 0 {
        return;
    }
    let label = if process.end_ns.is_some() { "held at exit" } else { "not freed so far" };
    let text = format!("{} in {}", show_bytes(total.0), counted(total.1, "block", "blocks"));
    page.field(4, label, Style::Plain, &text);
    let groups = share.never_freed.get(..GROUPS).unwrap_or(&share.never_freed);
    let rows: Vec<[String; 5]> = groups.iter().map(|group| row(clock, group)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    for [count, size, bytes, api, when] in &rows {
        let text = format!(
            "{count:>0$} x {size:>1$}  {bytes:>2$}  {api:<3$}  {when}",
            widths[0], widths[1], widths[2], widths[3]
        );
        page.line(6, Style::Plain, &text);
    }
    let shown: u64 = groups.iter().map(|group| group.count).sum();
    if shown < total.1 {
        let more = counted(total.1 - shown, "more block", "more blocks");
        page.line(6, Style::Dim, &format!("and {more} of other sizes or functions"));
    }
}

fn row(clock: Clock, group: &Group) -> [String; 5] {
    let level = match group.level {
        Level::Device => String::new(),
        level => format!(" ({})", level.as_str()),
    };
    let (first, last) = (clock.time(group.first_ns), clock.time(group.last_ns));
    [
        show_count(group.count),
        group.size_bytes.map_or("? B".to_owned(), show_bytes),
        show_bytes(group.bytes),
        format!("{}{level}", names::printable(&group.api)),
        if first == last { first } else { format!("{first} to {last}") },
    ]
}
