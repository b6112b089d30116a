//! The attaching thread: process life and new mappings in, probes out.

use std::{
    num::NonZeroU32,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{info, warn};

use agent_common::quota::Quota;

use super::{Attacher, FollowError, brake::Braking, mmaps};
/// What the attaching thread is told.
#[derive(Debug)]
pub enum Command {
    /// Follow these processes from their start; the answer says when their probes are in place.
    Follow(Vec<u32>, Sender<Result<(), String>>),
    /// Follow these processes, which run already.
    FollowRunning(Vec<u32>, Sender<Result<(), String>>),
    /// Probe for every process of the host.
    HostWide(Sender<Result<(), String>>),
    /// Probe these files for a process before it maps them.
    Prepare(Vec<PathBuf>, Option<NonZeroU32>),
    /// A followed process made a child.
    Forked {
        /// The child.
        tgid: u32,
        /// Its parent.
        parent: u32,
    },
    /// A followed process executed another program.
    Executed {
        /// Process.
        tgid: u32,
        /// Its main thread called `execve`, and not another.
        by_leader: bool,
    },
    /// A process ended.
    Ended(u32),
    /// A process mapped a file.
    Mapped(Vec<mmaps::NewMapping>),
    /// The kernel dropped mapping events.
    MappingsLost(u64),
    /// Take every probe out, and put none in any more.
    Detach(Sender<Result<(), String>>),
    /// Take detail away from a process.
    Brake(Braking),
    /// Limit what one user may add to the ring of calls, or lift the limits.
    Quota(Quota),
    /// The recording ends.
    Stop,
}

/// How often everything is looked through where mapping events work, and where they do not.
const RARELY: Duration = Duration::from_secs(30);
const OFTEN: Duration = Duration::from_secs(1);
/// How often processes that use a file are looked for: one that made no call ends without a word, and
/// its file is held until then.
const TIDY: Duration = Duration::from_secs(2);

/// Serves commands until [`Command::Stop`].
pub fn run(mut attacher: Attacher, commands: &Receiver<Command>, events_work: bool) {
    let period = if events_work { RARELY } else { OFTEN };
    let (mut next, mut tidy) = (Instant::now() + period, Instant::now() + TIDY);
    loop {
        let wait = next.min(tidy).saturating_duration_since(Instant::now());
        match commands.recv_timeout(wait) {
            Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(command) => serve(&mut attacher, command),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if next <= Instant::now() {
            attacher.look_at_all();
            next = Instant::now() + period;
        }
        if tidy <= Instant::now() {
            attacher.tidy();
            tidy = Instant::now() + TIDY;
        }
    }
}

fn serve(attacher: &mut Attacher, command: Command) {
    match command {
        Command::Follow(tgids, answer) => {
            let result = tgids.into_iter().try_for_each(|tgid| attacher.follow(tgid));
            reply(&answer, result.map_err(FollowError::from));
        }
        Command::FollowRunning(tgids, answer) => reply(&answer, attacher.follow_running(&tgids)),
        Command::HostWide(answer) => {
            attacher.begin_host_wide();
            reply(&answer, Ok(()));
        }
        Command::Prepare(files, tgid) => {
            for file in files {
                attacher.prepare(&file, tgid);
            }
        }
        Command::Forked { tgid, parent } => attacher.adopt(tgid, parent),
        Command::Executed { tgid, by_leader } => attacher.executed(tgid, by_leader),
        Command::Ended(tgid) => attacher.forget(tgid),
        Command::Mapped(mappings) => {
            for mapping in mappings {
                attacher.mapped(mapping.tgid, &mapping.path);
            }
        }
        Command::MappingsLost(count) => {
            attacher.tell(super::Notice::MappingsLost(count));
            attacher.look_at_all();
        }
        Command::Detach(answer) => {
            attacher.detach();
            reply(&answer, Ok(()));
        }
        Command::Brake(braking) => attacher.brake(braking),
        Command::Quota(quota) => attacher.set_quota(quota),
        Command::Stop => {}
    }
}

fn reply(answer: &Sender<Result<(), String>>, result: Result<(), FollowError>) {
    // Who asked may have given up.
    answer.send(result.map_err(|error| super::chain(&error))).unwrap_or_default();
}

/// Opens the mapping events; `None` (with a word to the user) where the kernel refuses.
pub fn open_events() -> Option<mmaps::MappingEvents> {
    match mmaps::MappingEvents::open(&online_cpus()) {
        Ok(events) => Some(events),
        Err(error) => {
            warn!(%error, "no mapping events from perf: looking through /proc every second instead");
            None
        }
    }
}

/// Waits for mapping events and hands them on until `stop`.
pub fn watch(mut events: mmaps::MappingEvents, stop: &Arc<AtomicBool>, out: &Sender<Command>) {
    let timeout = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    while !stop.load(Ordering::Acquire) {
        {
            let fds = events.fds();
            let mut polled: Vec<_> =
                fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            // A signal or a spurious wake-up only means looking once more.
            if poll(&mut polled, Some(&timeout)).is_err() {
                continue;
            }
        }
        let (mappings, lost) = events.drain();
        let told = (mappings.is_empty() || out.send(Command::Mapped(mappings)).is_ok())
            && (lost == 0 || out.send(Command::MappingsLost(lost)).is_ok());
        if !told {
            return;
        }
    }
    info!("mapping events closed");
}

impl mmaps::MappingEvents {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.counters()
            .map(|counter| {
                // SAFETY: the descriptor is the counter's own and stays open while `self`, which
                // owns the counter, is borrowed.
                unsafe { BorrowedFd::borrow_raw(counter.as_raw_fd()) }
            })
            .collect()
    }
}

/// CPUs from `/sys/devices/system/cpu/online`, `0-3,8` for example.
fn online_cpus() -> Vec<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    parse_cpus(&text)
}

fn parse_cpus(text: &str) -> Vec<usize> {
    text.trim()
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse_cpus;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpus("0\n"), [0]);
        assert_eq!(parse_cpus("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert!(parse_cpus("").is_empty());
    }
}
