//! Where a CPython interpreter keeps what a walk of its frames needs.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// This interpreter has no such member.
pub const NONE: u32 = u32::MAX;

/// Bytes of a frame that one read takes at most.
pub const FRAME_READ_BYTES: usize = 112;
/// Frames are read with what lies before them, down to a multiple of so many bytes: never over the
/// beginning of a page, so a frame that can be read can be read so.
pub const FRAME_GRANULE: u64 = 2048;
/// Bytes of a code object that one read takes at most.
pub const CODE_READ_BYTES: usize = 96;

/// One process's interpreter: addresses and member offsets, in bytes. Written by the agent when it
/// finds the interpreter; the kernel half copies it at a fork and drops it at an exec.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PythonConfig {
    /// Address of `_PyRuntime`.
    pub runtime: u64,
    /// `_PyRuntimeState.interpreters.head`.
    pub interpreters_head: u32,
    /// `PyInterpreterState.next`.
    pub interpreter_next: u32,
    /// `PyInterpreterState.threads.head` (`tstate_head` before 3.11).
    pub interpreter_threads: u32,
    /// `PyThreadState.next`.
    pub thread_next: u32,
    /// `PyThreadState.thread_id`.
    pub thread_id: u32,
    /// `PyThreadState.frame` (3.8 to 3.10), `.cframe` (3.11, 3.12), `.current_frame` (3.13 on).
    pub thread_frame: u32,
    /// `CFrame.current_frame`, where `thread_frame` is a `CFrame` (3.11, 3.12); else [`NONE`].
    pub cframe_current: u32,
    /// `PyThreadState.cframe` (3.10 to 3.12), for the addresses of `CFrame`s; else [`NONE`].
    pub thread_cframe: u32,
    /// `CFrame.previous`; [`NONE`] where there are none.
    pub cframe_previous: u32,
    /// Bytes of a frame that are read: below [`FRAME_READ_BYTES`], and all members end before it.
    pub frame_bytes: u32,
    /// [`FRAME_GRANULE`] - 1 where frames lie one after the other (3.11 on), so that one read takes
    /// in several; 0 where each is an object of its own.
    pub frame_granule_mask: u32,
    /// `f_back` or `previous`, within the frame.
    pub frame_previous: u32,
    /// `f_code` or `f_executable`, within the frame.
    pub frame_code: u32,
    /// `f_lasti`, `prev_instr` or `instr_ptr`, within the frame.
    pub frame_instruction: u32,
    /// 1: the instruction is a 32-bit index (3.8 to 3.10).
    pub instruction_is_index: u32,
    /// `owner` or `is_entry`, a byte within the frame; [`NONE`] before 3.11.
    pub frame_owner: u32,
    /// From which owner on a frame is a shim without code; 255 where there are none.
    pub shim_owner: u32,
    /// Where the read of a code object begins, within it.
    pub code_from: u32,
    /// Bytes of it that are read, at most [`CODE_READ_BYTES`].
    pub code_bytes: u32,
    /// `co_firstlineno`, from `code_from` on.
    pub code_first_line: u32,
    /// `co_qualname` (3.11 on) or `co_name`, from `code_from` on.
    pub code_name: u32,
    /// `co_filename`, from `code_from` on.
    pub code_file: u32,
    /// `co_linetable` or `co_lnotab`, from `code_from` on.
    pub code_lines: u32,
    /// `PyASCIIObject.length`.
    pub text_length: u32,
    /// `PyASCIIObject.hash`.
    pub text_hash: u32,
    /// `PyASCIIObject.state`.
    pub text_state: u32,
    /// Where the characters of an ASCII string begin.
    pub text_ascii: u32,
    /// Where those of another compact string begin.
    pub text_compact: u32,
    /// `PyVarObject.ob_size`.
    pub bytes_size: u32,
    /// `PyBytesObject.ob_sval`.
    pub bytes_data: u32,
}

const _: () = assert!(size_of::<PythonConfig>() == 8 + 4 * 30);
