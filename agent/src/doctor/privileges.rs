//! What the agent may do: capabilities, limits, which processes it sees.

use super::{Check, System, kernel};
use crate::host::text;

/// Bits of `CapEff`, from linux/capability.h.
const DAC_READ_SEARCH: u32 = 2;
const SYS_PTRACE: u32 = 19;
const SYS_ADMIN: u32 = 21;
const SYS_RESOURCE: u32 = 24;
const PERFMON: u32 = 38;
const BPF: u32 = 39;
const CHECKPOINT_RESTORE: u32 = 40;

/// A capability, whether nothing works without it, and what it is for.
const NEEDED: [(u32, &str, bool, &str); 5] = [
    (BPF, "CAP_BPF", true, "load programs"),
    (PERFMON, "CAP_PERFMON", true, "attach probes"),
    (SYS_PTRACE, "CAP_SYS_PTRACE", true, "see what others have mapped"),
    (CHECKPOINT_RESTORE, "CAP_CHECKPOINT_RESTORE", false, "open mapped files that were deleted"),
    (DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH", false, "read libraries of other users"),
];

/// Inode of the initial pid namespace, `PROC_PID_INIT_INO` in `linux/proc_ns.h`.
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Open files that a host with several copies of libcuda and PyTorch takes: one a probe.
const OPEN_FILES: u64 = 4096;
/// Memory that maps and ring take, where a kernel charges it to the limit.
const LOCKED_MEMORY: u64 = 256 << 20;

fn effective(system: &System) -> Option<u64> {
    let status = text::read_bounded(&system.host.path("proc/self/status"), 64 << 10)?;
    u64::from_str_radix(text::field(&status, "CapEff")?, 16).ok()
}

fn has(effective: u64, capability: u32) -> bool {
    let bit = |number: u32| effective >> number & 1 == 1;
    // The old all-powerful one stands for those that were split off from it.
    bit(capability) || (bit(SYS_ADMIN) && matches!(capability, BPF | PERFMON | CHECKPOINT_RESTORE))
}

pub(super) fn capabilities(system: &System) -> Check {
    let name = "privileges";
    let Some(effective) = effective(system) else {
        return Check::warn(name, "not known: /proc/self/status", "mount -t proc proc /proc");
    };
    let missing: Vec<_> = NEEDED.iter().filter(|(bit, ..)| !has(effective, *bit)).collect();
    let why = missing.iter().map(|(_, capability, _, what)| format!("{capability} ({what})"));
    let value = format!("missing: {}", why.collect::<Vec<_>>().join(", "));
    if missing.iter().any(|(_, _, required, _)| *required) {
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
    let may_raise = effective(system).is_some_and(|caps| has(caps, SYS_RESOURCE));
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
