//! What a report says, as data: the text and the JSON are both made from it.
//!
//! Sizes are bytes, times nanoseconds since the epoch; what is not known is `null`, never 0.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use super::{findings::Finding, growth::MATERIAL_BYTES, work::Work};
use crate::call::Level;

/// Version of the JSON. Fields may be added without changing it.
pub const SCHEMA: u32 = 1;

/// A report. `docs/report.schema.json` describes its JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of vramscope that made the report.
    pub tool_version: String,
    /// The log's directories.
    pub logs: Vec<String>,
    /// Hosts that recorded.
    pub hosts: Vec<String>,
    /// First moment that the log tells of.
    pub start_ns: Option<i64>,
    /// Last one.
    pub end_ns: Option<i64>,
    /// Rows of `events`.
    pub events: u64,
    /// Recordings in the log.
    pub runs: Vec<Run>,
    /// What is worth attention, most important first; never empty.
    pub findings: Vec<Finding>,
    /// Devices, by host and NVML's number.
    pub devices: Vec<Device>,
    /// Processes that were traced, by the device memory they took.
    pub processes: Vec<Process>,
    /// How many stacks were taken, and how many allocations have none.
    pub stacks: StackShare,
    /// What was not seen.
    pub losses: Vec<Loss>,
    /// What the agent warned of while it recorded.
    pub warnings: Vec<Warning>,
    /// Files that were left out or read in part.
    pub problems: Vec<String>,
}

/// How much of what was allocated has a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StackShare {
    /// Distinct stacks.
    pub taken: u64,
    /// Of these, those that reach their thread's start.
    pub complete: u64,
    /// Why the others do not, and how many.
    pub incomplete: BTreeMap<String, u64>,
    /// Allocations with a stack.
    pub allocs_with: u64,
    /// Of these, those whose stack is complete.
    pub allocs_complete: u64,
    /// Allocations without one; tensors of processes without any stack are left out.
    pub allocs_without: u64,
    /// Stacks that allocations name but the log does not have.
    pub missing: u64,
}

/// One recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// Its id.
    pub run_id: String,
    /// Where it ran.
    pub host: String,
    /// Version of vramscope that recorded.
    pub tool_version: String,
    /// Start.
    pub start_ns: Option<i64>,
    /// End; `null` where it goes on or was killed.
    pub end_ns: Option<i64>,
    /// Nothing of it is left in the journal, which only vramscope reads.
    pub sealed: bool,
}

/// A GPU or MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Device {
    /// UUID.
    pub gpu_uuid: String,
    /// NVML's number.
    pub nvml_index: Option<i32>,
    /// Host that it is in.
    pub host: Option<String>,
    /// Model name.
    pub model: Option<String>,
    /// Driver version.
    pub driver_version: Option<String>,
    /// Memory in all.
    pub total_bytes: Option<i64>,
    /// Memory in use, by NVML's last reading.
    pub used: Option<Reading>,
    /// The highest reading.
    pub used_peak: Option<Reading>,
    /// Memory that the driver keeps for itself.
    pub reserved_bytes: Option<i64>,
    /// The sum over its processes, and the rest, at the last steady reading.
    pub breakdown: Option<Breakdown>,
}

/// A figure and when it held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// The figure.
    pub bytes: i64,
    /// When.
    pub ts_ns: i64,
}

/// A process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Process {
    /// Key into the log's tables; a string, since it does not fit into JavaScript's numbers.
    #[serde(serialize_with = "as_text")]
    pub proc_id: i64,
    /// Process id on the host.
    pub pid: i32,
    /// Process id inside its innermost pid namespace.
    pub ns_pid: Option<i32>,
    /// Short name: its script, else its program.
    pub name: String,
    /// Command, as far as it was recorded.
    pub command: Option<String>,
    /// Real user id.
    pub uid: Option<i32>,
    /// Name of the host.
    pub host: Option<String>,
    /// Container id.
    pub container_id: Option<String>,
    /// Kubernetes pod UID.
    pub pod_uid: Option<String>,
    /// Rank in its job.
    pub rank: Option<i32>,
    /// Ranks of the job.
    pub world_size: Option<i32>,
    /// What names the job.
    pub job: Option<String>,
    /// Start.
    pub start_ns: Option<i64>,
    /// End, where it was seen.
    pub end_ns: Option<i64>,
    /// Exit status 0..255, or 128 + signal.
    pub exit_code: Option<i32>,
    /// First and last moment that the log tells of it.
    pub seen_ns: Option<(i64, i64)>,
    /// It ran before the recording began: what it held then is one sum.
    pub late: bool,
    /// It was seen from before its first CUDA call.
    pub from_start: bool,
    /// How much was recorded of tensors.
    pub detail: String,
    /// What it did on each device.
    pub shares: Vec<Share>,
    /// Calls that the driver refused.
    pub failures: Vec<Failure>,
}

/// One process on one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// UUID of the device; `null` where it is not known.
    pub gpu_uuid: Option<String>,
    /// NVML's number of it.
    pub nvml_index: Option<i32>,
    /// The process's number for it.
    pub cuda_ordinal: Option<i32>,
    /// What NVML charged to the process at its last reading.
    pub nvml_used: Option<Reading>,
    /// The highest reading.
    pub nvml_peak: Option<Reading>,
    /// NVML listed the process without saying how much it uses.
    pub nvml_unavailable: bool,
    /// Where the memory was at the last reading that can be broken down.
    pub breakdown: Option<Breakdown>,
    /// `PyTorch`'s own totals.
    pub torch: Option<Torch>,
    /// The account at the end, by level; levels that were never used are left out.
    pub levels: Vec<LevelUse>,
    /// How what it held went; what was seen too shortly to tell is left out.
    pub trends: Vec<Trend>,
    /// What the program itself never freed, most bytes first, at most [`GROUPS`].
    pub never_freed: Vec<Group>,
    /// All of that, by level.
    pub never_freed_totals: Vec<LevelTotal>,
    /// What `PyTorch` did here, for findings.
    #[serde(skip)]
    pub(super) work: Option<Work>,
}

/// Groups that a share lists.
pub const GROUPS: usize = 20;

/// What NVML shows, in parts that add up to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Breakdown {
    /// When.
    pub ts_ns: i64,
    /// The sum.
    pub nvml_used_bytes: i64,
    /// Its parts, in the order in which they are read.
    pub parts: Vec<Part>,
}

/// A part of a breakdown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What it is, as the log's `breakdown` table says it.
    pub category: String,
    /// Whose it is, where the category is `library`; `null` there: not known.
    pub library: Option<String>,
    /// Bytes; what is unexplained may be negative.
    pub bytes: i64,
    /// It is a bound or an estimate.
    pub estimated: bool,
    /// Live blocks that keep it from being given back, where it is `reusable`.
    pub pinned_by_blocks: Option<i64>,
    /// Where most of what they keep was allocated.
    pub pinned_by_site: Option<String>,
}

/// `PyTorch`'s allocator, as it reported itself last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Torch {
    /// When.
    pub ts_ns: i64,
    /// `torch.cuda.memory_allocated()`.
    pub allocated_bytes: Option<i64>,
    /// `torch.cuda.memory_reserved()`.
    pub reserved_bytes: Option<i64>,
    /// Highest allocated value since the agent saw the process.
    pub peak_allocated_bytes: Option<i64>,
    /// When that was, to a quarter of a second.
    pub peak_allocated_ns: Option<i64>,
    /// Highest reserved value.
    pub peak_reserved_bytes: Option<i64>,
}

/// The account of one level: at the end of the log, or just before the end of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LevelUse {
    /// The level.
    pub level: Level,
    /// Bytes alive.
    pub live_bytes: i64,
    /// Allocations alive.
    pub live_count: u64,
    /// Highest live bytes.
    pub peak_bytes: i64,
    /// When that was reached first.
    pub peak_ns: i64,
    /// Allocations made.
    pub allocs: u64,
    /// Frees of them.
    pub frees: u64,
    /// Frees of what was allocated before the recording, or was not seen.
    pub unknown_frees: u64,
}

/// What a trend is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Of {
    /// Bytes of `PyTorch`'s live tensors.
    Tensors,
    /// What `PyTorch`'s allocator holds.
    TorchReserved,
    /// Device memory.
    Device,
    /// Blocks of stream-ordered pools.
    Pool,
    /// Managed memory.
    Managed,
    /// Pinned host memory.
    Host,
}

/// How live bytes went, warm-up left out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Trend {
    /// Of what.
    pub of: Of,
    /// Robust rate; negative for shrinking.
    pub bytes_per_second: f64,
    /// Begin of the stretch.
    pub since_ns: i64,
    /// Its end.
    pub until_ns: i64,
    /// What was held then and never came back.
    pub from_bytes: i64,
    /// The same at the end.
    pub to_bytes: i64,
    /// It grew materially, steadily and until the end.
    pub grows: bool,
}

/// Allocations of one size by one function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Function that allocated.
    pub api: String,
    /// Level.
    pub level: Level,
    /// Bytes of each; `null` where not known.
    pub size_bytes: Option<i64>,
    /// How many.
    pub count: u64,
    /// Bytes of all.
    pub bytes: i64,
    /// When the first was allocated.
    pub first_ns: i64,
    /// When the last was.
    pub last_ns: i64,
}

/// Bytes and blocks of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LevelTotal {
    /// The level.
    pub level: Level,
    /// Bytes.
    pub bytes: i64,
    /// Blocks.
    pub count: u64,
}

/// Failed calls of one function with one result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Function.
    pub api: String,
    /// `CUresult`.
    pub result: i32,
    /// Its name in `cuda.h`, for the common ones.
    pub result_name: Option<&'static str>,
    /// Calls.
    pub count: u64,
    /// When the last one returned.
    pub last_ns: i64,
}

/// Something that was not seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// Reason, as in the log's `losses`.
    pub reason: String,
    /// In words, for reasons that this version knows.
    pub meaning: Option<&'static str>,
    /// Process; `null` where it cannot be told.
    pub pid: Option<i32>,
    /// The process's key.
    #[serde(serialize_with = "maybe_as_text")]
    pub proc_id: Option<i64>,
    /// How many.
    pub count: i64,
    /// Bytes that they were about, where known.
    pub bytes: Option<i64>,
    /// Begin of the window in which they were lost.
    pub since_ns: i64,
    /// Its end.
    pub until_ns: i64,
    /// What is held and what grew may be wrong by this.
    pub affects_account: bool,
}

/// What the agent said while it recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// When.
    pub ts_ns: i64,
    /// Process; `null` for the whole run.
    pub pid: Option<i32>,
    /// In words.
    pub text: String,
}

impl Trend {
    /// It rose by more than a trifle, but not as what leaks does.
    pub(super) fn rises_unsteadily(&self) -> bool {
        let rose = self.to_bytes.saturating_sub(self.from_bytes);
        !self.grows && rose > MATERIAL_BYTES
    }
}

impl Share {
    /// The account of one level, where it was used.
    pub fn level(&self, level: Level) -> Option<&LevelUse> {
        self.levels.iter().find(|usage| usage.level == level)
    }

    /// How one thing went, where it was seen long enough.
    pub fn trend(&self, of: Of) -> Option<&Trend> {
        self.trends.iter().find(|trend| trend.of == of)
    }

    /// The most device memory that the process is known to have had here.
    pub fn weight(&self) -> i64 {
        let peak = |level| self.level(level).map_or(0, |usage| usage.peak_bytes);
        let nvml = self.nvml_peak.map_or(0, |reading| reading.bytes);
        let torch = self.torch.and_then(|torch| torch.reserved_bytes).unwrap_or(0);
        nvml.max(peak(Level::Device).saturating_add(peak(Level::Pool))).max(torch)
    }

    /// Whether the process used memory of this device at all, as far as is known.
    pub fn has_device_memory(&self) -> bool {
        self.weight() > 0 || self.level(Level::Managed).is_some() || self.nvml_unavailable
    }
}

impl Process {
    /// The most device memory that it is known to have had, on any device.
    pub fn weight(&self) -> i64 {
        self.shares.iter().map(Share::weight).max().unwrap_or(0)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for this signature")]
fn as_text<S: Serializer>(id: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(id)
}

#[expect(clippy::ref_option, reason = "serde asks for this signature")]
fn maybe_as_text<S: Serializer>(id: &Option<i64>, serializer: S) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => serializer.collect_str(id),
        None => serializer.serialize_none(),
    }
}
