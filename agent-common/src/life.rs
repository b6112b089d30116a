//! The life of processes, as the kernel half saw it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First traced call of a process.
pub const KIND_SEEN: u8 = 16;
/// A known process made a child process.
pub const KIND_FORK: u8 = 17;
/// A known process executed a program.
pub const KIND_EXEC: u8 = 18;
/// The last thread of a known process ended.
pub const KIND_EXIT: u8 = 19;

/// Bit of a followed process's flags: its children are followed too.
pub const FOLLOW_CHILDREN: u32 = 1;
/// Bit of a process's flags: of `PyTorch`'s blocks only the totals are kept. Its children begin
/// without it.
pub const TOTALS_ONLY: u32 = 2;

/// One event of a process's life.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawLife {
    /// `KIND_*`.
    pub kind: u8,
    /// Padding.
    pub pad: [u8; 3],
    /// `wait` status of an exit.
    pub exit_code: i32,
    /// The process (the child of a fork).
    pub tgid: u32,
    /// Parent of a fork; 0 otherwise.
    pub parent_tgid: u32,
    /// When, nanoseconds of `CLOCK_BOOTTIME`.
    pub ts_ns: u64,
    /// Start of the process, nanoseconds of `CLOCK_BOOTTIME`; 0 where not read.
    pub start_ns: u64,
    /// Real user id; of the parent at a fork.
    pub uid: u32,
    /// Of an exec: the thread that called it, which takes the process's id over; 0 otherwise.
    pub exec_tid: u32,
    /// Name of the thread that the event happened on, NUL-padded; of the parent at a fork.
    pub comm: [u8; 16],
}

const _: () = assert!(size_of::<RawLife>() == 56);
