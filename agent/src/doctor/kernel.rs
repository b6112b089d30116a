//! The kernel: uprobes, BPF, what locks them down.

use super::{Check, System};
use crate::{host::text, kernel::returns::Returns};

/// Longest file that a check reads.
const LIMIT: u64 = 64 << 10;

/// First words of a small file below the root.
pub(super) fn small_file(system: &System, path: &str) -> Option<String> {
    text::read_bounded(&system.host.path(path), LIMIT)
        .map(|bytes| text::clean(bytes.trim_ascii(), 256))
}

/// Major and minor number of the running kernel.
pub(super) fn release(system: &System) -> Option<(u32, u32)> {
    system.host.kernel_release()
}

pub(super) fn version(system: &System) -> Check {
    let name = "kernel";
    let Some(release) = small_file(system, "proc/sys/kernel/osrelease") else {
        return Check::fail(name, "/proc is not mounted", "mount -t proc proc /proc");
    };
    let banner = small_file(system, "proc/version").unwrap_or_default();
    if banner.contains("gVisor") {
        let remedy = "run vramscope on the host: gVisor has no uprobes and no BPF";
        return Check::fail(name, format!("{release} (gVisor)"), remedy);
    }
    if banner.to_ascii_lowercase().contains("microsoft") {
        return Check::ok(name, format!("{release} (WSL: NVML lists no processes here)"));
    }
    Check::ok(name, release)
}

pub(super) fn uprobes(system: &System) -> Check {
    let name = "uprobes";
    let has_events = system.host.path("sys/bus/event_source/devices/uprobe/type").exists();
    match (has_events, system.features.probes) {
        (true, Some(true)) => Check::ok(name, "supported"),
        (true, None) => unknown(name, "the kernel has uprobe events"),
        (true, Some(false)) => {
            let remedy = "use a kernel with CONFIG_BPF_SYSCALL and CONFIG_BPF_EVENTS";
            Check::fail(name, "uprobe events, but no BPF programs for them", remedy)
        }
        (false, _) if !system.host.path("sys/bus").exists() => {
            Check::fail(name, "/sys is not mounted", "mount -t sysfs sysfs /sys")
        }
        (false, _) => {
            let remedy = "use a kernel with CONFIG_UPROBES and CONFIG_UPROBE_EVENTS";
            Check::fail(name, "the kernel has no uprobe events", remedy)
        }
    }
}

pub(super) fn btf(system: &System) -> Check {
    let name = "BTF";
    if !system.host.path("sys/kernel/btf/vmlinux").exists() {
        let remedy =
            "use a kernel with CONFIG_DEBUG_INFO_BTF; in a container mount /sys/kernel/btf";
        return Check::fail(name, "the kernel does not describe its types", remedy);
    }
    match &system.types {
        Ok(()) => Check::ok(name, "/sys/kernel/btf/vmlinux"),
        Err(why) => Check::fail(name, why.as_str(), "use a kernel that docs/kernels.md names"),
    }
}

pub(super) fn ring_buffer(system: &System) -> Check {
    feature("ring buffer", system.features.ring_buffer, "use kernel 5.8 or later")
}

pub(super) fn cookies(system: &System) -> Check {
    feature("attach cookies", system.features.cookies, "use kernel 5.15 or later")
}

/// Without them everything is recorded all the same.
pub(super) fn multi_links(system: &System) -> Check {
    let name = "many probes a link";
    match system.features.multi_links {
        Some(true) => Check::ok(name, "supported"),
        Some(false) => {
            let value = "not supported, or not with a filter that works: each probe is a link of \
                         its own, and nothing less is recorded";
            let remedy = "use kernel 6.10 or later; until then taking the probes of a process out \
                          takes the kernel seconds, in which new ones wait";
            Check::warn(name, value, remedy)
        }
        None => unknown(name, "not known"),
    }
}

fn feature(name: &'static str, supported: Option<bool>, remedy: &str) -> Check {
    match supported {
        Some(true) => Check::ok(name, "supported"),
        Some(false) => Check::fail(name, "not supported by this kernel", remedy),
        None => unknown(name, "not known"),
    }
}

fn unknown(name: &'static str, found: &str) -> Check {
    let value = format!("{found}; the kernel does not tell an unprivileged program more");
    Check::warn(name, value, "run sudo vramscope doctor")
}

pub(super) fn lockdown(system: &System) -> Check {
    let name = "kernel lockdown";
    let Some(modes) = small_file(system, "sys/kernel/security/lockdown") else {
        return Check::ok(name, "none that the kernel tells of");
    };
    let mode = modes.split(['[', ']']).nth(1).unwrap_or("none");
    if mode == "confidentiality" {
        let remedy = "boot with lockdown=integrity: confidentiality forbids BPF to read memory";
        return Check::fail(name, mode, remedy);
    }
    Check::ok(name, mode)
}

/// Some kernels kill processes under a seccomp filter when a probed function returns, x86-64 only.
pub(super) fn seccomp(system: &System) -> Check {
    let name = "seccomp and return probes";
    if system.arch != "x86_64" {
        return Check::ok(name, "not a processor with the fault of kernels 6.11 to 6.13");
    }
    let remedy = "use kernel 6.14 or later; until then the whole host is not recorded, and run and \
                  attach spare processes under a seccomp filter (containers, most services), unless \
                  given --allow-return-probes";
    let kill = system.returns.kill(release(system));
    match (&system.returns, kill) {
        (Returns::Harmless, _) => Check::ok(name, "tried: a filtered process lives"),
        (Returns::Kill, _) => {
            Check::warn(name, "tried: this kernel kills filtered processes", remedy)
        }
        (Returns::Untried(why), true) => {
            let value = format!("this kernel's number is one of 6.11 to 6.13, or unknown ({why})");
            Check::warn(name, value, remedy)
        }
        (Returns::Untried(_), false) => {
            Check::ok(name, "not a kernel with the fault of 6.11 to 6.13")
        }
    }
}

pub(super) fn paranoid(system: &System) -> Check {
    let name = "perf_event_paranoid";
    if let Some(value) = small_file(system, "proc/sys/kernel/perf_event_paranoid") {
        return Check::ok(name, format!("{value} (binds unprivileged programs only)"));
    }
    let remedy = "use a kernel with CONFIG_PERF_EVENTS";
    Check::fail(name, "the kernel has no perf events", remedy)
}
