//! Stacks, as the kernel half captured them: registers, a copy of the native stack, the Python
//! frames as addresses, and the Python code objects that they run.
//!
//! A stack is captured whole ([`RawStack`]) the first time its key is met; later calls from there
//! carry the key alone.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A captured stack: a [`RawStack`] and the copy after it.
pub const KIND_STACK: u8 = 32;
/// A Python code object: a [`RawCode`].
pub const KIND_CODE: u8 = 33;

/// More Python frames than [`PYTHON_FRAMES`].
pub const FLAG_PYTHON_CUT: u8 = 1;
/// The process has a Python configuration, and the thread runs Python.
pub const FLAG_PYTHON: u8 = 2;
/// Captured again to verify that the key still means this stack.
pub const FLAG_VERIFY: u8 = 4;
/// A read of a Python structure failed: frames may be missing.
pub const FLAG_PYTHON_FAULT: u8 = 8;
/// The thread has no Python frames and works for a backward pass: `caller_key` is the stack that
/// called autograd.
pub const FLAG_BACKWARD: u8 = 16;

/// Count of a key that the agent wants again, with the large copy.
pub const WANTED: u32 = u32::MAX;

/// Python frames of one stack.
pub const PYTHON_FRAMES: usize = 128;
/// `CFrame`s of one stack (CPython 3.10 and 3.11).
pub const CFRAMES: usize = 32;
/// Return slots that a pending return probe has hijacked.
pub const PENDING_RETURNS: usize = 16;
/// Bytes of the stack copy.
pub const COPY_BYTES: usize = 16 << 10;
/// Bytes of the stack copy, where the smaller one was too short.
pub const LARGE_COPY_BYTES: usize = 60 << 10;

/// One Python frame.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RawPythonFrame {
    /// Address of the frame itself. That of a shim lies on the C stack.
    pub addr: u64,
    /// Address of the code object.
    pub code: u64,
    /// Address of the instruction (3.11 and later); before that, `f_lasti`.
    pub instruction: u64,
    /// Which [`RawCode`] describes the code object; 0 = none (a shim).
    pub definition: u64,
    /// `owner` (3.12 and later) or `is_entry` (3.11); 0 before.
    pub owner: u64,
}

/// A return address that a pending return probe replaced on the stack.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RawReturn {
    /// Address of the slot on the stack.
    pub slot: u64,
    /// What the slot held.
    pub address: u64,
}

/// What precedes the copy of a stack.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawStack {
    /// [`KIND_STACK`].
    pub kind: u8,
    /// `FLAG_*`.
    pub flags: u8,
    /// How many of `frames` are used.
    pub frame_count: u16,
    /// How many of `cframes` are used.
    pub cframe_count: u16,
    /// How many of `returns` are used.
    pub return_count: u16,
    /// Process.
    pub tgid: u32,
    /// Thread.
    pub tid: u32,
    /// When, nanoseconds of `CLOCK_BOOTTIME`.
    pub ts_ns: u64,
    /// The key that stands for the stack from now on.
    pub key: u64,
    /// Key of the stack that called autograd; 0 = none.
    pub caller_key: u64,
    /// Instruction pointer: where the traced function begins.
    pub ip: u64,
    /// Stack pointer: address of the first byte of the copy.
    pub sp: u64,
    /// Frame pointer.
    pub fp: u64,
    /// Link register (aarch64; 0 elsewhere).
    pub lr: u64,
    /// Bytes of the copy that are filled.
    pub copied: u32,
    /// Padding.
    pub pad: u32,
    /// Pending return probes of the thread, innermost first.
    pub returns: [RawReturn; PENDING_RETURNS],
    /// Addresses of `CFrame`s, innermost first.
    pub cframes: [u64; CFRAMES],
    /// Python frames, innermost first, shims included.
    pub frames: [RawPythonFrame; PYTHON_FRAMES],
}

/// Bytes of a record with the small copy.
pub const STACK_LEN: usize = size_of::<RawStack>() + COPY_BYTES;
/// Bytes of a record with the large copy.
pub const LARGE_STACK_LEN: usize = size_of::<RawStack>() + LARGE_COPY_BYTES;

/// Bytes of a name that are copied.
pub const NAME_BYTES: usize = 128;
/// Bytes of a file name that are copied: its end.
pub const FILE_BYTES: usize = 256;
/// Bytes of a line table that are copied.
pub const LINES_BYTES: usize = 512;

/// A Python string, as far as it was copied.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RawText {
    /// Characters of the whole string.
    pub length: u32,
    /// Bytes of one character: 1, 2 or 4; 0 where the string could not be read.
    pub kind: u8,
    /// The bytes are ASCII (else Latin-1 where `kind` is 1).
    pub ascii: u8,
    /// Bytes that were copied: the whole buffer, its beginning or nothing, whatever the string's
    /// length.
    pub copied: u16,
}

/// A Python code object at the time when it was first met: it may be freed at any time after.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawCode {
    /// [`KIND_CODE`].
    pub kind: u8,
    /// Padding.
    pub pad: [u8; 3],
    /// Process.
    pub tgid: u32,
    /// What frames refer to it by.
    pub definition: u64,
    /// Address of the code object.
    pub code: u64,
    /// Address of the bytes of its line table.
    pub lines_addr: u64,
    /// Bytes of its line table; more than [`LINES_BYTES`] were not copied whole.
    pub lines_bytes: u32,
    /// Bytes that were copied: the whole buffer, its beginning or nothing, whatever its length.
    pub lines_copied: u32,
    /// `co_firstlineno`.
    pub first_line: i32,
    /// Padding.
    pub pad_2: u32,
    /// Qualified name (3.11 and later), else name: its beginning is in `name`.
    pub name_text: RawText,
    /// File name: its end is in `file`.
    pub file_text: RawText,
    /// Characters as they lie in memory.
    pub name: [u8; NAME_BYTES],
    /// Characters as they lie in memory.
    pub file: [u8; FILE_BYTES],
    /// The beginning of the line table.
    pub lines: [u8; LINES_BYTES],
}

/// Bits of a window of [`ExecutablePages`].
pub const WINDOW_BITS: u64 = 1 << 17;
/// Words of a window's bits.
pub const WINDOW_WORDS: usize = (WINDOW_BITS / 64) as usize;

/// Part of an address space; a bit says that executable code of a file lies in a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Window {
    /// Address of the first granule.
    pub start: u64,
    /// Granules are `1 << shift` bytes, at least a page.
    pub shift: u64,
    /// A bit a granule.
    pub bits: [u64; WINDOW_WORDS],
}

/// Windows of [`ExecutablePages`].
pub const WINDOWS: usize = 3;

/// Where a process has executable code: the words of a stack that point there tell call paths
/// apart. One window is for the executable, one for the libraries, and one for what lies far from
/// both: libraries that ask for their address, or that are loaded after a large reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExecutablePages {
    /// The windows, by address; the last ones may be empty.
    pub windows: [Window; WINDOWS],
}

const _: () = {
    assert!(size_of::<RawPythonFrame>() == 40);
    assert!(size_of::<RawStack>() == 80 + 16 * PENDING_RETURNS + 8 * CFRAMES + 40 * PYTHON_FRAMES);
    assert!(core::mem::offset_of!(RawStack, returns) == 80);
    assert!(size_of::<RawCode>() == 64 + NAME_BYTES + FILE_BYTES + LINES_BYTES);
    assert!(core::mem::offset_of!(RawCode, name) == 64);
    assert!(STACK_LEN.is_multiple_of(8) && LARGE_STACK_LEN.is_multiple_of(8));
};
