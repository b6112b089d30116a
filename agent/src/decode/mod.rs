//! Bytes of a call record -> [`Action`], by the meaning of the record's row.
//!
//! Bytes from the kernel are input: what cannot be decoded is an error that the caller counts.

mod structs;

use agent_common::{
    call::{
        EXTRA_LEN, FLAG_EXTRA, FLAG_OUT_FAULT, FLAG_STRUCT_FAULT, FLAG_WIDE, NARROW_LEN, NO_ROW,
        RawCall, WIDE_LEN, WORDS,
    },
    cookie::When,
};
use ledger::call::{Action, Location};
use thiserror::Error;
use zerocopy::{FromZeros as _, IntoBytes as _};

use crate::probes::{Arg, Meaning, Out, PROBES, Probe, Size, Struct};

/// Why a record could not be decoded.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DecodeError {
    /// No length that a record has.
    #[error(
        "a call record of {0} bytes, where {NARROW_LEN}, {WIDE_LEN} or {EXTRA_LEN} were expected"
    )]
    Length(usize),
    /// A row that the table does not have.
    #[error("a call record of row {0}, which the probe table does not have")]
    Row(u8),
}

/// Reads the bytes of a record; a shorter record's missing words are 0.
pub fn record(bytes: &[u8]) -> Result<RawCall, DecodeError> {
    let flags = bytes.get(1).copied().unwrap_or(0);
    let expected = match (flags & FLAG_WIDE, flags & FLAG_EXTRA) {
        (0, 0) => NARROW_LEN,
        (_, 0) => WIDE_LEN,
        _ => EXTRA_LEN,
    };
    // A failed short call that took the reserved ring arrives whole.
    if bytes.len() != expected && bytes.len() != EXTRA_LEN {
        return Err(DecodeError::Length(bytes.len()));
    }
    let mut call = RawCall::new_zeroed();
    let target = call.as_mut_bytes();
    let length = bytes.len().min(target.len());
    target[..length].copy_from_slice(&bytes[..length]);
    Ok(call)
}

/// The probe that a record is about.
pub fn probe(call: &RawCall) -> Result<&'static Probe, DecodeError> {
    PROBES.get(usize::from(call.row)).ok_or(DecodeError::Row(call.row))
}

/// The runtime function that the call lies in, where labels are recorded.
pub fn runtime_api(call: &RawCall) -> Option<&'static str> {
    let row = (call.runtime_row != NO_ROW).then_some(usize::from(call.runtime_row))?;
    PROBES.get(row).map(Probe::api)
}

/// The record's words, with access by the table's argument types.
struct Words<'a> {
    call: &'a RawCall,
    words: [u64; WORDS],
}

impl<'a> Words<'a> {
    fn new(call: &'a RawCall, narrow: u8) -> Self {
        let (low, high) = (call.words, call.wide_words);
        let mut words = [low[0], low[1], low[2], high[0], high[1], high[2]];
        for (n, word) in words.iter_mut().enumerate() {
            if narrow >> n & 1 == 1 {
                *word &= u64::from(u32::MAX);
            }
        }
        Self { call, words }
    }

    fn word(&self, index: u8) -> u64 {
        self.words.get(usize::from(index)).copied().unwrap_or(0)
    }

    fn arg(&self, arg: Arg) -> u64 {
        self.word(arg.0)
    }

    /// A `CUdevice`: 32 bits, the register's upper half is garbage.
    fn ordinal(&self, arg: Arg) -> i32 {
        self.word(arg.0) as i32
    }

    /// A result; 0 where the call failed or its place was not readable.
    fn out(&self, out: Out) -> u64 {
        if self.succeeded() { self.word(out.0) } else { 0 }
    }

    /// A result that may be unknown.
    fn known(&self, out: Out) -> Option<u64> {
        self.succeeded().then(|| self.word(out.0))
    }

    fn succeeded(&self) -> bool {
        self.call.result == 0 && self.call.flags & FLAG_OUT_FAULT == 0
    }

    /// The structure's words, where they could be read (and the driver filled them in).
    fn structure(&self, structure: Struct) -> Option<structs::Structure> {
        let readable = match structure.when() {
            When::Entry => self.call.flags & FLAG_STRUCT_FAULT == 0,
            When::Exit => self.succeeded(),
        };
        readable.then_some(structs::Structure(self.call.extra))
    }

    fn size(&self, size: Size) -> Option<u64> {
        match size {
            Size::Of(arg) => Some(self.arg(arg)),
            Size::Pitch(pitch, height) => {
                self.known(pitch).map(|pitch| pitch.saturating_mul(self.arg(height)))
            }
        }
    }
}

/// What the call asked for; `None` for rows that make no call records.
pub fn action(call: &RawCall, probe: &Probe) -> Option<Action> {
    let words = Words::new(call, probe.narrow);
    let meaning = probe.meaning;
    memory(&words, meaning)
        .or_else(|| vmm(&words, meaning))
        .or_else(|| pool(&words, meaning))
        .or_else(|| shared(&words, meaning))
        .or_else(|| graph(&words, meaning))
        .or_else(|| context(&words, meaning))
        .or_else(|| device(&words, meaning))
        .or_else(|| note(&words, meaning))
}

fn memory(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::Alloc(level, out, size) => {
            Action::Alloc { level, addr: words.out(out), size_bytes: words.size(size) }
        }
        Meaning::Free(addr, space) => Action::Free { addr: words.arg(addr), space },
        Meaning::HostRegister(addr, size) => {
            Action::HostRegister { addr: words.arg(addr), size_bytes: words.arg(size) }
        }
        Meaning::HostUnregister(addr) => Action::HostUnregister { addr: words.arg(addr) },
        Meaning::Array(handle, shape, _, levels) => {
            let levels = levels.map_or(1, |levels| words.arg(levels) as u32);
            let structure = words.structure(shape);
            Action::Array {
                handle: words.out(handle),
                shape: structure.and_then(|structure| structure.array(shape, levels)),
            }
        }
        Meaning::ArrayDestroy(handle) => Action::ArrayDestroy { handle: words.arg(handle) },
        Meaning::ArrayMap => Action::ArrayMap,
        Meaning::TensorUsage => tensor(words),
        _ => return None,
    })
}

/// `reportMemoryUsageToProfiler(ptr, signed size, allocated, reserved, device)`.
fn tensor(words: &Words<'_>) -> Action {
    let (addr, size) = (words.word(0), words.word(1) as i64);
    let (_, ordinal) = torch_device(words.word(4));
    match u64::try_from(size) {
        Ok(size_bytes) => Action::TensorAlloc { addr, size_bytes, ordinal },
        Err(_) => Action::TensorFree { addr },
    }
}

/// `c10/core/Device.h`: a byte of type, then the index; the rest of the word is garbage.
fn torch_device(word: u64) -> (u8, i32) {
    (word as u8, i32::from((word >> 8) as i8))
}

/// `DeviceType::CUDA` (`c10/core/DeviceType.h`).
const TORCH_CUDA: u8 = 1;

/// `reportOutOfMemoryToProfiler(signed size, allocated, reserved, device)`. Other devices than GPUs have
/// allocators that report, too.
fn torch_oom(words: &Words<'_>) -> Action {
    let (size, (device, ordinal)) = (words.word(0) as i64, torch_device(words.word(3)));
    match u64::try_from(size) {
        Ok(size_bytes) if device == TORCH_CUDA => Action::TorchOom {
            size_bytes,
            allocated_bytes: words.word(1),
            reserved_bytes: words.word(2),
            ordinal,
        },
        _ => Action::Nothing,
    }
}

/// What is known from entries alone.
fn note(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::TorchOom => torch_oom(words),
        Meaning::CommInit(size, rank, id, _) => Action::CommInit {
            rank: words.arg(rank) as i32,
            size: words.arg(size) as i32,
            key: words.structure(id).map(|id| id.key()),
        },
        _ => return None,
    })
}

fn vmm(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::VmmCreate(out, size, _) => Action::VmmCreate {
            handle: words.out(out),
            size_bytes: words.arg(size),
            location: structs::location(words.structure(Struct::Location)),
        },
        Meaning::VmmRelease(handle) => Action::VmmRelease { handle: words.arg(handle) },
        Meaning::VmmMap(addr, size, handle) => Action::VmmMap {
            addr: words.arg(addr),
            size_bytes: words.arg(size),
            handle: words.arg(handle),
        },
        Meaning::VmmUnmap(addr, size) => {
            Action::VmmUnmap { addr: words.arg(addr), size_bytes: words.arg(size) }
        }
        Meaning::VmmRetain(handle, addr) => {
            Action::VmmRetain { handle: words.out(handle), addr: words.arg(addr) }
        }
        Meaning::VmmExport(handle) => Action::VmmExport { handle: words.arg(handle) },
        Meaning::VmmImport(handle) => Action::VmmImport { handle: words.out(handle) },
        Meaning::Reserve(addr, size) => {
            Action::Reserve { addr: words.out(addr), size_bytes: words.arg(size) }
        }
        Meaning::Unreserve(addr, size) => {
            Action::Unreserve { addr: words.arg(addr), size_bytes: words.arg(size) }
        }
        Meaning::MulticastCreate(handle, _) => Action::MulticastCreate {
            handle: words.out(handle),
            size_bytes: words.structure(Struct::Multicast).map(|at| at.first()),
        },
        Meaning::MulticastBind(handle, size) => {
            Action::MulticastBind { handle: words.arg(handle), size_bytes: words.arg(size) }
        }
        Meaning::MulticastUnbind(handle, size) => {
            Action::MulticastUnbind { handle: words.arg(handle), size_bytes: words.arg(size) }
        }
        _ => return None,
    })
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, the attribute whose setting explains what a pool keeps.
const RELEASE_THRESHOLD: u32 = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`, the attribute that tells what it keeps.
const RESERVED_MEM_CURRENT: u32 = 5;

fn pool(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::PoolAlloc(addr, size, pool) => Action::PoolAlloc {
            addr: words.out(addr),
            size_bytes: words.arg(size),
            pool: words.arg(pool),
        },
        Meaning::PoolCreate(pool, _) => Action::PoolCreate {
            pool: words.out(pool),
            location: structs::location(words.structure(Struct::Location)),
        },
        Meaning::PoolDestroy(pool) => Action::PoolDestroy { pool: words.arg(pool) },
        Meaning::PoolTrim(pool, keep) => {
            Action::PoolTrim { pool: words.arg(pool), keep_bytes: words.arg(keep) }
        }
        Meaning::PoolSet(pool, attribute, _) => {
            let given = words.structure(Struct::Given).map(|given| given.first());
            pool_size(words, (pool, attribute), RELEASE_THRESHOLD, given)
        }
        Meaning::PoolGet(pool, attribute, value) => {
            pool_size(words, (pool, attribute), RESERVED_MEM_CURRENT, words.known(value))
        }
        Meaning::PoolOfDevice(pool, device) => Action::PoolOf {
            pool: words.out(pool),
            location: Location::Device(words.ordinal(device)),
        },
        Meaning::PoolForDevice(device, pool) => Action::PoolOf {
            pool: words.arg(pool),
            location: Location::Device(words.ordinal(device)),
        },
        Meaning::PoolOfLocation(pool, _) => Action::PoolOf {
            pool: words.out(pool),
            location: structs::location(words.structure(Struct::BareLocation)),
        },
        Meaning::PoolForLocation(_, pool) => Action::PoolOf {
            pool: words.arg(pool),
            location: structs::location(words.structure(Struct::BareLocation)),
        },
        Meaning::PoolExport(pool) => Action::PoolExport { pool: words.arg(pool) },
        Meaning::PoolImport(pool) => Action::PoolImport { pool: words.out(pool) },
        _ => return None,
    })
}

/// Attributes other than the one that is a size say nothing of memory.
fn pool_size(
    words: &Words<'_>,
    (pool, attribute): (Arg, Arg),
    wanted: u32,
    value: Option<u64>,
) -> Action {
    match value {
        Some(size_bytes) if words.arg(attribute) as u32 == wanted => {
            Action::PoolSize { pool: words.arg(pool), size_bytes }
        }
        _ => Action::Nothing,
    }
}

fn shared(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::IpcExport(_, addr) => Action::BlockExport {
            addr: words.arg(addr),
            key: words.structure(Struct::IpcHandle).map(|handle| handle.key()),
        },
        Meaning::IpcOpen(addr, _) => Action::BlockImport {
            addr: words.out(addr),
            key: words.structure(Struct::IpcHandleByValue).map(|handle| handle.key()),
        },
        Meaning::IpcClose(addr) => Action::BlockClose { addr: words.arg(addr) },
        Meaning::PointerExport(addr) | Meaning::RangeExport(addr) => {
            Action::BlockExport { addr: words.arg(addr), key: None }
        }
        Meaning::PointerImport(addr) => Action::BlockImport { addr: words.out(addr), key: None },
        Meaning::ExternalImport(handle, _) => Action::ExternalImport {
            handle: words.out(handle),
            size_bytes: words.structure(Struct::ExternalHandle).map(|at| at.first()),
        },
        Meaning::ExternalBuffer(addr, _) => Action::ExternalBuffer {
            addr: words.out(addr),
            size_bytes: words.structure(Struct::ExternalBuffer).map(|at| at.first()),
        },
        Meaning::ExternalArray(handle) => Action::ExternalArray { handle: words.out(handle) },
        Meaning::ExternalDestroy(handle) => Action::ExternalDestroy { handle: words.arg(handle) },
        Meaning::GraphicsMap => Action::GraphicsMap { addr: 0, size_bytes: None },
        Meaning::GraphicsPointer(addr, size) => {
            Action::GraphicsMap { addr: words.out(addr), size_bytes: words.known(size) }
        }
        Meaning::GraphicsUnmap => Action::GraphicsUnmap,
        _ => return None,
    })
}

fn graph(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::GraphAlloc(_) => {
            words.structure(Struct::AllocNode).map_or(Action::Nothing, |node| node.alloc_node())
        }
        Meaning::GraphNode(_) => {
            words.structure(Struct::Node).map_or(Action::Nothing, |node| node.any_node())
        }
        Meaning::GraphFree(addr) => Action::Graph { addr: words.arg(addr) },
        Meaning::GraphMake(handle) => Action::Graph { addr: words.out(handle) },
        Meaning::GraphDestroy(handle) => Action::Graph { addr: words.arg(handle) },
        Meaning::GraphTrim(device) => Action::GraphTrim { ordinal: words.ordinal(device) },
        Meaning::ModuleLoad(handle) => Action::Module { handle: words.out(handle), loads: true },
        Meaning::ModuleUnload(handle) => Action::Module { handle: words.arg(handle), loads: true },
        Meaning::Function(handle) => Action::Module { handle: words.out(handle), loads: false },
        Meaning::FunctionLoad(handle) => Action::Module { handle: words.arg(handle), loads: false },
        Meaning::Capture(stream) => Action::Capture { stream: words.arg(stream), begins: true },
        Meaning::Captured(stream) => Action::Capture { stream: words.arg(stream), begins: false },
        _ => return None,
    })
}

fn context(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::CtxCreate(ctx, device) => {
            Action::CtxCreate { ctx: words.out(ctx), ordinal: words.ordinal(device) }
        }
        Meaning::CtxAttach(ctx) => Action::CtxAttach { ctx: words.out(ctx) },
        Meaning::CtxDetach(ctx) => Action::CtxDetach { ctx: words.arg(ctx) },
        Meaning::CtxDestroy(ctx) => Action::CtxDestroy { ctx: words.arg(ctx) },
        Meaning::PrimaryRetain(ctx, device) => {
            Action::PrimaryRetain { ctx: words.out(ctx), ordinal: words.ordinal(device) }
        }
        Meaning::PrimaryRelease(device) => {
            Action::PrimaryRelease { ordinal: words.ordinal(device) }
        }
        Meaning::PrimaryReset(device) => Action::PrimaryReset { ordinal: words.ordinal(device) },
        Meaning::GreenCreate(green, device) => {
            Action::GreenCreate { green: words.out(green), ordinal: words.ordinal(device) }
        }
        Meaning::CtxOfGreen(ctx, green) => {
            Action::CtxOfGreen { ctx: words.out(ctx), green: words.arg(green) }
        }
        Meaning::GreenDestroy(green) => Action::GreenDestroy { green: words.arg(green) },
        Meaning::CtxSet(ctx) => Action::CtxSet { ctx: words.arg(ctx) },
        Meaning::CtxPush(ctx) => Action::CtxPush { ctx: words.arg(ctx) },
        Meaning::CtxPop => Action::CtxPop,
        Meaning::CtxLimit(limit, value) => {
            Action::CtxLimit { limit: words.arg(limit) as u32, value: words.arg(value) }
        }
        Meaning::Checkpoint(pid) | Meaning::Restore(pid) => {
            Action::Checkpoint { pid: words.arg(pid) as u32 }
        }
        _ => return None,
    })
}

fn device(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    let by_bus_id = |ordinal| {
        let told = words.structure(Struct::BusId);
        told.map_or(Action::Nothing, |at| Action::DeviceBusId { ordinal, bus_id: at.bytes() })
    };
    Some(match meaning {
        Meaning::Init => Action::Init,
        Meaning::DeviceUuid(_, device) => {
            let (ordinal, told) = (words.ordinal(device), words.structure(Struct::Uuid));
            told.map_or(Action::Nothing, |at| Action::DeviceUuid { ordinal, uuid: at.bytes() })
        }
        Meaning::DeviceBusId(_, device) => by_bus_id(words.ordinal(device)),
        Meaning::DeviceByBusId(device, _) => by_bus_id(words.out(device) as i32),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use agent_common::{call::KIND_CALL, cookie::Kind};
    use ledger::call::{ArrayShape, Level};

    use super::*;

    fn raw(symbol: &str, words: [u64; 6], extra: &[u64], result: i32) -> RawCall {
        let row = PROBES.iter().position(|probe| probe.symbol == symbol).unwrap();
        let mut call = RawCall::new_zeroed();
        call.kind = KIND_CALL;
        call.row = row as u8;
        call.result = result;
        call.words.copy_from_slice(&words[..3]);
        call.wide_words.copy_from_slice(&words[3..]);
        call.extra[..extra.len()].copy_from_slice(extra);
        call
    }

    fn decoded(call: &RawCall) -> Action {
        action(call, probe(call).unwrap()).unwrap()
    }

    #[test]
    fn a_block_has_the_address_behind_the_out_pointer() {
        let call = raw("cuMemAlloc_v2", [0x7f00, 4096, 0, 0, 0, 0], &[], 0);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0x7f00, size_bytes: Some(4096) }
        );
    }

    #[test]
    fn a_failed_call_never_uses_the_callers_garbage() {
        let call = raw("cuMemAlloc_v2", [0xdead, 4096, 0, 0, 0, 0], &[], 2);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0, size_bytes: Some(4096) }
        );
    }

    #[test]
    fn a_pitched_block_is_pitch_times_height() {
        let call = raw("cuMemAllocPitch_v2", [0x7f00, 512, 100, 8, 4, 0], &[], 0);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0x7f00, size_bytes: Some(4096) }
        );
        let refused = raw("cuMemAllocPitch_v2", [0x7f00, 512, 100, 8, 4, 0], &[], 2);
        assert_eq!(
            decoded(&refused),
            Action::Alloc { level: Level::Device, addr: 0, size_bytes: None }
        );
    }

    #[test]
    fn physical_memory_lies_where_its_properties_say() {
        let device_3 = 1 | 3 << 32;
        let call = raw("cuMemCreate", [0x11, 1 << 21, 0, 0, 0, 0], &[device_3], 0);
        assert_eq!(
            decoded(&call),
            Action::VmmCreate { handle: 0x11, size_bytes: 1 << 21, location: Location::Device(3) }
        );
        let host = raw("cuMemCreate", [0x11, 1 << 21, 0, 0, 0, 0], &[2], 0);
        assert!(matches!(decoded(&host), Action::VmmCreate { location: Location::Host, .. }));
    }

    #[test]
    fn a_device_number_has_32_bits() {
        let call = raw("cuDevicePrimaryCtxRetain", [9, 0xffff_ffff_0000_0001, 0, 0, 0, 0], &[], 0);
        assert_eq!(decoded(&call), Action::PrimaryRetain { ctx: 9, ordinal: 1 });
    }

    #[test]
    fn functions_of_the_first_version_have_32_bits() {
        let garbage = 0xffff_ffff_0000_0000;
        let call = raw("cuMemAlloc", [garbage | 0x7f00, garbage | 4096, 0, 0, 0, 0], &[], 0);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0x7f00, size_bytes: Some(4096) }
        );
    }

    #[test]
    fn arrays_are_described_alike_in_all_versions() {
        let shape = |depth, flags, levels| {
            Some(ArrayShape {
                width: 7,
                height: 5,
                depth,
                format: 0x20,
                channels: 4,
                flags,
                levels,
            })
        };
        let format = 0x20 | 4 << 32;
        for (api, extra, shape) in [
            ("cuArrayCreate_v2", [7, 5, format, 0, 0], shape(0, 0, 1)),
            ("cuArray3DCreate_v2", [7, 5, 3, format, 2], shape(3, 2, 1)),
            ("cuMipmappedArrayCreate", [7, 5, 3, format, 2], shape(3, 2, 6)),
            ("cuArrayCreate", [7 | 5 << 32, format, 0, 0, 0], shape(0, 0, 1)),
            ("cuArray3DCreate", [7 | 5 << 32, 3 | 0x20 << 32, 4 | 2 << 32, 0, 0], shape(3, 2, 1)),
        ] {
            let call = raw(api, [0x99, 0, 6, 0, 0, 0], &extra, 0);
            assert_eq!(decoded(&call), Action::Array { handle: 0x99, shape }, "{api}");
        }
        let mut unread = raw("cuArrayCreate_v2", [0x99, 0, 0, 0, 0, 0], &[], 0);
        unread.flags |= FLAG_STRUCT_FAULT;
        assert_eq!(decoded(&unread), Action::Array { handle: 0x99, shape: None });
    }

    #[test]
    fn only_memory_nodes_of_graphs_matter() {
        let node = |kind, result| {
            let extra = [kind, 0x5000, 1 | 1 << 32, 4096, 0x7000];
            decoded(&raw("cuGraphAddNode_v2", [0; 6], &extra, result))
        };
        let location = Location::Device(1);
        let alloc = Action::GraphAlloc { addr: 0x7000, size_bytes: 4096, location };
        assert_eq!(node(10, 0), alloc);
        assert_eq!(node(11, 0), Action::Graph { addr: 0x5000 });
        assert_eq!(node(0, 0), Action::Nothing, "a kernel");
        assert_eq!(node(10, 1), Action::Nothing, "the driver filled nothing in");
    }

    #[test]
    fn an_ipc_handle_stands_for_the_same_block_on_both_sides() {
        let handle = [1, 2, 3, 4, 5, 6, 7, 8];
        let given = decoded(&raw("cuIpcGetMemHandle", [0, 0x7000, 0, 0, 0, 0], &handle, 0));
        let taken = decoded(&raw("cuIpcOpenMemHandle_v2", [0x9000, 1, 0, 0, 0, 0], &handle, 0));
        let Action::BlockExport { addr: 0x7000, key: Some(key) } = given else {
            panic!("{given:?}")
        };
        assert_eq!(taken, Action::BlockImport { addr: 0x9000, key: Some(key) });
    }

    #[test]
    fn a_communicator_is_the_same_on_all_its_ranks() {
        let id = [1, 2, 3, 4, 5, 6, 7, 8];
        let garbage = 0xffff_ffff_0000_0000;
        // On x86-64 the id is on the stack, elsewhere behind argument 2.
        let words = |rank: u64| {
            let behind = if cfg!(target_arch = "x86_64") { garbage | rank } else { 0x7fff };
            [0x7000, garbage | 8, behind, rank, 0, 0]
        };
        let by_value = |rank| decoded(&raw("ncclCommInitRankConfig", words(rank), &id, 0));
        let Action::CommInit { rank: 3, size: 8, key: Some(key) } = by_value(3) else {
            panic!("{:?}", by_value(3))
        };
        assert_eq!(by_value(7), Action::CommInit { rank: 7, size: 8, key: Some(key) });
        let many = raw("ncclCommInitRankScalable", [0x7000, 8, 5, 2, 0x9000, 0], &id, 0);
        assert_eq!(decoded(&many), Action::CommInit { rank: 5, size: 8, key: Some(key) });
        let mut unread = raw("ncclCommInitRank", words(1), &[], 0);
        unread.flags |= FLAG_STRUCT_FAULT;
        assert_eq!(decoded(&unread), Action::CommInit { rank: 1, size: 8, key: None });
    }

    #[test]
    fn of_pytorchs_refusals_those_on_gpus_matter() {
        let symbol = "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE";
        let refused = |size, device| decoded(&raw(symbol, [size, 70, 90, device, 0, 0], &[], 0));
        let garbage = 0xdead_beef_5a5a_0000;
        assert_eq!(
            refused(1 << 42, garbage | 3 << 8 | 1),
            Action::TorchOom {
                size_bytes: 1 << 42,
                allocated_bytes: 70,
                reserved_bytes: 90,
                ordinal: 3
            }
        );
        assert_eq!(refused(1 << 42, garbage | 0xff << 8), Action::Nothing, "the CPU");
        assert_eq!(refused(u64::MAX, garbage | 1), Action::Nothing, "no size");
    }

    #[test]
    fn of_a_pools_attributes_only_sizes_matter() {
        let set = |attribute| {
            decoded(&raw("cuMemPoolSetAttribute", [9, attribute, 0, 0, 0, 0], &[4096], 0))
        };
        assert_eq!(set(4), Action::PoolSize { pool: 9, size_bytes: 4096 });
        assert_eq!(set(1), Action::Nothing);
        let get = |attribute| {
            decoded(&raw("cuMemPoolGetAttribute", [9, attribute, 4096, 0, 0, 0], &[], 0))
        };
        assert_eq!(get(5), Action::PoolSize { pool: 9, size_bytes: 4096 });
        assert_eq!(get(4), Action::Nothing);
    }

    #[test]
    fn every_call_of_the_table_has_an_action() {
        let one_by_one = |probe: &Probe| matches!(probe.kind(), Kind::Call | Kind::Note);
        for (row, probe) in crate::probes::rows().filter(|(_, probe)| one_by_one(probe)) {
            let mut call = RawCall::new_zeroed();
            call.row = row;
            assert!(action(&call, probe).is_some(), "{}", probe.symbol);
        }
    }

    #[test]
    fn records_of_other_lengths_are_refused() {
        assert_eq!(record(&[]).unwrap_err(), DecodeError::Length(0));
        assert_eq!(record(&[0; 63]).unwrap_err(), DecodeError::Length(63));
        assert!(record(&[0; NARROW_LEN]).is_ok());
        let mut whole = [0; EXTRA_LEN];
        for (flags, length) in [(FLAG_WIDE, WIDE_LEN), (FLAG_WIDE | FLAG_EXTRA, EXTRA_LEN)] {
            whole[1] = flags;
            assert!(record(&whole[..length]).is_ok());
            assert_eq!(record(&whole[..NARROW_LEN]).unwrap_err(), DecodeError::Length(NARROW_LEN));
        }
    }

    #[test]
    fn an_unknown_row_is_an_error() {
        let mut call = RawCall::new_zeroed();
        call.row = 254;
        assert_eq!(probe(&call).unwrap_err(), DecodeError::Row(254));
    }
}
