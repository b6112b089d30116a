//! NVIDIA's driver: NVML, and the libraries that probes go into.

use std::{fs::File, path::Path};

use super::{Check, System, elf, libcuda};
use crate::{
    host::{Host, LibKind, Library, text},
    nvml::{Driver, Gpu},
};

/// Libraries of interest in running processes, each once, with who has it mapped.
#[derive(Debug, Default)]
pub(super) struct Mapped(Vec<(Library, Vec<u32>)>);

impl Mapped {
    /// Looks through the maps of every process that can be read.
    pub(super) fn scan(host: &Host) -> Self {
        let mut found: Vec<(Library, Vec<u32>)> = Vec::new();
        for pid in host.pids() {
            for library in host.libraries(pid).unwrap_or_default() {
                let same =
                    |known: &&mut (Library, Vec<u32>)| known.0.mapping.same_file(&library.mapping);
                match found.iter_mut().find(same) {
                    Some((_, pids)) => pids.push(pid),
                    None => found.push((library, vec![pid])),
                }
            }
        }
        Self(found)
    }

    /// Those of one kind.
    pub(super) fn of(&self, kind: LibKind) -> impl Iterator<Item = &(Library, Vec<u32>)> {
        self.0.iter().filter(move |(library, _)| library.kind == kind)
    }
}

/// `pid 42`, or `pid 42 and 3 more`.
pub(super) fn some_pids(pids: &[u32]) -> String {
    match pids {
        [] => "no process".to_owned(),
        [only] => format!("pid {only}"),
        [first, rest @ ..] => format!("pid {first} and {} more", rest.len()),
    }
}

pub(super) fn nvml(system: &System) -> Check {
    let name = "NVIDIA driver";
    match &system.nvml {
        Ok((driver, gpus)) if gpus.is_empty() => {
            let remedy = "see whether nvidia-smi lists a GPU; in a container start it with all GPUs \
                          (NVIDIA_VISIBLE_DEVICES=all)";
            Check::fail(name, format!("{}, no GPU", versions(driver)), remedy)
        }
        Ok((driver, gpus)) => Check::ok(name, format!("{}, {}", versions(driver), models(gpus))),
        Err(why) if has_driver(system) => {
            let remedy = "probes work, totals of devices are missing; in a container use the NVIDIA \
                          runtime with NVIDIA_DRIVER_CAPABILITIES=utility";
            Check::warn(name, format!("loaded, but no NVML: {why}"), remedy)
        }
        Err(why) => {
            let remedy = "vramscope traces the CUDA driver: use a host with an NVIDIA GPU and its \
                          driver (without one, vramscope demo and report still work)";
            Check::fail(name, format!("none: {why}"), remedy)
        }
    }
}

/// The kernel module, or WSL's window to the driver of Windows.
fn has_driver(system: &System) -> bool {
    ["proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg"]
        .iter()
        .any(|path| system.host.path(path).exists())
}

fn versions(driver: &Driver) -> String {
    let version = driver.version.as_deref().unwrap_or("of unknown version");
    let cuda = driver
        .cuda_version
        .map(|number| format!(", CUDA {}.{}", number / 1000, number % 1000 / 10));
    format!("{version}{}", cuda.unwrap_or_default())
}

/// `8 x NVIDIA H200`, models in the order in which they come.
fn models(gpus: &[Gpu]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for gpu in gpus {
        let model = match (&gpu.mig_parent_uuid, &gpu.model) {
            (_, Some(model)) => model.as_str(),
            (Some(_), None) => "MIG instance",
            (None, None) => "GPU of unknown model",
        };
        match counts.iter_mut().find(|(known, _)| *known == model) {
            Some((_, count)) => *count += 1,
            None => counts.push((model, 1)),
        }
    }
    let each = counts.iter().map(|(model, count)| format!("{count} x {model}"));
    each.collect::<Vec<_>>().join(", ")
}

/// One check for each libcuda, installed or mapped.
pub(super) fn libraries(system: &System, mapped: &Mapped, symbols: &[&str]) -> Vec<Check> {
    let installed = libcuda::find(&system.host);
    let mut checks: Vec<Check> = installed
        .iter()
        .map(|path| {
            let shown = shown_path(system, path);
            probes(&shown, File::open(path).ok(), symbols)
        })
        .collect();
    let is_installed = |library: &Library| installed.iter().any(|path| is_file_of(path, library));
    for (library, pids) in mapped.of(LibKind::Cuda).filter(|(library, _)| !is_installed(library)) {
        let shown = format!("{} of {}", library.mapping.path.display(), some_pids(pids));
        let shown = text::clean(shown.as_bytes(), 512);
        let file = pids.first().and_then(|pid| system.host.open_mapped(*pid, &library.mapping));
        checks.push(probes(&shown, file, symbols));
    }
    if checks.is_empty() {
        let value = "none installed here, none mapped by a process";
        let remedy = "nothing to probe yet: vramscope attaches when a process maps one";
        checks.push(Check::warn("libcuda", value, remedy));
    }
    checks
}

/// A path as it is below the root that was looked at.
fn shown_path(system: &System, path: &Path) -> String {
    let below = path.strip_prefix(system.host.path("")).unwrap_or(path);
    text::clean(Path::new("/").join(below).as_os_str().as_encoded_bytes(), 512)
}

fn is_file_of(path: &Path, library: &Library) -> bool {
    rustix::fs::stat(path).is_ok_and(|stat| {
        let dev = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        (library.mapping.dev, library.mapping.inode) == (dev, stat.st_ino)
    })
}

fn probes(shown: &str, file: Option<File>, symbols: &[&str]) -> Check {
    let name = "libcuda";
    let Some(file) = file else {
        return Check::warn(
            name,
            format!("{shown}: cannot be opened"),
            "run sudo vramscope doctor",
        );
    };
    let Some((found, missing)) = elf::exported(file, symbols) else {
        let remedy = "reinstall the driver if programs should use it";
        return Check::warn(name, format!("{shown}: no 64-bit library"), remedy);
    };
    let value = format!("{shown}: probes available {found}/{}", symbols.len());
    if found == 0 && !symbols.is_empty() {
        let remedy = "this is not NVIDIA's library: programs that load it cannot be traced";
        return Check::fail(name, value, remedy);
    }
    if missing.is_empty() {
        return Check::ok(name, value);
    }
    // A driver has the functions of its time only; programs cannot call the others either.
    let named: Vec<_> = missing.iter().take(4).copied().collect();
    let more = if missing.len() > named.len() { ", ..." } else { "" };
    Check::ok(name, format!("{value} (not in this version: {}{more})", named.join(", ")))
}
