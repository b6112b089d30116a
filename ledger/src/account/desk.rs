//! Where rows are written: numbers them, fills in who and which device, counts what was not seen.

use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
};

use super::{contexts::Place, order::call_effect_ns, process::Who, shared::Exports};
use crate::{
    call::{Call, Level, ProcId},
    rows::EventRow,
};

/// An allocation in the books.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) alloc_id: i64,
    pub(super) level: Level,
    /// Address or handle.
    pub(super) addr: u64,
    /// `None`: could not be read (or, imported, is not mapped yet).
    pub(super) size_bytes: Option<i64>,
    /// The size is a lower bound.
    pub(super) estimated: bool,
    pub(super) place: Place,
    /// The function that allocated.
    pub(super) api: &'static str,
    pub(super) stack_id: i64,
    /// When it took effect.
    pub(super) since_ns: i64,
}

/// What makes memory free without a call for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cause {
    /// The destroying call, `exit`, `exec` or `reused`.
    pub(super) api: &'static str,
    pub(super) tid: u32,
    pub(super) ts_ns: i64,
}

impl Cause {
    /// The block's address was handed out again at `ts_ns`: by then it was free, though no free
    /// of it was seen.
    pub(super) fn reused(ts_ns: i64) -> Self {
        Self { api: "reused", tid: 0, ts_ns }
    }
}

/// Which of a process's slots an entry is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shelf {
    /// Blocks of one address space, by index.
    Blocks(usize),
    /// VMM handles.
    Handles,
    /// VMM maps.
    Maps,
}

/// A displaced entry that waits for the record of its free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) proc_id: ProcId,
    pub(super) at: Shelf,
    pub(super) key: u64,
    pub(super) since_ns: i64,
    pub(super) displaced_ns: i64,
}

/// Key of the counters of what was not seen.
pub(super) type LossKey = (ProcId, u32, &'static str);

/// What all processes share.
#[derive(Debug, Default)]
pub(super) struct Books {
    pub(super) seq: i64,
    pub(super) alloc_ids: i64,
    pub(super) now_ns: i64,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) losses: HashMap<LossKey, (i64, Option<i64>)>,
    /// Blocks that processes exported to one another.
    pub(super) exports: Exports,
}

impl Books {
    /// Counts something that was not seen. `bytes` adds up where it is known.
    pub(super) fn lose(
        &mut self,
        proc_id: ProcId,
        tgid: u32,
        reason: &'static str,
        bytes: Option<i64>,
    ) {
        let (count, sum) = self.losses.entry((proc_id, tgid, reason)).or_insert((0, None));
        *count += 1;
        if let Some(bytes) = bytes {
            *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
        }
    }
}

/// Writes rows about one process.
#[derive(Debug)]
pub(super) struct Desk<'a> {
    pub(super) books: &'a mut Books,
    pub(super) who: &'a mut Who,
    pub(super) out: &'a mut Vec<EventRow>,
}

impl Desk<'_> {
    /// A new allocation's number.
    pub(super) fn alloc_id(&mut self) -> i64 {
        self.books.alloc_ids += 1;
        self.books.alloc_ids
    }

    /// A row about `call`, with no allocation and no bytes yet.
    pub(super) fn event(
        &self,
        call: &Call,
        op: &'static str,
        level: Level,
        ordinal: Option<i32>,
    ) -> EventRow {
        EventRow {
            ts_ns: call_effect_ns(call),
            duration_ns: call.exit_ns.saturating_sub(call.enter_ns),
            tid: call.tid as i32,
            api: Cow::Borrowed(call.api),
            runtime_api: call.runtime_api.map(str::to_owned),
            result: call.result,
            stack_id: call.stack_id,
            ..self.blank(op, level, ordinal)
        }
    }

    /// Numbers the row and hands it out.
    pub(super) fn emit(&mut self, row: EventRow) {
        self.books.seq += 1;
        self.out.push(EventRow { seq: self.books.seq, ..row });
    }

    /// `block` was allocated by `call`.
    pub(super) fn opened(&mut self, call: &Call, op: &'static str, block: &Block) {
        let row = self.event(call, op, block.level, block.place.ordinal);
        self.emit(EventRow { delta_bytes: block.size_bytes.unwrap_or(0), ..about(row, block) });
    }

    /// `block` was freed by `call`, at `ts_ns`.
    pub(super) fn closed(&mut self, call: &Call, block: &Block, ts_ns: i64) {
        let row = self.event(call, "free", block.level, block.place.ordinal);
        self.emit(EventRow {
            ts_ns,
            delta_bytes: block.size_bytes.unwrap_or(0).saturating_neg(),
            ..about(row, block)
        });
    }

    /// `block` is free without a call for it.
    pub(super) fn implied(&mut self, cause: Cause, block: &Block) {
        let row = EventRow {
            ts_ns: cause.ts_ns,
            tid: cause.tid as i32,
            api: Cow::Borrowed(cause.api),
            delta_bytes: block.size_bytes.unwrap_or(0).saturating_neg(),
            implicit: true,
            ..self.blank("free", block.level, block.place.ordinal)
        };
        self.emit(about(row, block));
    }

    /// `call` freed or released something that is not in the books: it is from before
    /// attach, or, in a process seen from its start, its allocation was not seen.
    pub(super) fn unknown(&mut self, call: &Call, level: Level, addr: u64) {
        self.who.unknown_frees += 1;
        if self.who.from_start {
            self.lose("alloc_not_seen", None);
        }
        let row = self.event(call, "free", level, None);
        self.emit(EventRow { addr: addr as i64, ..row });
    }

    /// Remembers a displaced entry until its free is seen or given up.
    pub(super) fn wait(&mut self, at: Shelf, key: u64, since_ns: i64, displaced_ns: i64) {
        let proc_id = self.who.proc_id;
        self.books.waiting.push_back(Waiting { proc_id, at, key, since_ns, displaced_ns });
    }

    /// Counts something of this process that was not seen.
    pub(super) fn lose(&mut self, reason: &'static str, bytes: Option<i64>) {
        self.books.lose(self.who.proc_id, self.who.tgid, reason, bytes);
    }

    fn blank(&self, op: &'static str, level: Level, ordinal: Option<i32>) -> EventRow {
        let gpu = ordinal.and_then(|ordinal| self.who.devices.get(&ordinal));
        EventRow {
            proc_id: self.who.proc_id.0,
            pid: self.who.tgid as i32,
            op: Cow::Borrowed(op),
            level: Cow::Borrowed(level.as_str()),
            nvml_index: gpu.map(|gpu| gpu.nvml_index),
            gpu_uuid: gpu.map(|gpu| gpu.gpu_uuid.clone()),
            cuda_ordinal: ordinal,
            ..EventRow::default()
        }
    }
}

/// Fills in which allocation a row is about.
pub(super) fn about(row: EventRow, block: &Block) -> EventRow {
    EventRow {
        addr: block.addr as i64,
        size_bytes: block.size_bytes,
        alloc_id: block.alloc_id,
        stack_id: block.stack_id,
        estimated: Some(block.estimated),
        ..row
    }
}

/// Bytes as the log has them; what no signed column can hold is a misread argument.
pub(super) fn bytes(size: u64) -> Option<i64> {
    i64::try_from(size).ok()
}
