//! Reads what the programs print about themselves (`tests/programs/truth.h` says how).

use std::str::FromStr;

/// A block that is live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    /// The word of the log's `level` column.
    pub level: String,
    /// Its address; of VMM memory, its handle.
    pub addr: u64,
    /// Bytes asked for.
    pub size_bytes: u64,
    /// The process that holds it.
    pub pid: u32,
    /// The thread that allocated it.
    pub tid: u32,
}

/// How many calls a program made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Allocations that succeeded.
    pub allocs: u64,
    /// Frees that succeeded.
    pub frees: u64,
    /// Calls that failed.
    pub failed: u64,
}

/// The value of `name=value` in the line.
pub fn field<T: FromStr>(line: &str, name: &str) -> Option<T> {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    value.parse().ok()
}

/// The first line that begins with the word.
pub fn line<'a>(lines: &'a [String], word: &str) -> Option<&'a str> {
    lines.iter().map(String::as_str).find(|line| line.split(' ').next() == Some(word))
}

/// The blocks of all `LIVE` lines.
pub fn live(lines: &[String]) -> Vec<Live> {
    lines.iter().filter_map(|line| parse_live(line)).collect()
}

fn parse_live(line: &str) -> Option<Live> {
    let mut words = line.strip_prefix("LIVE ")?.split(' ');
    let level = words.next()?.to_owned();
    let addr = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    let size_bytes = words.next()?.parse().ok()?;
    Some(Live { level, addr, size_bytes, pid: field(line, "pid")?, tid: field(line, "tid")? })
}

/// The last `MADE` line.
pub fn made(lines: &[String]) -> Option<Made> {
    let line = lines.iter().rev().find(|line| line.starts_with("MADE "))?;
    Some(Made {
        allocs: field(line, "alloc")?,
        frees: field(line, "free")?,
        failed: field(line, "failed")?,
    })
}

/// What NVML says about the GPUs at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Smi {
    /// The GPUs in NVML's order.
    pub gpus: Vec<Gpu>,
}

/// One GPU in NVML's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `GPU-...`.
    pub uuid: String,
    /// All of its memory, bytes.
    pub total_bytes: u64,
    /// What the driver keeps for itself, bytes.
    pub reserved_bytes: u64,
    /// What all processes use, bytes.
    pub used_bytes: u64,
    /// (pid, bytes) of each process; `u64::MAX` where NVML says that it is not available.
    pub processes: Vec<(u32, u64)>,
    /// Likewise of the processes that come through MPS.
    pub mps_processes: Vec<(u32, u64)>,
    /// What it is divided into.
    pub instances: Vec<Instance>,
}

/// One MIG instance in NVML's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// `MIG-...`.
    pub uuid: String,
    /// All of its memory, bytes.
    pub total_bytes: u64,
    /// What processes use of it, bytes.
    pub used_bytes: u64,
}

impl Smi {
    pub(super) fn parse(text: &str) -> Self {
        let mut smi = Self::default();
        for line in text.lines() {
            if let (true, Some(gpu)) = (line.starts_with("GPU "), parse_gpu(line)) {
                smi.gpus.push(gpu);
            } else if let (Some(gpu), Some(pid), Some(used)) =
                (smi.gpus.last_mut(), field(line, "pid"), field(line, "used"))
            {
                let of_mps = line.starts_with("MPS ");
                let list = if of_mps { &mut gpu.mps_processes } else { &mut gpu.processes };
                list.push((pid, used));
            } else if let (Some(gpu), Some(instance)) = (smi.gpus.last_mut(), parse_instance(line))
            {
                gpu.instances.push(instance);
            }
        }
        smi
    }

    /// What NVML charges the process with on this GPU; `None` if it does not list it there.
    pub fn process_bytes(&self, gpu: usize, pid: u32) -> Option<u64> {
        let processes = &self.gpus.get(gpu)?.processes;
        processes.iter().find(|(listed, _)| *listed == pid).map(|(_, bytes)| *bytes)
    }
}

fn parse_gpu(line: &str) -> Option<Gpu> {
    Some(Gpu {
        uuid: field(line, "uuid")?,
        total_bytes: field(line, "total")?,
        reserved_bytes: field(line, "reserved")?,
        used_bytes: field(line, "used")?,
        processes: Vec::new(),
        mps_processes: Vec::new(),
        instances: Vec::new(),
    })
}

fn parse_instance(line: &str) -> Option<Instance> {
    line.strip_prefix("INSTANCE ")?;
    Some(Instance {
        uuid: field(line, "uuid")?,
        total_bytes: field(line, "total")?,
        used_bytes: field(line, "used")?,
    })
}
