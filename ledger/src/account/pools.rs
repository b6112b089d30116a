//! Stream-ordered pools, and graphs: memory that is handed out from what a device keeps for them.

use std::collections::HashMap;

use super::{
    contexts::Place,
    desk::{Desk, bytes},
    process::{Account, DEVICE, new_block},
};
use crate::{
    call::{Action, Call, Level, Location},
    rows::EventRow,
};

/// The devices of a process's pools.
#[derive(Debug, Default)]
pub(super) struct Pools {
    ordinals: HashMap<u64, i32>,
}

impl Pools {
    fn know(&mut self, pool: u64, location: Location) {
        if let Location::Device(ordinal) = location {
            self.ordinals.insert(pool, ordinal);
        }
    }

    fn ordinal(&self, pool: u64) -> Option<i32> {
        self.ordinals.get(&pool).copied()
    }
}

impl Account {
    /// Applies a call about pools. False: it is about something else.
    pub(super) fn apply_pool(&mut self, desk: &mut Desk<'_>, call: &Call) -> bool {
        match call.action {
            Action::PoolAlloc { addr, size_bytes, pool } => {
                self.alloc_from_pool(desk, call, (addr, size_bytes), pool);
            }
            Action::PoolCreate { pool, location } => {
                self.pools.know(pool, location);
                self.pool_row(desk, call, "pool", pool, None);
            }
            Action::PoolOf { pool, location } => self.pools.know(pool, location),
            Action::PoolDestroy { pool } => {
                self.pool_row(desk, call, "pool", pool, None);
                self.pools.ordinals.remove(&pool);
            }
            Action::PoolTrim { pool, keep_bytes: size }
            | Action::PoolSize { pool, size_bytes: size } => {
                self.pool_row(desk, call, "pool", pool, bytes(size));
            }
            Action::PoolExport { pool } => self.pool_row(desk, call, "export", pool, None),
            Action::PoolImport { pool } => self.pool_row(desk, call, "import", pool, None),
            _ => return false,
        }
        true
    }

    /// A block lies where its pool does, whichever context is current. Of a pool that is not known
    /// the device is not known either, unless the process has only one.
    fn alloc_from_pool(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        (addr, size_bytes): (u64, u64),
        pool: u64,
    ) {
        let current = self.contexts.place(call.tid, desk.who.from_start);
        let ordinal = self.pools.ordinal(pool).or(self.contexts.only_ordinal());
        let place = Place { ctx: current.ctx, ordinal };
        self.alloc_at(desk, call, (Level::Pool, place), addr, Some(size_bytes));
    }

    fn pool_row(
        &self,
        desk: &mut Desk<'_>,
        call: &Call,
        op: &'static str,
        pool: u64,
        size_bytes: Option<i64>,
    ) {
        let row = desk.event(call, op, Level::Pool, self.pools.ordinal(pool));
        desk.emit(EventRow { addr: pool as i64, size_bytes, ..row });
    }

    /// Applies a call about graphs or code. False: it is about something else.
    ///
    /// A node that allocates fixes an address; the memory behind it comes from the device's graph
    /// pool at a launch, which is not traced, and stays there until the pool is trimmed. So nodes
    /// are address space, and what the pool takes is a part of what NVML shows unexplained.
    pub(super) fn apply_graph(&mut self, desk: &mut Desk<'_>, call: &Call) -> bool {
        // Asked for by these alone: calls that set contexts come through here too, and often.
        let current = |desk: &Desk<'_>| self.contexts.place(call.tid, desk.who.from_start);
        match call.action {
            Action::GraphAlloc { addr, size_bytes, location } => {
                let ordinal = match location {
                    Location::Device(ordinal) => Some(ordinal),
                    Location::Host | Location::Unknown => None,
                };
                let place = Place { ctx: current(desk).ctx, ordinal };
                let size_bytes = bytes(size_bytes);
                let block = new_block(desk, call, (Level::Virtual, place), addr, size_bytes);
                // Where device blocks are: after a launch `cuMemFree` takes it.
                self.open(desk, call, DEVICE, &block);
            }
            Action::Graph { addr } => {
                let row = desk.event(call, "graph", Level::Virtual, current(desk).ordinal);
                desk.emit(EventRow { addr: addr as i64, ..row });
            }
            Action::GraphTrim { ordinal } => {
                let row = desk.event(call, "graph", Level::Virtual, Some(ordinal));
                desk.emit(row);
            }
            Action::Capture { stream, begins } => {
                let op = if begins { "capture" } else { "captured" };
                let row = desk.event(call, op, Level::Virtual, current(desk).ordinal);
                desk.emit(EventRow { addr: stream as i64, ..row });
            }
            Action::Module { handle, .. } => {
                let row = desk.event(call, "module", Level::Device, current(desk).ordinal);
                desk.emit(EventRow { addr: handle as i64, ..row });
            }
            _ => return false,
        }
        true
    }
}
