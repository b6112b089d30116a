//! The reader thread: empties the rings into batches, in an order in which a process's calls never
//! follow its end.
//!
//! Two rings are not ordered against each other. A process's first record (`KIND_SEEN`) is written
//! before its first call, and its last call before its end. So each round takes the calls first and
//! the life records after them: a beginning in this round's life records goes before this round's
//! calls; an exit goes after the *next* round's calls, since its last calls may have been written
//! after this round had emptied their ring. An exec goes with this round: the calls that follow it
//! may be here already, and time stamps tell those from the old program's.

use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, SyncSender},
    },
};

use agent_common::{
    call::{KIND_CALL, KIND_NOTE, RawCall},
    life::{KIND_EXEC, KIND_EXIT, KIND_FORK, RawLife},
};
use aya::maps::{MapData, RingBuf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::FromBytes as _;

use super::spares::Spares;
use crate::{attach::worker::Command, clock, decode, kernel::Rings, stacks::resolver::ToResolver};

/// Calls of one batch at most; a batch is the unit of the channel to the state thread.
const BATCH_CALLS: usize = 8192;
/// Pause when the rings were empty. The ring holds about a second of the heaviest load.
const IDLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// Pause when they were not: long enough to batch, short against the ring's second.
const BUSY: Timespec = Timespec { tv_sec: 0, tv_nsec: 3_000_000 };

/// What came out of the rings in one round.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Beginnings of processes (seen, fork): apply before the calls.
    pub begins: Vec<RawLife>,
    /// Calls that returned.
    pub calls: Vec<RawCall>,
    /// Ends of processes and of programs (exit, exec): hand on after the calls.
    pub ends: Vec<RawLife>,
    /// Stacks and code objects as they came, for the resolver.
    pub stacks: Vec<Vec<u8>>,
    /// What the resolver made of them.
    pub resolved: Vec<Resolved>,
    /// Records that could not be read: another length or kind than this agent knows.
    pub undecodable: u64,
    /// Every call that returned before this moment (`CLOCK_BOOTTIME`) has been handed over.
    pub complete_until_ns: u64,
}

/// A stack that was resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Process.
    pub tgid: u32,
    /// What stands for the stack in the kernel half.
    pub key: u64,
    /// Content hash.
    pub stack_id: i64,
    /// Whose what it allocates is; `None`: not known, or told before.
    pub library: Option<Arc<str>>,
    /// The key stood for another stack before.
    pub mismatch: bool,
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.begins.is_empty()
            && self.calls.is_empty()
            && self.ends.is_empty()
            && self.stacks.is_empty()
            && self.undecodable == 0
    }
}

/// Empties the rings until `stop`, and then of all that was written before it, however much waits.
/// The attaching thread hears of new and ended processes first: its probes race a child's first
/// call.
pub fn run(
    mut rings: Rings,
    stop: &Arc<AtomicBool>,
    attach: &Sender<Command>,
    out: &SyncSender<ToResolver>,
    spares: &Spares<RawCall>,
) {
    let mut held_ends = Vec::new();
    let mut last_rounds = LastRounds::default();
    loop {
        // Read before the rings, so that nothing written before the stop is left.
        let stopped = stop.load(Ordering::Acquire);
        let (batch, full) = round(&mut rings, &mut held_ends, spares.take());
        tell_attaching(&batch, attach);
        let (idle, until_ns) = (batch.is_empty(), batch.complete_until_ns);
        if out.send(ToResolver::Batch(batch)).is_err() {
            return;
        }
        if stopped && last_rounds.are_over(until_ns) {
            // The resolver lives as long as this.
            return out.send(ToResolver::Stop).unwrap_or_default();
        }
        if !full {
            wait(&rings.life, if idle { &IDLE } else { &BUSY });
        }
    }
}

/// Pauses, but not beyond a fork or an exec.
fn wait(life: &RingBuf<MapData>, pause: &Timespec) {
    let mut polled = [PollFd::from_borrowed_fd(life.as_fd(), PollFlags::IN)];
    // A signal only means looking once more.
    poll(&mut polled, Some(pause)).unwrap_or_default();
}

fn tell_attaching(batch: &Batch, attach: &Sender<Command>) {
    let forks = batch.begins.iter().filter(|life| life.kind == KIND_FORK);
    let forks = forks.map(|life| Command::Forked { tgid: life.tgid, parent: life.parent_tgid });
    let ends = batch.ends.iter().map(|life| match life.kind {
        KIND_EXIT => Command::Ended(life.tgid),
        _ => Command::Executed { tgid: life.tgid, by_leader: life.exec_tid == life.tgid },
    });
    for command in forks.chain(ends) {
        // The attaching thread lives as long as the recording.
        attach.send(command).unwrap_or_default();
    }
}

/// The rounds after the stop: until everything from before it is handed over, and as many more as
/// an end of a process may be held back. On a host that never pauses the rings never are empty, so
/// the time of what they hold decides.
#[derive(Debug, Default)]
struct LastRounds {
    stopped_ns: Option<u64>,
    complete: u32,
}

impl LastRounds {
    /// Takes in a round after the stop; true if it was the last one.
    fn are_over(&mut self, complete_until_ns: u64) -> bool {
        let stopped_ns = *self.stopped_ns.get_or_insert_with(clock::boot_ns);
        self.complete += u32::from(complete_until_ns >= stopped_ns);
        self.complete == 2
    }
}

/// One round; true if the calls did not fit in one batch and more wait.
fn round(rings: &mut Rings, held_ends: &mut Vec<RawLife>, calls: Vec<RawCall>) -> (Batch, bool) {
    let mut batch = Batch { calls, complete_until_ns: clock::boot_ns(), ..Batch::default() };
    let full = take_calls(&mut rings.calls, &mut batch);
    // After the calls: the stack of each was written before it.
    while let Some(item) = rings.stacks.next() {
        batch.stacks.push(item.to_vec());
    }
    if full {
        // Ends wait: their last calls may still lie in the ring.
        batch.complete_until_ns = batch.calls.last().map_or(0, |call| call.exit_ns);
        take_begins(&mut rings.life, &mut batch, held_ends);
    } else {
        batch.ends = std::mem::take(held_ends);
        take_begins(&mut rings.life, &mut batch, held_ends);
    }
    (batch, full)
}

fn take_calls(ring: &mut RingBuf<MapData>, batch: &mut Batch) -> bool {
    while batch.calls.len() < BATCH_CALLS {
        let Some(item) = ring.next() else { return false };
        match decode::record(&item) {
            Ok(call) if call.kind == KIND_CALL => batch.calls.push(call),
            _ => batch.undecodable += 1,
        }
    }
    true
}

fn take_begins(ring: &mut RingBuf<MapData>, batch: &mut Batch, held_ends: &mut Vec<RawLife>) {
    while let Some(item) = ring.next() {
        match item.first() {
            Some(&KIND_CALL | &KIND_NOTE) => match decode::record(&item) {
                Ok(call) => batch.calls.push(call),
                Err(_) => batch.undecodable += 1,
            },
            _ => match RawLife::read_from_bytes(&item) {
                Ok(life) if life.kind == KIND_EXEC => batch.ends.push(life),
                Ok(life) if life.kind == KIND_EXIT => held_ends.push(life),
                Ok(life) => batch.begins.push(life),
                Err(_) => batch.undecodable += 1,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_go_on_until_all_from_before_the_stop_was_handed_over() {
        let mut rounds = LastRounds::default();
        let before_ns = clock::boot_ns();
        for _ in 0..10 {
            assert!(!rounds.are_over(before_ns - 1_000_000_000), "a full ring is not the end");
        }
        let after_ns = clock::boot_ns() + 1;
        assert!(!rounds.are_over(after_ns), "ends are held back for a round");
        assert!(rounds.are_over(after_ns));
    }
}
