//! Virtual memory management: physical memory behind handles, with references and maps.
//!
//! Memory is free when its last reference *and* its last map are gone, whichever call takes the
//! last one away. NCCL tears down with retain, release, unmap, release; CUDA's samples release
//! right after the map.

use std::collections::HashMap;

use super::{
    contexts::Place,
    desk::{Block, Cause, Desk, Shelf, about, bytes},
    order::call_effect_ns,
    slots::{Entry, Slots},
};
use crate::{
    call::{Call, Level, Location},
    rows::EventRow,
};

/// Physical memory behind a handle.
#[derive(Clone, Copy, Debug)]
struct Object {
    block: Block,
    refs: u32,
    maps: u32,
    /// When a reference or map last went: the memory can't have been free before.
    changed_ns: i64,
}

/// A range of addresses that shows (part of) an object.
#[derive(Clone, Copy, Debug)]
struct Map {
    size_bytes: u64,
    /// The object; 0 = from before attach.
    alloc_id: i64,
}

/// VMM state of one process.
#[derive(Debug, Default)]
pub(super) struct Vmm {
    objects: HashMap<i64, Object>,
    handles: Slots<i64>,
    maps: Slots<Map>,
}

impl Vmm {
    /// `cuMemCreate`.
    pub(super) fn create(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        handle: u64,
        size_bytes: u64,
        location: Location,
    ) {
        let (level, ordinal) = match location {
            Location::Device(ordinal) => (Level::Device, Some(ordinal)),
            Location::Host => (Level::Host, None),
            Location::Unknown => (Level::Device, None),
        };
        let block = Block {
            level,
            size_bytes: bytes(size_bytes),
            place: Place { ctx: None, ordinal },
            ..fresh(desk, call, handle)
        };
        desk.opened(call, "alloc", &block);
        self.insert(desk, block);
    }

    /// `cuMulticastCreate`: address space that several devices share, behind a handle.
    pub(super) fn create_multicast(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        handle: u64,
        size_bytes: Option<u64>,
    ) {
        let size_bytes = size_bytes.and_then(bytes);
        let block = Block { level: Level::Virtual, size_bytes, ..fresh(desk, call, handle) };
        desk.opened(call, "reserve", &block);
        self.insert(desk, block);
    }

    /// `cuMemImportFromShareableHandle`: another process's memory, of a size that the first map
    /// tells.
    pub(super) fn import(&mut self, desk: &mut Desk<'_>, call: &Call, handle: u64) {
        let block = fresh(desk, call, handle);
        desk.opened(call, "import", &block);
        self.insert(desk, block);
    }

    /// `cuMemExportToShareableHandle`.
    pub(super) fn export(&self, desk: &mut Desk<'_>, call: &Call, handle: u64) {
        let object = self.object(handle, call.enter_ns);
        let level = object.map_or(Level::Device, |object| object.block.level);
        let ordinal = object.and_then(|object| object.block.place.ordinal);
        let row = EventRow { addr: handle as i64, ..desk.event(call, "export", level, ordinal) };
        desk.emit(match object {
            Some(object) => about(row, &object.block),
            None => row,
        });
    }

    /// The memory that is mapped at an address.
    pub(super) fn mapped_at(&self, addr: u64, ns: i64) -> Option<&Block> {
        let start = self.maps.key_below(addr.checked_add(1)?)?;
        let map = self.maps.find(start, ns)?.value;
        let inside = addr < start.saturating_add(map.size_bytes);
        self.objects.get(&map.alloc_id).filter(|_| inside).map(|object| &object.block)
    }

    /// `cuMemRetainAllocationHandle`: one more reference.
    pub(super) fn retain(&mut self, desk: &mut Desk<'_>, call: &Call, handle: u64) {
        let object = self.object_mut(handle, call.enter_ns);
        if let Some(object) = object {
            object.refs = object.refs.saturating_add(1);
        }
        let block = self.object(handle, call.enter_ns).map(|object| object.block);
        reference_row(desk, call, "retain", handle, block.as_ref());
    }

    /// `cuMemRelease`: one reference less.
    pub(super) fn release(&mut self, desk: &mut Desk<'_>, call: &Call, handle: u64) {
        let Some(object) = self.object_mut(handle, call.enter_ns) else {
            desk.unknown(call, Level::Device, handle);
            return;
        };
        object.refs = object.refs.saturating_sub(1);
        object.changed_ns = object.changed_ns.max(call.enter_ns);
        let object = *object;
        if object.refs > 0 || object.maps > 0 {
            reference_row(desk, call, "free", handle, Some(&object.block));
        } else {
            self.close(desk, call, &object);
        }
    }

    /// `cuMemMap`: a map holds a reference. The first map of imported memory tells its size.
    pub(super) fn map(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        addr: u64,
        size_bytes: u64,
        handle: u64,
    ) {
        let mut row = desk.event(call, "map", Level::Virtual, None);
        if let Some(object) = self.object_mut(handle, call.enter_ns) {
            object.maps = object.maps.saturating_add(1);
            let block = &mut object.block;
            let ordinal = block.place.ordinal;
            if block.level == Level::Imported && block.size_bytes.is_none() {
                block.size_bytes = bytes(size_bytes);
                row = desk.event(call, "map", Level::Imported, ordinal);
                row.delta_bytes = block.size_bytes.unwrap_or(0);
            } else {
                row = desk.event(call, "map", Level::Virtual, ordinal);
            }
            row = about(row, block);
        }
        let map = Map { size_bytes, alloc_id: row.alloc_id };
        desk.emit(EventRow { addr: addr as i64, size_bytes: bytes(size_bytes), ..row });
        if let Some(displaced) = self.maps.insert(addr, call.exit_ns, map) {
            let until_ns = displaced.displaced_ns.unwrap_or(call.exit_ns);
            desk.wait(Shelf::Maps, addr, displaced.since_ns, until_ns);
        }
    }

    /// `cuMemUnmap`: every map that lies whole inside the range, a row each.
    pub(super) fn unmap(&mut self, desk: &mut Desk<'_>, call: &Call, addr: u64, size_bytes: u64) {
        let end = addr.saturating_add(size_bytes);
        let starts: Vec<u64> = self.maps.keys(addr, end).collect();
        let mut found = false;
        for start in starts.iter().copied().chain(self.maps.key_below(addr)) {
            let Some(map) = self.maps.find(start, call.enter_ns).map(|entry| entry.value) else {
                continue;
            };
            let map_end = start.saturating_add(map.size_bytes);
            if start >= addr && map_end <= end {
                found = true;
                self.maps.take(start, call.enter_ns);
                self.unmapped(desk, call, start, map);
            } else if map_end > addr {
                desk.lose("partial_unmap", None);
            }
        }
        if !found {
            // From before attach, or nothing: the driver accepts ranges (and holes in ranges) where
            // nothing is mapped (seen on an H200, driver 580), so this proves no loss.
            let row = desk.event(call, "unmap", Level::Virtual, None);
            desk.emit(EventRow { addr: addr as i64, size_bytes: bytes(size_bytes), ..row });
        }
    }

    /// Gives up waiting for the free of a displaced handle.
    pub(super) fn give_up_handle(&mut self, desk: &mut Desk<'_>, handle: u64, since_ns: i64) {
        let Some(entry) = self.handles.take_if(handle, |entry| is_waiting(entry, since_ns)) else {
            return;
        };
        if let Some(object) = self.objects.remove(&entry.value) {
            abandon(desk, &entry, &object.block);
        }
    }

    /// Gives up waiting for the unmap of a displaced map.
    pub(super) fn give_up_map(&mut self, desk: &mut Desk<'_>, addr: u64, since_ns: i64) {
        let Some(entry) = self.maps.take_if(addr, |entry| is_waiting(entry, since_ns)) else {
            return;
        };
        desk.lose("free_not_seen", None);
        let Some(object) = self.objects.get_mut(&entry.value.alloc_id) else { return };
        let displaced_ns = entry.displaced_ns.unwrap_or(entry.since_ns);
        object.maps = object.maps.saturating_sub(1);
        object.changed_ns = object.changed_ns.max(displaced_ns);
        let object = *object;
        if object.refs == 0 && object.maps == 0 {
            self.forget(&object);
            desk.implied(Cause::reused(object.changed_ns), &object.block);
        }
    }

    /// Everything is free: the process (or its program) ended.
    pub(super) fn close_all(&mut self, desk: &mut Desk<'_>, cause: Cause) {
        for entry in self.handles.take_all(|_| true) {
            let Some(object) = self.objects.remove(&entry.value) else { continue };
            // A handle that was handed out again while the memory stayed mapped is no loss.
            if entry.displaced_ns.is_some() && object.refs > 0 {
                abandon(desk, &entry, &object.block);
            } else {
                desk.implied(cause, &object.block);
            }
        }
    }

    /// Allocations in the books.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.objects.values().map(|object| &object.block)
    }

    fn insert(&mut self, desk: &mut Desk<'_>, block: Block) {
        let object = Object { block, refs: 1, maps: 0, changed_ns: block.since_ns };
        self.objects.insert(block.alloc_id, object);
        let displaced = self.handles.insert(block.addr, block.since_ns, block.alloc_id);
        let Some(displaced) = displaced else { return };
        // Without references the handle was free to be handed out again; the maps still hold the
        // memory, and the last unmap will close it.
        if self.objects.get(&displaced.value).is_some_and(|object| object.refs > 0) {
            let until_ns = displaced.displaced_ns.unwrap_or(block.since_ns);
            desk.wait(Shelf::Handles, block.addr, displaced.since_ns, until_ns);
        }
    }

    fn unmapped(&mut self, desk: &mut Desk<'_>, call: &Call, addr: u64, map: Map) {
        let object = self.objects.get_mut(&map.alloc_id);
        let ordinal = object.as_ref().and_then(|object| object.block.place.ordinal);
        let mut row = desk.event(call, "unmap", Level::Virtual, ordinal);
        let mut last = None;
        if let Some(object) = object {
            object.maps = object.maps.saturating_sub(1);
            object.changed_ns = object.changed_ns.max(call.enter_ns);
            row = about(row, &object.block);
            last = (object.refs == 0 && object.maps == 0).then_some(*object);
        }
        desk.emit(EventRow { addr: addr as i64, size_bytes: bytes(map.size_bytes), ..row });
        if let Some(object) = last {
            self.close(desk, call, &object);
        }
    }

    fn close(&mut self, desk: &mut Desk<'_>, call: &Call, object: &Object) {
        self.forget(object);
        desk.closed(call, &object.block, object.changed_ns);
    }

    fn forget(&mut self, object: &Object) {
        let alloc_id = object.block.alloc_id;
        self.objects.remove(&alloc_id);
        self.handles.take_if(object.block.addr, |entry| entry.value == alloc_id);
    }

    /// The object that `handle` named at `ns`.
    fn object(&self, handle: u64, ns: i64) -> Option<&Object> {
        self.objects.get(&self.handles.find(handle, ns)?.value)
    }

    fn object_mut(&mut self, handle: u64, ns: i64) -> Option<&mut Object> {
        self.objects.get_mut(&self.handles.find(handle, ns)?.value)
    }
}

/// The displaced entry of that time.
pub(super) fn is_waiting<T>(entry: &Entry<T>, since_ns: i64) -> bool {
    entry.since_ns == since_ns && entry.displaced_ns.is_some()
}

/// Closes a displaced allocation whose free was never seen.
pub(super) fn abandon<T>(desk: &mut Desk<'_>, entry: &Entry<T>, block: &Block) {
    desk.lose("free_not_seen", block.size_bytes);
    desk.implied(Cause::reused(entry.displaced_ns.unwrap_or(entry.since_ns)), block);
}

/// An allocation of imported memory, the part that all handles share.
fn fresh(desk: &mut Desk<'_>, call: &Call, handle: u64) -> Block {
    Block {
        alloc_id: desk.alloc_id(),
        level: Level::Imported,
        addr: handle,
        size_bytes: None,
        estimated: false,
        place: Place::default(),
        api: call.api,
        stack_id: call.stack_id,
        since_ns: call_effect_ns(call),
    }
}

/// A row about a reference: level `virtual`, since no memory comes or goes with it.
fn reference_row(
    desk: &mut Desk<'_>,
    call: &Call,
    op: &'static str,
    handle: u64,
    block: Option<&Block>,
) {
    let ordinal = block.and_then(|block| block.place.ordinal);
    let row = EventRow { addr: handle as i64, ..desk.event(call, op, Level::Virtual, ordinal) };
    desk.emit(match block {
        Some(block) => about(row, block),
        None => row,
    });
}
