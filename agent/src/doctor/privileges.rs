//! What the agent may do: capabilities, limits, which processes it sees.

use rustix::thread::CapabilitySet;

use super::{Check, System, kernel};
use crate::{
    host::text,
    privileges::{NEEDED, Need, listed},
};

/// Inode of the initial pid namespace, `PROC_PID_INIT_INO` in `linux/proc_ns.h`.
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Open files that a host with several copies of libcuda and PyTorch takes: one a probe.
const OPEN_FILES: u64 = 4096;
/// Memory that maps and ring take, where a kernel charges it to the limit.
const LOCKED_MEMORY: u64 = 256 << 20;

fn effective(system: &System) -> Option<CapabilitySet> {
    let status = text::read_bounded(&system.host.path("proc/self/status"), 64 << 10)?;
    let bits = u64::from_str_radix(text::field(&status, "CapEff")?, 16).ok()?;
    Some(CapabilitySet::from_bits_retain(bits))
}

/// Without multi links each probe is an event of perf, which kernels keep for the all-powerful one.
fn is_required(system: &System, need: &Need) -> bool {
    let events = system.features.multi_links == Some(false);
    need.required || (events && need.capability == CapabilitySet::SYS_ADMIN)
}

pub(super) fn capabilities(system: &System) -> Check {
    let name = "privileges";
    let Some(effective) = effective(system) else {
        return Check::warn(name, "not known: /proc/self/status", "mount -t proc proc /proc");
    };
    let missing: Vec<_> = NEEDED.iter().filter(|need| !need.is_in(effective)).collect();
    let value = format!("missing: {}", listed(missing.iter().copied()));
    if missing.iter().any(|need| is_required(system, need)) {
        return Check::fail(name, value, "run vramscope by sudo, or grant these capabilities");
    }
    if !in_initial_user_namespace(system) {
        let remedy = "run vramscope as the host's root: privileges inside a user namespace (rootless \
                      container) do not open probes";
        return Check::fail(name, "root of a user namespace only", remedy);
    }
    if missing.is_empty() {
        return Check::ok(name, "all that are needed");
    }
    Check::warn(name, value, "grant these capabilities too")
}

/// The initial user namespace maps every id to itself. Unknown counts as initial: the kernel will
/// refuse later and say so.
fn in_initial_user_namespace(system: &System) -> bool {
    kernel::small_file(system, "proc/self/uid_map")
        .is_none_or(|map| map.split_ascii_whitespace().eq(["0", "0", "4294967295"]))
}

pub(super) fn open_files(system: &System) -> Check {
    let name = "open files";
    match system.open_files {
        Some(limit) if limit < OPEN_FILES => {
            let value = format!("at most {limit}; every probe in every library takes one");
            Check::warn(name, value, format!("raise the hard limit: ulimit -Hn {OPEN_FILES}"))
        }
        Some(limit) => Check::ok(name, format!("at most {limit}")),
        None => Check::ok(name, "no limit"),
    }
}

/// Until kernel 5.11 BPF memory counted against the limit of locked memory.
pub(super) fn locked_memory(system: &System) -> Check {
    let name = "locked memory";
    let charged = kernel::release(system).is_some_and(|release| release < (5, 11));
    let may_raise =
        effective(system).is_some_and(|caps| caps.contains(CapabilitySet::SYS_RESOURCE));
    match system.locked_memory {
        Some(limit) if charged && !may_raise && limit < LOCKED_MEMORY => {
            let value = format!("at most {} KiB, which this kernel charges BPF to", limit >> 10);
            Check::warn(name, value, "ulimit -l unlimited, or grant CAP_SYS_RESOURCE")
        }
        _ if charged => Check::ok(name, "the limit can be raised"),
        _ => Check::ok(name, "not charged for BPF by this kernel"),
    }
}

/// The kernel half and NVML tell pids of the initial namespace: in another one they mean nothing.
pub(super) fn pid_namespace(system: &System) -> Check {
    let name = "host processes";
    let remedy = "share the host's processes with the container: hostPID: true in the pod, \
                  --pid=host for docker and podman";
    let Ok(namespace) = std::fs::read_link(system.host.path("proc/self/ns/pid")) else {
        return Check::warn(name, "not known: /proc/self/ns/pid cannot be read", remedy);
    };
    if namespace.as_os_str() == INITIAL_PID_NAMESPACE {
        return Check::ok(name, "visible");
    }
    Check::fail(name, "only this container's processes are visible", remedy)
}
