//! What this machine lacks for the tests that need a kernel, a compiler or a network.

use crate::sh;
use anyhow::{Context as _, Result};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Why a part can't run.
pub(super) struct Obstacle {
    pub(super) reason: String,
    /// Whether installing something or becoming root, as this user may, would remove it.
    pub(super) avoidable: bool,
}

impl Obstacle {
    pub(super) fn avoidable(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), avoidable: true }
    }

    pub(super) fn of_the_machine(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), avoidable: false }
    }
}

/// Whether this runs in continuous integration.
pub(super) fn is_ci() -> bool {
    env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}

/// The first thing that keeps probes from being loaded.
pub(super) fn probe_obstacle() -> Option<Obstacle> {
    if !sh::is_root() {
        let reason =
            "not root: loading probes needs it; `sudo env \"PATH=$PATH\" cargo xtask test`";
        let may_become_root = sh::succeeds("sudo", &["-n", "true"]);
        return Some(Obstacle { reason: reason.into(), avoidable: may_become_root });
    }
    for (path, what) in [
        ("/sys/kernel/btf/vmlinux", "the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)"),
        (
            "/sys/bus/event_source/devices/uprobe",
            "the kernel has no uprobes (CONFIG_UPROBE_EVENTS)",
        ),
    ] {
        if !Path::new(path).exists() {
            return Some(Obstacle::of_the_machine(format!("{what}: no {path}")));
        }
    }
    if !may_load_probes(&fs::read_to_string("/proc/self/status").unwrap_or_default()) {
        return Some(Obstacle::of_the_machine(
            "root here lacks CAP_BPF and CAP_PERFMON (a container without privileges?)",
        ));
    }
    None
}

/// What keeps the simulated GPU from being built.
pub(super) fn compiler_obstacle() -> Option<Obstacle> {
    let reason = "no gcc to build the simulated GPU: `apt-get install gcc libc6-dev`";
    (!sh::succeeds("gcc", &["--version"])).then(|| Obstacle::avoidable(reason))
}

/// From `/proc/PID/status`: `CAP_SYS_ADMIN` (21), or `CAP_PERFMON` (38) with `CAP_BPF` (39).
fn may_load_probes(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(caps) = line.and_then(|caps| u64::from_str_radix(caps.trim(), 16).ok()) else {
        return false;
    };
    let has = |bit: u32| caps & (1 << bit) != 0;
    has(21) || (has(38) && has(39))
}

/// Builds the agent and returns its path.
pub(super) fn build_agent() -> Result<PathBuf> {
    sh::run(sh::cargo()?.args(["build", "--locked", "-p", "agent"]))?;
    Ok(sh::target_dir()?.join("debug/vramscope"))
}

/// Agents that run already, each as `pid 12`.
pub(super) fn running_agents() -> Vec<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_agent = |folder: &Path| {
        fs::read_to_string(folder.join("comm")).is_ok_and(|comm| comm.trim() == "vramscope")
    };
    processes
        .filter(|process| is_agent(&process.path()))
        .map(|process| format!("pid {}", process.file_name().to_string_lossy()))
        .collect()
}

/// The text of a file of the repository.
pub(super) fn read(name: &str) -> Result<String> {
    let path = sh::root()?.join(name);
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_decide_whether_probes_can_be_loaded() {
        for (caps, expected) in [
            ("000001ffffffffff", true),
            ("00000000a80425fb", false),
            ("0000000000200000", true),
            ("000000c000000000", true),
            ("0000008000000000", false),
        ] {
            let status = format!("Name:\tx\nCapInh:\t0\nCapEff:\t{caps}\n");
            assert_eq!(may_load_probes(&status), expected, "{caps}");
        }
        assert!(!may_load_probes(""));
    }
}
