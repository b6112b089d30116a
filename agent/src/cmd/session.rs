//! What the recording verbs share: starting, waiting, finishing.

use std::{
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rustix::process::Signal;

use super::{EXIT_NOTHING_TRACED, output, precondition, say};
use crate::{
    attach::guard::Sparing,
    cli::{MaxOverhead, Recording},
    host::Host,
    kernel::{
        KernelError,
        returns::Returns,
        sign::{Sign, SignError, Who},
    },
    live::{Options, SelfTest, Session, Target},
    privileges::{self, Kept},
    stop_file,
    units::show_bytes,
};

/// How often waiting looks whether the processes still run.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// Starts a recording, or says what this machine lacks. `roots` are the processes that it will
/// follow, with their descendants.
pub(super) fn start(
    recording: &Recording,
    folder: &Path,
    target: Target,
    verb: &str,
    roots: &[u32],
) -> anyhow::Result<Session> {
    let missing = privileges::missing(true);
    if !missing.is_empty() {
        return Err(precondition(format!(
            "recording needs root, or the capabilities that this process lacks: {}. Either sudo \
             vramscope {verb} ..., or grant them (see `vramscope doctor`)",
            privileges::listed(missing)
        )));
    }
    if stop_file::exists() {
        return Err(precondition(stop_file::refusal()));
    }
    let host = Host::live();
    let kill = Returns::of_this_kernel().kill(host.kernel_release());
    let filtered = kill && !recording.risks.allow_return_probes;
    if filtered && target == Target::Host {
        return Err(precondition(RETURNS));
    }
    let who = Who::this(verb, folder, target == Target::Host, roots);
    let sign = Sign::put_up(&host, &who).map_err(cannot_start)?;
    let options = Options {
        folder: folder.to_owned(),
        owner: output::sudo_owner().map(|owner| (owner.uid, owner.gid)),
        target,
        detail: recording.detail,
        max_disk_bytes: recording.max_disk,
        ring_bytes: ring_bytes(recording.ring_size),
        full_commands: recording.full_commands,
        stacks: !recording.no_stacks,
        runtime_labels: recording.runtime_api,
        user_code: recording.user_code.clone(),
        max_overhead: recording.max_overhead.unwrap_or(match target {
            Target::Host => MaxOverhead::OF_HOST,
            Target::Processes => MaxOverhead::OF_NAMED,
        }),
        self_test: if kill && host.is_filtered(std::process::id()) != Some(false) {
            SelfTest::Dangerous
        } else {
            SelfTest::Harmless
        },
        sparing: Sparing { ucx: !recording.risks.force, filtered },
        left_out: recording.leave_out.iter().map(|function| function.0).collect(),
        command: verb.to_owned(),
        // Where the programs are this process's children, it passes signals on to them.
        kept: Kept { signals: roots.contains(&std::process::id()) },
    };
    privileges::tell_missing();
    Session::start(&options, sign).map_err(|error| {
        // What the kernel refuses before anything is recorded, this machine does not permit.
        if error.is::<KernelError>() { precondition(format!("{error:#}")) } else { error }
    })
}

/// Why the whole host is not recorded on some kernels.
const RETURNS: &str = "this kernel kills processes under a seccomp filter (containers, most services) when a probed \
     function returns, and probes of the whole host would be in every process: record single \
     processes (run, attach; filtered ones are spared), use kernel 6.14 or later, or give \
     --allow-return-probes where no CUDA program is filtered";

fn cannot_start(error: SignError) -> anyhow::Error {
    match error {
        SignError::Taken(_) | SignError::Unknown => precondition(error.to_string()),
        error => precondition(format!("{:#}", anyhow::Error::from(error))),
    }
}

/// The kernel wants a power of two of at least a page.
fn ring_bytes(asked: u64) -> u32 {
    asked.clamp(4096, 1 << 30).next_power_of_two() as u32
}

/// Why a recording ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// As it was asked to.
    Asked,
    /// By the stop file.
    Stopped,
}

/// Says that it records, and waits for Ctrl-C, SIGTERM, the end of the time, or of all `pids` (where
/// there are any), or for the stop file.
pub(super) fn wait(
    folder: &Path,
    what: &str,
    duration: Option<Duration>,
    pids: &[u32],
) -> anyhow::Result<End> {
    runtime()?.block_on(async {
        // Before a word of it: who reads that it records may end it at once.
        let mut signals = Signals::new()?;
        say_started(folder, what, duration);
        let deadline = duration.map(|duration| Instant::now() + duration);
        let host = Host::live();
        loop {
            tokio::select! {
                () = signals.next() => return Ok(End::Asked),
                () = tokio::time::sleep(LOOK) => {}
            }
            let time_is_up = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let all_ended = !pids.is_empty() && pids.iter().all(|pid| !runs(&host, *pid));
            if time_is_up || all_ended {
                return Ok(End::Asked);
            }
            if stop_file::exists() {
                return Ok(End::Stopped);
            }
        }
    })
}

/// Tells where the log grows and how to end.
fn say_started(folder: &Path, what: &str, duration: Option<Duration>) {
    let until = match duration {
        Some(duration) => format!("for {} s", duration.as_secs_f64()),
        None => "until Ctrl-C".to_owned(),
    };
    say(&format!("recording {what} {until}; log {}", folder.display()));
}

fn runs(host: &Host, pid: u32) -> bool {
    // A process that only waits to be reaped has no executable any more.
    std::fs::read_link(host.process_path(pid, "exe")).is_ok()
}

/// A runtime for signals and timers.
pub(super) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime for signals and timers")
}

/// The signals that end a recording.
pub(super) struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    /// Catches them from here on.
    pub(super) fn new() -> anyhow::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).context("catch SIGINT")?,
            terminate: signal(SignalKind::terminate()).context("catch SIGTERM")?,
            hangup: signal(SignalKind::hangup()).context("catch SIGHUP")?,
        })
    }

    /// Waits for one.
    pub(super) async fn next(&mut self) {
        self.next_signal().await;
    }

    /// Waits for one and says which.
    pub(super) async fn next_signal(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.hangup.recv() => Signal::HUP,
        }
    }
}

/// As [`finish`]; a recording that was stopped takes its probes out first and fails.
pub(super) fn end(session: &mut Session, folder: &Path, end: End) -> anyhow::Result<ExitCode> {
    if end == End::Asked {
        return finish(session, folder);
    }
    stop(session, folder)?;
    Err(precondition(stop_file::reason()))
}

/// Takes the probes out at once, and ends the recording.
pub(super) fn stop(session: &mut Session, folder: &Path) -> anyhow::Result<ExitCode> {
    session.detach(&stop_file::reason())?;
    finish(session, folder)
}

/// Ends the recording and says what was seen, what was not, and what to type next.
pub(super) fn finish(session: &mut Session, folder: &Path) -> anyhow::Result<ExitCode> {
    let summary = session.stop()?;
    let lost = match summary.lost {
        0 => "nothing lost".to_owned(),
        lost => format!("{lost} LOST (the report says what)"),
    };
    say(&format!(
        "{} events of {} process(es), {lost}; {} in {}",
        summary.events,
        summary.processes,
        show_bytes(summary.log_bytes as i64),
        folder.display(),
    ));
    if summary.processes == 0 {
        say("no process called CUDA's driver library while recording. Was it the right process? \
             `vramscope doctor` lists the libcuda copies of this host.");
        return Ok(ExitCode::from(EXIT_NOTHING_TRACED));
    }
    say(&format!("next: vramscope report {}", folder.display()));
    Ok(ExitCode::SUCCESS)
}
