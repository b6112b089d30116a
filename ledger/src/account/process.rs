//! One process in the books: its contexts, its blocks, its handles.

use std::collections::HashMap;

use super::{
    asked::asked,
    contexts::{Contexts, Place},
    desk::{Block, Cause, Desk, Shelf, Waiting, bytes},
    order::call_effect_ns,
    pools::Pools,
    shared::Opens,
    slots::Slots,
    vmm::{Vmm, abandon, is_waiting},
};
use crate::{
    call::{Action, ArrayShape, Call, Level, ProcId, Space},
    rows::EventRow,
};

/// Which GPU a process means by an ordinal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceId {
    /// NVML's number.
    pub nvml_index: i32,
    /// UUID with its `GPU-` or `MIG-` prefix.
    pub gpu_uuid: String,
}

/// Who a process is, and what the agent knows of it.
#[derive(Debug)]
pub(super) struct Who {
    pub(super) proc_id: ProcId,
    pub(super) tgid: u32,
    /// Seen from its first `cuInit`: nothing is from before attach.
    pub(super) from_start: bool,
    pub(super) devices: HashMap<i32, DeviceId>,
    /// Frees of what is not in the books.
    pub(super) unknown_frees: u64,
}

/// Address spaces: an address of one never meets the same number in another.
pub(super) const DEVICE: usize = 0;
const HOST: usize = 1;
const VIRTUAL: usize = 2;
const TENSOR: usize = 3;
/// Handles of arrays and of other APIs' memory.
pub(super) const OBJECT: usize = 4;

fn space_of(level: Level) -> usize {
    match level {
        Level::Device | Level::Pool | Level::Managed | Level::Imported => DEVICE,
        Level::Host => HOST,
        Level::Virtual => VIRTUAL,
        // The first tensor of a segment lies at the segment's own address.
        Level::Tensor => TENSOR,
    }
}

/// One process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) who: Who,
    /// When its program began: calls from before an exec are about a state that is gone.
    pub(super) begin_ns: i64,
    /// When it first did something that is no `cuInit`: the entry of its first other call, or
    /// before all time where it ran CUDA before attach. Only a `cuInit` that entered earlier is the
    /// process's first call. (Entries, since the driver's own `cuInit` makes traced calls, which
    /// return before it does: seen on an H200, driver 580.)
    pub(super) touched_ns: Option<i64>,
    /// A call other than `cuInit` succeeded: the process got as far as using CUDA.
    used: bool,
    pub(super) books: Account,
}

/// What a process holds.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) contexts: Contexts,
    pub(super) blocks: [Slots<Block>; 5],
    pub(super) vmm: Vmm,
    pub(super) pools: Pools,
    pub(super) opens: Opens,
    /// Devices of green contexts.
    greens: HashMap<u64, i32>,
}

impl Process {
    pub(super) fn new(proc_id: ProcId, tgid: u32, begin_ns: i64) -> Self {
        let who =
            Who { proc_id, tgid, from_start: false, devices: HashMap::new(), unknown_frees: 0 };
        Self { who, begin_ns, touched_ns: None, used: false, books: Account::default() }
    }

    /// Notes what a call says of how early the process is seen.
    pub(super) fn note(&mut self, call: &Call) {
        self.who.tgid = call.tgid;
        if matches!(call.action, Action::CommInit { .. }) {
            // No call of the driver: NCCL makes the first one only then.
            return;
        }
        if call.action == Action::Init {
            if call.result != 0 {
                return;
            }
            self.who.from_start |= self.touched_ns.is_none_or(|ns| call.enter_ns <= ns);
        }
        self.used |= call.result == 0 && call.action != Action::Init;
        let earliest = self.touched_ns.unwrap_or(call.enter_ns).min(call.enter_ns);
        self.touched_ns = Some(earliest);
    }

    /// It used CUDA, nobody said that it was attached to late, and yet its first `cuInit` was not
    /// seen: calls before the first seen one may be missing, and nothing else tells of them.
    pub(super) fn start_was_missed(&self) -> bool {
        self.used && !self.who.from_start && self.touched_ns.is_some_and(|ns| ns != i64::MIN)
    }
}

impl Account {
    /// Contexts from before attach are all on this device.
    pub(super) fn set_before_attach(&mut self, ordinal: i32) {
        self.contexts.set_before_attach(ordinal);
    }

    /// Applies a call that succeeded.
    pub(super) fn apply(&mut self, desk: &mut Desk<'_>, call: &Call) {
        let done = self.apply_memory(desk, call)
            || self.apply_pool(desk, call)
            || self.apply_shared(desk, call)
            || self.apply_graph(desk, call)
            || self.apply_context(desk, call);
        debug_assert!(done || changes_nothing(&call.action), "{call:?}");
    }

    /// False: another kind of call.
    fn apply_memory(&mut self, desk: &mut Desk<'_>, call: &Call) -> bool {
        match call.action {
            Action::Alloc { level, addr, size_bytes } => {
                self.alloc(desk, call, level, addr, size_bytes);
            }
            Action::HostRegister { addr, size_bytes } => {
                self.alloc(desk, call, Level::Host, addr, Some(size_bytes));
            }
            Action::TensorAlloc { addr, size_bytes, ordinal } => {
                let place = Place { ctx: None, ordinal: Some(ordinal) };
                self.alloc_at(desk, call, (Level::Tensor, place), addr, Some(size_bytes));
            }
            Action::TensorFree { addr } => self.free(desk, call, TENSOR, addr),
            Action::Reserve { addr, size_bytes } => {
                self.alloc(desk, call, Level::Virtual, addr, Some(size_bytes));
            }
            Action::Free { addr, space: Space::Device } => self.free(desk, call, DEVICE, addr),
            Action::Free { addr, space: Space::Host } | Action::HostUnregister { addr } => {
                self.free(desk, call, HOST, addr);
            }
            Action::Unreserve { addr, .. } => self.free(desk, call, VIRTUAL, addr),
            Action::VmmCreate { handle, size_bytes, location } => {
                self.vmm.create(desk, call, handle, size_bytes, location);
            }
            Action::VmmRelease { handle } => self.vmm.release(desk, call, handle),
            Action::VmmMap { addr, size_bytes, handle } => {
                self.vmm.map(desk, call, addr, size_bytes, handle);
            }
            Action::VmmUnmap { addr, size_bytes } => self.vmm.unmap(desk, call, addr, size_bytes),
            Action::VmmRetain { handle, .. } => self.vmm.retain(desk, call, handle),
            Action::VmmExport { handle } => self.vmm.export(desk, call, handle),
            Action::VmmImport { handle } => self.vmm.import(desk, call, handle),
            Action::MulticastCreate { handle, size_bytes } => {
                self.vmm.create_multicast(desk, call, handle, size_bytes);
            }
            Action::Array { handle, shape } => self.array(desk, call, handle, shape),
            Action::ArrayDestroy { handle } => self.free(desk, call, OBJECT, handle),
            _ => return false,
        }
        true
    }

    fn apply_context(&mut self, desk: &mut Desk<'_>, call: &Call) -> bool {
        let contexts = &mut self.contexts;
        match call.action {
            Action::CtxSet { ctx } => contexts.set(call.tid, ctx),
            Action::CtxPush { ctx } => contexts.push(call.tid, ctx),
            Action::CtxPop => contexts.pop(call.tid),
            Action::CtxCreate { ctx, ordinal } => {
                let reused = contexts.create(call.tid, ctx, ordinal, call.exit_ns);
                self.context_made(
                    desk,
                    call,
                    Place { ctx: Some(ctx), ordinal: Some(ordinal) },
                    reused,
                );
            }
            Action::PrimaryRetain { ctx, ordinal } => {
                let reused = contexts.retain(ctx, ordinal, call.exit_ns);
                self.context_made(
                    desk,
                    call,
                    Place { ctx: Some(ctx), ordinal: Some(ordinal) },
                    reused,
                );
            }
            Action::CtxDestroy { ctx } => {
                context_row(desk, call, Place { ctx: Some(ctx), ordinal: contexts.ordinal(ctx) });
                if contexts.destroy(call.tid, ctx, call.enter_ns) {
                    self.free_context(desk, call, ctx);
                }
            }
            Action::PrimaryRelease { ordinal } => {
                let ctx = contexts.primary(ordinal);
                context_row(desk, call, Place { ctx, ordinal: Some(ordinal) });
                if let Some(ctx) = contexts.release(ordinal) {
                    self.free_context(desk, call, ctx);
                }
            }
            Action::PrimaryReset { ordinal } => {
                let ctx = contexts.primary(ordinal);
                context_row(desk, call, Place { ctx, ordinal: Some(ordinal) });
                if let Some(ctx) = contexts.reset(ordinal, call.api.ends_with("_v2")) {
                    self.free_context(desk, call, ctx);
                }
            }
            Action::CtxAttach { ctx } => contexts.attach(ctx),
            Action::CtxDetach { ctx } => {
                context_row(desk, call, Place { ctx: Some(ctx), ordinal: contexts.ordinal(ctx) });
                if contexts.detach(ctx) && contexts.destroy(call.tid, ctx, call.enter_ns) {
                    self.free_context(desk, call, ctx);
                }
            }
            Action::GreenCreate { green, ordinal } => {
                self.greens.insert(green, ordinal);
                context_row(desk, call, Place { ctx: Some(green), ordinal: Some(ordinal) });
            }
            Action::CtxOfGreen { ctx, green } => {
                let ordinal = self.greens.get(&green).copied();
                let place = Place { ctx: Some(ctx), ordinal };
                let reused = ordinal.is_some_and(|at| contexts.adopt(ctx, at, call.exit_ns));
                self.context_made(desk, call, place, reused);
            }
            Action::GreenDestroy { green } => {
                let ordinal = self.greens.remove(&green);
                context_row(desk, call, Place { ctx: Some(green), ordinal });
            }
            Action::CtxLimit { limit, value } => {
                let ordinal = contexts.place(call.tid, desk.who.from_start).ordinal;
                let row = desk.event(call, "ctx", Level::Device, ordinal);
                let size_bytes = bytes(value).filter(|_| limit <= LAST_LIMIT_IN_BYTES);
                desk.emit(EventRow { addr: i64::from(limit), size_bytes, ..row });
            }
            Action::Checkpoint { pid } => {
                let row = desk.event(call, "ctx", Level::Device, None);
                desk.emit(EventRow { addr: i64::from(pid), ..row });
            }
            _ => return false,
        }
        true
    }

    /// An array: the driver pads it in ways of its own, so its size is a lower bound.
    fn array(&mut self, desk: &mut Desk<'_>, call: &Call, handle: u64, shape: Option<ArrayShape>) {
        let place = self.contexts.place(call.tid, desk.who.from_start);
        let unmapped = shape.is_some_and(|shape| shape.is_unmapped());
        let level = if unmapped { Level::Virtual } else { Level::Device };
        let size_bytes = shape.and_then(|shape| shape.least_bytes()).and_then(bytes);
        let estimated = size_bytes.is_some();
        let block =
            Block { estimated, ..new_block(desk, call, (level, place), handle, size_bytes) };
        self.open(desk, call, OBJECT, &block);
    }

    /// Writes the row of a call that failed: never live bytes.
    pub(super) fn fail(&self, desk: &mut Desk<'_>, call: &Call) {
        let place = self.contexts.place(call.tid, desk.who.from_start);
        let asked = asked(&call.action, place.ordinal);
        let row = desk.event(call, "fail", asked.level, asked.ordinal);
        desk.emit(EventRow {
            addr: asked.addr as i64,
            size_bytes: asked.size_bytes.and_then(bytes),
            stack_id: call.stack_id,
            ..row
        });
    }

    /// Gives up waiting for the free of a displaced entry.
    pub(super) fn give_up(&mut self, desk: &mut Desk<'_>, waiting: &Waiting) {
        match waiting.at {
            Shelf::Handles => self.vmm.give_up_handle(desk, waiting.key, waiting.since_ns),
            Shelf::Maps => self.vmm.give_up_map(desk, waiting.key, waiting.since_ns),
            Shelf::Blocks(space) => {
                let Some(slots) = self.blocks.get_mut(space) else { return };
                let entry = slots.take_if(waiting.key, |entry| is_waiting(entry, waiting.since_ns));
                if let Some(entry) = entry {
                    abandon(desk, &entry, &entry.value);
                }
            }
        }
    }

    /// Everything is free: the process (or its program) ended.
    pub(super) fn close_all(&mut self, desk: &mut Desk<'_>, cause: Cause) {
        for slots in &mut self.blocks {
            for entry in slots.take_all(|_| true) {
                if entry.displaced_ns.is_some() {
                    abandon(desk, &entry, &entry.value);
                } else {
                    desk.implied(cause, &entry.value);
                }
            }
        }
        self.vmm.close_all(desk, cause);
    }

    /// Allocations in the books, displaced ones included.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        let slots = self.blocks.iter().flat_map(Slots::iter);
        slots.map(|(_, entry)| &entry.value).chain(self.vmm.blocks())
    }

    fn alloc(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        level: Level,
        addr: u64,
        size_bytes: Option<u64>,
    ) {
        let place = match level {
            Level::Virtual => Place::default(),
            _ => self.contexts.place(call.tid, desk.who.from_start),
        };
        self.alloc_at(desk, call, (level, place), addr, size_bytes);
    }

    pub(super) fn alloc_at(
        &mut self,
        desk: &mut Desk<'_>,
        call: &Call,
        (level, place): (Level, Place),
        addr: u64,
        size_bytes: Option<u64>,
    ) {
        let block = new_block(desk, call, (level, place), addr, size_bytes.and_then(bytes));
        self.open(desk, call, space_of(level), &block);
    }

    /// Puts a block into the books.
    pub(super) fn open(&mut self, desk: &mut Desk<'_>, call: &Call, space: usize, block: &Block) {
        let op = match block.level {
            Level::Virtual => "reserve",
            Level::Imported => "import",
            _ => "alloc",
        };
        desk.opened(call, op, block);
        let (addr, since_ns) = (block.addr, block.since_ns);
        if let Some(displaced) = self.blocks[space].insert(addr, since_ns, *block) {
            let until_ns = displaced.displaced_ns.unwrap_or(since_ns);
            desk.wait(Shelf::Blocks(space), addr, displaced.since_ns, until_ns);
        }
    }

    pub(super) fn free(&mut self, desk: &mut Desk<'_>, call: &Call, space: usize, addr: u64) {
        if addr == 0 {
            return;
        }
        if let Some(entry) = self.blocks[space].take(addr, call.enter_ns) {
            desk.closed(call, &entry.value, call.enter_ns);
        } else {
            let levels = [Level::Device, Level::Host, Level::Virtual, Level::Tensor, Level::Device];
            let level = levels[space];
            desk.unknown(call, level, addr);
        }
    }

    fn context_made(&mut self, desk: &mut Desk<'_>, call: &Call, place: Place, reused: bool) {
        context_row(desk, call, place);
        if let Some(ctx) = place.ctx
            && reused
        {
            self.free_context(desk, call, ctx);
        }
    }

    /// Frees what was made in a context. Pools and VMM handles have lives of their own, and so
    /// have reservations.
    fn free_context(&mut self, desk: &mut Desk<'_>, call: &Call, ctx: u64) {
        let cause = Cause { api: call.api, tid: call.tid, ts_ns: call.exit_ns };
        for space in [DEVICE, HOST, OBJECT] {
            let gone = self.blocks[space].take_all(|entry| {
                let block = &entry.value;
                block.place.ctx == Some(ctx)
                    && block.level != Level::Pool
                    && entry.displaced_ns.is_none()
                    && entry.since_ns <= cause.ts_ns
            });
            for entry in gone {
                desk.implied(cause, &entry.value);
            }
        }
    }
}

/// A block that `call` made.
pub(super) fn new_block(
    desk: &mut Desk<'_>,
    call: &Call,
    (level, place): (Level, Place),
    addr: u64,
    size_bytes: Option<i64>,
) -> Block {
    Block {
        alloc_id: desk.alloc_id(),
        level,
        addr,
        size_bytes,
        estimated: false,
        place,
        api: call.api,
        stack_id: call.stack_id,
        since_ns: call_effect_ns(call),
    }
}

/// What has no row, and moves no bytes. Which GPU an ordinal is needs NVML's answer, too:
/// `Ledger::set_device`.
fn changes_nothing(action: &Action) -> bool {
    use Action::{CommInit, DeviceBusId, DeviceUuid, Init, Nothing, TorchOom};
    let says_device = matches!(action, Init | DeviceUuid { .. } | DeviceBusId { .. });
    says_device || matches!(action, Nothing | TorchOom { .. } | CommInit { .. })
}

/// `CU_LIMIT_MALLOC_HEAP_SIZE` (`cuda.h`): it and the limits before it are sizes.
const LAST_LIMIT_IN_BYTES: u32 = 2;

fn context_row(desk: &mut Desk<'_>, call: &Call, place: Place) {
    let row = desk.event(call, "ctx", Level::Device, place.ordinal);
    desk.emit(EventRow { addr: place.ctx.unwrap_or(0) as i64, stack_id: call.stack_id, ..row });
}
