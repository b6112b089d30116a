//! One traced function call, decoded: what the account takes in.
//!
//! A [`Call`] says what the program asked the driver for and what the driver answered, in the
//! words of the account ([`Action`]); which register held what is the probe table's business and
//! is settled before a `Call` exists.

mod action;

use serde::{Deserialize, Serialize};

pub use action::{Action, ArrayShape, Location, Space};

/// One life of a pid: a hash of (boot id, tgid, start time), see [`ProcId::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcId(pub i64);

impl ProcId {
    /// Hashes one life of a pid. `start_ticks` is field 22 of `/proc/PID/stat` (clock ticks since
    /// boot), which survives exec, so a process keeps its id when it executes another program.
    pub fn new(boot_id: &str, tgid: u32, start_ticks: u64) -> Self {
        let mut bytes = Vec::with_capacity(boot_id.len() + 12);
        bytes.extend_from_slice(boot_id.trim().as_bytes());
        bytes.extend_from_slice(&tgid.to_le_bytes());
        bytes.extend_from_slice(&start_ticks.to_le_bytes());
        Self(xxhash_rust::xxh3::xxh3_64(&bytes) as i64)
    }
}

/// What kind of memory an allocation is. Bytes are summed within one level only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Takes device memory: `cuMemAlloc`, `cuMemCreate`, arrays.
    Device,
    /// A block inside a stream-ordered pool; the pool owns the device memory.
    Pool,
    /// A block of `PyTorch`'s cache, rounded as `PyTorch` rounds it.
    Tensor,
    /// Managed memory, whose residency is unknown.
    Managed,
    /// Pinned or registered host memory.
    Host,
    /// Reservations and maps of address space: no memory.
    Virtual,
    /// Memory that another process allocated.
    Imported,
}

impl Level {
    /// Every level, in the order of reports.
    pub const ALL: [Self; 7] = [
        Self::Device,
        Self::Pool,
        Self::Tensor,
        Self::Managed,
        Self::Host,
        Self::Virtual,
        Self::Imported,
    ];

    /// The word in the log's `level` column.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pool => "pool",
            Self::Tensor => "tensor",
            Self::Managed => "managed",
            Self::Host => "host",
            Self::Virtual => "virtual",
            Self::Imported => "imported",
        }
    }

    /// The level that the log's word names, if it names one.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.as_str() == word)
    }
}

/// One decoded call of one traced function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The process that called.
    pub proc_id: ProcId,
    /// Its process id on the host (the kernel's tgid).
    pub tgid: u32,
    /// The calling thread.
    pub tid: u32,
    /// The function's exported name, `cuMemAlloc_v2` for example.
    pub api: &'static str,
    /// When the call entered, nanoseconds since the epoch.
    pub enter_ns: i64,
    /// When it returned, nanoseconds since the epoch.
    pub exit_ns: i64,
    /// The runtime (libcudart) function that the call lies in, where labels are recorded.
    pub runtime_api: Option<&'static str>,
    /// `CUresult`: 0 is success.
    pub result: i32,
    /// Content hash of the stack at entry; 0 = none taken.
    pub stack_id: i64,
    /// What was asked for, with the driver's answer filled in. Where `result` is not 0, values
    /// that only a successful call writes are 0 and must not be used.
    pub action: Action,
}

/// What the account takes in, in the order in which it arrived from the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A call that returned.
    Call(Call),
    /// The process ended: whatever it held is free.
    Exit {
        /// The process.
        proc_id: ProcId,
        /// Host pid.
        tgid: u32,
        /// When, nanoseconds since the epoch.
        ts_ns: i64,
        /// Exit code as `wait` shows it: status in bits 8.., signal in bits 0..7.
        exit_code: i32,
    },
    /// The process executed another program: its CUDA state is gone.
    Exec {
        /// The process.
        proc_id: ProcId,
        /// Host pid.
        tgid: u32,
        /// When, nanoseconds since the epoch.
        ts_ns: i64,
    },
}
