//! Verbs that print text about the program: schema, completions, manual page.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::CommandFactory as _;

use super::print;
use crate::cli::{Cli, Completions, Schema};

/// `vramscope schema`.
pub(super) fn schema(args: &Schema) -> anyhow::Result<ExitCode> {
    let text = if args.json { ledger::log::schema_json() } else { ledger::log::schema_text() };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// `vramscope completions`.
pub(super) fn completions(args: &Completions) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vramscope", &mut text);
    print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

/// `vramscope man`.
pub(super) fn man() -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_mangen::Man::new(Cli::command())
        .render(&mut text)
        .context("render the manual page")?;
    print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}
