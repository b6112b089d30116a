//! Refused allocations: the last one of each kind, what was held then, what happened before.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::facts::{Place, RefusalFacts, RefusalKey};
use crate::{
    account::state::{Process, State},
    call::Level,
    rows::{BreakdownRow, EventRow, OomRow},
};

/// Events before a refusal that are kept.
const BEFORE: usize = 6;

/// Of all pairs of moments so many must rise, and memory by one part in so many of what is held: a
/// cache that fills up in a few steps is no growth.
const RISING: f64 = 0.9;
const RISE_PART: f64 = 8.0;

/// The process's memory on a device has grown steadily until now.
fn grew(process: &Process) -> bool {
    process.devices().iter().any(|device| {
        device.growth().is_some_and(|growth| {
            let seconds = growth.until_ns.saturating_sub(growth.since_ns) as f64 / 1e9;
            let risen = growth.bytes_per_second * seconds;
            let held = device.usage(Level::Device).live_bytes as f64;
            growth.rising >= RISING && risen >= held / RISE_PART
        })
    })
}

/// What is kept of refusals.
#[derive(Debug, Default)]
pub(in crate::report) struct Refusals {
    pub(in crate::report) by_key: BTreeMap<RefusalKey, RefusalFacts>,
    /// Moments of the last refusals, with what processes held then.
    moments: HashMap<i64, Vec<BreakdownRow>>,
    /// Processes with refusals.
    watched: HashMap<i64, Watched>,
}

/// A process with refusals.
#[derive(Debug, Default)]
struct Watched {
    recent: VecDeque<EventRow>,
    /// Its refusals whose moment has not come yet.
    coming: Vec<(i64, RefusalKey)>,
}

impl Refusals {
    /// Takes in a refusal. PyTorch's own report stands for the driver's refusals that led to it.
    pub(super) fn see(&mut self, row: OomRow, total_bytes: Option<i64>) {
        if row.outcome.as_deref() == Some("raised") && row.api != "c10" {
            return;
        }
        let key = RefusalKey {
            proc_id: row.proc_id,
            api: row.api.clone(),
            place: Place::of(row.gpu_uuid.as_deref(), None),
            never_fits: row.size_bytes.zip(total_bytes).is_some_and(|(size, total)| size > total),
            went_well: row.outcome.as_deref() == Some("retried"),
        };
        let facts = self.by_key.entry(key.clone()).or_insert_with(|| RefusalFacts {
            count: 0,
            first_ns: row.ts_ns,
            last: row.clone(),
            held: Vec::new(),
            before: Vec::new(),
            grew: false,
        });
        facts.count += 1;
        facts.first_ns = facts.first_ns.min(row.ts_ns);
        if facts.last.ts_ns > row.ts_ns {
            return;
        }
        self.moments.remove(&facts.last.ts_ns);
        self.moments.insert(row.ts_ns, Vec::new());
        let coming = &mut self.watched.entry(row.proc_id).or_default().coming;
        coming.retain(|(_, of)| *of != key);
        coming.push((row.ts_ns, key));
        facts.last = row;
    }

    /// Takes in a row of a breakdown, if it tells of the moment of a refusal. Such a moment is no
    /// reading of NVML. Refusals come before.
    pub(super) fn held(&mut self, row: &BreakdownRow) -> bool {
        let Some(rows) = self.moments.get_mut(&row.ts_ns) else { return false };
        rows.push(row.clone());
        true
    }

    /// Takes in an event, in their order, before it is applied to `state`.
    pub(super) fn event(&mut self, row: &EventRow, state: &State) {
        let Some(watched) = self.watched.get_mut(&row.proc_id) else { return };
        if watched.coming.is_empty() {
            return;
        }
        let now = watched.coming.extract_if(.., |(ts_ns, _)| *ts_ns <= row.ts_ns);
        for (_, key) in now {
            if let Some(facts) = self.by_key.get_mut(&key) {
                facts.before = watched.recent.iter().cloned().collect();
                facts.grew = state.process(row.proc_id).is_some_and(grew);
            }
        }
        if row.delta_bytes != 0 && row.level != "virtual" {
            if watched.recent.len() == BEFORE {
                watched.recent.pop_front();
            }
            watched.recent.push_back(row.clone());
        }
    }

    /// All has been seen.
    pub(in crate::report) fn finish(&mut self) {
        for watched in self.watched.values_mut() {
            for (_, key) in watched.coming.drain(..) {
                if let Some(facts) = self.by_key.get_mut(&key) {
                    facts.before = watched.recent.iter().cloned().collect();
                }
            }
        }
        for facts in self.by_key.values_mut() {
            let rows = self.moments.get(&facts.last.ts_ns);
            facts.held.extend(rows.into_iter().flatten().cloned());
        }
    }
}
