//! `vramscope report`: what a log tells.

use std::process::ExitCode;

use anyhow::Context as _;
use ledger::report::{Model, who};

use super::{EXIT_LEAK, EXIT_LOSS, EXIT_OOM, print};
use crate::cli::{FailOn, Report};

/// Reads the logs and prints the report.
pub(super) fn run(args: &Report, color: bool) -> anyhow::Result<ExitCode> {
    if let Some(site) = &args.who {
        print(&who(&args.logs, site).context("read the log")?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let model = Model::read(&args.logs).context("read the log")?;
    if args.json {
        let mut json = serde_json::to_string_pretty(&model).context("write the report as JSON")?;
        json.push('\n');
        print(&json)?;
    } else {
        print(&model.text(color))?;
    }
    Ok(exit_code(&args.fail_on, &model).map_or(ExitCode::SUCCESS, ExitCode::from))
}

/// The code of the first condition, in the order of the codes, that holds.
fn exit_code(fail_on: &[FailOn], model: &Model) -> Option<u8> {
    let holds = |condition: FailOn| match condition {
        FailOn::Leak => model.leaks(),
        FailOn::Oom => model.refused(),
        FailOn::Loss => model.losses.iter().any(|loss| loss.affects_account),
    };
    [(FailOn::Leak, EXIT_LEAK), (FailOn::Oom, EXIT_OOM), (FailOn::Loss, EXIT_LOSS)]
        .into_iter()
        .find(|(condition, _)| fail_on.contains(condition) && holds(*condition))
        .map(|(_, code)| code)
}
