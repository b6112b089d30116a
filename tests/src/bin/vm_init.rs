//! The first program of a virtual machine: `cargo xtask test --kernel` packs it as `/init`.
//!
//! Mounts what the agent and the tests need, runs each line of `/steps` (`PROGRAM
//! ARGUMENT...`; no quoting) and tells on the second serial line what became of it: `VM BEGIN` and
//! the command, its output, `VM END` and its exit code. `/pythons` lists the interpreters for
//! the tests. `VM DONE` comes after the last step; without
//! it the machine ended early.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};
use rustix::{
    mount::{MountFlags, mount},
    system::{RebootCommand, reboot},
};

/// Where the host listens; the first line belongs to the kernel.
const CONSOLE: &str = "/dev/ttyS1";

/// File systems, in the order in which they can be mounted.
const MOUNTS: [(&str, &str); 7] = [
    ("devtmpfs", "/dev"),
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("tmpfs", "/tmp"),
    ("tracefs", "/sys/kernel/tracing"),
    ("debugfs", "/sys/kernel/debug"),
    ("bpf", "/sys/fs/bpf"),
];

/// Where the agent and the simulated GPU are.
const ENVIRONMENT: [(&str, &str); 6] = [
    ("PATH", "/bin"),
    ("HOME", "/tmp"),
    ("VRAMSCOPE_BIN", "/bin/vramscope"),
    ("VRAMSCOPE_TEST_SIM", "/sim"),
    ("VRAMSCOPE_TEST_SLOWNESS", "10"),
    ("VRAMSCOPE_NVML_LIB", "/sim/lib/libnvidia-ml.so.1"),
];

fn main() -> Result<()> {
    // What goes wrong before there is a console shows in the kernel's panic.
    for (kind, place) in MOUNTS {
        fs::create_dir_all(place).or_else(already_there)?;
        mount(kind, place, kind, MountFlags::empty(), None)
            .with_context(|| format!("mount {kind} at {place}"))?;
    }
    let mut console = OpenOptions::new().write(true).open(CONSOLE)?;
    if let Err(error) = steps(&mut console) {
        writeln!(console, "VM ERROR {error:#}")?;
    }
    writeln!(console, "VM DONE")?;
    rustix::termios::tcdrain(&console)?;
    reboot(RebootCommand::PowerOff).context("turn the machine off")
}

fn already_there(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
}

fn steps(console: &mut File) -> Result<()> {
    let steps = fs::read_to_string("/steps").context("read /steps")?;
    let pythons = fs::read_to_string("/pythons").context("read /pythons")?;
    for step in steps.lines() {
        let mut words = step.split(' ');
        let program = words.next().with_context(|| format!("no program in the step {step:?}"))?;
        let mut command = Command::new(program);
        command
            .args(words)
            .envs(ENVIRONMENT)
            .env("VRAMSCOPE_TEST_PYTHONS", &pythons)
            .stdin(Stdio::null());
        command.stdout(console.try_clone()?).stderr(console.try_clone()?);
        writeln!(console, "VM BEGIN {step}")?;
        let status = command.status().with_context(|| format!("run {program}"))?;
        let ended = status.code().map_or_else(|| status.to_string(), |code| code.to_string());
        writeln!(console, "VM END {ended}")?;
    }
    Ok(())
}
