//! What else is on the host that vramscope must get along with.

use super::{Check, System, driver::some_pids};
use crate::{attach::guard, host::Space};

/// Space under which a recording would soon stop.
const SPACE: i64 = 1 << 30;

/// The file that keeps every agent from recording.
pub(super) fn stop_file(system: &System) -> Check {
    let name = "stop file";
    match &system.stopped {
        Some(why) => Check::fail(name, why.as_str(), "remove it to record again"),
        None => Check::ok(name, "not there"),
    }
}

/// A second set of probes on one program is refused.
pub(super) fn agents(system: &System) -> Check {
    let name = "other agents";
    let each = system
        .agents
        .iter()
        .map(|who| format!("vramscope {} (pid {}, log {})", who.verb, who.pid, who.log));
    let value = each.collect::<Vec<_>>().join(", ");
    if value.is_empty() {
        return Check::ok(name, "none records on this host");
    }
    let remedy = "what it records can't be recorded a second time: wait for its end, or stop it \
                  (kill -INT)";
    Check::warn(name, value, remedy)
}

/// UCX patches the functions that probes go into; see the page on UCX in the documentation.
pub(super) fn ucx(system: &System) -> Check {
    let name = "UCX";
    let patches = |pid: &u32| {
        let mappings = system.host.mappings(*pid);
        mappings.is_some_and(|mappings| guard::has_ucx(&system.host, *pid, &mappings))
    };
    let pids: Vec<u32> = system.host.pids().into_iter().filter(patches).collect();
    if pids.is_empty() {
        let value = "no process has its CUDA hooks (libucm_cuda); jobs that use them are recorded \
                     with UCX_MEM_CUDA_HOOK_MODE=reloc";
        return Check::ok(name, value);
    }
    let value = format!("its CUDA hooks patch libcuda, or will, in {}", some_pids(&pids));
    let remedy = "start those jobs with UCX_MEM_CUDA_HOOK_MODE=reloc; as they are, vramscope does \
                  not probe the libcuda that they use";
    Check::warn(name, value, remedy)
}

/// CRIU cannot dump the page of trampolines that a process keeps once a probe was hit.
pub(super) fn criu(system: &System) -> Check {
    let name = "CRIU";
    let places = ["usr/sbin/criu", "usr/bin/criu", "usr/local/sbin/criu", "usr/local/bin/criu"];
    if places.iter().any(|place| system.host.path(place).exists()) {
        let value = "installed; it refuses processes that were ever traced, also long after";
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
