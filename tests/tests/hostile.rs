//! What a program or container can't do to the agent by the names and kinds of its libraries.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use agent_tests::{
    agent::{Agent, Recorded},
    machine,
    sim::{Running, SimDevice},
};

const LIBRARY: &str = "libcuda.so.1";

/// A folder beside the GPUs' state.
fn folder(device: &SimDevice, name: &str) -> PathBuf {
    let folder = device.folder().join(name);
    fs::create_dir(&folder).unwrap();
    folder
}

fn driver(device: &SimDevice) -> PathBuf {
    device.lib_dir().join(LIBRARY)
}

/// `hold`, with the driver library from this folder.
fn holding(device: &SimDevice, libraries: &Path) -> Running {
    let mut command = device.program("hold");
    command.args(["1048576", "1"]).env("LD_LIBRARY_PATH", libraries);
    let mut program = Running::start(command).unwrap();
    program.until_ready().unwrap();
    program
}

/// Each of them allocates once more; that is all that the log has of it.
fn all_are_recorded(device: &SimDevice, mut programs: Vec<Running>) -> Recorded {
    let recording = Agent::new(device).record().unwrap();
    for program in &mut programs {
        program.step("alloc 2097152").unwrap();
    }
    let recorded = recording.stop().unwrap();
    let events = recorded.open().unwrap().events().unwrap();
    for program in programs {
        let ours: Vec<i64> = events
            .iter()
            .filter(|event| event.pid == program.pid() as i32)
            .map(|event| event.delta_bytes)
            .collect();
        assert_eq!(ours, [2_097_152], "{}", recorded.said);
        assert!(program.finish().unwrap().1.success());
    }
    recorded
}

#[test]
fn libraries_of_any_name_and_place_are_met_as_what_is_mapped() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let strange = folder(&device, "a b\n7f00-7f80 r-xp 00000000 99 (deleted)");
    fs::copy(driver(&device), strange.join(LIBRARY)).unwrap();

    let linked = folder(&device, "linked");
    fs::copy(driver(&device), linked.join("libcuda.so.580.1")).unwrap();
    symlink("libcuda.so.580.1", linked.join(LIBRARY)).unwrap();

    // As large as its file system allows, most of it holes.
    let sparse = folder(&device, "sparse");
    fs::copy(driver(&device), sparse.join(LIBRARY)).unwrap();
    File::options().write(true).open(sparse.join(LIBRARY)).unwrap().set_len(1 << 40).unwrap();

    let programs: Vec<Running> =
        [&strange, &linked, &sparse].map(|libraries| holding(&device, libraries)).into();
    let recorded = all_are_recorded(&device, programs);
    assert_eq!(recorded.open().unwrap().losses().unwrap(), [].into(), "{}", recorded.said);
}

#[test]
fn a_file_that_was_replaced_since_is_not_taken_for_the_mapped_one() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let replace = |name: &str, replacement: &dyn Fn(&Path)| {
        let libraries = folder(&device, name);
        let library = libraries.join(LIBRARY);
        fs::copy(driver(&device), &library).unwrap();
        let program = holding(&device, &libraries);
        fs::remove_file(&library).unwrap();
        replacement(&library);
        program
    };
    let programs = vec![
        replace("gone", &|_| {}),
        replace("text", &|path| fs::write(path, "no library").unwrap()),
        replace("fifo", &|path| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        replace("folder", &|path| fs::create_dir(path).unwrap()),
        replace("link", &|path| symlink("/etc/passwd", path).unwrap()),
    ];
    let recorded = all_are_recorded(&device, programs);
    assert_eq!(recorded.open().unwrap().losses().unwrap(), [].into(), "{}", recorded.said);
}

#[test]
fn a_mount_over_the_library_is_met_as_what_is_mapped() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let (seen, mapped) = (folder(&device, "seen"), folder(&device, "mapped"));
    // What the agent finds at the path that the process tells is another file.
    fs::write(seen.join(LIBRARY), "no library").unwrap();
    fs::copy(driver(&device), mapped.join(LIBRARY)).unwrap();
    let hold = device.program("hold");
    let mut command = Command::new("unshare");
    let script = "mount --bind \"$1\" \"$2\" && exec \"$3\" 1048576 1";
    command.args(["--mount", "sh", "-c", script, "sh"]);
    command.args([mapped.join(LIBRARY), seen.join(LIBRARY)]).arg(hold.get_program());
    command.envs(device.env()).env("LD_LIBRARY_PATH", &seen);
    let mut program = Running::start(command).unwrap();
    program.until_ready().unwrap();
    let recorded = all_are_recorded(&device, vec![program]);
    assert_eq!(recorded.open().unwrap().losses().unwrap(), [].into(), "{}", recorded.said);
}

#[test]
fn a_file_that_only_has_the_librarys_name_is_said_to_be_none() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let decoys = folder(&device, "decoys");
    for name in [LIBRARY, "libcuda.so.1 (deleted)", "libcuda.so.2"] {
        fs::write(decoys.join(name), vec![b'x'; 8192]).unwrap();
    }
    File::options()
        .write(true)
        .open(decoys.join("libcuda.so.2"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let script = "import mmap, os, sys\n\
                  files = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]\n\
                  prot = mmap.PROT_READ | mmap.PROT_EXEC\n\
                  maps = [mmap.mmap(file, 4096, prot=prot) for file in files]\n\
                  print('READY', flush=True)\n\
                  sys.stdin.read()";
    let mut python = Command::new("python3");
    python.args(["-c", script]);
    python.args(fs::read_dir(&decoys).unwrap().map(|entry| entry.unwrap().path()));
    let mut program = Running::start(python).unwrap();
    program.until_ready().unwrap();
    let hold = holding(&device, device.lib_dir());
    let recorded = all_are_recorded(&device, vec![hold]);
    let losses = recorded.open().unwrap().losses().unwrap();
    assert_eq!(losses, [("library_not_probed".to_owned(), 3)].into(), "{}", recorded.said);
    program.kill().unwrap();
}

#[test]
fn run_passes_over_what_is_no_file_where_libraries_are_looked_for() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let odd = folder(&device, "odd");
    assert!(Command::new("mkfifo").arg(odd.join(LIBRARY)).status().unwrap().success());
    fs::create_dir(odd.join("libcuda.so")).unwrap();
    symlink("/dev/zero", odd.join("libcuda.so.2")).unwrap();
    symlink("libcuda.so.3", odd.join("libcuda.so.3")).unwrap();
    let path = format!("{}:{}", device.lib_dir().display(), odd.display());
    let agent = Agent::new(&device).env("LD_LIBRARY_PATH", &path);
    let recorded = agent.run("hold", &["1048576", "1"]).unwrap();
    let logged = recorded.open().unwrap();
    assert!(logged.events().unwrap().iter().any(|event| event.delta_bytes == 1_048_576));
    assert_eq!(logged.losses().unwrap(), [].into(), "{}", recorded.said);
}
