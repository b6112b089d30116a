//! What takes device memory, and at which addresses it can be used.

use std::collections::{BTreeMap, HashSet};

use super::process::{LiveAllocation, Process};
use crate::{call::Level, rows::EventRow};

/// A live block of device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBlock<'a> {
    /// Its number.
    pub alloc_id: i64,
    /// The allocation.
    pub live: &'a LiveAllocation,
    /// Its first address; `None` for what lies behind a handle (see [`Process::maps`]).
    pub addr: Option<u64>,
}

/// Numbers of the live blocks of level `device`, and the maps of what lies behind handles.
#[derive(Debug, Default)]
pub(super) struct Held {
    device: HashSet<i64>,
    /// First address to bytes and allocation.
    maps: BTreeMap<u64, (u64, i64)>,
    /// Streams that are recorded into a CUDA graph.
    captures: HashSet<i64>,
    /// Live blocks that were made meanwhile.
    of_graphs: HashSet<i64>,
}

impl Held {
    pub(super) fn opened(&mut self, alloc_id: i64, level: Level) {
        if level == Level::Device {
            self.device.insert(alloc_id);
            if !self.captures.is_empty() {
                self.of_graphs.insert(alloc_id);
            }
        }
    }

    /// A stream begins to be recorded into a graph, or ends: also by a call that fails, since what
    /// spoilt the recording has ended it.
    pub(super) fn captures(&mut self, stream: i64, begins: bool) {
        if begins {
            self.captures.insert(stream);
        } else {
            self.captures.remove(&stream);
        }
    }

    pub(super) fn closed(&mut self, alloc_id: i64) {
        self.device.remove(&alloc_id);
        self.of_graphs.remove(&alloc_id);
    }

    pub(super) fn mapped(&mut self, row: &EventRow) {
        let size_bytes = row.size_bytes.unwrap_or(0).max(0) as u64;
        self.maps.insert(row.addr as u64, (size_bytes, row.alloc_id));
    }

    /// A row comes for each map that went, with the first address of it.
    pub(super) fn unmapped(&mut self, row: &EventRow) {
        self.maps.remove(&(row.addr as u64));
    }
}

impl Process {
    /// Live blocks of level `device` on some of [`Process::devices`], in no particular order.
    pub fn device_blocks(&self, devices: &[usize]) -> impl Iterator<Item = DeviceBlock<'_>> {
        let ids = self.held.device.iter();
        ids.filter_map(move |&alloc_id| {
            let live = self.allocation(alloc_id).filter(|live| devices.contains(&live.device))?;
            let addr = (!self.is_handle(live)).then_some(live.addr as u64);
            Some(DeviceBlock { alloc_id, live, addr })
        })
    }

    /// The block was made while a stream was recorded into a CUDA graph.
    pub fn is_of_graph(&self, alloc_id: i64) -> bool {
        self.held.of_graphs.contains(&alloc_id)
    }

    /// Maps of memory behind handles: first address, bytes and allocation (0 = not known), in order
    /// of address. Those from before attach, and before the checkpoint where a log begins with
    /// one, are not among them.
    pub fn maps(&self) -> impl Iterator<Item = (u64, u64, i64)> {
        self.held.maps.iter().map(|(&addr, &(bytes, alloc_id))| (addr, bytes, alloc_id))
    }
}
