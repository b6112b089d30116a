//! One traced function call, decoded: what the account takes in.
//!
//! A [`Call`] says what the program asked the driver for and what the driver answered, in the
//! words of the account ([`Action`]); which register held what is the probe table's business and
//! is settled before a `Call` exists.

use serde::{Deserialize, Serialize};

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
    /// `CUresult`: 0 is success.
    pub result: i32,
    /// Content hash of the stack at entry; 0 = none taken.
    pub stack_id: i64,
    /// What was asked for, with the driver's answer filled in. Where `result` is not 0, values
    /// that only a successful call writes are 0 and must not be used.
    pub action: Action,
}

/// What a call asked for. Sizes are bytes; addresses are what the driver handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A new block at `addr` in the calling thread's current context.
    Alloc {
        /// The kind of memory.
        level: Level,
        /// Device (or host) address that the driver returned.
        addr: u64,
        /// Bytes asked for (pitch x height for a pitched block); `None` where a successful
        /// call's size could not be read.
        size_bytes: Option<u64>,
    },
    /// `PyTorch`'s allocator handed a block out.
    TensorAlloc {
        /// Its address.
        addr: u64,
        /// Bytes, as `PyTorch` rounds them.
        size_bytes: u64,
        /// The device's number in the process.
        ordinal: i32,
    },
    /// `PyTorch`'s allocator took a block back.
    TensorFree {
        /// Its address.
        addr: u64,
    },
    /// Frees the block at `addr`, whatever its level (`cuMemFree` takes device, managed and pool
    /// blocks alike). Address 0 is an initialisation idiom, not an event about memory.
    Free {
        /// Address to free.
        addr: u64,
        /// The address space: host frees never match device blocks.
        space: Space,
    },
    /// `cuMemCreate`: physical memory behind a handle.
    VmmCreate {
        /// `CUmemGenericAllocationHandle`.
        handle: u64,
        /// Bytes.
        size_bytes: u64,
        /// Where the memory lies, from `CUmemAllocationProp.location`.
        location: Location,
    },
    /// `cuMemRelease`: drops one reference of a handle.
    VmmRelease {
        /// The handle.
        handle: u64,
    },
    /// `cuMemMap`: maps (part of) a handle; a map holds a reference.
    VmmMap {
        /// First mapped address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
        /// The handle.
        handle: u64,
    },
    /// `cuMemUnmap`: drops every map inside the range.
    VmmUnmap {
        /// First address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemRetainAllocationHandle`: one more reference of the handle that is mapped at `addr`.
    VmmRetain {
        /// The handle that the driver returned (equal to the one mapped there).
        handle: u64,
        /// An address inside a map.
        addr: u64,
    },
    /// `cuMemExportToShareableHandle`: the exported object keeps the pages alive.
    VmmExport {
        /// The handle.
        handle: u64,
    },
    /// `cuMemImportFromShareableHandle`: another process's memory behind a new handle.
    VmmImport {
        /// The new handle.
        handle: u64,
    },
    /// `cuMemAddressReserve`: address space only.
    Reserve {
        /// First address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemAddressFree`.
    Unreserve {
        /// First address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemHostRegister`: pins memory of the program's own.
    HostRegister {
        /// Host address.
        addr: u64,
        /// Bytes.
        size_bytes: u64,
    },
    /// `cuMemHostUnregister`.
    HostUnregister {
        /// Host address.
        addr: u64,
    },
    /// `cuCtxCreate*`: a new context, current on the calling thread.
    CtxCreate {
        /// `CUcontext`.
        ctx: u64,
        /// CUDA ordinal of its device.
        ordinal: i32,
    },
    /// `cuCtxDestroy*`: frees all that was made in the context.
    CtxDestroy {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuDevicePrimaryCtxRetain`: the first retain creates the device's primary context.
    PrimaryRetain {
        /// `CUcontext`.
        ctx: u64,
        /// CUDA ordinal of its device.
        ordinal: i32,
    },
    /// `cuDevicePrimaryCtxRelease*`: the last release destroys the primary context.
    PrimaryRelease {
        /// CUDA ordinal.
        ordinal: i32,
    },
    /// `cuDevicePrimaryCtxReset*`: destroys the primary context whoever retains it.
    PrimaryReset {
        /// CUDA ordinal.
        ordinal: i32,
    },
    /// `cuCtxSetCurrent`: replaces the top of the thread's context stack (0 = none).
    CtxSet {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuCtxPushCurrent*`.
    CtxPush {
        /// `CUcontext`.
        ctx: u64,
    },
    /// `cuCtxPopCurrent*`.
    CtxPop,
    /// `cuInit`: the process becomes a CUDA process. Seen from the first one, nothing was missed.
    Init,
    /// `cuDeviceGetUuid*`: the process's own ordinal -> UUID map.
    DeviceUuid {
        /// CUDA ordinal.
        ordinal: i32,
        /// The 16 bytes of `CUuuid`.
        uuid: [u8; 16],
    },
}

/// Which address space a free works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Device addresses: device, managed and pool blocks.
    Device,
    /// Pinned host memory.
    Host,
}

/// `CUmemLocation` of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Device memory of this CUDA ordinal.
    Device(i32),
    /// Host memory (`CU_MEM_LOCATION_TYPE_HOST`, `HOST_NUMA`, `HOST_NUMA_CURRENT`).
    Host,
    /// The properties could not be read.
    Unknown,
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
