//! Scenario tests on other kernels: Debian's, in virtual machines.
//!
//! The agent, the simulated GPU and the tests are those of this machine, packed with the libraries
//! that they need into an initial file system; nothing is installed, in the machines or here (but
//! for QEMU, where root lacks it). What the tests hold the agent to is the same as on this machine's
//! kernel.

mod archive;
mod vm;

use super::{Args, Part, libtest, machine, machine::Obstacle, pythons};
use crate::{sh, tally::Tally};
use anyhow::{Context as _, Result};
use archive::Archive;
use std::{
    env,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use vm::End;

const FETCH: &str = "tests/kernels/fetch.py";
/// Where kernels and file systems are, within the target folder.
const FOLDER: &str = "kernels";
/// How long a machine may take, emulated on a slow host.
const PATIENCE: Duration = Duration::from_mins(45);

/// Tests that are run in each machine: those of a file, and what of it is left out.
const TESTS: [(&str, &[&str]); 11] = [
    ("kernels", &[]),
    // Two million calls: more than an emulated processor makes in the time that a test has.
    ("order", &["sixty_four_threads_race"]),
    ("rows", &[]),
    ("totals", &[]),
    ("oom", &[]),
    ("ranks", &[]),
    // These want a child's probes 200 ms after its fork: single links on such a processor take more.
    ("life", &["a_child_that_executes", "a_child_that_was_forked_before", "executed_by_a_thread"]),
    ("attach", &[]),
    // Nor does this child wait for its probes.
    ("contexts", &["memory_that_two_processes_share"]),
    ("native_stacks", &[]),
    ("python_stacks", &[]),
];

/// A kernel of Debian's.
struct Kernel {
    package: String,
    version: String,
    image: PathBuf,
}

pub(super) fn run(args: &Args) -> Part {
    if !args.full && !args.kernel {
        let reason = "only with --kernel or --full: it boots Debian's kernels in virtual machines";
        return Ok(Err(Obstacle::of_the_machine(reason)));
    }
    if env::consts::ARCH != "x86_64" {
        return Ok(Err(Obstacle::of_the_machine("Debian's kernels are pinned for x86-64 only")));
    }
    if let Some(obstacle) = machine::compiler_obstacle().or_else(vm::obstacle) {
        return Ok(Err(obstacle));
    }
    let folder = sh::target_dir()?.join(FOLDER);
    let kernels = fetch(&folder)?;
    let initial = folder.join("initial.cpio");
    pack(&initial, &folder, &pythons::fetch()?)?;
    let mut total = Tally::default();
    for kernel in kernels {
        total += boot(&kernel, &initial, &folder)?;
    }
    Ok(Ok(total))
}

fn fetch(folder: &Path) -> Result<Vec<Kernel>> {
    let mut fetch = sh::command("python3")?;
    println!("$ {}", sh::line(fetch.arg(FETCH).arg(folder)));
    let found = sh::output(&mut fetch)?;
    let kernel = |line: &str| {
        let mut words = line.splitn(3, ' ').map(str::to_owned);
        let (package, version) = (words.next()?, words.next()?);
        Some(Kernel { package, version, image: words.next()?.into() })
    };
    found.lines().map(kernel).collect::<Option<_>>().context("read what fetch.py found")
}

/// The initial file system.
fn pack(to: &Path, scratch: &Path, python: &Path) -> Result<()> {
    let agent = machine::build_agent()?;
    let programs = test_programs()?;
    let program = |name: &str| {
        let found = programs.iter().find(|(known, _)| known == name);
        found.map(|(_, path)| path).with_context(|| format!("cargo built no {name}"))
    };
    let mut archive = Archive::create(to)?;
    for folder in ["dev", "proc", "sys", "tmp"] {
        archive.folder(&Path::new("/").join(folder))?;
    }
    archive.program(Path::new("/init"), program("vm_init")?, scratch)?;
    archive.program(Path::new("/bin/vramscope"), &agent, scratch)?;
    let mut steps = Vec::new();
    for (name, left_out) in TESTS {
        let path = format!("/tests/{name}");
        archive.program(Path::new(&path), program(name)?, scratch)?;
        let skips = left_out.iter().flat_map(|test| ["--skip", test]);
        let step = [&path, "--test-threads=1", "--show-output"].into_iter().chain(skips);
        steps.push(step.collect::<Vec<_>>().join(" "));
    }
    archive.bytes(Path::new("/steps"), 0o644, steps.join("\n").as_bytes())?;
    simulation(&mut archive, program("sim_folder")?)?;
    interpreter(&mut archive, python)?;
    archive.finish()
}

/// The simulated GPU and its programs.
fn simulation<W: std::io::Write>(archive: &mut Archive<W>, sim_folder: &Path) -> Result<()> {
    let folder = sh::output(&mut sh::command(sim_folder)?)?;
    let folder = Path::new(folder.trim_end());
    archive.files(Path::new("/sim"), folder)?;
    let programs = folder.join("bin");
    for entry in std::fs::read_dir(&programs).context("list the simulation's programs")? {
        archive.libraries(&entry?.path())?;
    }
    Ok(())
}

/// CPython, and the programs in Python: where they lie on this machine, as the tests and the
/// interpreter know these paths.
fn interpreter<W: std::io::Write>(archive: &mut Archive<W>, python: &Path) -> Result<()> {
    let installed = python.ancestors().nth(2).context("the interpreter is in usr/bin")?;
    archive.files(installed, installed)?;
    let programs = sh::root()?.join("tests/programs");
    archive.files(&programs, &programs)?;
    archive.bytes(Path::new("/pythons"), 0o644, python.display().to_string().as_bytes())
}

/// Builds the tests' programs: names and paths.
fn test_programs() -> Result<Vec<(String, PathBuf)>> {
    let mut build = sh::cargo()?;
    build.args(["test", "--locked", "--no-run", "-p", "agent-tests", "--message-format=json"]);
    println!("$ {}", sh::line(&build));
    let mut found = Vec::new();
    for message in sh::output(&mut build)?.lines() {
        let message: serde_json::Value =
            serde_json::from_str(message).context("parse a message of cargo")?;
        let (name, path) = (message["target"]["name"].as_str(), message["executable"].as_str());
        // Programs come twice: as they are, and with a harness that tests them.
        let is_test = message["profile"]["test"].as_bool() == Some(true);
        let of_tests = message["target"]["kind"][0].as_str() == Some("test");
        if let (Some(name), Some(path)) = (name, path)
            && is_test == of_tests
        {
            found.push((name.to_owned(), path.into()));
        }
    }
    Ok(found)
}

/// Starts a machine and counts what passed in it.
fn boot(kernel: &Kernel, initial: &Path, folder: &Path) -> Result<Tally> {
    println!("-- {} {}", kernel.package, kernel.version);
    let console = folder.join(format!("{}.log", kernel.package));
    let started = Instant::now();
    let mut output = libtest::Output::default();
    let mut total = Tally::default();
    let mut is_done = false;
    let end = vm::run(&kernel.image, initial, &console, PATIENCE, |line| {
        // A test that failed counts by itself; one that crashed took the others with it.
        if line.starts_with("VM END ") && !["VM END 0", "VM END 101"].contains(&line) {
            total += Tally::FAILED;
        }
        is_done |= line == "VM DONE";
        if output.take(line) {
            println!("{line}");
        }
    })?;
    total += output.finish(true);
    if !is_done {
        let how = match end {
            End::Itself => "ended early".to_owned(),
            End::Late(limit) => format!("was not done after {} s", limit.as_secs()),
        };
        println!("{} {how}; its kernel's words: {}", kernel.package, console.display());
        total += Tally::FAILED;
    }
    println!("{} {}: {total} ({} s)", kernel.package, kernel.version, started.elapsed().as_secs());
    Ok(total)
}
