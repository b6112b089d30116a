//! What the log's rows add up to: the state behind screens, checkpoints and reports.
//!
//! Fed by [`EventRow`]s only, live and offline alike, so both show the same. One address is never
//! counted twice: where a block is allocated at an address that is alive, the older one is out from
//! then on, though its free row may still be to come (see [`super::Ledger::apply`]).

mod growth;
mod held;
mod pools;
mod process;
mod series;
mod usage;

use std::collections::HashMap;

pub(crate) use growth::theil_sen;
pub use growth::{Growth, growth};
pub use held::DeviceBlock;
pub use pools::PoolUse;
pub use process::{ApiUsage, Device, Group, LiveAllocation, Process};
pub use series::{Bucket, Series};
pub use usage::{Failures, Usage};

use crate::{
    call::Level,
    rows::{EventRow, LiveRow},
};

/// State of all processes.
#[derive(Debug, Default)]
pub struct State {
    processes: HashMap<i64, Process>,
    unreadable: u64,
}

impl State {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies the next row, in order of `seq`.
    pub fn apply(&mut self, row: &EventRow) {
        let Some(level) = Level::parse(&row.level) else {
            self.unreadable += 1;
            return;
        };
        let process = self.processes.entry(row.proc_id).or_default();
        process.apply(row, level);
    }

    /// Takes in one allocation of a checkpoint. Apply all rows of one checkpoint to an empty state,
    /// then the events after its `seq`; totals of allocated and freed bytes then count from it.
    pub fn start_from(&mut self, row: &LiveRow) {
        let Some(level) = Level::parse(&row.level) else {
            self.unreadable += 1;
            return;
        };
        self.processes.entry(row.proc_id).or_default().start_from(row, level);
    }

    /// Processes that had a row, by `proc_id`, in no particular order.
    pub fn processes(&self) -> impl Iterator<Item = (i64, &Process)> {
        self.processes.iter().map(|(&proc_id, process)| (proc_id, process))
    }

    /// One process.
    pub fn process(&self, proc_id: i64) -> Option<&Process> {
        self.processes.get(&proc_id)
    }

    /// Drops a process that ended and is not shown any more.
    pub fn forget(&mut self, proc_id: i64) {
        self.processes.remove(&proc_id);
    }

    /// Rows whose level is no word of this version, which were left out.
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }
}

#[cfg(test)]
mod tests;
