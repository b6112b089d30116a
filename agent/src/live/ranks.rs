//! Which rank a process is by what it tells NCCL, where its environment does not say.

use ledger::{call::ProcId, rows::ProcessRow};

use super::books::Books;

/// A communicator that a process takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Communicator {
    rank: i32,
    size: i32,
    /// The same on all its ranks; `None`: not known.
    key: Option<u64>,
}

impl Communicator {
    /// `None` where a process is alone in it, or NCCL will refuse it.
    pub(super) fn new(rank: i32, size: i32, key: Option<u64>) -> Option<Self> {
        let has_rank = size > 1 && (0..size).contains(&rank);
        has_rank.then_some(Self { rank, size, key })
    }

    /// Whether it tells more of the job than one from before: groups of some of its ranks are smaller
    /// than that of all, and may be made first.
    fn outranks(self, before: Option<Self>) -> bool {
        before.is_none_or(|before| self.size > before.size)
    }

    /// Fills in what the environment did not tell. Rank and size are of one source: a rank among
    /// others' ranks means nothing.
    pub(super) fn fill_in(self, row: &mut ProcessRow) {
        if row.rank.is_none() {
            (row.rank, row.world_size) = (Some(self.rank), Some(self.size));
        }
        if row.job.is_none() {
            row.job = self.key.map(|key| format!("nccl-{key:016x}"));
        }
    }
}

impl Books {
    /// A process takes part in a communicator.
    pub(super) fn joined(&mut self, proc_id: ProcId, communicator: Communicator) {
        let Some(life) = self.lives.by_id(proc_id) else { return };
        if communicator.outranks(life.communicator) {
            life.communicator = Some(communicator);
            self.write_process(proc_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled_in(row: ProcessRow) -> (Option<i32>, Option<i32>, Option<String>) {
        let mut row = row;
        Communicator::new(3, 8, Some(0xabc)).unwrap().fill_in(&mut row);
        (row.rank, row.world_size, row.job)
    }

    #[test]
    fn what_the_environment_says_stays() {
        let job = Some("nccl-0000000000000abc".to_owned());
        assert_eq!(filled_in(ProcessRow::default()), (Some(3), Some(8), job.clone()));
        // torchrun's default names no job.
        let row = ProcessRow { rank: Some(1), world_size: Some(4), ..ProcessRow::default() };
        assert_eq!(filled_in(row.clone()), (Some(1), Some(4), job));
        let row = ProcessRow { world_size: None, job: Some("77".to_owned()), ..row };
        assert_eq!(filled_in(row), (Some(1), None, Some("77".to_owned())));
    }

    #[test]
    fn the_largest_group_is_the_job() {
        let of = |rank, size| Communicator::new(rank, size, None);
        assert!(of(1, 2).unwrap().outranks(None));
        assert!(of(1, 4).unwrap().outranks(of(0, 2)));
        assert!(!of(1, 2).unwrap().outranks(of(0, 2)), "another one of the same size");
        assert!(!of(1, 2).unwrap().outranks(of(0, 4)));
    }

    #[test]
    fn who_is_alone_or_out_of_range_has_no_rank() {
        for (rank, size) in [(0, 1), (0, 0), (0, -1), (2, 2), (-1, 2), (0x7000_0000, 4)] {
            assert_eq!(Communicator::new(rank, size, Some(1)), None, "{rank} of {size}");
        }
    }
}
