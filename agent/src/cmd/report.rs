//! `vramscope report`: what a log tells.

use std::process::ExitCode;

use anyhow::Context as _;
use ledger::report::Model;

use super::print;
use crate::cli::Report;

/// Reads the logs and prints the report.
pub(super) fn run(args: &Report, color: bool) -> anyhow::Result<ExitCode> {
    let model = Model::read(&args.logs).context("read the log")?;
    if args.json {
        let mut json = serde_json::to_string_pretty(&model).context("write the report as JSON")?;
        json.push('\n');
        print(&json)?;
    } else {
        print(&model.text(color))?;
    }
    Ok(ExitCode::SUCCESS)
}
