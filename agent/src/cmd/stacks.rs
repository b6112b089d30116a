//! `vramscope stacks`: whole stacks, those that hold most first.

use std::process::ExitCode;

use anyhow::Context as _;
use ledger::{
    call::Level,
    report::{StackChoice, StackOrder},
};

use super::print;
use crate::cli::{Stacks, StacksBy};

/// Reads the logs and prints the stacks.
pub(super) fn run(args: &Stacks) -> anyhow::Result<ExitCode> {
    let by = match args.by {
        StacksBy::Live => StackOrder::Live,
        StacksBy::Allocated => StackOrder::Allocated,
        StacksBy::Count => StackOrder::Count,
    };
    let level = args.level.as_deref().and_then(Level::parse);
    let choice = StackChoice { top: args.top, level, by, pid: args.pid };
    print(&choice.list(&args.logs).context("read the log")?)?;
    Ok(ExitCode::SUCCESS)
}
