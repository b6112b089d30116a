//! What the pass keeps of processes, places, devices and losses.

use std::collections::{BTreeMap, HashMap};

use crate::{
    account::state::{Device, Series},
    call::Level,
    log::Run8,
    report::model::Reading,
    rows::{BreakdownRow, DeviceRow, EventRow, OomRow, ProcessRow},
};

/// Where memory is, as precisely as a row tells.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::report) enum Place {
    /// A device, by UUID.
    Gpu(String),
    /// A device by the number that the process uses.
    Ordinal(i32),
    /// Not known.
    Unknown,
}

impl Place {
    pub(in crate::report) fn of(uuid: Option<&str>, ordinal: Option<i32>) -> Self {
        match (uuid, ordinal) {
            (Some(uuid), _) => Self::Gpu(uuid.to_owned()),
            (None, Some(ordinal)) => Self::Ordinal(ordinal),
            (None, None) => Self::Unknown,
        }
    }
}

/// First and last moment of something.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::report) struct Span(pub(in crate::report) Option<(i64, i64)>);

impl Span {
    pub(in crate::report) fn see(&mut self, ns: i64) {
        let (first, last) = self.0.unwrap_or((ns, ns));
        self.0 = Some((first.min(ns), last.max(ns)));
    }
}

/// The latest and the highest of a figure.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::report) struct Figure {
    pub(in crate::report) last: Option<Reading>,
    pub(in crate::report) peak: Option<Reading>,
}

impl Figure {
    pub(super) fn see(&mut self, ts_ns: i64, bytes: i64) {
        let reading = Reading { bytes, ts_ns };
        if self.last.is_none_or(|last| last.ts_ns <= ts_ns) {
            self.last = Some(reading);
        }
        if self.peak.is_none_or(|peak| peak.bytes < bytes) {
            self.peak = Some(reading);
        }
    }
}

/// A value over time, and what it is now.
#[derive(Clone, Debug, Default)]
pub(in crate::report) struct Course {
    pub(in crate::report) series: Series,
    pub(in crate::report) bytes: i64,
}

impl Course {
    pub(super) fn see(&mut self, ts_ns: i64, bytes: i64) {
        self.series.push(ts_ns, bytes);
        self.bytes = bytes;
    }

    /// Of two stretches of one course, the one with more in it.
    fn absorb(&mut self, other: Self) {
        let length = |course: &Self| {
            let series = &course.series;
            series.width_ns().saturating_mul(series.buckets().len() as i64)
        };
        if length(&other) > length(self) {
            *self = other;
        }
    }
}

/// What `PyTorch` handed out at one place.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::report) struct Handed {
    pub(in crate::report) bytes: i64,
    /// When the last was.
    pub(in crate::report) ns: i64,
    /// Rows in which some were, without more alive than ever before.
    pub(in crate::report) turns: u32,
    highest: i64,
}

impl Handed {
    /// `live`: what is alive; `bytes`: all that was handed out until now.
    pub(super) fn see(&mut self, ns: i64, live: i64, bytes: i64) {
        if bytes > self.bytes {
            (self.bytes, self.ns) = (bytes, ns);
            self.turns += u32::from(live <= self.highest);
        }
        self.highest = self.highest.max(live);
    }

    fn absorb(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.turns = self.turns.saturating_add(other.turns);
        self.ns = self.ns.max(other.ns);
    }
}

/// One process at one place.
#[derive(Debug, Default)]
pub(in crate::report) struct PlaceFacts {
    pub(in crate::report) nvml: Figure,
    pub(in crate::report) nvml_unavailable: bool,
    pub(in crate::report) breakdown: Vec<BreakdownRow>,
    pub(in crate::report) allocated: Figure,
    pub(in crate::report) reserved: Figure,
    pub(in crate::report) peak_allocated: Option<i64>,
    /// When it was told first.
    pub(in crate::report) peak_allocated_ns: Option<i64>,
    pub(in crate::report) peak_reserved: Option<i64>,
    pub(in crate::report) tensors: Course,
    pub(in crate::report) handed: Handed,
    pub(in crate::report) torch_reserved: Course,
    /// Levels of which the account's state keeps no course: pool, managed, host.
    pub(in crate::report) courses: BTreeMap<Level, Course>,
}

impl PlaceFacts {
    /// Takes in what is known under another name of the same place.
    pub(in crate::report) fn absorb(&mut self, other: Self) {
        for (mine, its) in [
            (&mut self.nvml, other.nvml),
            (&mut self.allocated, other.allocated),
            (&mut self.reserved, other.reserved),
        ] {
            for reading in [its.last, its.peak].into_iter().flatten() {
                mine.see(reading.ts_ns, reading.bytes);
            }
        }
        self.nvml_unavailable |= other.nvml_unavailable;
        if self.breakdown.is_empty() {
            self.breakdown = other.breakdown;
        }
        if other.peak_allocated > self.peak_allocated {
            self.peak_allocated_ns = other.peak_allocated_ns;
        }
        self.peak_allocated = self.peak_allocated.max(other.peak_allocated);
        self.peak_reserved = self.peak_reserved.max(other.peak_reserved);
        self.tensors.absorb(other.tensors);
        self.handed.absorb(other.handed);
        self.torch_reserved.absorb(other.torch_reserved);
        for (level, course) in other.courses {
            self.courses.entry(level).or_default().absorb(course);
        }
    }
}

/// Failed calls.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::report) struct FailureFacts {
    pub(in crate::report) count: u64,
    pub(in crate::report) last_ns: i64,
}

/// One process.
#[derive(Debug, Default)]
pub(in crate::report) struct ProcessFacts {
    pub(in crate::report) row: Option<ProcessRow>,
    pub(in crate::report) run: Option<Run8>,
    pub(in crate::report) pid: i32,
    pub(in crate::report) late: bool,
    pub(in crate::report) seen: Span,
    pub(in crate::report) places: BTreeMap<Place, PlaceFacts>,
    /// Devices by the process's numbers.
    pub(in crate::report) ordinals: BTreeMap<i32, String>,
    pub(in crate::report) failures: BTreeMap<(String, i32), FailureFacts>,
    /// The devices as they were before the end of a context or of the process freed what it held,
    /// and when.
    pub(in crate::report) teardown: HashMap<usize, (Device, i64)>,
}

impl ProcessFacts {
    pub(super) fn place(&mut self, uuid: Option<&str>, ordinal: Option<i32>) -> &mut PlaceFacts {
        if let (Some(uuid), Some(ordinal)) = (uuid, ordinal)
            && !self.ordinals.contains_key(&ordinal)
        {
            self.ordinals.insert(ordinal, uuid.to_owned());
        }
        self.places.entry(Place::of(uuid, ordinal)).or_default()
    }

    /// When it ended, where that was seen.
    pub(in crate::report) fn end_ns(&self) -> Option<i64> {
        self.row.as_ref().and_then(|row| row.end_ns)
    }
}

/// One device.
#[derive(Debug, Default)]
pub(in crate::report) struct DeviceFacts {
    pub(in crate::report) row: Option<DeviceRow>,
    pub(in crate::report) nvml_index: Option<i32>,
    pub(in crate::report) used: Figure,
    pub(in crate::report) total_bytes: Option<i64>,
    pub(in crate::report) reserved_bytes: Option<i64>,
    pub(in crate::report) breakdown: Vec<BreakdownRow>,
}

/// Requests that were refused: those that could never have fitted are apart from the others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::report) struct RefusalKey {
    pub(in crate::report) proc_id: i64,
    pub(in crate::report) api: String,
    pub(in crate::report) place: Place,
    pub(in crate::report) never_fits: bool,
    /// Another try of the same size went well.
    pub(in crate::report) went_well: bool,
}

/// How often, and the last one.
#[derive(Debug)]
pub(in crate::report) struct RefusalFacts {
    pub(in crate::report) count: u64,
    pub(in crate::report) first_ns: i64,
    pub(in crate::report) last: OomRow,
    /// What the processes on the device held at the last one.
    pub(in crate::report) held: Vec<BreakdownRow>,
    /// What the process had done before it, oldest first.
    pub(in crate::report) before: Vec<EventRow>,
    /// Its device memory had grown steadily until then.
    pub(in crate::report) grew: bool,
}

/// What was lost, by reason and process.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::report) struct LossFacts {
    pub(in crate::report) pid: Option<i32>,
    pub(in crate::report) count: i64,
    pub(in crate::report) bytes: Option<i64>,
    pub(in crate::report) window: Span,
}
