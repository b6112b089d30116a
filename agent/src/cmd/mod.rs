//! One file a verb, and what they share: exit codes, logging, output.

#[cfg(feature = "live")]
mod attach;
mod compact;
#[cfg(feature = "live")]
mod doctor;
#[cfg(feature = "live")]
mod gate;
#[cfg(feature = "live")]
mod output;
#[cfg(feature = "live")]
mod record;
mod recover;
mod report;
#[cfg(feature = "live")]
mod run;
#[cfg(feature = "live")]
mod session;
mod stacks;
mod texts;

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

use crate::cli::{Cli, Color, Command};

/// A precondition that this machine does not meet: root, BTF, a driver.
pub const EXIT_PRECONDITION: u8 = 3;
/// Nothing was traced.
pub const EXIT_NOTHING_TRACED: u8 = 4;

/// `--fail-on leak`: memory grows.
pub const EXIT_LEAK: u8 = 10;
/// `--fail-on oom`: an allocation was refused.
pub const EXIT_OOM: u8 = 11;
/// `--fail-on loss`: records are missing.
pub const EXIT_LOSS: u8 = 13;

/// An error that ends the program with a code of its own.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Exit {
    /// Exit code.
    pub code: u8,
    /// What happened and what to do next.
    pub text: String,
}

/// A precondition that is not met.
pub fn precondition(text: impl Into<String>) -> anyhow::Error {
    Exit { code: EXIT_PRECONDITION, text: text.into() }.into()
}

/// Logs go to stderr; stdout belongs to output.
pub fn init_logging(cli: &Cli) {
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, _) => "debug",
    };
    let filter = EnvFilter::try_from_env("VRAMSCOPE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(colored(cli.color, io::stderr().is_terminal()))
        .with_target(false)
        .without_time()
        .init();
}

/// Whether to colour a stream.
pub fn colored(choice: Color, is_terminal: bool) -> bool {
    match choice {
        Color::Always => true,
        Color::Never => false,
        Color::Auto => {
            is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        }
    }
}

/// Does what was asked.
pub fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    let color = colored(cli.color, io::stdout().is_terminal());
    match cli.command {
        #[cfg(feature = "live")]
        Command::Run(args) => run::run(&args),
        #[cfg(feature = "live")]
        Command::Attach(args) => attach::run(&args),
        #[cfg(feature = "live")]
        Command::Record(args) => record::run(&args),
        #[cfg(feature = "live")]
        Command::Doctor(args) => doctor::run(&args, color),
        #[cfg(feature = "live")]
        Command::Gate(args) => gate::run(&args),
        #[cfg(feature = "live")]
        Command::Agent(args) => run::elevated(&args),
        #[cfg(feature = "live")]
        Command::Filtered(args) => {
            crate::kernel::returns::child(args.forbidden).context("meet a probe")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Report(args) => report::run(&args, color),
        Command::Stacks(args) => stacks::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Compact(args) => compact::run(&args),
        Command::Schema(args) => texts::schema(&args),
        Command::Completions(args) => texts::completions(&args),
        Command::Man => texts::man(),
    }
}

/// Prints an error with its causes and gives the exit code.
pub fn fail(error: &anyhow::Error) -> ExitCode {
    let mut stderr = io::stderr().lock();
    // Nothing is left to do where stderr is closed.
    writeln!(stderr, "vramscope: {error:#}").unwrap_or_default();
    match error.downcast_ref::<Exit>() {
        Some(exit) => ExitCode::from(exit.code),
        None => ExitCode::FAILURE,
    }
}

/// Writes to stdout. A reader that went away (`| head`) is no failure.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("write to stdout"),
    }
}

/// Says something to the user on stderr.
pub fn say(text: &str) {
    let mut stderr = io::stderr().lock();
    // Nothing is left to do where stderr is closed.
    writeln!(stderr, "vramscope: {text}").unwrap_or_default();
}
