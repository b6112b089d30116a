//! The report for people: findings first, then what they rest on, then what to type next.

mod breakdown;
mod oom;
mod page;
mod process;
mod rest;
mod sums;

use self::page::{Page, Style};
use super::{
    clock::Clock,
    findings::Finding,
    model::{Device, Model, Process, Reading, Share, StackShare},
    names,
    units::{counted, show_bytes, show_count, show_duration},
};

/// Findings of one kind that are printed.
const FINDINGS: usize = 10;
/// Processes that are printed for a device.
const PROCESSES: usize = 20;

impl Model {
    /// The report as text, at most 100 columns wide; coloured with ANSI codes where asked.
    pub fn text(&self, color: bool) -> String {
        let mut page = Page::new(color);
        let clock = Clock::new(self.start_ns);
        findings(&mut page, self);
        header(&mut page, self);
        oom::section(&mut page, self, clock);
        for device in &self.devices {
            on_device(&mut page, self, clock, device);
        }
        elsewhere(&mut page, self, clock);
        idle(&mut page, self);
        rest::without_memory(&mut page, self);
        rest::failed_calls(&mut page, self, clock);
        rest::not_seen(&mut page, self, clock);
        rest::next(&mut page, self);
        page.into_text()
    }
}

fn findings(page: &mut Page, model: &Model) {
    let mut printed: Vec<(&str, usize)> = Vec::new();
    for finding in &model.findings {
        let tag = finding.tag();
        let index = printed.iter().position(|(of, _)| *of == tag).unwrap_or_else(|| {
            printed.push((tag, 0));
            printed.len() - 1
        });
        printed[index].1 += 1;
        if printed[index].1 <= FINDINGS {
            page.tagged(tag, style_of(finding), finding.sentence());
        }
    }
    for (tag, count) in printed {
        if let Some(more) = count.checked_sub(FINDINGS + 1) {
            page.tagged(tag, Style::Dim, &format!("{} more; --json lists them all.", more + 1));
        }
    }
    page.gap();
}

fn style_of(finding: &Finding) -> Style {
    match finding {
        Finding::OutOfMemory(refusal) if refusal.went_well() => Style::Yellow,
        Finding::Leak(_) | Finding::OutOfMemory(_) | Finding::Lost(_) => Style::Red,
        Finding::Growth(_) | Finding::Context(_) => Style::Yellow,
        Finding::Nothing(_) if finding.tag() == "OK" => Style::Green,
        Finding::Nothing(_) => Style::Bold,
    }
}

/// Host, span, processes, events.
fn header(page: &mut Page, model: &Model) {
    let hosts = match model.hosts.as_slice() {
        [] => "log".to_owned(),
        [host] => names::printable(host),
        hosts => counted(hosts.len() as u64, "host", "hosts"),
    };
    let span = match (model.start_ns, model.end_ns) {
        (Some(start_ns), Some(end_ns)) => {
            let clock = Clock::new(model.start_ns);
            let length = show_duration(end_ns.saturating_sub(start_ns));
            format!("{} to {} UTC ({length}), ", Clock::date_time(start_ns), clock.time(end_ns))
        }
        _ => String::new(),
    };
    let processes = counted(model.processes.len() as u64, "process", "processes");
    let events = counted(model.events, "event", "events");
    page.tagged(&hosts, Style::Bold, &format!("{span}{processes}, {events}"));
    if model.stacks.taken > 0 {
        page.tagged("stacks", Style::Bold, &stacks(&model.stacks));
    }
    page.gap();
}

/// `46 taken, 44 of them complete; of 12,204 allocations 98.2 % have a complete one`.
fn stacks(share: &StackShare) -> String {
    let (taken, complete) = (show_count(share.taken), show_count(share.complete));
    let mut text = format!("{taken} taken, {complete} of them complete");
    let allocs = share.allocs_with.saturating_add(share.allocs_without);
    if allocs > 0 {
        let percent = share.allocs_complete as f64 / allocs as f64 * 100.0;
        let of = counted(allocs, "allocation", "allocations");
        text.extend([format!("; of {of} {percent:.1} % have a complete one")]);
    }
    for (count, what) in
        [(share.allocs_without, " without any"), (share.missing, " named but not in the log")]
    {
        if count > 0 {
            text.extend([format!(", {}{what}", show_count(count))]);
        }
    }
    text
}

/// `1.2 GiB at 14:03:22`.
fn show_reading(clock: Clock, reading: Reading) -> String {
    format!("{} at {}", show_bytes(reading.bytes), clock.time(reading.ts_ns))
}

fn shares_on<'a>(model: &'a Model, uuid: Option<&'a str>) -> Vec<(&'a Process, &'a Share)> {
    let mut shares: Vec<_> = model
        .processes
        .iter()
        .flat_map(|process| process.shares.iter().map(move |share| (process, share)))
        .filter(|(_, share)| share.gpu_uuid.as_deref() == uuid && share.has_device_memory())
        .collect();
    shares.sort_by_key(|(process, share)| (std::cmp::Reverse(share.weight()), process.pid));
    shares
}

fn on_device(page: &mut Page, model: &Model, clock: Clock, device: &Device) {
    let shares = shares_on(model, Some(&device.gpu_uuid));
    if shares.is_empty() {
        return;
    }
    let used = device.used.map(|used| format!("used {}", show_reading(clock, used)));
    let peak = device.used_peak.map(|peak| format!("peak {}", show_reading(clock, peak)));
    let nvml: Vec<String> = [used, peak].into_iter().flatten().collect();
    let host = device.host.as_ref().filter(|_| model.hosts.len() > 1);
    let facts = [
        device.model.clone(),
        device.total_bytes.map(show_bytes),
        host.map(|host| format!("on {host}")),
        (!nvml.is_empty()).then(|| nvml.join(", ")),
    ];
    let facts: Vec<String> = facts.into_iter().flatten().collect();
    page.tagged(&names::device(device), Style::Bold, &facts.join(", "));
    if let Some(parts) = &device.breakdown {
        breakdown::of_device(page, clock, parts, device.reserved_bytes.unwrap_or(0));
    }
    processes(page, model, clock, &shares);
}

fn processes(page: &mut Page, model: &Model, clock: Clock, shares: &[(&Process, &Share)]) {
    for (process, share) in shares.iter().take(PROCESSES) {
        page.gap();
        process::block(page, model, clock, process, share);
    }
    let more = shares.get(PROCESSES..).unwrap_or_default();
    if !more.is_empty() {
        let used = more.iter().filter_map(|(_, share)| share.nvml_used);
        let used: i64 = used.map(|used| used.bytes).fold(0, i64::saturating_add);
        let count = counted(more.len() as u64, "more process", "more processes");
        page.gap();
        let text = format!("and {count}, {} by NVML's last readings of them", show_bytes(used));
        page.line(2, Style::Plain, &text);
    }
    page.gap();
}

/// Processes on devices that the log does not describe, or that are not known.
fn elsewhere(page: &mut Page, model: &Model, clock: Clock) {
    let listed = |share: &Share| {
        let uuid = share.gpu_uuid.as_deref();
        model.devices.iter().any(|device| Some(device.gpu_uuid.as_str()) == uuid)
    };
    let mut others: Vec<Option<&str>> = model
        .processes
        .iter()
        .flat_map(|process| &process.shares)
        .filter(|share| !listed(share))
        .map(|share| share.gpu_uuid.as_deref())
        .collect();
    others.sort_unstable();
    others.dedup();
    for uuid in others {
        let shares = shares_on(model, uuid);
        if !shares.is_empty() {
            let why = "which GPU this is could not be told (no NVML, or the process hid it)";
            page.tagged(uuid.unwrap_or("GPU ?"), Style::Bold, uuid.map_or(why, |_| ""));
            processes(page, model, clock, &shares);
        }
    }
}

/// Devices without a process that was recorded.
fn idle(page: &mut Page, model: &Model) {
    let idle = model.devices.iter().filter(|device| {
        let uuid = Some(device.gpu_uuid.as_str());
        shares_on(model, uuid).is_empty()
    });
    let idle: Vec<String> = idle
        .map(|device| {
            let used = device.used.map(|used| format!(" ({} used)", show_bytes(used.bytes)));
            format!("{}{}", names::device(device), used.unwrap_or_default())
        })
        .collect();
    if !idle.is_empty() {
        let text = format!("No recorded process held memory on {}.", idle.join(", "));
        page.line(0, Style::Plain, &text);
        page.gap();
    }
}
