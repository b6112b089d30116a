//! Short words for inputs.

use crate::{
    account::{
        Ledger,
        state::{LiveAllocation, State},
    },
    call::{Action, Call, Input, Level, Location, ProcId, Space},
    rows::EventRow,
};

pub(crate) const PROC: ProcId = ProcId(11);
pub(crate) const TGID: u32 = 100;

/// A successful call of thread 1.
pub(crate) fn call(action: Action, enter_ns: i64, exit_ns: i64) -> Call {
    Call {
        proc_id: PROC,
        tgid: TGID,
        tid: 1,
        api: api_of(&action),
        enter_ns,
        exit_ns,
        runtime_api: None,
        result: 0,
        stack_id: 0,
        action,
    }
}

/// [`call`], as an input.
pub(crate) fn at(action: Action, enter_ns: i64, exit_ns: i64) -> Input {
    Input::Call(call(action, enter_ns, exit_ns))
}

pub(crate) fn alloc(addr: u64, size: u64) -> Action {
    Action::Alloc { level: Level::Device, addr, size_bytes: Some(size) }
}

pub(crate) fn alloc_of(level: Level, addr: u64, size: u64) -> Action {
    Action::Alloc { level, addr, size_bytes: Some(size) }
}

pub(crate) fn free(addr: u64) -> Action {
    Action::Free { addr, space: Space::Device }
}

pub(crate) fn free_host(addr: u64) -> Action {
    Action::Free { addr, space: Space::Host }
}

pub(crate) fn create(handle: u64, size: u64) -> Action {
    Action::VmmCreate { handle, size_bytes: size, location: Location::Device(0) }
}

pub(crate) fn exit(ts_ns: i64) -> Input {
    Input::Exit { proc_id: PROC, tgid: TGID, ts_ns, exit_code: 0 }
}

pub(crate) fn exec(ts_ns: i64) -> Input {
    Input::Exec { proc_id: PROC, tgid: TGID, ts_ns }
}

fn api_of(action: &Action) -> &'static str {
    match action {
        Action::Alloc { level: Level::Pool, .. } => "cuMemAllocAsync",
        Action::Alloc { level: Level::Managed, .. } => "cuMemAllocManaged",
        Action::Alloc { level: Level::Host, .. } => "cuMemHostAlloc",
        Action::Alloc { .. } => "cuMemAlloc_v2",
        Action::Free { space: Space::Host, .. } => "cuMemFreeHost",
        Action::Free { .. } => "cuMemFree_v2",
        Action::VmmCreate { .. } => "cuMemCreate",
        Action::VmmRelease { .. } => "cuMemRelease",
        Action::VmmMap { .. } => "cuMemMap",
        Action::VmmUnmap { .. } => "cuMemUnmap",
        Action::VmmImport { .. } => "cuMemImportFromShareableHandle",
        Action::Array { .. } => "cuArrayCreate_v2",
        Action::ExternalImport { .. } => "cuImportExternalMemory",
        Action::CtxDestroy { .. } => "cuCtxDestroy_v2",
        Action::PrimaryReset { .. } => "cuDevicePrimaryCtxReset",
        _ => "cuOther",
    }
}

/// A ledger that feeds a state and keeps all rows; every row is checked as it comes.
#[derive(Debug, Default)]
pub(crate) struct Bench {
    pub(crate) ledger: Ledger,
    pub(crate) state: State,
    pub(crate) rows: Vec<EventRow>,
}

impl Bench {
    /// Applies successful calls of thread 1, each after the one before.
    pub(crate) fn run(&mut self, actions: &[Action]) -> &mut Self {
        for &action in actions {
            let now = 10 * (self.rows.len() as i64 + 1_000);
            self.apply(&at(action, now, now + 1));
        }
        self
    }

    pub(crate) fn apply(&mut self, input: &Input) -> &mut Self {
        let first = self.rows.len();
        self.ledger.apply(input, &mut self.rows);
        for (index, row) in self.rows.iter().enumerate().skip(first) {
            assert_eq!(row.seq, index as i64 + 1, "seq has no gaps");
            self.state.apply(row);
        }
        self.check();
        self
    }

    /// No address is live twice, and totals are the sum of what is live.
    pub(crate) fn check(&self) {
        let Some(process) = self.state.process(PROC.0) else { return };
        for level in Level::ALL {
            let live = || process.live().filter(move |(_, live)| live.level == level);
            let sum: i64 = live().map(|(_, live)| live.size_bytes.unwrap_or(0)).sum();
            assert_eq!(process.live_bytes(level), sum, "{level:?}");
            let count: u64 =
                process.devices().iter().map(|device| device.usage(level).live_count).sum();
            assert_eq!(count, live().count() as u64);
        }
        let is_address = |live: &LiveAllocation| {
            let handle = [
                "cuMemCreate",
                "cuMemImportFromShareableHandle",
                "cuArrayCreate_v2",
                "cuImportExternalMemory",
            ];
            live.level != Level::Virtual && !handle.contains(&process.api(live))
        };
        let mut addrs: Vec<(bool, i64)> = process
            .live()
            .filter(|(_, live)| is_address(live))
            .map(|(_, live)| (live.level == Level::Host, live.addr))
            .collect();
        let all = addrs.len();
        addrs.sort_unstable();
        addrs.dedup();
        assert_eq!(addrs.len(), all, "an address is live twice");
    }

    pub(crate) fn live_bytes(&self, level: Level) -> i64 {
        self.state.process(PROC.0).map_or(0, |process| process.live_bytes(level))
    }

    /// `sum(delta_bytes)` of a level.
    pub(crate) fn sum(&self, level: Level) -> i64 {
        let of_level = self.rows.iter().filter(|row| row.level == level.as_str());
        of_level.map(|row| row.delta_bytes).sum()
    }

    pub(crate) fn last(&self) -> &EventRow {
        self.rows.last().unwrap()
    }

    /// Op, level and delta of the rows from `first` on.
    pub(crate) fn words(&self, first: usize) -> Vec<(&str, &str, i64)> {
        let rows = self.rows.iter().skip(first);
        rows.map(|row| (row.op.as_ref(), row.level.as_ref(), row.delta_bytes)).collect()
    }

    pub(crate) fn losses(&mut self) -> Vec<(&'static str, i64, Option<i64>)> {
        let losses = self.ledger.take_losses();
        losses.into_iter().map(|loss| (loss.reason, loss.count, loss.bytes)).collect()
    }
}
