//! What was held when a request was refused, and what had been done before.

use super::{
    breakdown,
    page::{Page, Style},
};
use crate::report::{
    clock::Clock,
    findings::{Before, Finding, Holder, Refusal},
    model::Model,
    names,
    units::show_bytes,
};

/// Refusals that are shown in full.
const REFUSALS: usize = 3;
/// Processes that are shown for each.
const HOLDERS: usize = 8;

/// The latest refusals for lack of memory, each with what the log knows of its moment.
pub(super) fn section(page: &mut Page, model: &Model, clock: Clock) {
    let refusals = model.findings.iter().filter_map(|finding| match finding {
        Finding::OutOfMemory(refusal) if !refusal.went_well() => Some(refusal),
        _ => None,
    });
    let told = refusals.filter(|of| !of.holders.is_empty() || !of.before.is_empty());
    let told: Vec<&Refusal> = told.take(REFUSALS).collect();
    if told.is_empty() {
        return;
    }
    page.heading("Out of memory");
    for refusal in told {
        moment(page, clock, refusal);
        page.gap();
    }
}

fn moment(page: &mut Page, clock: Clock, refusal: &Refusal) {
    let size = refusal.size_bytes.map_or("memory".to_owned(), show_bytes);
    let place = refusal.site.as_deref().map(|site| format!(" at {}", names::printable(site)));
    let (at, place) = (clock.time(refusal.last_ns), place.unwrap_or_default());
    let title = format!("{at}  pid {} asked for {size}{place}", refusal.pid);
    page.line(2, Style::Bold, &title);
    for holder in refusal.holders.iter().take(HOLDERS) {
        held(page, holder);
    }
    if let Some(more) = refusal.holders.get(HOLDERS..).filter(|more| !more.is_empty()) {
        page.line(4, Style::Dim, &format!("and {} more processes", more.len()));
    }
    for (index, event) in refusal.before.iter().enumerate() {
        let label = if index == 0 { "before it" } else { "" };
        page.field(4, label, Style::Plain, &done(clock, event));
    }
}

/// `pid 4824 rank 3  70.3 GiB: tensors 31.0 · reusable 5.2 · context 0.5`.
fn held(page: &mut Page, holder: &Holder) {
    let rank = holder.rank.map(|rank| format!(" rank {rank}")).unwrap_or_default();
    let label = format!("pid {}{rank}", holder.pid);
    let name = names::printable(&holder.name);
    page.field(4, &label, Style::Plain, &format!("{name}  {}", breakdown::line(&holder.breakdown)));
}

/// `14:03:59  +2.0 GiB  cuMemAlloc_v2  train.py:80 forward`.
fn done(clock: Clock, event: &Before) -> String {
    let sign = if event.delta_bytes < 0 { "" } else { "+" };
    let level = if event.level == "device" { String::new() } else { format!(" ({})", event.level) };
    let site = event.site.as_deref().map(names::printable).unwrap_or_default();
    let at = clock.time(event.ts_ns);
    let api = names::printable(&event.api);
    format!("{at}  {sign}{}  {api}{level}  {site}", show_bytes(event.delta_bytes))
}
