//! `vramscope run`: a program and its children, recorded from their first instruction.
//!
//! The program belongs to the user: it is a child of this process, in the user's environment. What
//! needs root is the recording half, which is this process where it is root already, and else a
//! second one under `sudo` that is told the waiting program's pid.

mod elevated;
mod outside;

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::Write as _,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    path::Path,
    process::{Child, Command, ExitCode, ExitStatus},
};

use anyhow::Context as _;
use rustix::{
    io::{Errno, FdFlags, fcntl_setfd},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal},
};

pub(super) use elevated::run as elevated;

use super::{gate::GO, output, say, session};
use crate::{
    attach::candidates,
    cli::Run,
    live::{Session, Target},
    privileges, stop_file,
};

/// Runs the program and passes its exit code on.
pub(super) fn run(args: &Run) -> anyhow::Result<ExitCode> {
    if let Some(hint) = outside::hint(&args.command) {
        return Err(super::Exit { code: 2, text: hint }.into());
    }
    let folder = output::folder(&args.recording.output)?;
    // Root that lacks something is not helped by `sudo`: it is told what.
    let records = output::is_root() || privileges::missing(true).is_empty();
    if records { as_root(args, &folder) } else { elevated::as_user(args, &folder) }
}

/// A program that waits behind its gate.
struct Waiting {
    child: Child,
    gate: File,
}

impl Waiting {
    /// Starts the gate; as the user who called `sudo`, where somebody did.
    fn start(command: &[OsString]) -> anyhow::Result<Self> {
        let (read, write) =
            pipe_with(PipeFlags::empty()).context("make a pipe for the program's gate")?;
        fcntl_setfd(&write, FdFlags::CLOEXEC).context("keep the gate's end to this process")?;
        let child = spawn_gate(command, &read)?;
        Ok(Self { child, gate: File::from(write) })
    }

    /// The program's process id.
    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the gate: the program is not run.
    fn cancel(self) {
        let Self { mut child, gate } = self;
        drop(gate);
        // It ends by itself, and leaves nothing that could be told of.
        drop(child.wait());
    }

    /// Opens the gate.
    fn go(mut self) -> anyhow::Result<Child> {
        self.gate.write_all(&[GO]).context("start the program: it ended before it began")?;
        Ok(self.child)
    }
}

fn spawn_gate(command: &[OsString], read: &OwnedFd) -> anyhow::Result<Child> {
    let itself = std::env::current_exe().context("find this program's own file")?;
    let mut gate = Command::new(itself);
    gate.arg("__gate").arg("--fd").arg(read.as_raw_fd().to_string());
    if let Some(owner) = output::sudo_owner() {
        gate.arg("--uid").arg(owner.uid.to_string()).arg("--gid").arg(owner.gid.to_string());
        gate.arg("--groups").arg(groups_of(&owner)?);
        // What sudo replaced is the user's own again.
        for (name, value) in output::user_environment(&owner) {
            gate.env(name, value);
        }
    }
    gate.arg("--").args(command);
    gate.spawn().context("start the program's gate")
}

/// Supplementary groups, as `id -G` tells them.
fn groups_of(owner: &output::Owner) -> anyhow::Result<String> {
    let id = Command::new("id")
        .args(["-G", "--", &owner.uid.to_string()])
        .output()
        .with_context(|| format!("ask `id` for the groups of user {}", owner.uid))?;
    let groups = String::from_utf8_lossy(&id.stdout).trim().replace(' ', ",");
    Ok(if groups.is_empty() { owner.gid.to_string() } else { groups })
}

/// This process records.
fn as_root(args: &Run, folder: &Path) -> anyhow::Result<ExitCode> {
    // The program will be a child of this process.
    let roots = [std::process::id()];
    // First: it has the caller's rights, which this process gives up to record.
    let waiting = Waiting::start(&args.command)?;
    let session = match session::start(&args.recording, folder, Target::Processes, "run", &roots) {
        Ok(session) => session,
        Err(error) => {
            waiting.cancel();
            return Err(error);
        }
    };
    let library_path = std::env::var_os("LD_LIBRARY_PATH");
    follow(&session, waiting.pid(), library_path.as_deref())?;
    let mut recording = Some(session);
    let mut stop = || {
        if let Some(mut session) = recording.take() {
            say(&stop_file::reason());
            say_failure(session::stop(&mut session, folder));
        }
    };
    // Caught from here on: Ctrl-C is the program's, and what it wrote must still be sealed.
    let status = session::runtime()?.block_on(async {
        let signals = session::Signals::new()?;
        wait_for(waiting.go()?, signals, &mut stop).await
    })?;
    if let Some(mut session) = recording {
        say_failure(session::finish(&mut session, folder));
    }
    Ok(code_of(status))
}

/// The exit code is the program's, whatever becomes of the recording.
fn say_failure(ended: anyhow::Result<ExitCode>) {
    if let Err(error) = ended {
        say(&format!("{error:#}"));
    }
}

/// Probes the libraries that the program will load, and follows it.
fn follow(session: &Session, pid: u32, library_path: Option<&OsStr>) -> anyhow::Result<()> {
    session.prepare(candidates::libcuda(library_path), pid);
    session.follow(&[pid]).context("follow the program")
}

/// Waits for the program; SIGTERM and SIGHUP are passed on, SIGINT reaches it by itself. `stop` is
/// called as long as the stop file is there: the program goes on without being recorded.
async fn wait_for(
    mut child: Child,
    mut signals: session::Signals,
    stop: &mut impl FnMut(),
) -> anyhow::Result<ExitStatus> {
    let pid = Pid::from_child(&child);
    let waiter = tokio::task::spawn_blocking(move || child.wait());
    tokio::pin!(waiter);
    loop {
        tokio::select! {
            status = &mut waiter => {
                return status.context("wait for the program")?.context("wait for the program");
            }
            () = tokio::time::sleep(session::LOOK) => {
                if stop_file::exists() {
                    stop();
                }
            }
            signal = signals.next_signal() => {
                if signal != Signal::INT {
                    pass_on(pid, signal);
                }
            }
        }
    }
}

/// Passes a signal on. That the program has ended meanwhile is no failure.
fn pass_on(pid: Pid, signal: Signal) {
    match rustix::process::kill_process(pid, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => say(&format!(
            "{signal:?} could not be passed on to the program (pid {}): {error}. A program of \
             another user takes CAP_KILL; end it with sudo kill {}",
            pid.as_raw_nonzero(),
            pid.as_raw_nonzero(),
        )),
    }
}

/// The program's exit code, or 128 + its signal, as shells have it.
fn code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(code as u8)
}
