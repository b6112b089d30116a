//! What this host lacks for vramscope, and what to do about it.
//!
//! [`checks`] gathers facts once ([`System`]), every check after that is a pure function of them.
//! A check that cannot be made is a warning that says so, not a pass.

mod driver;
mod elf;
mod kernel;
mod libcuda;
mod privileges;
mod render;
mod surroundings;

use std::path::PathBuf;

use aya::{
    maps::MapType,
    programs::ProgramType,
    sys::{is_map_supported, is_program_supported},
};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

pub use self::{elf::exported, libcuda::find as find_libcuda, render::render};
use crate::{
    host::Host,
    kernel::{
        btf, has_cookies, has_multi_links,
        returns::Returns,
        sign::{self, Who},
    },
    nvml::{Driver, Gpu, GpuReader as _, NvmlReader},
    stop_file,
};

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Nothing is missing.
    Ok,
    /// vramscope runs, and tells less or must be used with care.
    Warn,
    /// vramscope cannot trace GPU memory here.
    Fail,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it stands.
    pub status: Status,
    /// What was found.
    pub value: String,
    /// What to do, where something is to be done.
    pub remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, value: value.into(), remedy: None }
    }

    fn warn(name: &'static str, value: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (value, remedy) = (value.into(), Some(remedy.into()));
        Self { name, status: Status::Warn, value, remedy }
    }

    fn fail(name: &'static str, value: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Fail, ..Self::warn(name, value, remedy) }
    }
}

/// Whether any check failed: then the exit code is 3, a precondition is missing.
pub fn failed(checks: &[Check]) -> bool {
    checks.iter().any(|check| check.status == Status::Fail)
}

/// What the kernel's BPF can do, `None` where it would not tell (asking takes privileges).
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// Programs of the kind that uprobes run.
    pub probes: Option<bool>,
    /// The ring buffer, kernel 5.8.
    pub ring_buffer: Option<bool>,
    /// Cookies of probes, kernel 5.15.
    pub cookies: Option<bool>,
    /// Many probes in one link, with a filter that works, kernel 6.10.
    pub multi_links: Option<bool>,
}

impl Features {
    /// Asks the kernel by loading tiny programs and maps.
    pub fn probe() -> Self {
        Self {
            probes: is_program_supported(ProgramType::KProbe).ok(),
            ring_buffer: is_map_supported(MapType::RingBuf).ok(),
            cookies: has_cookies(),
            multi_links: has_multi_links().ok(),
        }
    }
}

/// Facts that checks are made of.
#[derive(Debug)]
pub struct System {
    /// `/proc`, `/sys`, `/usr` and so on.
    pub host: Host,
    /// Processor, as Rust names it: `x86_64`.
    pub arch: &'static str,
    /// BPF of the kernel.
    pub features: Features,
    /// What return probes do to filtered processes.
    pub returns: Returns,
    /// Agents that record on this host.
    pub agents: Vec<Who>,
    /// Recording is switched off: why.
    pub stopped: Option<String>,
    /// Whether the kernel describes its types, with all that vramscope reads of them, or why not.
    pub types: Result<(), String>,
    /// Driver and devices, or why NVML is not there.
    pub nvml: Result<(Driver, Vec<Gpu>), String>,
    /// Hard limit of open files; `None` is no limit.
    pub open_files: Option<u64>,
    /// Hard limit of locked memory, bytes; `None` is no limit.
    pub locked_memory: Option<u64>,
    /// Where a log would be written.
    pub directory: PathBuf,
}

impl System {
    /// Gathers the facts of this host.
    pub fn live() -> Self {
        let nvml = NvmlReader::open()
            .map(|reader| (reader.driver().clone(), reader.devices().to_vec()))
            .map_err(|absent| absent.to_string());
        let host = Host::live();
        Self {
            agents: sign::running(&host),
            stopped: stop_file::exists().then(stop_file::refusal),
            host,
            arch: std::env::consts::ARCH,
            features: Features::probe(),
            returns: Returns::of_this_kernel(),
            types: types(),
            nvml,
            open_files: getrlimit(Resource::Nofile).maximum,
            locked_memory: getrlimit(Resource::Memlock).maximum,
            directory: std::env::current_dir().unwrap_or_else(|_| PathBuf::from(".")),
        }
    }
}

/// Looks for every member of the kernel's structures that vramscope reads.
fn types() -> Result<(), String> {
    let found = btf::Btf::of_kernel().and_then(|btf| btf::offsets(&btf));
    found.map(drop).map_err(|error| error.to_string())
}

/// Checks this host. `symbols` are the functions of libcuda that the probe table names.
pub fn checks(symbols: &[&str]) -> Vec<Check> {
    checks_of(&System::live(), symbols)
}

/// Checks a system, most basic first.
pub fn checks_of(system: &System, symbols: &[&str]) -> Vec<Check> {
    let mapped = driver::Mapped::scan(&system.host);
    let mut all = vec![
        kernel::version(system),
        kernel::uprobes(system),
        kernel::btf(system),
        kernel::ring_buffer(system),
        kernel::cookies(system),
        kernel::multi_links(system),
        kernel::lockdown(system),
        kernel::seccomp(system),
        privileges::capabilities(system),
        kernel::paranoid(system),
        privileges::open_files(system),
        privileges::locked_memory(system),
        privileges::pid_namespace(system),
        driver::nvml(system),
    ];
    all.extend(driver::libraries(system, &mapped, symbols));
    all.push(surroundings::stop_file(system));
    all.push(surroundings::agents(system));
    all.push(surroundings::ucx(system));
    all.push(surroundings::criu(system));
    all.push(surroundings::disk(system));
    all
}

#[cfg(test)]
mod tests;
