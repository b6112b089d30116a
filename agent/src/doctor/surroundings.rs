//! What else is on the host that vramscope must get along with.

use super::{
    Check, System,
    driver::{Mapped, some_pids},
};
use crate::host::{LibKind, Space};

/// Space under which a recording would soon stop.
const SPACE: i64 = 1 << 30;

/// UCX patches the functions that probes go into; see the notes on UCX in the documentation.
pub(super) fn ucx(mapped: &Mapped) -> Check {
    let name = "UCX";
    let pids: Vec<u32> =
        mapped.of(LibKind::UcmCuda).flat_map(|(_, pids)| pids.iter().copied()).collect();
    if pids.is_empty() {
        let value = "no process has its CUDA hooks (libucm_cuda) mapped; jobs that use it with \
                     vramscope need UCX_MEM_CUDA_HOOK_MODE=reloc";
        return Check::ok(name, value);
    }
    let value = format!("its CUDA hooks patch libcuda in {}", some_pids(&pids));
    let remedy = "start those jobs with UCX_MEM_CUDA_HOOK_MODE=reloc; as they are, vramscope does \
                  not probe the libcuda that they use";
    Check::warn(name, value, remedy)
}

/// CRIU cannot dump the page of trampolines that a process keeps once a probe was hit.
pub(super) fn criu(system: &System) -> Check {
    let name = "CRIU";
    let places = ["usr/sbin/criu", "usr/bin/criu", "usr/local/sbin/criu", "usr/local/bin/criu"];
    if places.iter().any(|place| system.host.path(place).exists()) {
        let value = "installed; it refuses processes that were ever traced";
        return Check::warn(name, value, "do not trace jobs that are to be checkpointed by CRIU");
    }
    Check::ok(name, "not installed (it would refuse processes that were ever traced)")
}

pub(super) fn disk(system: &System) -> Check {
    let name = "disk";
    let directory = system.directory.display();
    let Some(space) = Space::at(&system.directory) else {
        let remedy = "change to a directory that exists, or choose one by --output";
        return Check::warn(name, format!("{directory} cannot be asked for its space"), remedy);
    };
    let free = space.available as f64 / f64::from(1 << 30);
    let value = format!("{free:.1} GiB free in {directory}");
    if space.available < SPACE {
        return Check::warn(name, value, "record into a directory with more space (--output)");
    }
    Check::ok(name, value)
}
