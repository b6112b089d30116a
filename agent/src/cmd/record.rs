//! `vramscope record`: the whole host.

use std::process::ExitCode;

use super::{output, session};
use crate::{cli::Record, live::Target};

/// Records until Ctrl-C or the time is up.
pub(super) fn run(args: &Record) -> anyhow::Result<ExitCode> {
    let folder = output::folder(&args.recording.output)?;
    let mut session = session::start(&args.recording, &folder, Target::Host, "record", &[])?;
    let end = session::wait(&folder, "every process of this host", args.duration, &[])?;
    session::end(&mut session, &folder, end)
}
