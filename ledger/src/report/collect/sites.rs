//! What each place of allocation holds, over time and over backward passes.

use std::collections::HashMap;

use super::facts::Place;
use crate::{account::state::Series, call::Level, report::stacks::Stacks};

/// Windows of a course. Courses are many: memory is bounded by sites times this.
const WINDOWS: usize = 128;
/// One backward pass in a series that counts time.
pub(in crate::report) const PASS: i64 = 1_000_000_000;

/// A place of allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::report) enum SiteId {
    /// By the number of its site; several stacks may have it.
    Site(usize),
    /// By a stack that is not in the log's `stacks`.
    Stack(i64),
}

/// Whose memory, where and of which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::report) struct Holder {
    pub(in crate::report) proc_id: i64,
    pub(in crate::report) level: Level,
    /// Number of the place in [`SiteBook::places`].
    pub(in crate::report) place: usize,
}

/// When something changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct When {
    pub(super) ns: i64,
    pub(super) pass: Option<i64>,
}

/// Bytes and blocks over one axis.
#[derive(Clone, Debug)]
pub(in crate::report) struct Axis {
    pub(in crate::report) bytes: Series,
    pub(in crate::report) count: Series,
}

impl Default for Axis {
    fn default() -> Self {
        Self { bytes: Series::bounded(WINDOWS), count: Series::bounded(WINDOWS) }
    }
}

/// What one site holds.
#[derive(Clone, Debug, Default)]
pub(in crate::report) struct SiteCourse {
    pub(in crate::report) time: Axis,
    pub(in crate::report) pass: Axis,
    pub(in crate::report) bytes: i64,
    /// Blocks; meaningless unless [`SiteCourse::counted`].
    pub(in crate::report) count: i64,
    /// No row left the number of blocks open.
    pub(in crate::report) counted: bool,
    pub(in crate::report) last_ns: i64,
    /// Bytes allocated since the first row.
    pub(in crate::report) allocated: i64,
    /// Every row told the floor of its second: nothing that comes back within it looks like growth.
    pub(in crate::report) floors: bool,
    /// By how much the floor of this moment is below `bytes`.
    below: i64,
    /// The last backward pass.
    pub(in crate::report) pass_at: Option<i64>,
    open: bool,
}

impl SiteCourse {
    /// Changes of one moment count together: stacks of a site are told one after the other.
    fn turn_to(&mut self, when: When) {
        if !self.open {
            (self.counted, self.floors) = (true, true);
        } else if when.ns != self.last_ns {
            self.settle();
        }
        self.open = true;
        self.last_ns = when.ns;
        self.pass_at = when.pass.or(self.pass_at);
    }

    fn settle(&mut self) {
        let floor = self.bytes.saturating_sub(std::mem::take(&mut self.below));
        self.time.bytes.push(self.last_ns, floor);
        self.time.bytes.push(self.last_ns, self.bytes);
        self.time.count.push(self.last_ns, self.count);
        if let Some(pass) = self.pass_at {
            self.pass.bytes.push(pass.saturating_mul(PASS), floor);
            self.pass.bytes.push(pass.saturating_mul(PASS), self.bytes);
            self.pass.count.push(pass.saturating_mul(PASS), self.count);
        }
    }
}

/// What one stack holds.
#[derive(Clone, Copy, Debug)]
pub(in crate::report) struct StackNow {
    pub(in crate::report) holder: Holder,
    pub(in crate::report) stack_id: i64,
    pub(in crate::report) bytes: i64,
    pub(in crate::report) count: Option<i64>,
    pub(in crate::report) allocated_bytes: i64,
    pub(in crate::report) allocs: i64,
    course: usize,
}

/// What a holder has in all.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::report) struct Total {
    pub(in crate::report) bytes: i64,
    /// Allocations, where a row tells of all of them.
    pub(in crate::report) allocs: Option<i64>,
}

/// Numbers of a stack as a row tells them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) bytes: i64,
    /// Lowest in the second before, where a row tells.
    pub(super) floor: Option<i64>,
    pub(super) count: Option<i64>,
    pub(super) allocated_bytes: i64,
    pub(super) allocs: i64,
}

/// All of them.
#[derive(Debug, Default)]
pub(in crate::report) struct SiteBook {
    pub(in crate::report) places: Vec<Place>,
    pub(in crate::report) stacks: Vec<StackNow>,
    by_stack: HashMap<(Holder, i64), usize>,
    pub(in crate::report) courses: Vec<(Holder, SiteId, SiteCourse)>,
    by_site: HashMap<(Holder, SiteId), usize>,
    /// Numbers of the backward passes of each process, over time.
    pub(in crate::report) passes: HashMap<i64, Series>,
    /// All that a holder has, with or without a stack.
    pub(in crate::report) totals: HashMap<Holder, Total>,
    /// Allocations without a stack, tensors left out.
    pub(in crate::report) without_stack: u64,
}

/// Whether all that was allocated between two rows is alive, and all that was alive before. The
/// floor is then what was alive before, and the told one, of a second that began earlier, is lower
/// by what came meanwhile: a different part of a row each time.
const fn only_grew(before: i64, now: i64, made: i64) -> bool {
    made >= 0 && now.saturating_sub(before) == made
}

impl SiteBook {
    /// Courses never change their place: the process's own number comes first, since the UUID may
    /// become known later. Pinned memory belongs to no device.
    pub(super) fn holder(
        &mut self,
        proc_id: i64,
        level: Level,
        uuid: Option<&str>,
        ordinal: Option<i32>,
    ) -> Holder {
        let (uuid, ordinal) = match level {
            Level::Host => (None, None),
            _ => (uuid.filter(|_| ordinal.is_none()), ordinal),
        };
        let is = |place: &Place| match (place, uuid, ordinal) {
            (Place::Gpu(known), Some(uuid), _) => known == uuid,
            (Place::Ordinal(known), None, Some(ordinal)) => *known == ordinal,
            (Place::Unknown, None, None) => true,
            _ => false,
        };
        let place = self.places.iter().position(is).unwrap_or_else(|| {
            self.places.push(Place::of(uuid, ordinal));
            self.places.len() - 1
        });
        Holder { proc_id, level, place }
    }

    /// A backward pass was under way.
    pub(super) fn pass(&mut self, proc_id: i64, when: When) {
        if let Some(pass) = when.pass {
            let series = self.passes.entry(proc_id).or_insert_with(|| Series::bounded(WINDOWS));
            series.push(when.ns, pass);
        }
    }

    fn slot(&mut self, stacks: &Stacks, holder: Holder, stack_id: i64) -> usize {
        if let Some(slot) = self.by_stack.get(&(holder, stack_id)) {
            return *slot;
        }
        let site = stacks.get(stack_id).map(|stack| SiteId::Site(stack.site));
        let site = site.unwrap_or(SiteId::Stack(stack_id));
        let courses = &mut self.courses;
        let course = *self.by_site.entry((holder, site)).or_insert_with(|| {
            courses.push((holder, site, SiteCourse::default()));
            courses.len() - 1
        });
        self.stacks.push(StackNow {
            holder,
            stack_id,
            bytes: 0,
            count: Some(0),
            allocated_bytes: 0,
            allocs: 0,
            course,
        });
        self.by_stack.insert((holder, stack_id), self.stacks.len() - 1);
        self.stacks.len() - 1
    }

    /// A stack's numbers became these.
    pub(super) fn set(
        &mut self,
        stacks: &Stacks,
        (holder, stack_id): (Holder, i64),
        when: When,
        told: Told,
    ) {
        let slot = self.slot(stacks, holder, stack_id);
        let now = &mut self.stacks[slot];
        let before = (now.bytes, now.count);
        let made = told.allocated_bytes.saturating_sub(now.allocated_bytes);
        (now.bytes, now.count) = (told.bytes, told.count);
        (now.allocated_bytes, now.allocs) = (told.allocated_bytes, told.allocs);
        let course = &mut self.courses[now.course].2;
        course.turn_to(when);
        course.allocated = course.allocated.saturating_add(made);
        match told.floor {
            Some(floor) => {
                let floor = if only_grew(before.0, told.bytes, made) { before.0 } else { floor };
                course.below = course.below.saturating_add(told.bytes.saturating_sub(floor).max(0));
            }
            None => course.floors = false,
        }
        course.bytes = course.bytes.saturating_add(told.bytes.saturating_sub(before.0));
        match (before.1, told.count) {
            (Some(before), Some(count)) => {
                course.count = course.count.saturating_add(count.saturating_sub(before));
            }
            _ => course.counted = false,
        }
    }

    /// A stack's block came (`count` 1) or went (-1).
    pub(super) fn change(
        &mut self,
        stacks: &Stacks,
        (holder, stack_id): (Holder, i64),
        when: When,
        (delta, count): (i64, i64),
    ) {
        let slot = self.slot(stacks, holder, stack_id);
        let now = self.stacks[slot];
        let told = Told {
            bytes: now.bytes.saturating_add(delta),
            floor: None,
            count: now.count.map(|now| now.saturating_add(count)),
            allocated_bytes: now.allocated_bytes.saturating_add(delta.max(0)),
            allocs: now.allocs + count.max(0),
        };
        self.set(stacks, (holder, stack_id), when, told);
    }

    /// Takes the last changes in.
    pub(in crate::report) fn settle(&mut self) {
        for (_, _, course) in &mut self.courses {
            course.settle();
        }
    }

    /// The stack of a site that holds most at the end.
    pub(in crate::report) fn main_stack(&self, holder: Holder, site: SiteId) -> Option<i64> {
        let course = *self.by_site.get(&(holder, site))?;
        let stacks = self.stacks.iter().filter(|stack| stack.course == course);
        stacks.max_by_key(|stack| (stack.bytes, stack.stack_id)).map(|stack| stack.stack_id)
    }
}
