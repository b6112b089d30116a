//! The ledger: one input in, the log's rows out.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{
    desk::{Block, Books, Cause, Desk, Waiting},
    order::{call_effect_ns, effect_ns},
    process::{DeviceId, Process},
};
use crate::{
    call::{Action, Call, Input, ProcId},
    rows::{EventRow, LiveRow},
};

/// How long the record of a displaced block's free is waited for. A free returns when the device
/// has finished its work, so seconds are normal; what has not come after this is taken for lost.
const GRACE_NS: i64 = 60_000_000_000;

/// Displaced blocks that are waited for at once; more means that records are being lost.
const MAX_WAITING: usize = 65_536;

/// [`Loss::reason`] of a process whose first `cuInit` went by unseen.
const START_NOT_SEEN: &str = "start_not_seen";

/// Ended processes that are remembered, so that a straggling record doesn't bring one back.
const MAX_ENDED: usize = 4_096;

/// Something that was not seen, since the last [`Ledger::take_losses`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The process.
    pub proc_id: ProcId,
    /// Its host pid.
    pub tgid: u32,
    /// `free_not_seen`: an address was handed out again, the free of the block before was never
    /// seen (it is closed as of then). `alloc_not_seen`: a process seen from its start freed what
    /// is not in the books. `partial_unmap`: a range that cuts through a map. `after_end`: a call
    /// of a process that had ended, not applied. `start_not_seen`: a process used CUDA, its first
    /// `cuInit` was not seen, and it was not attached to late.
    pub reason: &'static str,
    /// How often.
    pub count: i64,
    /// Bytes, where known.
    pub bytes: Option<i64>,
}

/// Interprets calls. Holds what is needed to pair them and nothing that can be added up from the
/// rows: that is [`super::state::State`]'s.
#[derive(Debug, Default)]
pub struct Ledger {
    processes: HashMap<ProcId, Process>,
    ended: HashSet<ProcId>,
    ended_order: VecDeque<ProcId>,
    books: Books,
}

impl Ledger {
    /// An empty ledger; the first row's `seq` is 1.
    pub fn new() -> Self {
        Self::default()
    }

    /// Interprets one input and appends the rows that it makes to `out`.
    ///
    /// Inputs should come in the order of [`super::order::Order`], and need not: a free that comes
    /// late is paired by its time. Where its address has a new owner by then, the old block stays in
    /// the books as *displaced*: the live state counts it out from the moment at which the address
    /// was handed out again (by then it was free, and one address is never counted twice), and its
    /// free row comes once, with its own time, when the record does. So the rows are the same
    /// whatever arrived first, and `sum(delta_bytes)` up to a time is exact. A free that never
    /// comes is made up as an implicit row, as of the hand-out, and counted as a [`Loss`].
    pub fn apply(&mut self, input: &Input, out: &mut Vec<EventRow>) {
        self.books.now_ns = self.books.now_ns.max(effect_ns(input));
        match input {
            Input::Call(call) => self.apply_call(call, out),
            Input::Exit { proc_id, ts_ns, .. } => {
                self.close(*proc_id, "exit", *ts_ns, out);
                self.remember_end(*proc_id);
            }
            Input::Exec { proc_id, tgid, ts_ns } => {
                if self.close(*proc_id, "exec", *ts_ns, out) {
                    let process = Process::new(*proc_id, *tgid, *ts_ns);
                    self.processes.insert(*proc_id, process);
                }
            }
        }
        self.give_up(out);
    }

    /// Says which GPU a process means by `ordinal`; `None` where that is not (or no longer) known.
    /// Rows from here on carry it.
    pub fn set_device(&mut self, proc_id: ProcId, ordinal: i32, device: Option<DeviceId>) {
        let Some(process) = self.process(proc_id) else { return };
        match device {
            Some(device) => process.who.devices.insert(ordinal, device),
            None => process.who.devices.remove(&ordinal),
        };
    }

    /// Says that the process used CUDA before it was attached to: a `cuInit` that is seen is not
    /// its first.
    pub fn set_attached_late(&mut self, proc_id: ProcId) {
        if let Some(process) = self.process(proc_id) {
            process.touched_ns = Some(i64::MIN);
        }
    }

    /// Says that every context that the process had when it was attached to is on one device.
    pub fn set_device_before_attach(&mut self, proc_id: ProcId, ordinal: i32) {
        if let Some(process) = self.process(proc_id) {
            process.books.set_before_attach(ordinal);
        }
    }

    /// The process was seen from its first `cuInit`: nothing of it is from before attach.
    pub fn from_start(&self, proc_id: ProcId) -> bool {
        self.processes.get(&proc_id).is_some_and(|process| process.who.from_start)
    }

    /// Frees of what was not in the books: memory from before attach, or of unseen allocations.
    pub fn unknown_frees(&self, proc_id: ProcId) -> u64 {
        self.processes.get(&proc_id).map_or(0, |process| process.who.unknown_frees)
    }

    /// The recording ends: counts as a loss what [`Ledger::apply`] counts at the end of a process,
    /// for those that go on.
    pub fn finish(&mut self) {
        for (proc_id, process) in &self.processes {
            if process.start_was_missed() {
                self.books.lose(*proc_id, process.who.tgid, START_NOT_SEEN, None);
            }
        }
    }

    /// `seq` of the last row handed out.
    pub fn seq(&self) -> i64 {
        self.books.seq
    }

    /// The allocations in the books, as a checkpoint of the log at `ts_ns`, oldest first. A block
    /// that waits for the record of its free is among them: its free row is still to come.
    pub fn live(&self, ts_ns: i64) -> impl Iterator<Item = LiveRow> + '_ {
        let mut rows: Vec<(&Process, &Block)> = self
            .processes
            .values()
            .flat_map(|process| process.books.blocks().map(move |block| (process, block)))
            .collect();
        rows.sort_by_key(|(_, block)| (block.since_ns, block.alloc_id));
        let seq = self.books.seq;
        rows.into_iter().map(move |(process, block)| live_row(process, block, ts_ns, seq))
    }

    /// What was not seen since the last call of this.
    pub fn take_losses(&mut self) -> Vec<Loss> {
        let mut losses: Vec<Loss> = self
            .books
            .losses
            .drain()
            .map(|((proc_id, tgid, reason), (count, bytes))| Loss {
                proc_id,
                tgid,
                reason,
                count,
                bytes,
            })
            .collect();
        losses.sort_by_key(|loss| (loss.proc_id, loss.reason));
        losses
    }

    fn apply_call(&mut self, call: &Call, out: &mut Vec<EventRow>) {
        if !self.processes.contains_key(&call.proc_id) && self.ended.contains(&call.proc_id) {
            self.books.lose(call.proc_id, call.tgid, "after_end", None);
            return;
        }
        let new = || Process::new(call.proc_id, call.tgid, i64::MIN);
        let process = self.processes.entry(call.proc_id).or_insert_with(new);
        if call_effect_ns(call) < process.begin_ns {
            self.books.lose(call.proc_id, call.tgid, "after_end", None);
            return;
        }
        process.note(call);
        let mut desk = Desk { books: &mut self.books, who: &mut process.who, out };
        if call.result == 0 {
            process.books.apply(&mut desk, call);
        } else if !matches!(call.action, Action::Free { addr: 0, .. }) {
            process.books.fail(&mut desk, call);
        }
    }

    /// The process, new if need be; `None` for one that has ended.
    fn process(&mut self, proc_id: ProcId) -> Option<&mut Process> {
        if self.ended.contains(&proc_id) {
            return None;
        }
        // The host pid comes with the first call.
        let new = || Process::new(proc_id, 0, i64::MIN);
        Some(self.processes.entry(proc_id).or_insert_with(new))
    }

    /// Frees all that a process holds and drops its state. False: it had none.
    fn close(
        &mut self,
        proc_id: ProcId,
        api: &'static str,
        ts_ns: i64,
        out: &mut Vec<EventRow>,
    ) -> bool {
        let Some(mut process) = self.processes.remove(&proc_id) else { return false };
        if process.start_was_missed() {
            self.books.lose(proc_id, process.who.tgid, START_NOT_SEEN, None);
        }
        let mut desk = Desk { books: &mut self.books, who: &mut process.who, out };
        process.books.close_all(&mut desk, Cause { api, tid: 0, ts_ns });
        true
    }

    fn remember_end(&mut self, proc_id: ProcId) {
        if !self.ended.insert(proc_id) {
            return;
        }
        self.ended_order.push_back(proc_id);
        if self.ended_order.len() > MAX_ENDED
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }

    /// Closes displaced entries whose free has not come in time.
    fn give_up(&mut self, out: &mut Vec<EventRow>) {
        while let Some(&waiting) = self.books.waiting.front() {
            let due = waiting.displaced_ns.saturating_add(GRACE_NS) < self.books.now_ns;
            if !due && self.books.waiting.len() <= MAX_WAITING {
                return;
            }
            self.books.waiting.pop_front();
            self.give_up_one(&waiting, out);
        }
    }

    fn give_up_one(&mut self, waiting: &Waiting, out: &mut Vec<EventRow>) {
        let Some(process) = self.processes.get_mut(&waiting.proc_id) else { return };
        let mut desk = Desk { books: &mut self.books, who: &mut process.who, out };
        process.books.give_up(&mut desk, waiting);
    }
}

fn live_row(process: &Process, block: &Block, ts_ns: i64, seq: i64) -> LiveRow {
    let ordinal = block.place.ordinal;
    let device = ordinal.and_then(|ordinal| process.who.devices.get(&ordinal));
    LiveRow {
        ts_ns,
        seq,
        proc_id: process.who.proc_id.0,
        alloc_id: block.alloc_id,
        level: block.level.as_str().to_owned(),
        nvml_index: device.map(|device| device.nvml_index),
        gpu_uuid: device.map(|device| device.gpu_uuid.clone()),
        cuda_ordinal: ordinal,
        addr: block.addr as i64,
        size_bytes: block.size_bytes,
        api: block.api.to_owned(),
        stack_id: block.stack_id,
        alloc_ts_ns: block.since_ns,
        estimated: Some(block.estimated),
    }
}
