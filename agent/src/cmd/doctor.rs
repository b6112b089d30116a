//! `vramscope doctor`: what this machine needs.

use std::process::ExitCode;

use anyhow::Context as _;

use super::{EXIT_PRECONDITION, print};
use crate::{
    cli::Doctor,
    doctor::{checks, failed, render},
    probes::{Library, rows_of},
};

/// Prints the checks; exit code 3 where one fails.
pub(super) fn run(args: &Doctor, color: bool) -> anyhow::Result<ExitCode> {
    let symbols: Vec<&str> = rows_of(Library::Cuda).map(|(_, probe)| probe.symbol).collect();
    let checks = checks(&symbols);
    if args.json {
        let text = serde_json::to_string_pretty(&checks).context("write the checks as JSON")?;
        print(&format!("{text}\n"))?;
    } else if !args.quick {
        print(&render(&checks, color))?;
    }
    Ok(if failed(&checks) { ExitCode::from(EXIT_PRECONDITION) } else { ExitCode::SUCCESS })
}
