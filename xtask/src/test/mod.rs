//! `cargo xtask test`: every test that this machine can run, and what it can't, with the reason.
//!
//! Parts, in order: the committed objects, unit and doc tests, fuzz targets (guided by coverage with
//! `--full`), tests of the simulated GPU, scenario tests under the real agent on it (as root), the
//! stacks of a newer CPython (with `--full`), PyTorch's wheels (with `--wheels` or `--full`), readers of
//! the log in Python, and the scenarios on other kernels (with `--kernel` or `--full`). A part that can't
//! run is a skip; in continuous integration (`CI=true`) a skip that the machine could have avoided is a
//! failure.

mod kernels;
mod libtest;
mod machine;
mod pythons;
mod readers;
mod wheels;

use crate::{ebpf, fuzz, sh, tally::Tally};
use anyhow::{Context as _, Result};
use machine::Obstacle;
use std::{
    io::{BufRead as _, BufReader},
    process::{Command, ExitCode, Stdio},
    time::Instant,
};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also run what takes long: tests see `VRAMSCOPE_FULL=1`
    #[arg(long)]
    full: bool,
    /// Only the scenario tests on Debian's kernels, in virtual machines (part of --full)
    #[arg(long)]
    kernel: bool,
    /// Only PyTorch's wheels: whether what is probed is in each version (part of --full)
    #[arg(long, conflicts_with = "kernel")]
    wheels: bool,
}

/// Seconds for each fuzz target: as many inputs as a change by mistake needs.
const QUICK_FUZZ_S: u64 = 4;
/// Seconds for each, guided by coverage.
const FULL_FUZZ_S: u64 = 60;

/// The part that `--kernel` names.
const KERNELS: &str = "scenario tests on other kernels";

/// The part that `--wheels` names.
const WHEELS: &str = "functions in PyTorch's wheels";

/// A part either ran and has counts, or met an obstacle.
type Part = Result<Result<Tally, Obstacle>>;

pub(crate) fn run(args: &Args) -> ExitCode {
    for agent in machine::running_agents() {
        println!(
            "note: an agent runs already ({agent}): a second one is refused, so stop it first"
        );
    }
    let parts: [(&str, &dyn Fn() -> Part); 10] = [
        ("objects of the kernel half", &|| Ok(Ok(ebpf::check()?))),
        ("unit and doc tests", &|| unit(args)),
        ("fuzz targets", &|| quick_fuzz(args)),
        ("fuzz targets, guided by coverage", &|| guided_fuzz(args)),
        ("simulated GPU", &|| simulated_gpu(args)),
        ("scenario tests under the real agent", &|| scenarios(args)),
        ("stacks of a newer CPython", &|| pythons::run(args)),
        (WHEELS, &|| wheels::run(args)),
        ("readers of the log in Python", &|| readers::run(args.full)),
        (KERNELS, &|| kernels::run(args)),
    ];
    let only = only(args);
    let parts = parts.into_iter().filter(|(name, _)| only.is_none_or(|only| *name == only));
    let mut total = Tally::default();
    let mut summary = Vec::new();
    for (name, part) in parts {
        println!("== test: {name}");
        let started = Instant::now();
        let (tally, note) = counted(part());
        println!("{note}");
        summary.push(format!("{name}: {tally} ({} s){note}", started.elapsed().as_secs()));
        total += tally;
    }
    println!("== test: summary\n{}\n{total}", summary.join("\n"));
    total.exit_code()
}

/// The part that is asked for by its name.
fn only(args: &Args) -> Option<&'static str> {
    match args {
        Args { kernel: true, .. } => Some(KERNELS),
        Args { wheels: true, .. } => Some(WHEELS),
        _ => None,
    }
}

/// Counts of a part, with a remark where it did not run or ended in an error.
fn counted(part: Part) -> (Tally, String) {
    match part {
        Ok(Ok(tally)) => (tally, String::new()),
        Ok(Err(obstacle)) if obstacle.avoidable && machine::is_ci() => {
            (Tally::FAILED, format!(": a skip this machine could avoid: {}", obstacle.reason))
        }
        Ok(Err(obstacle)) => (Tally::SKIPPED, format!(": skipped: {}", obstacle.reason)),
        Err(error) => (Tally::FAILED, format!(": {error:#}")),
    }
}

fn unit(args: &Args) -> Part {
    Ok(Ok(cargo_test(&["test", "--locked", "--no-fail-fast"], args, &[])?))
}

fn quick_fuzz(args: &Args) -> Part {
    let own = cargo_test(&["test", "--locked", "-p", "fuzz", "--lib"], args, &[])?;
    let mut total = fuzz::quick(QUICK_FUZZ_S)?;
    total += own;
    Ok(Ok(total))
}

fn guided_fuzz(args: &Args) -> Part {
    if !args.full {
        let reason = "only with --full: it is a build of its own; `cargo xtask fuzz` runs it too";
        return Ok(Err(Obstacle::of_the_machine(reason)));
    }
    match fuzz::missing() {
        Some(reason) => Ok(Err(Obstacle::avoidable(reason))),
        None => Ok(Ok(fuzz::guided(FULL_FUZZ_S, None)?)),
    }
}

fn simulated_gpu(args: &Args) -> Part {
    if let Some(obstacle) = machine::compiler_obstacle() {
        return Ok(Err(obstacle));
    }
    Ok(Ok(cargo_test(&["test", "--locked", "-p", "agent-tests", "--lib"], args, &[])?))
}

fn scenarios(args: &Args) -> Part {
    if let Some(obstacle) = machine::probe_obstacle().or_else(machine::compiler_obstacle) {
        return Ok(Err(obstacle));
    }
    let agent = machine::build_agent()?;
    // One at a time: they share one kernel, and one agent a host is the rule.
    let harness = ["--", "--test-threads=1", "--show-output"];
    let test =
        [&["test", "--locked", "--no-fail-fast", "-p", "agent-tests", "--test", "*"][..], &harness]
            .concat();
    Ok(Ok(cargo_test(&test, args, &[("VRAMSCOPE_BIN", &agent.display().to_string())])?))
}

/// Runs `cargo test`, shows its output as it comes and counts its tests.
fn cargo_test(cargo_args: &[&str], args: &Args, env: &[(&str, &str)]) -> Result<Tally> {
    let mut command = sh::cargo()?;
    command.args(cargo_args).envs(env.iter().copied());
    set_full(&mut command, args.full);
    println!("$ {}", sh::line(&command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("run `{}`", sh::line(&command)))?;
    let mut output = libtest::Output::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.context("read the tests' output")?;
            let line = String::from_utf8_lossy(&line);
            if output.take(&line) {
                println!("{line}");
            }
        }
    }
    let status = child.wait().context("wait for cargo test")?;
    Ok(output.finish(status.success()))
}

fn set_full(command: &mut Command, full: bool) {
    if full {
        command.env("VRAMSCOPE_FULL", "1");
    }
}
