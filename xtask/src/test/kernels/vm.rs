//! A virtual machine: a kernel, an initial file system, and what its second serial line says.

use super::super::machine::Obstacle;
use crate::sh;
use anyhow::{Context as _, Result};
use std::{
    fs::{self, OpenOptions},
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

const QEMU: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// The file systems lie in memory, twice while they are unpacked.
const MEMORY_MIB: &str = "3072";
const CPUS: &str = "2";

/// How a machine came to its end.
pub(super) enum End {
    /// It turned itself off, or crashed.
    Itself,
    /// It was killed after this time.
    Late(Duration),
}

/// What keeps virtual machines from being started. Root gets the package.
pub(super) fn obstacle() -> Option<Obstacle> {
    if sh::succeeds(QEMU, &["--version"]) {
        return None;
    }
    if sh::is_root() && sh::succeeds("apt-get", &["--version"]) {
        println!("{QEMU} is missing: installing it");
        let options = ["install", "-qq", "-y", "--no-install-recommends", PACKAGE];
        let mut install = Command::new("apt-get");
        let done = sh::run(Command::new("apt-get").args(["update", "-qq"]))
            .and_then(|()| sh::run(install.env("DEBIAN_FRONTEND", "noninteractive").args(options)));
        match done {
            Ok(()) if sh::succeeds(QEMU, &["--version"]) => return None,
            Ok(()) => {}
            Err(error) => println!("{error:#}"),
        }
    }
    Some(Obstacle::avoidable(format!("no {QEMU}: `apt-get install {PACKAGE}`")))
}

/// How the machine's processor is made: by this one, where it can, else in software.
pub(super) fn accelerator() -> &'static [&'static str] {
    // A processor that says nothing of it may have a /dev/kvm all the same, which runs some
    // programs and breaks on others.
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let virtualizes = cpus
        .lines()
        .find_map(|line| line.strip_prefix("flags"))
        .is_some_and(|flags| flags.split(' ').any(|flag| flag == "vmx" || flag == "svm"));
    if virtualizes && OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok() {
        &["-accel", "kvm", "-cpu", "host"]
    } else {
        &["-accel", "tcg,thread=multi", "-cpu", "max"]
    }
}

/// Starts the kernel, hands on each line of the second serial line, and waits for the end.
/// `console` gets what the kernel itself says.
pub(super) fn run(
    kernel: &Path,
    initial: &Path,
    console: &Path,
    limit: Duration,
    mut line: impl FnMut(&str),
) -> Result<End> {
    let mut command = Command::new(QEMU);
    command.args(accelerator()).args(["-m", MEMORY_MIB, "-smp", CPUS]);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.arg("-serial").arg(format!("file:{}", console.display())).args(["-serial", "stdio"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initial);
    command.args(["-append", "console=ttyS0 panic=-1 rdinit=/init"]);
    println!("$ {}", sh::line(&command));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = Killed(child.with_context(|| format!("run {QEMU}"))?);
    let stdout = child.0.stdout.take().context("take the machine's serial line")?;
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            // Nobody listens any more where the machine took too long.
            if sender
                .send(String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned())
                .is_err()
            {
                break;
            }
        }
    });
    let started = Instant::now();
    loop {
        match lines.recv_timeout(limit.saturating_sub(started.elapsed())) {
            Ok(said) => line(&said),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => return Ok(End::Late(limit)),
        }
    }
    child.0.wait().context("wait for the machine")?;
    Ok(End::Itself)
}

/// A process that does not outlive this.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail where it ended already, which is what is wanted.
        self.0.kill().unwrap_or_default();
        drop(self.0.wait());
    }
}
