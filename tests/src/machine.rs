//! What this machine lacks for scenario tests, and how a test says that it did not run.

use std::{env, path::Path};

use anyhow::Result;

use crate::sim::{Sim, SimDevice};

/// Why a test can't run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// In words, with the remedy.
    pub reason: String,
    /// The user could remove it on this machine.
    pub avoidable: bool,
}

impl Obstacle {
    /// One that installing something or becoming root would remove.
    pub fn avoidable(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), avoidable: true }
    }

    /// One that is the machine's own.
    pub fn of_the_machine(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), avoidable: false }
    }
}

/// What keeps probes from being loaded.
pub fn probe_obstacle() -> Option<Obstacle> {
    if !rustix::process::geteuid().is_root() {
        return Some(Obstacle::avoidable("not root: scenario tests load probes"));
    }
    let needed = [
        ("/sys/kernel/btf/vmlinux", "the kernel has no BTF"),
        ("/sys/bus/event_source/devices/uprobe", "the kernel has no uprobes"),
    ];
    if let Some(missing) = needed.iter().find(|(path, _)| !Path::new(path).exists()) {
        return Some(Obstacle::of_the_machine(format!("{}: no {}", missing.1, missing.0)));
    }
    let (major, minor) = kernel_version();
    ((major, minor) < COOKIES_SINCE).then(|| {
        Obstacle::of_the_machine(format!("kernel {major}.{minor} has no cookies of probes"))
    })
}

/// The first kernel that tells a program which probe it runs for.
pub const COOKIES_SINCE: (u32, u32) = (5, 15);

/// Major and minor number of the running kernel.
pub fn kernel_version() -> (u32, u32) {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Says that a test did not run, in the words that `cargo xtask test` counts.
///
/// # Panics
///
/// In continuous integration (`CI=true`), where the obstacle was avoidable.
#[expect(clippy::print_stdout, reason = "the runner of the tests reads it there")]
pub fn skip(obstacle: &Obstacle) {
    let in_ci = env::var("CI").is_ok_and(|value| value == "true" || value == "1");
    assert!(!(in_ci && obstacle.avoidable), "a skip that this machine could avoid: {obstacle:?}");
    println!("SKIP {}", obstacle.reason);
}

/// GPUs of the test's own, with libraries of its own: probes belong to the file, so other tests'
/// programs are not met. `None`, and a word on stdout, where this machine can't load probes.
pub fn gpus() -> Result<Option<SimDevice>> {
    if let Some(obstacle) = probe_obstacle() {
        skip(&obstacle);
        return Ok(None);
    }
    Sim::build()?.device()?.own_libraries().map(Some)
}
