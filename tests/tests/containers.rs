//! Programs in containers: namespaces and mounts of their own, overlays over common layers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{fs, os::unix::fs::MetadataExt as _, path::Path, process::Command};

use agent_tests::{
    agent::{Agent, Recorded, signal},
    container::{self, ALL, Cgroup, Image, LIBRARIES, PRIVILEGED, Root, child_of},
    disk::Disk,
    logs::Logged,
    machine::{self, Obstacle, skip},
    sim::{Running, SimDevice},
    wait::eventually,
};
use ledger::rows::{AnnotationRow, LossRow};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// What the log has of a process: the MiB of its allocations.
fn allocated(recorded: &Recorded, pid: u32) -> Vec<i64> {
    let events = recorded.open().unwrap().events().unwrap();
    let ours = events.iter().filter(|event| event.pid == pid as i32 && event.op == "alloc");
    ours.map(|event| event.delta_bytes >> 20).collect()
}

/// Waits until the recording has put probes into so many files whose path, as their process sees it,
/// ends so.
fn probed(device: &SimDevice, path: &str, files: usize) {
    let log = device.folder().join("log");
    eventually(&format!("{path} is probed"), || {
        let rows = Logged::open(&log).and_then(|log| log.rows::<AnnotationRow>());
        let rows = rows.unwrap_or_default();
        let attached = rows.iter().filter(|row| row.kind == "attach" && row.text.ends_with(path));
        attached.count() == files
    });
}

/// Whoever else uses a GPU of this host meanwhile is not meant.
fn nothing_lost(recorded: &Recorded, pids: &[u32]) {
    let logged = recorded.open().unwrap();
    let ours = pids.iter().map(|pid| logged.process(*pid).unwrap().proc_id);
    let ours: Vec<Option<i64>> = ours.map(Some).collect();
    let losses = logged.rows::<LossRow>().unwrap();
    let losses: Vec<_> = losses.iter().filter(|row| ours.contains(&row.proc_id)).collect();
    assert!(losses.is_empty(), "{losses:?} {}", recorded.said);
}

/// A process in a container is recorded under the host's number, and known by its own.
fn known_by_both_numbers(recorded: &Recorded, pid: u32) {
    let process = recorded.open().unwrap().process(pid).unwrap();
    assert_eq!(process.ns_pid, Some(1), "{process:?}");
    let report = recorded.report().unwrap();
    assert!(report.contains(&format!("pid {pid} (1 in its container)")), "{report}");
}

#[test]
fn a_library_that_only_a_container_has_is_probed_by_what_is_mapped() {
    let Some(device) = container::gpus().unwrap() else { return };
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "box").unwrap();
    // Its layers are on no path of the host any more.
    drop(image);
    assert!(!device.folder().join("image/opt").exists());
    let mut running = root.start(&device, ALL, &["1048576", "1"]).unwrap();
    // And its root is on none.
    let unmount = Command::new("umount").arg("-l").arg(root.folder()).status().unwrap();
    assert!(unmount.success());

    let recording = Agent::new(&device).record().unwrap();
    running.alloc(2 * MIB).unwrap();
    let pid = running.pid;
    let recorded = recording.stop().unwrap();
    running.finish().unwrap();
    assert_eq!(allocated(&recorded, pid), [2], "{}", recorded.said);
    known_by_both_numbers(&recorded, pid);
    nothing_lost(&recorded, &[pid]);
}

#[test]
fn attach_finds_the_process_of_a_container() {
    let Some(device) = container::gpus().unwrap() else { return };
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "box").unwrap();
    let mut running = root.start(&device, ALL, &["1048576", "1"]).unwrap();
    let recording = Agent::new(&device).attach(&[running.pid]).unwrap();
    running.alloc(3 * MIB).unwrap();
    let recorded = recording.stop().unwrap();
    assert_eq!(allocated(&recorded, running.pid), [3], "{}", recorded.said);
    known_by_both_numbers(&recorded, running.pid);
    nothing_lost(&recorded, &[running.pid]);
    running.finish().unwrap();
}

#[test]
fn a_cgroup_names_container_and_pod_also_from_a_namespace_of_its_own() {
    let Some(device) = container::gpus().unwrap() else { return };
    let (id, pod) = ("0123456789abcdef".repeat(4), "2c48913c-b29f-11e7-9350-020968147796");
    let slice = format!("kubepods-burstable-pod{}.slice", pod.replace('-', "_"));
    let path = format!("vramscope-{}/{slice}/cri-containerd-{id}.scope", std::process::id());
    let Some(cgroup) = Cgroup::new(&path) else {
        return skip(&Obstacle::of_the_machine("no cgroup can be made: no writable v2 tree"));
    };
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "box").unwrap();
    let command = cgroup.command(&root.command(&device, ALL, &["1048576", "1"]));
    let mut running = container::start(command).unwrap();
    let inside = fs::read_to_string(format!("/proc/{}/cgroup", running.pid)).unwrap();
    assert!(inside.contains(&path), "{inside}");
    let recording = Agent::new(&device).record().unwrap();
    running.alloc(2 * MIB).unwrap();
    let recorded = recording.stop().unwrap();
    let process = recorded.open().unwrap().process(running.pid).unwrap();
    assert_eq!(process.container_id.as_ref(), Some(&id));
    assert_eq!(process.pod_uid.as_deref(), Some(pod));
    let report = recorded.report().unwrap();
    let title = format!("(1 in its container)  container {}  pod 2c48913c", &id[..12]);
    assert!(report.contains(&title), "{report}");
    running.finish().unwrap();
}

#[test]
fn run_follows_its_program_into_a_container() {
    let Some(device) = container::gpus().unwrap() else { return };
    // A driver's start takes its time, in which the child is found to map the library.
    let device = device.init_ms(300);
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "box").unwrap();
    let agent = Agent::new(&device);
    // The layer's own file is where libraries are looked for: found before it is mapped by the
    // overlay's number, and probed once.
    let below = image.folder().join(LIBRARIES.trim_start_matches('/'));
    let inner = root.command(&device, ALL, &["1048576", "1"]);
    let mut command = agent.command("run");
    command.args(["--", "env"]).arg(format!("LD_LIBRARY_PATH={LIBRARIES}"));
    command.arg(inner.get_program()).args(inner.get_args()).env("LD_LIBRARY_PATH", &below);
    let mut traced = agent.trace(command).unwrap();
    traced.until_ready().unwrap();
    let pid = child_of(child_of(traced.agent_pid()).unwrap()).unwrap();
    traced.step("alloc 2097152").unwrap();
    let recorded = traced.finish().unwrap();
    assert_eq!(allocated(&recorded, pid), [1, 2], "{}", recorded.said);
    known_by_both_numbers(&recorded, pid);
    nothing_lost(&recorded, &[pid]);
}

#[test]
fn containers_of_one_image_are_recorded_once_each_and_one_outlives_the_other() {
    let Some(device) = container::gpus().unwrap() else { return };
    let image = Image::new(&device, "image").unwrap();
    let first_root = Root::new(&device, &image, "first").unwrap();
    let second_root = Root::new(&device, &image, "second").unwrap();
    let id = |root: &Root| {
        let found = fs::metadata(root.folder().join("opt/cuda/lib/libcuda.so.1")).unwrap();
        (found.dev(), found.ino())
    };
    assert_ne!(id(&first_root), id(&second_root), "overlayfs shows one file under two numbers");

    let mut first = first_root.start(&device, ALL, &["1048576", "1"]).unwrap();
    let recording = Agent::new(&device).record().unwrap();
    first.alloc(2 * MIB).unwrap();
    // One that starts during the recording.
    let mut second = second_root.start(&device, PRIVILEGED, &["1048576", "1"]).unwrap();
    let (one, other) = (first.pid, second.pid);
    first.alloc(3 * MIB).unwrap();
    second.alloc(4 * MIB).unwrap();
    first.finish().unwrap();
    second.alloc(5 * MIB).unwrap();
    first_root.must_go();
    second.alloc(6 * MIB).unwrap();
    let third_root = Root::new(&device, &image, "third").unwrap();
    let mut third = third_root.start(&device, ALL, &["1048576", "1"]).unwrap();
    third.alloc(7 * MIB).unwrap();
    second.alloc(8 * MIB).unwrap();
    let last = third.pid;
    let recorded = recording.stop().unwrap();

    assert_eq!(allocated(&recorded, one), [2, 3], "{}", recorded.said);
    // These map a file that is probed already: from their first call.
    assert_eq!(allocated(&recorded, other), [1, 4, 5, 6, 8], "{}", recorded.said);
    assert_eq!(allocated(&recorded, last), [1, 7], "{}", recorded.said);
    nothing_lost(&recorded, &[one, other, last]);
    second.finish().unwrap();
    third.finish().unwrap();
}

#[test]
fn a_container_that_ended_can_be_unmounted() {
    let Some(device) = container::gpus().unwrap() else { return };
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "box").unwrap();
    let mut hold = root.start_in_mount_namespace_of_the_host(&device).unwrap();
    let recording = Agent::new(&device).record().unwrap();
    hold.step("alloc 2097152").unwrap();
    let pid = hold.pid();
    hold.finish().unwrap();
    root.must_go();
    let recorded = recording.stop().unwrap();
    assert_eq!(allocated(&recorded, pid), [2], "{}", recorded.said);
}

#[test]
fn a_container_that_ended_without_a_call_can_be_unmounted() {
    let Some(device) = container::gpus().unwrap() else { return };
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "idle").unwrap();
    // Ten minutes before its first call, no process of which the kernel half knows.
    let mut idle =
        Running::start(root.command(&device, ALL, &["1048576", "1", "0", "600000"])).unwrap();
    let mut pid = 0;
    eventually("the container's process maps the library", || {
        pid = child_of(idle.pid()).unwrap_or(0);
        fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("libcuda"))
    });
    let recording = Agent::new(&device).record().unwrap();
    signal(pid, Signal::KILL).unwrap();
    idle.kill().unwrap();
    root.must_go();
    recording.stop().unwrap();
}

#[test]
fn a_library_that_its_container_wrote_to_is_probed_in_both_states() {
    let Some(device) = container::gpus().unwrap() else { return };
    let image = Image::new(&device, "image").unwrap();
    let root = Root::new(&device, &image, "box").unwrap();
    let mut before = root.start(&device, PRIVILEGED, &["1048576", "1"]).unwrap();
    let recording = Agent::new(&device).record().unwrap();
    before.alloc(2 * MIB).unwrap();
    // As `chown -R` at a container's start: the file moves to the upper layer, under its number.
    let library = root.folder().join("opt/cuda/lib/libcuda.so.1");
    let id = fs::metadata(&library).unwrap().ino();
    fs::set_permissions(&library, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    assert_eq!(fs::metadata(&library).unwrap().ino(), id);
    let mut after = root.start(&device, PRIVILEGED, &["1048576", "1"]).unwrap();
    probed(&device, "/libcuda.so.1", 2);
    before.alloc(3 * MIB).unwrap();
    after.alloc(4 * MIB).unwrap();
    let recorded = recording.stop().unwrap();
    let seen = allocated(&recorded, after.pid);
    assert_eq!(allocated(&recorded, before.pid), [2, 3], "{}", recorded.said);
    assert_eq!(seen.strip_prefix(&[1]).unwrap_or(&seen), [4], "{}", recorded.said);
    before.finish().unwrap();
    after.finish().unwrap();
}

/// A file system that gives inode numbers to new files at once.
fn reusing(device: &SimDevice) -> Option<Disk> {
    let disk = Disk::with_ext4(device).unwrap();
    if disk.is_none() {
        skip(&Obstacle::of_the_machine("no ext4 on a loop device"));
    }
    disk
}

/// Puts another file in the place of one, with the same inode number: it is free once nobody holds
/// the first any more.
fn replace(library: &Path, by: &Path) {
    let inode = fs::metadata(library).unwrap().ino();
    fs::remove_file(library).unwrap();
    eventually("the inode number is given again", || {
        fs::copy(by, library).unwrap();
        let same = fs::metadata(library).unwrap().ino() == inode;
        if !same {
            fs::remove_file(library).unwrap();
        }
        same
    });
}

#[test]
fn a_file_with_the_inode_number_of_a_deleted_one_is_another_file() {
    // With stacks, their half of the agent holds the file, too.
    for options in [&["--no-stacks"][..], &[]] {
        another_file_of_the_same_number(options);
    }
}

fn another_file_of_the_same_number(options: &[&str]) {
    let Some(device) = machine::gpus().unwrap() else { return };
    let Some(disk) = reusing(&device) else { return };
    let folder = disk.folder();
    let library = folder.join("libcuda.so.1");
    fs::copy(device.lib_dir().join("libcuda.so.1"), &library).unwrap();
    let hold = device.program("hold");
    let script = "LD_LIBRARY_PATH=$1 \"$2\" 1048576 1 </dev/null; echo READY; read go; \
                  LD_LIBRARY_PATH=$1 \"$2\" 2097152 1 0 300; echo \"STATUS $?\"";
    let agent = Agent::new(&device).options(options);
    let mut command = agent.command("run");
    command.args(["--", "sh", "-c", script, "sh"]).arg(folder).arg(hold.get_program());
    command.env("LD_LIBRARY_PATH", "/nonexistent");
    let mut traced = agent.trace(command).unwrap();
    traced.until_ready().unwrap();
    traced.until_ready().unwrap();
    replace(&library, &device.other_lib_dir().join("libcuda.so.1"));
    traced.step("").unwrap();
    traced.step("alloc 4194304").unwrap();
    let recorded = traced.finish().unwrap();
    assert!(recorded.lines.contains(&"STATUS 0".to_owned()), "{:?}", recorded.lines);
    let events = recorded.open().unwrap().events().unwrap();
    let sizes: Vec<i64> = events.iter().map(|event| event.delta_bytes).collect();
    assert!(sizes.contains(&(4 << 20)), "{sizes:?} {}", recorded.said);
}

#[test]
fn a_library_with_the_inode_number_of_a_file_that_was_none_is_probed() {
    for options in [&["--no-stacks"][..], &[]] {
        a_library_in_the_place_of_none(options);
    }
}

fn a_library_in_the_place_of_none(options: &[&str]) {
    let Some(device) = machine::gpus().unwrap() else { return };
    let Some(disk) = reusing(&device) else { return };
    let folder = disk.folder();
    let library = folder.join("libcuda.so.1");
    fs::write(&library, vec![b'x'; 8192]).unwrap();
    let script = "import mmap, os, sys\n\
                  file = os.open(sys.argv[1], os.O_RDONLY)\n\
                  held = mmap.mmap(file, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)\n\
                  print('READY', flush=True)\n\
                  sys.stdin.read()";
    let mut python = Command::new("python3");
    python.args(["-c", script]).arg(&library);
    let mut decoy = Running::start(python).unwrap();
    decoy.until_ready().unwrap();
    let recording = Agent::new(&device).options(options).record().unwrap();
    decoy.finish().unwrap();
    replace(&library, &device.lib_dir().join("libcuda.so.1"));
    let mut command = device.program("hold");
    command.args(["1048576", "1"]).env("LD_LIBRARY_PATH", folder);
    let mut hold = Running::start(command).unwrap();
    hold.until_ready().unwrap();
    probed(&device, "/disk/libcuda.so.1", 1);
    hold.step("alloc 2097152").unwrap();
    let pid = hold.pid();
    let recorded = recording.stop().unwrap();
    assert_eq!(allocated(&recorded, pid).last(), Some(&2), "{}", recorded.said);
    hold.finish().unwrap();
}
