//! Bytes of a call record -> [`Action`], by the meaning of the record's row.
//!
//! Bytes from the kernel are input: what cannot be decoded is an error that the caller counts.

use agent_common::call::{
    FLAG_OUT_FAULT, FLAG_STRUCT_FAULT, FLAG_WIDE, NARROW_LEN, RawCall, WIDE_LEN, WORDS,
};
use ledger::call::{Action, Location};
use thiserror::Error;
use zerocopy::{FromZeros as _, IntoBytes as _};

use crate::probes::{Arg, Meaning, Out, PROBES, Probe, Size};

/// Why a record could not be decoded.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DecodeError {
    /// Neither a narrow nor a wide record.
    #[error("a call record of {0} bytes, where {NARROW_LEN} or {WIDE_LEN} were expected")]
    Length(usize),
    /// A row that the table does not have.
    #[error("a call record of row {0}, which the probe table does not have")]
    Row(u16),
}

/// Reads the bytes of a record; a narrow record's missing words are 0.
pub fn record(bytes: &[u8]) -> Result<RawCall, DecodeError> {
    let expected = match bytes.get(1) {
        Some(flags) if flags & FLAG_WIDE != 0 => WIDE_LEN,
        _ => NARROW_LEN,
    };
    // A failed narrow call that took the reserved ring arrives whole.
    if bytes.len() != expected && bytes.len() != WIDE_LEN {
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

/// The record's words, with access by the table's argument types.
struct Words<'a> {
    call: &'a RawCall,
    words: [u64; WORDS],
}

impl<'a> Words<'a> {
    fn new(call: &'a RawCall) -> Self {
        let (low, high) = (call.words, call.wide_words);
        Self { call, words: [low[0], low[1], low[2], high[0], high[1], high[2]] }
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

    fn succeeded(&self) -> bool {
        self.call.result == 0 && self.call.flags & FLAG_OUT_FAULT == 0
    }

    fn size(&self, size: Size) -> Option<u64> {
        match size {
            Size::Of(arg) => Some(self.arg(arg)),
            Size::Pitch(pitch, height) => {
                self.succeeded().then(|| self.word(pitch.0).saturating_mul(self.arg(height)))
            }
        }
    }

    /// `CUmemAllocationProp`: location type at byte 8, its id at byte 12 (`cuda.h`).
    fn location(&self) -> Location {
        if self.call.flags & FLAG_STRUCT_FAULT != 0 {
            return Location::Unknown;
        }
        let word = self.call.extra[1];
        match word as u32 {
            1 => Location::Device((word >> 32) as i32),
            2..=4 => Location::Host,
            _ => Location::Unknown,
        }
    }

    fn uuid(&self) -> [u8; 16] {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.call.extra[0].to_le_bytes());
        uuid[8..].copy_from_slice(&self.call.extra[1].to_le_bytes());
        uuid
    }
}

/// What the call asked for; `None` for rows that make no call records.
pub fn action(call: &RawCall, meaning: Meaning) -> Option<Action> {
    let words = Words::new(call);
    Some(match meaning {
        Meaning::Alloc(level, out, size) => {
            Action::Alloc { level, addr: words.out(out), size_bytes: words.size(size) }
        }
        Meaning::Free(addr, space) => Action::Free { addr: words.arg(addr), space },
        Meaning::VmmCreate(out, size, _) => Action::VmmCreate {
            handle: words.out(out),
            size_bytes: words.arg(size),
            location: words.location(),
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
        Meaning::HostRegister(addr, size) => {
            Action::HostRegister { addr: words.arg(addr), size_bytes: words.arg(size) }
        }
        Meaning::TensorUsage => tensor(&words),
        Meaning::HostUnregister(addr) => Action::HostUnregister { addr: words.arg(addr) },
        _ => return context_action(&words, meaning),
    })
}

/// `reportMemoryUsageToProfiler(ptr, signed size, allocated, reserved, device)`.
fn tensor(words: &Words<'_>) -> Action {
    let (addr, size) = (words.word(0), words.word(1) as i64);
    // c10/core/Device.h: a byte of type, then the index.
    let ordinal = i32::from((words.word(4) >> 8) as i8);
    match u64::try_from(size) {
        Ok(size_bytes) => Action::TensorAlloc { addr, size_bytes, ordinal },
        Err(_) => Action::TensorFree { addr },
    }
}

fn context_action(words: &Words<'_>, meaning: Meaning) -> Option<Action> {
    Some(match meaning {
        Meaning::CtxCreate(ctx, device) => {
            Action::CtxCreate { ctx: words.out(ctx), ordinal: words.ordinal(device) }
        }
        Meaning::CtxDestroy(ctx) => Action::CtxDestroy { ctx: words.arg(ctx) },
        Meaning::PrimaryRetain(ctx, device) => {
            Action::PrimaryRetain { ctx: words.out(ctx), ordinal: words.ordinal(device) }
        }
        Meaning::PrimaryRelease(device) => {
            Action::PrimaryRelease { ordinal: words.ordinal(device) }
        }
        Meaning::PrimaryReset(device) => Action::PrimaryReset { ordinal: words.ordinal(device) },
        Meaning::CtxSet(ctx) => Action::CtxSet { ctx: words.arg(ctx) },
        Meaning::CtxPush(ctx) => Action::CtxPush { ctx: words.arg(ctx) },
        Meaning::CtxPop => Action::CtxPop,
        Meaning::Init => Action::Init,
        Meaning::DeviceUuid(_, device) => {
            Action::DeviceUuid { ordinal: words.ordinal(device), uuid: words.uuid() }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use agent_common::call::KIND_CALL;
    use ledger::call::Level;

    use super::*;

    fn raw(symbol: &str, words: [u64; 6], extra: [u64; 2], result: i32) -> RawCall {
        let row = PROBES.iter().position(|probe| probe.symbol == symbol).unwrap();
        let mut call = RawCall::new_zeroed();
        call.kind = KIND_CALL;
        call.row = row as u16;
        call.result = result;
        call.words.copy_from_slice(&words[..3]);
        call.wide_words.copy_from_slice(&words[3..]);
        call.extra = extra;
        call
    }

    fn decoded(call: &RawCall) -> Action {
        action(call, probe(call).unwrap().meaning).unwrap()
    }

    #[test]
    fn a_block_has_the_address_behind_the_out_pointer() {
        let call = raw("cuMemAlloc_v2", [0x7f00, 4096, 0, 0, 0, 0], [0; 2], 0);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0x7f00, size_bytes: Some(4096) }
        );
    }

    #[test]
    fn a_failed_call_never_uses_the_callers_garbage() {
        let call = raw("cuMemAlloc_v2", [0xdead, 4096, 0, 0, 0, 0], [0; 2], 2);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0, size_bytes: Some(4096) }
        );
    }

    #[test]
    fn a_pitched_block_is_pitch_times_height() {
        let call = raw("cuMemAllocPitch_v2", [0x7f00, 512, 100, 8, 4, 0], [0; 2], 0);
        assert_eq!(
            decoded(&call),
            Action::Alloc { level: Level::Device, addr: 0x7f00, size_bytes: Some(4096) }
        );
        let refused = raw("cuMemAllocPitch_v2", [0x7f00, 512, 100, 8, 4, 0], [0; 2], 2);
        assert_eq!(
            decoded(&refused),
            Action::Alloc { level: Level::Device, addr: 0, size_bytes: None }
        );
    }

    #[test]
    fn physical_memory_lies_where_its_properties_say() {
        let device_3 = 1 | 3 << 32;
        let call = raw("cuMemCreate", [0x11, 1 << 21, 0, 0, 0, 0], [1, device_3], 0);
        assert_eq!(
            decoded(&call),
            Action::VmmCreate { handle: 0x11, size_bytes: 1 << 21, location: Location::Device(3) }
        );
        let host = raw("cuMemCreate", [0x11, 1 << 21, 0, 0, 0, 0], [1, 2], 0);
        assert!(matches!(decoded(&host), Action::VmmCreate { location: Location::Host, .. }));
    }

    #[test]
    fn a_device_number_has_32_bits() {
        let call =
            raw("cuDevicePrimaryCtxRetain", [9, 0xffff_ffff_0000_0001, 0, 0, 0, 0], [0; 2], 0);
        assert_eq!(decoded(&call), Action::PrimaryRetain { ctx: 9, ordinal: 1 });
    }

    #[test]
    fn records_of_other_lengths_are_refused() {
        assert_eq!(record(&[]).unwrap_err(), DecodeError::Length(0));
        assert_eq!(record(&[0; 63]).unwrap_err(), DecodeError::Length(63));
        assert!(record(&[0; NARROW_LEN]).is_ok());
        let mut wide = [0; WIDE_LEN];
        wide[1] = FLAG_WIDE;
        assert!(record(&wide).is_ok());
        assert_eq!(record(&wide[..NARROW_LEN]).unwrap_err(), DecodeError::Length(NARROW_LEN));
    }

    #[test]
    fn an_unknown_row_is_an_error() {
        let mut call = RawCall::new_zeroed();
        call.row = 9999;
        assert_eq!(probe(&call).unwrap_err(), DecodeError::Row(9999));
    }
}
