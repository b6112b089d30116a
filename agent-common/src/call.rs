//! A traced call, as the kernel half saw it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How many argument words a narrow record carries.
pub const NARROW_WORDS: usize = 3;
/// How many argument words a wide record carries: the registers of both supported ABIs.
pub const WORDS: usize = 6;
/// Words that are picked out of a structure: those of the 64 bytes of a `CUipcMemHandle`.
pub const EXTRA_WORDS: usize = 8;

/// A call that returned, or (`Kind::Note`) whose entry is all that is probed: `exit_ns` is `enter_ns`.
pub const KIND_CALL: u8 = 1;
/// A backward pass began: word 0 is its number, `exit_ns` is 0.
pub const KIND_NOTE: u8 = 2;

/// Words 3 to 5 follow the narrow part.
pub const FLAG_WIDE: u8 = 1;
/// A result behind an out-pointer could not be read (the page was not resident).
pub const FLAG_OUT_FAULT: u8 = 2;
/// The structure behind a pointer could not be read.
pub const FLAG_STRUCT_FAULT: u8 = 4;
/// The extra words follow those.
pub const FLAG_EXTRA: u8 = 8;

/// No runtime function is around the call, or labels are not recorded.
pub const NO_ROW: u8 = u8::MAX;

/// One call. A narrow record ends after [`NARROW_LEN`] bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawCall {
    /// [`KIND_CALL`] or [`KIND_NOTE`].
    pub kind: u8,
    /// `FLAG_*`.
    pub flags: u8,
    /// Row of the probe table.
    pub row: u8,
    /// Row of the runtime function that the call lies in, or [`NO_ROW`].
    pub runtime_row: u8,
    /// Return value (`CUresult`).
    pub result: i32,
    /// Process.
    pub tgid: u32,
    /// Thread.
    pub tid: u32,
    /// Entry, nanoseconds of `CLOCK_BOOTTIME`.
    pub enter_ns: u64,
    /// Return, nanoseconds of `CLOCK_BOOTTIME`.
    pub exit_ns: u64,
    /// Key of the stack at entry; 0 = none taken.
    pub stack_key: u64,
    /// Arguments 0 to 2; an out-pointer is replaced by what it pointed to at return.
    pub words: [u64; NARROW_WORDS],
    /// Arguments 3 to 5, likewise.
    pub wide_words: [u64; WORDS - NARROW_WORDS],
    /// Words of the structure that the row's [`Structure`] names, in its order.
    pub extra: [u64; EXTRA_WORDS],
}

/// Bytes of a narrow record.
pub const NARROW_LEN: usize = 64;
/// Bytes of a wide record.
pub const WIDE_LEN: usize = 88;
/// Bytes of a record with extra words.
pub const EXTRA_LEN: usize = 152;

/// Which words of a structure a row wants.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Structure {
    /// The argument that points to it.
    pub arg: u8,
    /// 1: the argument is the structure itself, passed by value and too large for registers.
    pub by_value: u8,
    /// How many of `offsets` are wanted.
    pub words: u8,
    /// Spelled out.
    pub pad: u8,
    /// Where the 8-byte words begin, bytes from the structure's beginning.
    pub offsets: [u16; EXTRA_WORDS],
}

const _: () = {
    assert!(size_of::<RawCall>() == EXTRA_LEN);
    assert!(core::mem::offset_of!(RawCall, wide_words) == NARROW_LEN);
    assert!(core::mem::offset_of!(RawCall, extra) == WIDE_LEN);
    assert!(size_of::<Structure>() == 20);
    assert!(core::mem::offset_of!(RawCall, enter_ns) == 16);
};
