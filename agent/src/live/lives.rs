//! Which process a tgid means at a time: pids are reused.

use std::collections::HashMap;

use agent_common::life::RawLife;
use ledger::{call::ProcId, rows::ProcessRow};

use super::ranks::Communicator;
use crate::host::{Identity, text};

/// Nanoseconds of a clock tick of `/proc/PID/stat` (`USER_HZ` is 100 on every architecture that we
/// run on).
const TICK_NS: u64 = 10_000_000;
/// How long an ended life is kept for records that are still under way.
const KEEP_NS: u64 = 10_000_000_000;

/// One life of a pid.
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Debug)]
pub(super) struct Life {
    /// Its key.
    pub proc_id: ProcId,
    /// Host pid.
    pub tgid: u32,
    /// Start, `CLOCK_BOOTTIME`.
    pub start_ns: u64,
    /// End, `CLOCK_BOOTTIME`, once seen.
    pub ended_ns: Option<u64>,
    /// What the kernel said of it, for where `/proc` tells no more.
    pub told: Told,
    /// Who it is, looked up before its first traced call.
    pub early: Option<Identity>,
    /// Its row, once it made its first traced call.
    pub row: Option<ProcessRow>,
    /// It used CUDA, or may have, before its probes were in place.
    pub late: bool,
    /// It has counted its devices (`cuInit`), and its numbers for them are settled.
    pub counted_devices: bool,
    /// The largest communicator that its program was seen to join.
    pub communicator: Option<Communicator>,
    /// When its probes were in place, epoch nanoseconds.
    pub attached_ns: Option<i64>,
    /// How much is recorded of its tensors, where that is less than of the others'.
    pub detail: Option<&'static str>,
    /// It was not there any more when it was looked for.
    pub missing: bool,
    /// Nobody told its end, or how it ended.
    pub end_untold: bool,
}

/// What the kernel half says of a process. One that ended soon after its first call has nothing in
/// `/proc` any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// Name of its main thread.
    pub comm: String,
    /// Real user id.
    pub uid: Option<u32>,
    /// Its parent, where it was seen to fork.
    pub ppid: Option<u32>,
}

impl Told {
    /// Takes in an event of the process.
    pub(super) fn learn(&mut self, life: &RawLife) {
        let name = life.comm.split(|byte| *byte == 0).next().unwrap_or_default();
        self.comm = text::clean(name, life.comm.len());
        self.uid = Some(life.uid);
        if life.parent_tgid != 0 {
            self.ppid = Some(life.parent_tgid);
        }
    }
}

/// Lives by tgid, the latest last.
#[derive(Debug)]
pub(super) struct Lives {
    boot_id: String,
    lives: HashMap<u32, Vec<Life>>,
}

impl Lives {
    /// None yet.
    pub(super) fn new(boot_id: &str) -> Self {
        Self { boot_id: boot_id.to_owned(), lives: HashMap::new() }
    }

    /// The life of `tgid` that started at `start_ns`, made if new.
    pub(super) fn begin(&mut self, tgid: u32, start_ns: u64) -> &mut Life {
        let proc_id = ProcId::new(&self.boot_id, tgid, start_ns / TICK_NS);
        let lives = self.lives.entry(tgid).or_default();
        let at = lives.iter().position(|life| life.proc_id == proc_id).unwrap_or_else(|| {
            lives.push(Life {
                proc_id,
                tgid,
                start_ns,
                ended_ns: None,
                told: Told::default(),
                early: None,
                row: None,
                late: false,
                counted_devices: false,
                communicator: None,
                attached_ns: None,
                detail: None,
                missing: false,
                end_untold: false,
            });
            lives.sort_by_key(|life| life.start_ns);
            lives.iter().position(|life| life.proc_id == proc_id).unwrap_or(0)
        });
        let life = &mut lives[at];
        // The kernel tells the start exactly, /proc rounds it down to a tick.
        life.start_ns = life.start_ns.max(start_ns);
        life
    }

    /// Whose life a record of `tgid` at `ts_ns` belongs to.
    pub(super) fn at(&mut self, tgid: u32, ts_ns: u64) -> Option<&mut Life> {
        let lives = self.lives.get_mut(&tgid)?;
        let begun = |until_ns: u64| lives.iter().rposition(|life| life.start_ns <= until_ns);
        // A life before this one may have ended less than a tick ago: exact times go first.
        let at = begun(ts_ns).or_else(|| begun(ts_ns + TICK_NS))?;
        lives.get_mut(at)
    }

    /// [`Lives::at`], or a life that begins with the record.
    pub(super) fn at_or_begin(&mut self, tgid: u32, ts_ns: u64) -> &mut Life {
        let start_ns = self.at(tgid, ts_ns).map_or(ts_ns, |life| life.start_ns);
        self.begin(tgid, start_ns)
    }

    /// The latest life of `tgid` that has not ended.
    pub(super) fn current(&mut self, tgid: u32) -> Option<&mut Life> {
        self.lives.get_mut(&tgid)?.last_mut().filter(|life| life.ended_ns.is_none())
    }

    /// The latest life of `tgid` that made a traced call, whether it has ended or not.
    pub(super) fn latest(&self, tgid: u32) -> Option<&Life> {
        self.lives.get(&tgid)?.iter().rev().find(|life| life.row.is_some())
    }

    /// A life by its key.
    pub(super) fn by_id(&mut self, proc_id: ProcId) -> Option<&mut Life> {
        self.lives.values_mut().flatten().find(|life| life.proc_id == proc_id)
    }

    /// Every life that has not ended and made a traced call.
    pub(super) fn running(&self) -> impl Iterator<Item = &Life> {
        self.lives.values().flatten().filter(|life| life.ended_ns.is_none() && life.row.is_some())
    }

    /// Lives whose end was not told, but of which `exists` says for the second time that they are not
    /// there: the record of an end may be under way for a while.
    pub(super) fn missed(&mut self, exists: impl Fn(&Life) -> bool) -> Vec<(ProcId, u32)> {
        let mut missed = Vec::new();
        for life in self.lives.values_mut().flatten().filter(|life| life.ended_ns.is_none()) {
            let is_missing = !exists(life);
            let was_missing = std::mem::replace(&mut life.missing, is_missing);
            if life.missing && was_missing {
                missed.push((life.proc_id, life.tgid));
            }
        }
        missed
    }

    /// Drops lives that ended long before `now_ns`.
    pub(super) fn tidy(&mut self, now_ns: u64) {
        self.lives.retain(|_, lives| {
            lives.retain(|life| life.ended_ns.is_none_or(|end| now_ns < end + KEEP_NS));
            !lives.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_pid_is_told_apart_by_time() {
        let mut lives = Lives::new("boot");
        let first = lives.begin(7, 1_000_000_000).proc_id;
        lives.at(7, 1_500_000_000).unwrap().ended_ns = Some(2_000_000_000);
        let second = lives.begin(7, 3_000_000_000).proc_id;
        assert_ne!(first, second);
        assert_eq!(lives.at(7, 1_900_000_000).unwrap().proc_id, first);
        assert_eq!(lives.at(7, 3_000_000_001).unwrap().proc_id, second);
        assert_eq!(lives.current(7).unwrap().proc_id, second);
        assert!(lives.at(8, 5).is_none());
    }

    #[test]
    fn a_pid_that_is_reused_within_a_tick_is_told_apart() {
        let mut lives = Lives::new("boot");
        let first = lives.begin(7, 1_000_000_000).proc_id;
        lives.begin(7, 1_100_000_000);
        let second = lives.begin(7, 1_104_000_000).proc_id;
        assert_eq!(lives.at(7, 1_103_000_000).unwrap().proc_id, first);
        assert_eq!(lives.at(7, 1_104_000_000).unwrap().proc_id, second);
        assert_eq!(lives.at(7, 999_000_000).unwrap().proc_id, first, "a start from /proc");
    }

    #[test]
    fn an_ended_life_stays_for_late_records_and_goes() {
        let mut lives = Lives::new("boot");
        lives.begin(7, 1_000_000_000).ended_ns = Some(2_000_000_000);
        lives.tidy(3_000_000_000);
        assert!(lives.at(7, 1_500_000_000).is_some());
        assert!(lives.current(7).is_none());
        lives.tidy(20_000_000_000);
        assert!(lives.at(7, 1_500_000_000).is_none());
    }

    #[test]
    fn an_end_that_nobody_told_is_noticed_at_the_second_look() {
        let mut lives = Lives::new("boot");
        let gone = lives.begin(7, 1_000_000_000).proc_id;
        lives.begin(8, 1_000_000_000);
        lives.begin(9, 1_000_000_000).ended_ns = Some(2_000_000_000);
        let exists = |life: &Life| life.tgid == 8;
        assert_eq!(lives.missed(exists), []);
        assert_eq!(lives.missed(exists), [(gone, 7)]);
        assert_eq!(lives.missed(|_| true), []);
        assert_eq!(lives.missed(exists), [], "it was there again");
    }

    #[test]
    fn what_the_kernel_told_of_a_fork_outlives_the_exec() {
        let mut told = Told::default();
        let event = |parent_tgid, name: &[u8]| {
            let mut comm = [0; 16];
            comm[..name.len()].copy_from_slice(name);
            let (kind, pad, exit_code, tgid) = (0, [0; 3], 0, 7);
            let (ts_ns, start_ns, uid, exec_tid) = (2, 1, 1000, 0);
            RawLife {
                kind,
                pad,
                exit_code,
                tgid,
                parent_tgid,
                ts_ns,
                start_ns,
                uid,
                exec_tid,
                comm,
            }
        };
        told.learn(&event(5, b"sh"));
        told.learn(&event(0, b"train\n"));
        let expected = Told { comm: "train\\n".to_owned(), uid: Some(1000), ppid: Some(5) };
        assert_eq!(told, expected);
    }

    #[test]
    fn a_start_from_proc_and_one_from_the_kernel_are_one_life() {
        let mut lives = Lives::new("boot");
        let from_kernel = lives.begin(7, 1_234_567_890).proc_id;
        assert_eq!(lives.begin(7, 1_230_000_000).proc_id, from_kernel);
        assert_eq!(lives.running().count(), 0);
    }
}
