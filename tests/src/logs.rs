//! What a log says, for comparing with what is true.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Context, Result};
use ledger::{
    account::state::{Process, State},
    log::{Log, Row},
    rows::{EventRow, LossRow, ProcessRow},
};

use crate::sim::truth::Live;

/// A block: level, address or handle, bytes.
pub type Block = (String, u64, u64);

/// What a program said it holds, in the order of [`blocks`].
pub fn true_blocks(live: &[Live]) -> BTreeSet<Block> {
    live.iter().map(|block| (block.level.clone(), block.addr, block.size_bytes)).collect()
}

/// What one process holds by the account; reservations and maps, which are no memory, left out.
pub fn blocks(state: &State, proc_id: i64) -> BTreeSet<Block> {
    let live = state.process(proc_id).into_iter().flat_map(Process::live);
    live.filter(|(_, live)| live.level.as_str() != "virtual")
        .map(|(_, live)| {
            let bytes = live.size_bytes.unwrap_or(-1) as u64;
            (live.level.as_str().to_owned(), live.addr as u64, bytes)
        })
        .collect()
}

/// An opened log.
#[derive(Debug)]
pub struct Logged {
    log: Log,
}

impl Logged {
    /// Opens the log; it must be whole.
    pub fn open(folder: &Path) -> Result<Self> {
        let log = Log::open(&[folder.to_owned()])?;
        Ok(Self { log })
    }

    /// Files with problems and numbers of events that are missing, in words. Empty when the log is
    /// whole.
    pub fn defects(&self) -> Result<Vec<String>> {
        let problems = self.log.problems().iter();
        let problems = problems.map(|p| format!("{}: {}", p.path.display(), p.message));
        let gaps = self.log.gaps().context("look for gaps")?;
        Ok(problems.chain(gaps.iter().map(|gap| format!("{gap:?}"))).collect())
    }

    /// All rows of one table.
    pub fn rows<R: Row>(&self) -> Result<Vec<R>> {
        self.log.rows::<R>().map(|row| row.context("read a row")).collect()
    }

    /// Calls `take` with each event, in their order.
    pub fn each_event(&self, mut take: impl FnMut(&EventRow)) -> Result<()> {
        for item in self.log.events() {
            take(&item.context("read an event")?.event);
        }
        Ok(())
    }

    /// All events, in their order.
    pub fn events(&self) -> Result<Vec<EventRow>> {
        let mut events = Vec::new();
        self.each_event(|event| events.push(event.clone()))?;
        Ok(events)
    }

    /// The account as it was before ends of processes closed it.
    pub fn before_exit(&self) -> Result<State> {
        let mut state = State::new();
        self.each_event(|event| {
            if event.api != "exit" {
                state.apply(event);
            }
        })?;
        Ok(state)
    }

    /// The account at the end of the log.
    pub fn at_end(&self) -> Result<State> {
        let mut state = State::new();
        self.each_event(|event| state.apply(event))?;
        Ok(state)
    }

    /// What is known of each life of a pid: the latest row of each, by their start.
    pub fn lives(&self, pid: u32) -> Result<Vec<ProcessRow>> {
        let mut latest: BTreeMap<i64, ProcessRow> = BTreeMap::new();
        for row in self.rows::<ProcessRow>()? {
            if i64::from(row.pid) == i64::from(pid) {
                latest.insert(row.proc_id, row);
            }
        }
        let mut lives: Vec<_> = latest.into_values().collect();
        lives.sort_by_key(|row| row.start_ns);
        Ok(lives)
    }

    /// What is known of the process; there must have been one life of its pid.
    pub fn process(&self, pid: u32) -> Result<ProcessRow> {
        let mut lives = self.lives(pid)?;
        anyhow::ensure!(lives.len() == 1, "{} lives of pid {pid}, not one: {lives:?}", lives.len());
        lives.pop().context("no life")
    }

    /// What was not seen, by reason.
    pub fn losses(&self) -> Result<BTreeMap<String, i64>> {
        let mut losses = BTreeMap::new();
        for row in self.rows::<LossRow>()? {
            *losses.entry(row.reason).or_default() += row.count;
        }
        Ok(losses)
    }
}
