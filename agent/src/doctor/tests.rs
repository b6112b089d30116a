//! Checks over made-up systems.

use std::path::Path;

use super::*;
use crate::{host::testing::Tree, nvml::testing::gpu};

const ALL_CAPABILITIES: &str = "000001ffffffffff";

/// A tree of a host that lacks nothing.
fn tree() -> Tree {
    let tree = Tree::new();
    tree.write("proc/sys/kernel/osrelease", "6.8.0-41-generic\n");
    tree.write("proc/version", "Linux version 6.8.0-41-generic\n");
    tree.write("proc/sys/kernel/perf_event_paranoid", "4\n");
    tree.write("proc/self/status", format!("Name:\tx\nCapEff:\t{ALL_CAPABILITIES}\n"));
    tree.write("proc/self/uid_map", "         0          0 4294967295\n");
    tree.link("pid:[4026531836]", "proc/self/ns/pid");
    tree.write("sys/bus/event_source/devices/uprobe/type", "9\n");
    tree.write("sys/kernel/btf/vmlinux", "");
    tree.write("sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
    // Any library serves as a libcuda here: what counts is which functions it exports.
    let libc = real_libc();
    tree.write("usr/lib/x86_64-linux-gnu/libcuda.so.580.1", std::fs::read(libc).unwrap());
    tree
}

fn real_libc() -> PathBuf {
    let mappings = Host::live().mappings(std::process::id()).unwrap();
    mappings.into_iter().find(|map| map.file_name().starts_with(b"libc.so")).unwrap().path
}

fn system(tree: &Tree) -> System {
    let driver = Driver { version: Some("580.159.04".to_owned()), cuda_version: Some(13000) };
    System {
        host: tree.host(),
        arch: "x86_64",
        features: Features {
            probes: Some(true),
            ring_buffer: Some(true),
            cookies: Some(true),
            multi_links: Some(true),
        },
        types: Ok(()),
        returns: Returns::Untried("in a test".to_owned()),
        agents: Vec::new(),
        stopped: None,
        nvml: Ok((driver, vec![gpu(0), gpu(1)])),
        open_files: Some(1 << 20),
        locked_memory: Some(64 << 10),
        directory: tree.root().to_path_buf(),
    }
}

const SYMBOLS: [&str; 2] = ["malloc", "free"];

fn one(system: &System, name: &str) -> Check {
    let all = checks_of(system, &SYMBOLS);
    all.into_iter().find(|check| check.name == name).unwrap()
}

/// The one check that is not well, and it is the expected one.
fn assert_only(system: &System, name: &str, status: Status, words: &str) {
    let all = checks_of(system, &SYMBOLS);
    let ill: Vec<_> =
        all.iter().filter(|check| check.status != Status::Ok && check.name != "disk").collect();
    let [check] = ill.as_slice() else { panic!("{ill:?}") };
    assert_eq!((check.name, check.status), (name, status));
    assert!(check.remedy.as_ref().is_some_and(|remedy| !remedy.is_empty()), "{check:?}");
    let text = format!("{} {:?}", check.value, check.remedy);
    assert!(text.contains(words), "{words:?} not in {text}");
    assert_eq!(failed(&all), status == Status::Fail);
}

#[test]
fn a_host_that_lacks_nothing_passes() {
    let tree = tree();
    let all = checks_of(&system(&tree), &SYMBOLS);
    let ill: Vec<_> =
        all.iter().filter(|check| check.status != Status::Ok && check.name != "disk").collect();
    assert!(ill.is_empty(), "{ill:?}");
    let driver = one(&system(&tree), "NVIDIA driver");
    assert_eq!(driver.value, "580.159.04, CUDA 13.0, 2 x NVIDIA H200");
    let library = one(&system(&tree), "libcuda");
    assert_eq!(library.value, "/usr/lib/x86_64-linux-gnu/libcuda.so.580.1: probes available 2/2");
}

/// A change to a tree, the check that finds it, how bad it is, words of the finding.
type Case = (&'static str, &'static str, &'static str, Status, &'static str);

#[test]
fn one_changed_file_is_one_finding() {
    let cases: &[Case] = &[
        ("proc/version", "Linux version 4.4.0 (gVisor)", "kernel", Status::Fail, "gVisor"),
        (
            "sys/kernel/security/lockdown",
            "none integrity [confidentiality]",
            "kernel lockdown",
            Status::Fail,
            "lockdown=integrity",
        ),
        (
            "proc/sys/kernel/osrelease",
            "6.12.3-amd64",
            "seccomp and return probes",
            Status::Warn,
            "in a test",
        ),
        ("proc/self/status", "CapEff:\t0", "privileges", Status::Fail, "CAP_BPF"),
        // Everything but CAP_DAC_READ_SEARCH (bit 2).
        ("proc/self/status", "CapEff:\t1fffffffffb", "privileges", Status::Warn, "CAP_DAC_READ"),
        // CAP_SYS_ADMIN (21), CAP_SYS_PTRACE (19), CAP_DAC_READ_SEARCH (2) suffice; without 19 not.
        ("proc/self/status", "CapEff:\t200004", "privileges", Status::Fail, "CAP_SYS_PTRACE"),
        ("proc/self/uid_map", "0 1000 1", "privileges", Status::Fail, "user namespace"),
        ("usr/sbin/criu", "", "CRIU", Status::Warn, "ever traced"),
        ("usr/lib64/libcuda.so.1", "text", "libcuda", Status::Warn, "/usr/lib64/libcuda.so.1"),
    ];
    for (path, content, name, status, words) in cases {
        let tree = tree();
        tree.write(path, content);
        assert_only(&system(&tree), name, *status, words);
    }
}

#[test]
fn capabilities_may_be_the_old_all_powerful_one() {
    let tree = tree();
    tree.write("proc/self/status", "CapEff:\t280004\n");
    assert_eq!(one(&system(&tree), "privileges").status, Status::Ok);
}

#[test]
fn one_missing_file_is_one_finding() {
    let cases = [
        ("sys/kernel/btf/vmlinux", "BTF", Status::Fail, "CONFIG_DEBUG_INFO_BTF"),
        ("sys/bus/event_source/devices/uprobe/type", "uprobes", Status::Fail, "CONFIG_UPROBES"),
        ("proc/sys/kernel/perf_event_paranoid", "perf_event_paranoid", Status::Fail, "PERF"),
        ("proc/self/ns/pid", "host processes", Status::Warn, "hostPID"),
        ("usr/lib/x86_64-linux-gnu/libcuda.so.580.1", "libcuda", Status::Warn, "attaches when"),
    ];
    for (path, name, status, words) in cases {
        let tree = tree();
        std::fs::remove_file(tree.root().join(path)).unwrap();
        assert_only(&system(&tree), name, status, words);
    }
}

#[test]
fn a_container_without_the_hosts_processes_fails() {
    let tree = tree();
    std::fs::remove_file(tree.root().join("proc/self/ns/pid")).unwrap();
    tree.link("pid:[4026532198]", "proc/self/ns/pid");
    assert_only(&system(&tree), "host processes", Status::Fail, "--pid=host");
}

#[test]
fn features_of_the_kernel() {
    let tree = tree();
    let with = |features: Features| System { features, ..system(&tree) };
    let all = system(&tree).features;
    let old = Features { ring_buffer: Some(false), ..all };
    assert_only(&with(old), "ring buffer", Status::Fail, "5.8");
    let old = Features { cookies: Some(false), ..all };
    assert_only(&with(old), "attach cookies", Status::Fail, "5.15");
    let old = Features { multi_links: Some(false), ..all };
    assert_only(&with(old), "many probes a link", Status::Warn, "6.10");
    let without = Features { probes: Some(false), ..all };
    assert_only(&with(without), "uprobes", Status::Fail, "CONFIG_BPF");
    let untold = Features { cookies: None, ..all };
    assert_only(&with(untold), "attach cookies", Status::Warn, "sudo");
}

#[test]
fn a_kernel_whose_structures_differ_is_told_by_the_member() {
    let tree = tree();
    let types = Err("this kernel's type information has no task_struct.tgid".to_owned());
    assert_only(&System { types, ..system(&tree) }, "BTF", Status::Fail, "task_struct.tgid");
}

#[test]
fn the_seccomp_fault_is_of_some_kernels_on_one_processor() {
    let status = |release: &str, arch: &'static str| {
        let tree = tree();
        tree.write("proc/sys/kernel/osrelease", release);
        one(&System { arch, ..system(&tree) }, "seccomp and return probes").status
    };
    for release in ["6.11.0", "6.12.3-amd64", "6.13.12"] {
        assert_eq!(status(release, "x86_64"), Status::Warn, "{release}");
        assert_eq!(status(release, "aarch64"), Status::Ok, "{release}");
    }
    for release in ["6.10.9", "6.14.0-rc1", "7.0", "5.15.0"] {
        assert_eq!(status(release, "x86_64"), Status::Ok, "{release}");
    }
    // What was tried counts, not the number.
    let tree = tree();
    let tried = |returns: Returns| System { returns, ..system(&tree) };
    assert_only(&tried(Returns::Kill), "seccomp and return probes", Status::Warn, "kills filtered");
    tree.write("proc/sys/kernel/osrelease", "6.12.3");
    let name = "seccomp and return probes";
    assert_eq!(one(&tried(Returns::Harmless), name).status, Status::Ok);
}

#[test]
fn limits() {
    let tree = tree();
    let few = System { open_files: Some(512), ..system(&tree) };
    assert_only(&few, "open files", Status::Warn, "ulimit");
    tree.write("proc/sys/kernel/osrelease", "5.4.0");
    assert_eq!(one(&system(&tree), "locked memory").status, Status::Ok, "it may be raised");
    // Everything but CAP_SYS_RESOURCE (bit 24).
    tree.write("proc/self/status", "CapEff:\t1fffeffffff\n");
    assert_only(&system(&tree), "locked memory", Status::Warn, "ulimit -l");
    let unlimited = System { locked_memory: None, ..system(&tree) };
    assert_eq!(one(&unlimited, "locked memory").status, Status::Ok);
}

#[test]
fn a_host_without_a_gpu_says_so() {
    let tree = tree();
    let without =
        || System { nvml: Err("open libnvidia-ml.so.1: no such file".to_owned()), ..system(&tree) };
    assert_only(&without(), "NVIDIA driver", Status::Fail, "use a host with an NVIDIA GPU");
    tree.write("proc/driver/nvidia/version", "NVRM version: 580\n");
    assert_only(&without(), "NVIDIA driver", Status::Warn, "no such file");
    let empty = System { nvml: Ok((Driver::default(), Vec::new())), ..system(&tree) };
    assert_only(&empty, "NVIDIA driver", Status::Fail, "no GPU");
}

#[test]
fn missing_functions_are_named() {
    let tree = tree();
    let count = |symbols: &[&str]| {
        let all = checks_of(&system(&tree), symbols);
        all.into_iter().find(|check| check.name == "libcuda").unwrap()
    };
    let some = count(&["malloc", "cuMemAlloc_v2"]);
    assert_eq!(some.status, Status::Ok);
    assert!(some.value.contains("1/2 (not in this version: cuMemAlloc_v2)"), "{}", some.value);
    let none = count(&["cuMemAlloc_v2"]);
    assert_eq!(none.status, Status::Fail);
    assert!(none.value.contains("0/1"), "{}", none.value);
}

#[test]
fn mapped_libraries_are_found() {
    let tree = tree();
    let line = |path: &str| format!("1000-2000 r-xp 00000000 00:01 7 {path}\n");
    tree.write("proc/42/maps", line("/venv/lib/libcuda.so.9"));
    tree.write("proc/43/maps", line("/venv/lib/libcuda.so.9"));
    tree.link(real_libc(), "proc/42/map_files/1000-2000");
    let all = checks_of(&system(&tree), &SYMBOLS);
    let values: Vec<_> =
        all.iter().filter(|check| check.name == "libcuda").map(|c| c.value.as_str()).collect();
    assert_eq!(values.len(), 2);
    assert!(values[1].starts_with("/venv/lib/libcuda.so.9 of pid 4"), "{}", values[1]);
    assert!(values[1].contains(" and 1 more"), "{}", values[1]);
}

#[test]
fn what_must_be_got_along_with_is_told() {
    let tree = tree();
    assert_eq!(one(&system(&tree), "UCX").status, Status::Ok);
    let line = "1000-2000 r-xp 00000000 00:01 7 /ucx/lib/libucm_cuda.so.0\n";
    tree.write("proc/44/maps", line);
    assert_only(&system(&tree), "UCX", Status::Warn, "pid 44");
    let remedy = one(&system(&tree), "UCX").remedy.unwrap();
    assert!(remedy.contains("UCX_MEM_CUDA_HOOK_MODE=reloc"), "{remedy}");
    tree.write("proc/44/environ", "UCX_MEM_CUDA_HOOK_MODE=reloc\0");
    assert_eq!(one(&system(&tree), "UCX").status, Status::Ok);

    let stopped = Some("/run/vramscope/stop exists".to_owned());
    let stopped = System { stopped, ..system(&tree) };
    assert_only(&stopped, "stop file", Status::Fail, "/run/vramscope/stop");
    let who = Who::this("record", Path::new("/var/log/vramscope"), true, &[]);
    let beside = System { agents: vec![who], ..system(&tree) };
    assert_only(&beside, "other agents", Status::Warn, "/var/log/vramscope");
}

#[test]
fn this_host_can_be_checked() {
    let all = checks(&["cuMemAlloc_v2"]);
    assert!(all.len() >= 17);
    let ill = all.iter().filter(|check| check.status != Status::Ok);
    assert!(ill.clone().all(|check| check.remedy.is_some()), "{all:?}");
}
