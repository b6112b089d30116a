//! Memory that several processes, APIs or devices share.

use std::collections::{HashMap, VecDeque};

use super::{
    desk::{Block, Desk, about, bytes},
    process::{Account, DEVICE, OBJECT, new_block},
};
use crate::{
    call::{Action, Call, Level},
    rows::EventRow,
};

/// Exported blocks that are remembered; a program that exports without end forgets its oldest.
const MAX_EXPORTS: usize = 65_536;

/// Sizes of the blocks that processes exported, by what stands for them everywhere.
#[derive(Debug, Default)]
pub(super) struct Exports {
    sizes: HashMap<u64, i64>,
    order: VecDeque<u64>,
}

impl Exports {
    fn remember(&mut self, key: u64, size_bytes: i64) {
        if self.sizes.insert(key, size_bytes).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MAX_EXPORTS
            && let Some(oldest) = self.order.pop_front()
        {
            self.sizes.remove(&oldest);
        }
    }
}

/// How often this process opened the blocks that it imported, beyond the first time: the driver
/// gives the same address each time, and the last close takes it away.
#[derive(Debug, Default)]
pub(super) struct Opens {
    more: HashMap<u64, u32>,
}

impl Account {
    /// Applies a call about shared memory. False: it is about something else.
    pub(super) fn apply_shared(&mut self, desk: &mut Desk<'_>, call: &Call) -> bool {
        match call.action {
            Action::BlockExport { addr, key } => self.export_block(desk, call, addr, key),
            Action::BlockImport { addr, key } => self.import_block(desk, call, addr, key),
            Action::BlockClose { addr } => self.close_block(desk, call, addr),
            Action::ExternalImport { handle, size_bytes } => {
                self.open_as(desk, call, (OBJECT, Level::Imported), handle, size_bytes);
            }
            // `cuMemFree` takes it away, so it is where device blocks are.
            Action::ExternalBuffer { addr, size_bytes } => {
                self.open_as(desk, call, (DEVICE, Level::Virtual), addr, size_bytes);
            }
            Action::ExternalArray { handle } => {
                self.open_as(desk, call, (OBJECT, Level::Virtual), handle, None);
            }
            Action::ExternalDestroy { handle } => self.free(desk, call, OBJECT, handle),
            Action::GraphicsMap { addr, size_bytes } => {
                map_row(desk, call, "map", addr, size_bytes);
            }
            Action::ArrayMap => map_row(desk, call, "map", 0, None),
            Action::GraphicsUnmap => map_row(desk, call, "unmap", 0, None),
            Action::MulticastBind { handle, size_bytes } => {
                map_row(desk, call, "map", handle, Some(size_bytes));
            }
            Action::MulticastUnbind { handle, size_bytes } => {
                map_row(desk, call, "unmap", handle, Some(size_bytes));
            }
            _ => return false,
        }
        true
    }

    fn export_block(&self, desk: &mut Desk<'_>, call: &Call, addr: u64, key: Option<u64>) {
        let block = self.block_at(addr, call.enter_ns);
        let level = block.map_or(Level::Device, |block| block.level);
        let ordinal = block.and_then(|block| block.place.ordinal);
        let row = EventRow { addr: addr as i64, ..desk.event(call, "export", level, ordinal) };
        let Some(block) = block else { return desk.emit(row) };
        if let (Some(key), Some(size_bytes)) = (key, block.size_bytes) {
            desk.books.exports.remember(key, size_bytes);
        }
        desk.emit(about(row, block));
    }

    /// The block that an address lies in.
    fn block_at(&self, addr: u64, ns: i64) -> Option<&Block> {
        let slots = &self.blocks[DEVICE];
        let start = slots.key_below(addr.saturating_add(1));
        let block = start.and_then(|start| slots.find(start, ns)).map(|entry| &entry.value);
        let reaches = |block: &&Block| {
            let size_bytes = block.size_bytes.map_or(1, i64::unsigned_abs);
            addr < block.addr.saturating_add(size_bytes.max(1))
        };
        block.filter(reaches).or_else(|| self.vmm.mapped_at(addr, ns))
    }

    fn import_block(&mut self, desk: &mut Desk<'_>, call: &Call, addr: u64, key: Option<u64>) {
        let open = self.blocks[DEVICE].find(addr, call.exit_ns);
        let again = open.map(|entry| entry.value).filter(|block| block.level == Level::Imported);
        if let Some(block) = again {
            *self.opens.more.entry(addr).or_default() += 1;
            return open_again(desk, call, "retain", &block);
        }
        let size_bytes = key.and_then(|key| desk.books.exports.sizes.get(&key).copied());
        let place = self.contexts.place(call.tid, desk.who.from_start);
        let block = new_block(desk, call, (Level::Imported, place), addr, size_bytes);
        self.open(desk, call, DEVICE, &block);
    }

    fn close_block(&mut self, desk: &mut Desk<'_>, call: &Call, addr: u64) {
        let Some(more) = self.opens.more.get_mut(&addr) else {
            return self.free(desk, call, DEVICE, addr);
        };
        *more -= 1;
        if *more == 0 {
            self.opens.more.remove(&addr);
        }
        let block = self.blocks[DEVICE].find(addr, call.enter_ns).map(|entry| entry.value);
        if let Some(block) = block {
            open_again(desk, call, "free", &block);
        }
    }

    fn open_as(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        (space, level): (usize, Level),
        at: u64,
        size_bytes: Option<u64>,
    ) {
        let place = self.contexts.place(call.tid, desk.who.from_start);
        let block = new_block(desk, call, (level, place), at, size_bytes.and_then(bytes));
        self.open(desk, call, space, &block);
    }
}

/// A row about one opening more or less: level `virtual`, since no memory comes or goes with it.
fn open_again(desk: &mut Desk<'_>, call: &Call, op: &'static str, block: &Block) {
    let row = desk.event(call, op, Level::Virtual, block.place.ordinal);
    desk.emit(about(row, block));
}

/// A row about a mapping of memory that has rows of its own.
fn map_row(desk: &mut Desk<'_>, call: &Call, op: &'static str, addr: u64, size_bytes: Option<u64>) {
    let row = desk.event(call, op, Level::Virtual, None);
    desk.emit(EventRow { addr: addr as i64, size_bytes: size_bytes.and_then(bytes), ..row });
}
