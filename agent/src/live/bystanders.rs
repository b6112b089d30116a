//! Who else holds memory on a GPU: processes that are not traced, and those that are gone.

use std::collections::{HashMap, HashSet};

use ledger::{
    account::breakdown::whole,
    call::ProcId,
    rows::{ProcessRow, ProcessSampleRow},
};

use super::{books::Books, readings::Reading};
use crate::{host::Stat, nvml::ProcessReading, units::show_bytes};

/// `detail` of a process of which NVML alone tells.
const NOT_TRACED: &str = "not traced";
/// So many readings in a row must show the same: a process that ends is listed for a moment longer.
const READINGS: u32 = 3;

/// What is remembered of processes that hold memory.
#[derive(Debug, Default)]
pub(super) struct Bystanders {
    by_pid: HashMap<u32, Bystander>,
}

/// One pid that NVML lists.
#[derive(Debug)]
struct Bystander {
    proc_id: ProcId,
    /// Name and command, for when it is gone.
    shown: String,
    /// The parent that it had when it was met.
    parent: Option<u32>,
    /// Readings in a row with the same oddity.
    odd: (Option<Oddity>, u32),
    told: HashSet<Oddity>,
}

impl Bystander {
    fn new(proc_id: ProcId, shown: String, stat: Option<&Stat>) -> Self {
        let parent = stat.map(|stat| stat.ppid);
        Self { proc_id, shown, parent, odd: (None, 0), told: HashSet::new() }
    }
}

/// What a process that holds memory should not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Oddity {
    /// There is no process of that number.
    Gone,
    /// It has ended, and its parent has not taken note.
    Zombie,
    /// It waits in the kernel, where no signal reaches it.
    Stuck,
    /// Its parent has ended.
    Orphan,
}

impl Oddity {
    fn of(stat: Option<&Stat>, ppid: Option<u32>) -> Option<Self> {
        let Some(stat) = stat else { return Some(Self::Gone) };
        let orphaned = ppid.is_some_and(|ppid| ppid != stat.ppid);
        match stat.state {
            'Z' | 'X' => Some(Self::Zombie),
            'D' => Some(Self::Stuck),
            _ => orphaned.then_some(Self::Orphan),
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::Gone => {
                "there is no process of that number any more (another one keeps what it shared, a \
                 process in another pid namespace is listed, or the driver has not taken it back)"
            }
            Self::Zombie => {
                "it has ended and its parent has not taken note of that (a zombie): its memory goes \
                 when the parent does"
            }
            Self::Stuck => {
                "it is in an uninterruptible wait in the kernel, where no signal reaches it"
            }
            Self::Orphan => "its parent has ended, it goes on: was it forgotten?",
        }
    }
}

/// The word for `state` of `process_samples`.
pub(super) fn state_of(stat: Option<&Stat>) -> String {
    stat.map_or_else(|| "gone".to_owned(), |stat| stat.state.to_string())
}

impl Books {
    /// A process that holds memory and is not traced: who it is, and that it does.
    pub(super) fn bystander(
        &mut self,
        reading: &Reading,
        process: &ProcessReading,
        stat: Option<&Stat>,
    ) {
        let proc_id = self.meet(process.pid, stat);
        let times = self.look_after(process, proc_id, stat);
        // A process that ends is listed for a moment longer; that is no memory that was left behind.
        let ends = stat.is_none_or(|stat| matches!(stat.state, 'Z' | 'X'));
        if ends && times < READINGS {
            return;
        }
        let used = process.used_bytes.map(|bytes| bytes as i64);
        self.add(ProcessSampleRow {
            ts_ns: reading.ts_ns,
            proc_id: proc_id.0,
            pid: process.pid as i32,
            nvml_index: Some(process.nvml_index),
            gpu_uuid: Some(reading.gpu_uuid.clone()),
            nvml_used_bytes: used,
            cpu_ns: stat.map(|stat| stat.usage.cpu_ns),
            rss_bytes: stat.map(|stat| stat.usage.rss_bytes),
            state: Some(state_of(stat)),
            ..ProcessSampleRow::default()
        });
        if let Some(used) = used {
            for row in whole(proc_id, &reading.gpu_uuid, reading.ts_ns, used) {
                self.add(row);
            }
        }
    }

    /// The process behind a pid that NVML lists, introduced if it is new.
    fn meet(&mut self, pid: u32, stat: Option<&Stat>) -> ProcId {
        let now = self.opening.host.proc_id(pid);
        let known = self.bystanders.by_pid.get(&pid).map(|known| known.proc_id);
        if let Some(known) = known.filter(|known| now.is_none_or(|now| now == *known)) {
            return known;
        }
        // One that is gone and was traced has its row.
        let traced = self.lives.latest(pid).map(|life| life.proc_id).filter(|_| now.is_none());
        let (proc_id, row) = match traced {
            Some(proc_id) => (proc_id, None),
            None => self.introduce(pid),
        };
        let shown = row.as_ref().map(shown).unwrap_or_default();
        self.bystanders.by_pid.insert(pid, Bystander::new(proc_id, shown, stat));
        self.rows_of(row);
        proc_id
    }

    fn introduce(&mut self, pid: u32) -> (ProcId, Option<ProcessRow>) {
        let identity = self.opening.host.identity(pid, self.opening.commands);
        let row = identity.map_or_else(
            || ProcessRow {
                proc_id: ProcId::new(self.opening.host.boot_id(), pid, 0).0,
                pid: pid as i32,
                host: self.opening.host.name().to_owned(),
                ..ProcessRow::default()
            },
            |identity| identity.row,
        );
        let ts_ns = crate::clock::epoch_ns();
        let detail = NOT_TRACED.to_owned();
        (ProcId(row.proc_id), Some(ProcessRow { ts_ns, detail, from_start: false, ..row }))
    }

    fn rows_of(&mut self, row: Option<ProcessRow>) {
        if let Some(row) = row {
            self.add(row);
        }
    }

    /// Says once what is odd about a process that holds memory; gives how many readings in a row have
    /// shown the same.
    pub(super) fn look_after(
        &mut self,
        process: &ProcessReading,
        proc_id: ProcId,
        stat: Option<&Stat>,
    ) -> u32 {
        let new = || Bystander::new(proc_id, String::new(), stat);
        let known = self.bystanders.by_pid.entry(process.pid).or_insert_with(new);
        let odd = Oddity::of(stat, known.parent);
        known.odd = if known.odd.0 == odd { (odd, known.odd.1 + 1) } else { (odd, 1) };
        let times = known.odd.1;
        let Some(odd) = odd.filter(|_| times >= READINGS) else { return times };
        if !known.told.insert(odd) {
            return times;
        }
        let of = if known.shown.is_empty() { String::new() } else { format!(" ({})", known.shown) };
        let held = process.used_bytes.map_or("memory".to_owned(), |bytes| show_bytes(bytes as i64));
        let gpu = process.nvml_index;
        let text = format!("pid {}{of} holds {held} on GPU {gpu}: {}", process.pid, odd.text());
        let value = process.used_bytes.map(|bytes| bytes as i64);
        self.annotate(Some(proc_id.0), "after_death", text, value);
        times
    }

    /// Memory of other processes on a device, by NVML's last reading.
    pub(super) fn others_bytes(&self, uuid: &str, tgid: u32) -> Option<i64> {
        let listed = self.readings.listed_on(uuid)?;
        let others = listed.iter().filter(|process| process.pid != tgid);
        others.map(|process| process.used_bytes.map(|bytes| bytes as i64)).sum()
    }

    /// The process that NVML lists under a pid, where it is known.
    pub(super) fn listed_process(&self, pid: u32) -> Option<ProcId> {
        self.bystanders.by_pid.get(&pid).map(|known| known.proc_id)
    }
}

fn shown(row: &ProcessRow) -> String {
    row.command.clone().unwrap_or_else(|| row.comm.clone())
}

impl Bystanders {
    /// Forgets pids that NVML does not list any more on any device.
    pub(super) fn keep(&mut self, listed: &HashSet<u32>) {
        self.by_pid.retain(|pid, _| listed.contains(pid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::ProcessUsage;

    fn stat(state: char, ppid: u32) -> Stat {
        let usage = ProcessUsage { cpu_ns: 0, rss_bytes: 0 };
        Stat { comm: String::new(), state, ppid, start_ticks: 1, usage }
    }

    #[test]
    fn what_should_not_hold_memory_is_told_apart() {
        let of = |stat: Option<Stat>| Oddity::of(stat.as_ref(), Some(7));
        assert_eq!(of(None), Some(Oddity::Gone));
        assert_eq!(of(Some(stat('Z', 7))), Some(Oddity::Zombie));
        assert_eq!(of(Some(stat('D', 7))), Some(Oddity::Stuck));
        assert_eq!(of(Some(stat('S', 1))), Some(Oddity::Orphan));
        assert_eq!(of(Some(stat('R', 7))), None);
        assert_eq!(Oddity::of(Some(&stat('R', 1)), None), None);
    }
}
