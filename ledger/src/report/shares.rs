//! One process on each device: what was seen of it under the several names of the device.

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    collect::{Collector, Figure, Place, PlaceFacts, ProcessFacts, allocs},
    growth::{self, End},
    model::{Breakdown, GROUPS, Group, LevelTotal, LevelUse, Of, Share, Torch, Trend},
    work::Work,
};
use crate::{account::state, call::Level};

/// A device of the account at one place, as it was at its end.
struct EndState<'a> {
    index: usize,
    device: Cow<'a, state::Device>,
    /// When the end of a context or of the process freed what it held.
    torn_down_ns: Option<i64>,
}

/// All that is known of one process at one place.
#[derive(Default)]
struct Here<'a> {
    facts: PlaceFacts,
    devices: Vec<EndState<'a>>,
}

impl Collector {
    /// What the process did on each device, most memory first. `end`: when it ended, or was seen
    /// last, and whether it ended.
    pub(super) fn shares(
        &self,
        mut facts: ProcessFacts,
        account: Option<&state::Process>,
        end: (i64, bool),
    ) -> Vec<Share> {
        let mut unfreed = account.map(state::Process::unfreed_groups).unwrap_or_default();
        // No memory of its own; another process's; a part of the allocator's blocks, which are here.
        let no_own = [Level::Virtual, Level::Imported, Level::Tensor];
        unfreed.retain(|group| !no_own.contains(&group.level));
        let mut shares: Vec<Share> = places(&mut facts, account)
            .into_iter()
            .map(|(place, here)| {
                let total = match &place {
                    Place::Gpu(uuid) => self.devices.get(uuid).and_then(|facts| facts.total_bytes),
                    _ => None,
                };
                let share = self.share_at(&place, &here);
                Share {
                    trends: trends(&here, end, total),
                    work: Work::of(&here.facts, end.0),
                    never_freed: never_freed(&here, &unfreed),
                    never_freed_totals: totals(&here, &unfreed),
                    ..share
                }
            })
            .collect();
        shares.sort_by_key(|share| std::cmp::Reverse(share.weight()));
        shares
    }

    fn share_at(&self, place: &Place, here: &Here) -> Share {
        let device = here.devices.first().map(|end| &end.device);
        let (uuid, ordinal) = match place {
            Place::Gpu(uuid) => (Some(uuid.clone()), None),
            Place::Ordinal(ordinal) => (None, Some(*ordinal)),
            Place::Unknown => (None, None),
        };
        let listed = uuid.as_ref().and_then(|uuid| self.devices.get(uuid)?.nvml_index);
        Share {
            gpu_uuid: uuid,
            nvml_index: listed.or(device.and_then(|device| device.nvml_index)),
            cuda_ordinal: device.and_then(|device| device.cuda_ordinal).or(ordinal),
            nvml_used: here.facts.nvml.last,
            nvml_peak: here.facts.nvml.peak,
            nvml_unavailable: here.facts.nvml_unavailable,
            breakdown: Breakdown::of(&here.facts.breakdown, &self.stacks),
            torch: torch(&here.facts),
            levels: levels(&here.devices),
            ..Share::default()
        }
    }
}

/// Brings together what is known of a place under its several names.
fn places<'a>(
    facts: &mut ProcessFacts,
    account: Option<&'a state::Process>,
) -> BTreeMap<Place, Here<'a>> {
    let devices = account.map(state::Process::devices).unwrap_or_default();
    let resolve = |place: Place| match place {
        Place::Ordinal(ordinal) => {
            facts.ordinals.get(&ordinal).map_or(place, |uuid| Place::Gpu(uuid.clone()))
        }
        place => place,
    };
    let mut here: BTreeMap<Place, Here> = BTreeMap::new();
    for (place, its) in std::mem::take(&mut facts.places) {
        here.entry(resolve(place)).or_default().facts.absorb(its);
    }
    for (index, device) in devices.iter().enumerate() {
        let place = resolve(Place::of(device.gpu_uuid.as_deref(), device.cuda_ordinal));
        let end = match facts.teardown.remove(&index) {
            Some((before, ns)) if allocs(&before) == allocs(device) => {
                EndState { index, device: Cow::Owned(before), torn_down_ns: Some(ns) }
            }
            _ => EndState { index, device: Cow::Borrowed(device), torn_down_ns: None },
        };
        here.entry(place).or_default().devices.push(end);
    }
    adopt_unknown(&mut here);
    here
}

/// What has no device (pinned host memory, reservations) stands with the only device there is.
fn adopt_unknown(here: &mut BTreeMap<Place, Here>) {
    if here.len() != 2 {
        return;
    }
    let Some(unknown) = here.remove(&Place::Unknown) else { return };
    let on_a_device = |end: &EndState| {
        [Level::Device, Level::Pool].iter().any(|level| end.device.usage(*level).allocs > 0)
    };
    if unknown.devices.iter().any(on_a_device) {
        here.insert(Place::Unknown, unknown);
    } else if let Some(mut only) = here.first_entry() {
        only.get_mut().facts.absorb(unknown.facts);
        only.get_mut().devices.extend(unknown.devices);
    }
}

fn torch(facts: &PlaceFacts) -> Option<Torch> {
    let last = |figure: &Figure| figure.last.map(|reading| reading.bytes);
    let ts_ns = [facts.allocated.last, facts.reserved.last].into_iter().flatten();
    let peak = |figure: &Figure, told: Option<i64>| told.max(figure.peak.map(|peak| peak.bytes));
    Some(Torch {
        ts_ns: ts_ns.map(|reading| reading.ts_ns).max()?,
        allocated_bytes: last(&facts.allocated),
        reserved_bytes: last(&facts.reserved),
        peak_allocated_bytes: peak(&facts.allocated, facts.peak_allocated),
        peak_allocated_ns: facts.peak_allocated_ns.or(facts.allocated.peak.map(|peak| peak.ts_ns)),
        peak_reserved_bytes: peak(&facts.reserved, facts.peak_reserved),
    })
}

fn levels(devices: &[EndState]) -> Vec<LevelUse> {
    let of = |level: Level| {
        let used = devices.iter().map(|end| end.device.usage(level));
        let used = used.filter(|usage| usage.allocs + usage.unknown_frees + usage.live_count > 0);
        used.map(|usage| LevelUse {
            level,
            live_bytes: usage.live_bytes,
            live_count: usage.live_count,
            peak_bytes: usage.peak_bytes,
            peak_ns: usage.peak_ns,
            allocs: usage.allocs,
            frees: usage.frees,
            unknown_frees: usage.unknown_frees,
        })
        .reduce(both)
    };
    Level::ALL.into_iter().filter_map(of).collect()
}

/// Two names of one device: their peaks need not have been at one time, so the higher one holds.
fn both(a: LevelUse, b: LevelUse) -> LevelUse {
    let higher = if a.peak_bytes >= b.peak_bytes { a } else { b };
    LevelUse {
        live_bytes: a.live_bytes.saturating_add(b.live_bytes),
        live_count: a.live_count + b.live_count,
        allocs: a.allocs + b.allocs,
        frees: a.frees + b.frees,
        unknown_frees: a.unknown_frees + b.unknown_frees,
        ..higher
    }
}

fn trends(here: &Here, end: (i64, bool), device_bytes: Option<i64>) -> Vec<Trend> {
    let torn_down_ns = here.devices.iter().filter_map(|end| end.torn_down_ns).min();
    let (ns, of_process) = torn_down_ns.map_or(end, |ns| (ns, true));
    let judge = |of: Of, series: &state::Series, bytes: i64| {
        let trend = growth::judge(series, End { ns, bytes, of_process }, device_bytes)?;
        let growth::Trend { bytes_per_second, since_ns, until_ns, from_bytes, to_bytes, grows } =
            trend;
        Some(Trend { of, bytes_per_second, since_ns, until_ns, from_bytes, to_bytes, grows })
    };
    let facts = &here.facts;
    let torch = [(Of::Tensors, &facts.tensors), (Of::TorchReserved, &facts.torch_reserved)];
    let main = here.devices.iter().max_by_key(|end| end.device.usage(Level::Device).peak_bytes);
    let main = main.and_then(|end| {
        let live_bytes = end.device.usage(Level::Device).live_bytes;
        judge(Of::Device, &end.device.series, live_bytes)
    });
    let levels = [(Of::Pool, Level::Pool), (Of::Managed, Level::Managed), (Of::Host, Level::Host)];
    let courses =
        levels.into_iter().filter_map(|(of, level)| Some((of, facts.courses.get(&level)?)));
    let judged = torch.into_iter().chain(courses).filter_map(|(of, course)| {
        course.series.origin_ns()?;
        judge(of, &course.series, course.bytes)
    });
    main.into_iter().chain(judged).collect()
}

fn is_here<'a>(here: &'a Here) -> impl Fn(&&state::Group) -> bool + 'a {
    |group| here.devices.iter().any(|end| end.index == group.device)
}

fn never_freed(here: &Here, unfreed: &[state::Group]) -> Vec<Group> {
    let groups = unfreed.iter().filter(is_here(here)).take(GROUPS);
    groups
        .map(|group| Group {
            api: group.api.to_string(),
            level: group.level,
            size_bytes: group.size_bytes,
            count: group.count,
            bytes: group.bytes,
            first_ns: group.first_ns,
            last_ns: group.last_ns,
        })
        .collect()
}

fn totals(here: &Here, unfreed: &[state::Group]) -> Vec<LevelTotal> {
    let of = |level: Level| {
        let groups = unfreed.iter().filter(is_here(here)).filter(move |g| g.level == level);
        groups.fold(LevelTotal { level, bytes: 0, count: 0 }, |total, group| LevelTotal {
            level,
            bytes: total.bytes.saturating_add(group.bytes),
            count: total.count + group.count,
        })
    };
    Level::ALL.into_iter().map(of).filter(|total| total.count > 0).collect()
}
