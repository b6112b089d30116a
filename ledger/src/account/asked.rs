//! What a failed call asked for.

use crate::call::{Action, Level, Location, Space};

/// What a failed call asked for.
pub(super) struct Asked {
    pub(super) level: Level,
    pub(super) addr: u64,
    pub(super) size_bytes: Option<u64>,
    pub(super) ordinal: Option<i32>,
}

fn of(level: Level, addr: u64, size_bytes: Option<u64>, ordinal: Option<i32>) -> Asked {
    Asked { level, addr, size_bytes, ordinal }
}

/// Reads only what the call put in: the driver's answers are not there. `current` is the device of
/// the calling thread's context.
pub(super) fn asked(action: &Action, current: Option<i32>) -> Asked {
    match *action {
        Action::Alloc { level, size_bytes, .. } => of(level, 0, size_bytes, current),
        Action::PoolAlloc { size_bytes, .. } => of(Level::Pool, 0, Some(size_bytes), None),
        Action::Free { addr, space: Space::Device } => of(Level::Device, addr, None, current),
        Action::Free { addr, space: Space::Host } | Action::HostUnregister { addr } => {
            of(Level::Host, addr, None, current)
        }
        Action::HostRegister { addr, size_bytes } => {
            of(Level::Host, addr, Some(size_bytes), current)
        }
        Action::TensorAlloc { addr, size_bytes, ordinal } => {
            of(Level::Tensor, addr, Some(size_bytes), Some(ordinal))
        }
        Action::TensorFree { addr } => of(Level::Tensor, addr, None, None),
        Action::Array { shape, .. } => {
            of(Level::Device, 0, shape.and_then(|shape| shape.least_bytes()), current)
        }
        Action::VmmCreate { size_bytes, location, .. } => match location {
            Location::Device(ordinal) => of(Level::Device, 0, Some(size_bytes), Some(ordinal)),
            Location::Host => of(Level::Host, 0, Some(size_bytes), None),
            Location::Unknown => of(Level::Device, 0, Some(size_bytes), None),
        },
        Action::VmmMap { addr, size_bytes, .. }
        | Action::VmmUnmap { addr, size_bytes }
        | Action::Unreserve { addr, size_bytes } => {
            of(Level::Virtual, addr, Some(size_bytes), None)
        }
        Action::VmmRetain { addr, .. } => of(Level::Virtual, addr, None, None),
        Action::Reserve { size_bytes, .. } => of(Level::Virtual, 0, Some(size_bytes), None),
        Action::VmmImport { .. } => of(Level::Imported, 0, None, None),
        _ => other(action, current),
    }
}

fn other(action: &Action, current: Option<i32>) -> Asked {
    match *action {
        Action::PoolCreate { location: Location::Device(ordinal), .. } => {
            of(Level::Pool, 0, None, Some(ordinal))
        }
        Action::PoolTrim { pool, keep_bytes } => of(Level::Pool, pool, Some(keep_bytes), None),
        Action::PoolDestroy { pool }
        | Action::PoolSize { pool, .. }
        | Action::PoolExport { pool } => of(Level::Pool, pool, None, None),
        Action::PoolCreate { .. } | Action::PoolOf { .. } | Action::PoolImport { .. } => {
            of(Level::Pool, 0, None, None)
        }
        Action::BlockExport { addr, .. } => of(Level::Device, addr, None, current),
        Action::BlockClose { addr } => of(Level::Imported, addr, None, current),
        Action::BlockImport { .. } => of(Level::Imported, 0, None, current),
        Action::ExternalImport { size_bytes, .. } => of(Level::Imported, 0, size_bytes, current),
        Action::ExternalDestroy { handle } => of(Level::Imported, handle, None, current),
        Action::ExternalBuffer { size_bytes, .. } => of(Level::Virtual, 0, size_bytes, current),
        Action::MulticastCreate { size_bytes, .. } => of(Level::Virtual, 0, size_bytes, None),
        Action::MulticastBind { handle, size_bytes }
        | Action::MulticastUnbind { handle, size_bytes } => {
            of(Level::Virtual, handle, Some(size_bytes), None)
        }
        Action::ArrayMap
        | Action::ExternalArray { .. }
        | Action::GraphicsMap { .. }
        | Action::GraphicsUnmap
        | Action::GraphAlloc { .. }
        | Action::Graph { .. } => of(Level::Virtual, 0, None, current),
        Action::GraphTrim { ordinal } => of(Level::Virtual, 0, None, Some(ordinal)),
        Action::VmmRelease { handle }
        | Action::VmmExport { handle }
        | Action::ArrayDestroy { handle } => of(Level::Device, handle, None, None),
        Action::Module { .. } => of(Level::Device, 0, None, current),
        Action::Capture { stream, .. } => of(Level::Virtual, stream, None, current),
        Action::CtxDestroy { ctx }
        | Action::CtxDetach { ctx }
        | Action::CtxSet { ctx }
        | Action::CtxPush { ctx } => of(Level::Device, ctx, None, None),
        Action::GreenDestroy { green } | Action::CtxOfGreen { green, .. } => {
            of(Level::Device, green, None, None)
        }
        Action::CtxCreate { ordinal, .. }
        | Action::GreenCreate { ordinal, .. }
        | Action::PrimaryRetain { ordinal, .. }
        | Action::PrimaryRelease { ordinal }
        | Action::PrimaryReset { ordinal }
        | Action::DeviceUuid { ordinal, .. }
        | Action::DeviceBusId { ordinal, .. } => of(Level::Device, 0, None, Some(ordinal)),
        _ => of(Level::Device, 0, None, None),
    }
}
