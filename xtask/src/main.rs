//! vramscope's development commands: `cargo xtask help` lists them.
//!
//! One file (or folder) per command; `sh` runs programs, `tally` counts what passed.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a developer's tool: what it prints is what it is for"
)]

mod demo;
mod dist;
mod ebpf;
mod fuzz;
mod lint;
mod paths;
mod sh;
mod tally;
mod test;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Builds, checks and shows vramscope.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the kernel half and store its objects in agent/ebpf-objects
    Ebpf(ebpf::Args),
    /// Formatting, lints of both halves, docs, licences and the house rules
    Lint,
    /// Unit, doc, scenario and reader tests; says what it skips and why
    Test(test::Args),
    /// Fuzz what reads others' bytes, guided by coverage
    Fuzz(fuzz::Args),
    /// Record a leaking job on a simulated GPU and report it: no GPU needed
    Demo(demo::Args),
    /// Build the self-contained x86-64 tarball
    Dist(dist::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Ebpf(args) => ebpf::run(&args),
        Command::Lint => lint::run(),
        Command::Test(args) => Ok(test::run(&args)),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Dist(args) => dist::run(&args),
    };
    exit_code(result)
}

/// A failed check has printed its findings already; anything else is explained here.
fn exit_code(result: Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("cargo xtask: {error:#}");
        ExitCode::FAILURE
    })
}
