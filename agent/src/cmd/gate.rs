//! The gate in front of the program of `run`: waits until the recorder is ready, then becomes the
//! program. Its pid, its user and its environment are the program's own, so the probes can be in
//! place before the program's first instruction.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{FromRawFd as _, OwnedFd, RawFd},
        unix::process::CommandExt as _,
    },
    process::{Command, ExitCode},
};

use anyhow::Context as _;
use rustix::{
    process::{Gid, Uid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use super::{EXIT_PRECONDITION, Exit};
use crate::cli::Gate;

/// What the recorder writes when it is ready.
pub(super) const GO: u8 = b'g';

/// Not found, and found but not executable, as shells have it.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// Waits, gives privileges up, executes.
pub(super) fn run(args: &Gate) -> anyhow::Result<ExitCode> {
    if !wait(args.fd)? {
        // The recorder gave up and has said why.
        return Ok(ExitCode::from(EXIT_PRECONDITION));
    }
    become_user(args).context("become the user that the program belongs to")?;
    let (program, arguments) =
        args.command.split_first().ok_or_else(|| anyhow::anyhow!("no program to run"))?;
    let error = Command::new(program).args(arguments).exec();
    Err(not_started(program, &error))
}

/// True when the recorder is ready, false when it ended. The descriptor is closed either way: the
/// program must not inherit it.
fn wait(fd: RawFd) -> anyhow::Result<bool> {
    // SAFETY: `run` made this descriptor for this process alone and named it on the command line;
    // nothing else in this process owns it.
    let gate = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut signal = [0];
    let read = File::from(gate).read(&mut signal).context("read the gate of `vramscope run`")?;
    Ok(read == 1 && signal[0] == GO)
}

/// Groups first: without privileges they could not be set any more. This process has one thread.
fn become_user(args: &Gate) -> anyhow::Result<()> {
    let (Some(uid), Some(gid)) = (args.uid, args.gid) else { return Ok(()) };
    let groups: Vec<Gid> = args.groups.iter().map(|id| Gid::from_raw(*id)).collect();
    set_thread_groups(&groups).context("set the groups")?;
    let gid = Gid::from_raw(gid);
    set_thread_res_gid(gid, gid, gid).context("set the group")?;
    let uid = Uid::from_raw(uid);
    set_thread_res_uid(uid, uid, uid).context("set the user")
}

fn not_started(program: &OsString, error: &io::Error) -> anyhow::Error {
    let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
    Exit { code, text: format!("start {}: {error}", program.display()) }.into()
}
