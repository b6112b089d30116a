//! What NVML charges, in parts that add up as printed.

use super::{
    page::{Page, Style},
    show_reading,
    sums::{Unit, show_tenths, tenths},
};
use crate::report::{
    clock::Clock,
    model::{Breakdown, Part, Share, Torch},
    names,
    units::{counted, show_bytes},
};

/// Libraries that are named; the others are one figure.
const LIBRARIES: usize = 5;
/// Parts that share the last line: what no allocation of the program's own is.
const LAST: [&str; 5] = ["context", "modules", "rounding", "before_attach", "unexplained"];

/// The sum of a process and its parts.
pub(super) fn of_process(
    page: &mut Page,
    clock: Clock,
    share: &Share,
    breakdown: &Breakdown,
    also: &str,
) {
    let printed = Printed::of(breakdown);
    let at = clock.time(breakdown.ts_ns);
    let also = if also.is_empty() { String::new() } else { format!("; {also}") };
    let sum = format!("{} {}  at {at}{also}", printed.sum(), printed.unit.name());
    page.field(4, "NVML used", Style::Plain, &sum);
    for (index, part) in breakdown.parts.iter().enumerate() {
        let category = part.category.as_str();
        // PyTorch's tensors are told even where there are none; what is nothing else is left out.
        let is_nothing = part.bytes == 0 && category != "tensors";
        if category == "library" || is_nothing || LAST.contains(&category) {
            continue;
        }
        let (label, note) = explained(clock, part, share.torch.as_ref());
        page.field(4, &format!("  {label}"), Style::Plain, &printed.line(index, &note));
    }
    if let Some(line) = libraries(breakdown, &printed) {
        page.field(4, "  libraries", Style::Plain, &line);
    }
    page.line(6, Style::Plain, &last(breakdown, &printed, &LAST));
}

/// The sum of a device and its parts, in a line.
pub(super) fn of_device(page: &mut Page, clock: Clock, breakdown: &Breakdown, reserved: i64) {
    let printed = Printed::of(breakdown);
    let sum = format!("{} {}", printed.sum(), printed.unit.name());
    let parts = last(breakdown, &printed, &["processes", "unlisted", "unexplained"]);
    let at = clock.time(breakdown.ts_ns);
    let beside = match reserved {
        0 => String::new(),
        bytes => format!("; beside it the driver reserves {}", show_bytes(bytes)),
    };
    page.line(2, Style::Plain, &format!("NVML used {sum} at {at}: {parts}{beside}"));
}

/// Every part in tenths of one unit.
struct Printed {
    unit: Unit,
    tenths: Vec<i64>,
    total: i64,
    width: usize,
}

impl Printed {
    fn of(breakdown: &Breakdown) -> Self {
        let unit = Unit::for_sum(breakdown.nvml_used_bytes);
        let bytes: Vec<i64> = breakdown.parts.iter().map(|part| part.bytes).collect();
        let (tenths, total) = tenths(&bytes, unit);
        let figures = tenths.iter().chain([&total]).map(|tenths| show_tenths(*tenths).len());
        let width = figures.max().unwrap_or(0);
        Self { unit, tenths, total, width }
    }

    fn sum(&self) -> String {
        format!("{:>1$}", show_tenths(self.total), self.width)
    }

    fn figure(&self, index: usize) -> i64 {
        self.tenths.get(index).copied().unwrap_or(0)
    }

    /// A figure below the sum's, and what is to be said of it.
    fn line(&self, index: usize, note: &str) -> String {
        self.aligned(self.figure(index), note)
    }

    fn aligned(&self, tenths: i64, note: &str) -> String {
        format!("{:>1$}      {note}", show_tenths(tenths), self.width)
    }
}

/// What a part is called, and what it means.
fn explained(clock: Clock, part: &Part, torch: Option<&Torch>) -> (&'static str, String) {
    match part.category.as_str() {
        "tensors" => ("tensors", peak(clock, torch).unwrap_or_default()),
        "reusable" => ("reusable", format!("free, for PyTorch only{}", pinned(part))),
        "returnable" => {
            ("returnable", "at most: torch.cuda.empty_cache() would give it back".to_owned())
        }
        "graph_pools" => ("graph pools", "free, kept for the CUDA graphs that use it".to_owned()),
        "cached" => {
            let note = match torch {
                Some(_) => "free in PyTorch's cache; how much of it could go is not known",
                None => "PyTorch's cache; how much of it is in use is not known",
            };
            ("cached", note.to_owned())
        }
        "not_traced" => ("all", "not traced, so it cannot be told apart".to_owned()),
        "pools" => ("pools", "estimated: stream-ordered pools".to_owned()),
        "live_device" => ("allocated", "live device memory".to_owned()),
        "live_pool" => ("in pools", "live blocks; the pools hold at least these".to_owned()),
        _ => ("other", names::printable(&part.category)),
    }
}

fn peak(clock: Clock, torch: Option<&Torch>) -> Option<String> {
    let torch = torch?;
    let bytes = torch.peak_allocated_bytes?;
    Some(match torch.peak_allocated_ns {
        Some(ns) => format!("peak {} at {}", show_bytes(bytes), clock.time(ns)),
        None => format!("peak {}", show_bytes(bytes)),
    })
}

fn pinned(part: &Part) -> String {
    let Some(blocks) = part.pinned_by_blocks.filter(|blocks| *blocks > 0) else {
        return String::new();
    };
    let blocks = counted(blocks.unsigned_abs(), "live block", "live blocks");
    let site = part.pinned_by_site.as_deref().map(names::printable);
    let site = site.map(|site| format!(", most at {}", site.split(' ').next().unwrap_or(&site)));
    format!(": pinned by {blocks}{}", site.unwrap_or_default())
}

/// `2.1  libnccl 1.4 · libcublas 0.4 · libmyop 0.3`.
fn libraries(breakdown: &Breakdown, printed: &Printed) -> Option<String> {
    let mut owned: Vec<(String, i64, i64)> = breakdown
        .parts
        .iter()
        .enumerate()
        .filter(|(_, part)| part.category == "library")
        .map(|(index, part)| {
            let name = part.library.as_deref().map_or("not known".to_owned(), names::printable);
            (name, part.bytes, printed.figure(index))
        })
        .collect();
    if owned.is_empty() {
        return None;
    }
    owned.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let sum: i64 = owned.iter().map(|(.., tenths)| tenths).sum();
    let more = owned.get(LIBRARIES..).unwrap_or_default();
    let more = (!more.is_empty()).then(|| {
        let tenths: i64 = more.iter().map(|(.., tenths)| tenths).sum();
        (format!("{} others", more.len()), tenths)
    });
    let named = owned.iter().take(LIBRARIES).map(|(name, _, tenths)| (name.clone(), *tenths));
    let named: Vec<String> =
        named.chain(more).map(|(name, tenths)| format!("{name} {}", show_tenths(tenths))).collect();
    Some(printed.aligned(sum, &named.join(" · ")))
}

/// `context 0.5 · modules 0.2 · rounding 0.0 · unexplained 0.1`.
fn last(breakdown: &Breakdown, printed: &Printed, categories: &[&str]) -> String {
    let figure = |category: &&str| {
        let index = breakdown.parts.iter().position(|part| part.category == *category)?;
        let figure = show_tenths(printed.figure(index));
        Some(format!("{} {figure}", category.replace('_', " ")))
    };
    categories.iter().filter_map(figure).collect::<Vec<_>>().join(" · ")
}

/// The sum and its parts in a line: `70.3 GiB: tensors 31.0 · reusable 5.2 · context 0.5`. What is nothing
/// is left out; a library goes by its name.
pub(super) fn line(breakdown: &Breakdown) -> String {
    let printed = Printed::of(breakdown);
    let part = |(index, part): (usize, &Part)| {
        let figure = printed.figure(index);
        let name = match part.category.as_str() {
            "library" => {
                part.library.as_deref().map_or("owner not known".to_owned(), names::printable)
            }
            category => names::printable(category).replace('_', " "),
        };
        (figure != 0).then(|| format!("{name} {}", show_tenths(figure)))
    };
    let parts: Vec<String> = breakdown.parts.iter().enumerate().filter_map(part).collect();
    let sum = format!("{} {}", show_tenths(printed.total), printed.unit.name());
    if parts.is_empty() { sum } else { format!("{sum}: {}", parts.join(" · ")) }
}

/// Why there is no breakdown.
pub(super) fn none(clock: Clock, share: &Share, peak: Option<String>) -> String {
    match (share.nvml_used, peak) {
        (Some(used), Some(peak)) => format!(
            "{}, {peak}; not broken down, since its memory never stood still during a reading",
            show_reading(clock, used)
        ),
        _ if share.nvml_unavailable => {
            "not available (MPS, vGPU, WSL or permissions), so there is no breakdown".to_owned()
        }
        _ => "not known: no reading of NVML shows this process".to_owned(),
    }
}
