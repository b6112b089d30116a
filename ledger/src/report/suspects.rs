//! Places of allocation whose live bytes rise: what the leak finding is made of.

use std::collections::BTreeMap;

use super::{
    collect::{Collector, Holder, PASS, Place, ProcessFacts, SiteCourse, SiteId},
    growth::End,
    rise::{self, Asked, Rise, Verdict},
};
use crate::{
    account::state::{Series, theil_sen},
    call::Level,
};

/// Backward passes from which on growth is judged by them, not by time.
const ENOUGH_PASSES: i64 = 24;
/// Windows of a second below which a course is brief, however many backward passes it had.
const BRIEF: usize = 20;
/// Growth of one place below this, and below a thousandth of the device, is not worth a finding.
const MATERIAL_BYTES: i64 = 4 << 20;

/// Growth must be more than this many times what a place allocates in a step.
const BEAT: i64 = 2;

/// A place that rises.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Suspect {
    pub(super) proc_id: i64,
    pub(super) level: Level,
    pub(super) place: Place,
    /// `file:line function`; `None` where its stack was not written.
    pub(super) site: Option<String>,
    /// The stack of it that holds most.
    pub(super) stack_id: i64,
    pub(super) stack_complete: bool,
    pub(super) called_from: Option<String>,
    /// PyTorch's allocator asked for it, to hand it out itself.
    pub(super) torch_allocator: bool,
    pub(super) bytes_per_second: f64,
    pub(super) bytes_per_pass: Option<f64>,
    pub(super) blocks_per_pass: Option<f64>,
    pub(super) since_ns: i64,
    pub(super) until_ns: i64,
    pub(super) from_bytes: i64,
    pub(super) to_bytes: i64,
    pub(super) windows: usize,
    /// Blocks at the end, where they are counted.
    pub(super) live_count: Option<i64>,
    /// The number of blocks rises too; `None` where it is not known.
    pub(super) count_rises: Option<bool>,
    /// When the oldest block that is alive was allocated.
    pub(super) oldest_ns: Option<i64>,
}

impl Suspect {
    /// What it grew by.
    pub(super) fn grown(&self) -> i64 {
        self.to_bytes.saturating_sub(self.from_bytes)
    }
}

/// What a process holds somewhere is told by its sites, nearly all of it, and long enough: what is
/// not a suspect there does not grow.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BySite {
    pub(super) proc_id: i64,
    pub(super) level: Level,
    pub(super) place: Place,
}

/// What can be said of a course.
#[derive(Clone, Debug)]
enum Judged {
    Short,
    Steady,
    Rises(Box<Suspect>),
}

/// The end of a process, in time and in backward passes.
#[derive(Clone, Copy, Debug)]
struct Ends<'a> {
    ns: i64,
    of_process: bool,
    passes: Option<&'a Series>,
}

impl Collector {
    /// The places of a process that rise until its end, and where the places tell of all there is.
    /// `end`: when that was, or when it was seen last, and whether it ended.
    pub(super) fn suspects(
        &self,
        proc_id: i64,
        facts: &ProcessFacts,
        end: (i64, bool),
    ) -> (Vec<Suspect>, Vec<BySite>) {
        let passes = self.sites.passes.get(&proc_id).filter(|series| enough(series));
        let ends = Ends { ns: end.0, of_process: end.1, passes };
        let own = || self.sites.courses.iter().filter(|(holder, ..)| holder.proc_id == proc_id);
        let mut told: BTreeMap<Holder, i64> = BTreeMap::new();
        let mut suspects = Vec::new();
        for (holder, site, course) in own() {
            let place = self.place_of(*holder, facts);
            let judged = judged(course, ends, material(self.total_bytes(&place)));
            if matches!(judged, Judged::Short) {
                continue;
            }
            let told = told.entry(*holder).or_default();
            *told = told.saturating_add(course.bytes);
            let Judged::Rises(found) = judged else { continue };
            if self.is_sampled(*holder) && !course.floors && is_beat(course, &found) {
                continue;
            }
            let others = own().filter(|(of, id, _)| of == holder && id != site);
            let fell = others.map(|(.., other)| fall(&other.time.bytes, &found)).sum::<i64>();
            // What others gave up meanwhile moved; it did not grow.
            if fell <= found.grown() / 2 {
                suspects.push(Suspect { proc_id, place, ..self.named(*holder, *site, *found) });
            }
        }
        let total = |holder: &Holder| self.sites.totals.get(holder).map_or(i64::MAX, |t| t.bytes);
        let whole = told.iter().filter(|(holder, told)| **told >= total(holder) / 10 * 9);
        let by_site = whole.map(|(holder, _)| BySite {
            proc_id,
            level: holder.level,
            place: self.place_of(*holder, facts),
        });
        let by_site = by_site.collect();
        (suspects, by_site)
    }

    fn total_bytes(&self, place: &Place) -> Option<i64> {
        match place {
            Place::Gpu(uuid) => self.devices.get(uuid).and_then(|device| device.total_bytes),
            _ => None,
        }
    }

    /// The courses of a holder come from rows of once a second, not from single allocations.
    fn is_sampled(&self, holder: Holder) -> bool {
        holder.level == Level::Tensor && self.by_site.contains(&holder.proc_id)
    }

    fn place_of(&self, holder: Holder, facts: &ProcessFacts) -> Place {
        match &self.sites.places[holder.place] {
            Place::Ordinal(ordinal) => facts
                .ordinals
                .get(ordinal)
                .map_or(Place::Ordinal(*ordinal), |uuid| Place::Gpu(uuid.clone())),
            place => place.clone(),
        }
    }

    fn named(&self, holder: Holder, site: SiteId, found: Suspect) -> Suspect {
        let stack_id = self.sites.main_stack(holder, site).unwrap_or(0);
        let site = match site {
            SiteId::Site(site) => Some(self.stacks.site_name(site).to_owned()),
            SiteId::Stack(_) => None,
        };
        Suspect {
            level: holder.level,
            site: site.filter(|site| !site.is_empty()),
            stack_id,
            stack_complete: self.stacks.get(stack_id).is_some_and(|stack| stack.complete),
            called_from: self.stacks.called_from(stack_id),
            torch_allocator: self.stacks.is_torch_allocator(stack_id),
            oldest_ns: self.oldest(holder, stack_id),
            ..found
        }
    }

    /// When the oldest live block of a stack was allocated, where single blocks are recorded.
    fn oldest(&self, holder: Holder, stack_id: i64) -> Option<i64> {
        if let Some(oldest) = self.oldest.get(&(holder, stack_id)) {
            return Some(*oldest);
        }
        let process = self.states.iter().rev().find_map(|(_, s, _)| s.process(holder.proc_id))?;
        let of_stack = |live: &&crate::account::state::LiveAllocation| {
            live.level == holder.level && live.stack_id == stack_id
        };
        process.live().map(|(_, live)| live).filter(of_stack).map(|live| live.ts_ns).min()
    }
}

fn enough(passes: &Series) -> bool {
    let (first, last) = (passes.buckets().first(), passes.buckets().last());
    first.zip(last).is_some_and(|(first, last)| last.max - first.min >= ENOUGH_PASSES)
}

fn material(device_bytes: Option<i64>) -> i64 {
    device_bytes.map_or(MATERIAL_BYTES, |bytes| MATERIAL_BYTES.min(bytes / 1_000))
}

/// Judges a course over backward passes where there are enough of them until the end, else over
/// time.
fn judged(course: &SiteCourse, ends: Ends<'_>, material: i64) -> Judged {
    let bytes = course.bytes;
    let end = End { ns: ends.ns.max(course.last_ns), bytes, of_process: ends.of_process };
    if let Some(passes) = ends.passes {
        let last = passes.buckets().last().map_or(0, |bucket| bucket.max);
        let pass_end = End { ns: last.saturating_mul(PASS), ..end };
        let goes_on = rise::still_rises(passes, End { bytes: last, of_process: false, ..end });
        let origin = course.pass.bytes.origin_ns().map(|ns| ns / PASS);
        if goes_on && origin.is_some_and(|origin| last - origin >= ENOUGH_PASSES) {
            let asked = Asked { material, brief: course.time.bytes.buckets().len() < BRIEF };
            return match rise::judge(&course.pass.bytes, pass_end, asked) {
                Verdict::Rises(rise) if rise::still_rises(&course.time.bytes, end) => {
                    Judged::Rises(Box::new(by_passes(course, passes, rise, end)))
                }
                Verdict::Rises(_) | Verdict::Steady => Judged::Steady,
                Verdict::Short => Judged::Short,
            };
        }
    }
    match rise::judge(&course.time.bytes, end, Asked { material, brief: false }) {
        Verdict::Rises(rise) => Judged::Rises(Box::new(by_time(course, rise))),
        Verdict::Steady => Judged::Steady,
        Verdict::Short => Judged::Short,
    }
}

fn by_time(course: &SiteCourse, rise: Rise) -> Suspect {
    let slope = count_slope(&course.time.count, rise.since_ns, rise.until_ns);
    let live_count = blocks_alive(course, &course.time.count, rise.until_ns);
    Suspect { bytes_per_second: rise.per_second, live_count, ..suspect(course, rise, slope) }
}

fn by_passes(course: &SiteCourse, passes: &Series, rise: Rise, end: End) -> Suspect {
    let slope = count_slope(&course.pass.count, rise.since_ns, rise.until_ns);
    let since_ns = time_of(passes, rise.since_ns / PASS).unwrap_or(end.ns);
    let until_ns = time_of(passes, rise.until_ns / PASS).unwrap_or(end.ns);
    let seconds = (until_ns.saturating_sub(since_ns).max(1)) as f64 / 1e9;
    let made = (rise.until_ns - rise.since_ns) as f64 / PASS as f64;
    Suspect {
        bytes_per_second: rise.per_second * made / seconds,
        bytes_per_pass: Some(rise.per_second),
        blocks_per_pass: slope.filter(|_| course.counted),
        live_count: blocks_alive(course, &course.pass.count, rise.until_ns),
        since_ns,
        until_ns,
        ..suspect(course, rise, slope)
    }
}

fn suspect(course: &SiteCourse, rise: Rise, slope: Option<f64>) -> Suspect {
    Suspect {
        proc_id: 0,
        level: Level::Device,
        place: Place::Unknown,
        site: None,
        stack_id: 0,
        stack_complete: false,
        called_from: None,
        torch_allocator: false,
        bytes_per_second: 0.0,
        bytes_per_pass: None,
        blocks_per_pass: None,
        since_ns: rise.since_ns,
        until_ns: rise.until_ns,
        from_bytes: rise.from,
        to_bytes: rise.to,
        windows: rise.windows,
        live_count: None,
        count_rises: slope.filter(|_| course.counted).map(|slope| slope > 0.0),
        oldest_ns: None,
    }
}

/// Blocks alive at the end, or since the rise ended: a program that ends gives back what it held, and
/// that is not what was held.
fn blocks_alive(course: &SiteCourse, counts: &Series, until_ns: i64) -> Option<i64> {
    let since_ns = until_ns.saturating_sub(counts.width_ns());
    let then = within(counts, since_ns, i64::MAX).map(|(_, highest)| highest).max();
    course.counted.then(|| course.count.max(then.unwrap_or(0)))
}

/// Robust change of the number of blocks a second (or backward pass) over a stretch.
fn count_slope(counts: &Series, since_ns: i64, until_ns: i64) -> Option<f64> {
    let floors: Vec<i64> = within(counts, since_ns, until_ns).map(|(min, _)| min).collect();
    (floors.len() >= 2).then(|| theil_sen(&floors).0 / (counts.width_ns() as f64 / 1e9))
}

/// Lowest and highest values of the windows of a stretch.
fn within(series: &Series, since_ns: i64, until_ns: i64) -> impl Iterator<Item = (i64, i64)> {
    let index = |ns: i64| {
        let origin_ns = series.origin_ns().unwrap_or(ns);
        (ns.saturating_sub(origin_ns).max(0) / series.width_ns()) as usize
    };
    let (first, last) = (index(since_ns), index(until_ns));
    let buckets = series.buckets().iter().take(last).skip(first);
    buckets.map(|bucket| (bucket.min, bucket.max))
}

/// Samples once a second of what comes and goes with steps of nearly a second drift through the
/// step, and rise for minutes where nothing stays. What a place allocates in a step (in a second,
/// without backward passes) bounds that.
fn is_beat(course: &SiteCourse, found: &Suspect) -> bool {
    let ends = match found.bytes_per_pass {
        Some(_) => {
            (course.pass.bytes.origin_ns(), course.pass_at.map(|pass| pass.saturating_mul(PASS)))
        }
        None => (course.time.bytes.origin_ns(), Some(course.last_ns)),
    };
    let steps =
        ends.0.zip(ends.1).map_or(1, |(first, last)| (last.saturating_sub(first) / PASS).max(1));
    course.allocated / steps >= found.grown() / BEAT
}

/// By how much another course fell while the suspect rose: its floor and its peaks both.
fn fall(other: &Series, found: &Suspect) -> i64 {
    let third = (found.until_ns - found.since_ns) / 3;
    let range = |since_ns: i64, until_ns: i64| {
        let values = within(other, since_ns, until_ns);
        values.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    };
    let before = range(found.since_ns, found.since_ns + third);
    let last = other.buckets().last().map(|bucket| (bucket.min, bucket.max));
    let after = range(found.until_ns - third, found.until_ns).or(last);
    before
        .zip(after)
        .map_or(0, |(before, after)| (before.0 - after.0).min(before.1 - after.1).max(0))
}

/// When a backward pass was reached.
fn time_of(passes: &Series, pass: i64) -> Option<i64> {
    let index = passes.buckets().iter().position(|bucket| bucket.max >= pass)?;
    Some(passes.origin_ns()?.saturating_add(passes.width_ns() * index as i64))
}
