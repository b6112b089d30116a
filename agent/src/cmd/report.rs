//! placeholder
pub(super) fn run(_: &crate::cli::Report, _c: bool) -> anyhow::Result<std::process::ExitCode> { Ok(std::process::ExitCode::SUCCESS) }
