//! The reader thread: empties the rings into batches, in an order in which a process's calls never
//! follow its end.
//!
//! Two rings are not ordered against each other. A process's first record (`KIND_SEEN`) is written
//! before its first call, and its last call before its end. So each round takes the calls first and
//! the life records after them: a beginning in this round's life records goes before this round's
//! calls; an end goes after the *next* round's calls, since its last calls may have been written
//! after this round had emptied their ring.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::SyncSender,
    },
    time::Duration,
};

use agent_common::{
    call::{KIND_CALL, KIND_NOTE, RawCall},
    life::{KIND_EXEC, KIND_EXIT, RawLife},
};
use aya::maps::{MapData, RingBuf};
use zerocopy::FromBytes as _;

use super::Message;
use crate::{clock, decode, kernel::Rings};

/// Calls of one batch at most; a batch is the unit of the channel to the state thread.
const BATCH_CALLS: usize = 8192;
/// Pause when the rings were empty. The ring holds about a second of the heaviest load.
const IDLE: Duration = Duration::from_millis(10);
/// Pause when they were not: long enough to batch, short against the ring's second.
const BUSY: Duration = Duration::from_millis(3);

/// What came out of the rings in one round.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Beginnings of processes (seen, fork): apply before the calls.
    pub begins: Vec<RawLife>,
    /// Calls that returned.
    pub calls: Vec<RawCall>,
    /// Ends of processes (exec, exit): apply after the calls.
    pub ends: Vec<RawLife>,
    /// Records that could not be read: another length or kind than this agent knows.
    pub undecodable: u64,
    /// Every call that returned before this moment (`CLOCK_BOOTTIME`) has been handed over.
    pub complete_until_ns: u64,
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.begins.is_empty()
            && self.calls.is_empty()
            && self.ends.is_empty()
            && self.undecodable == 0
    }
}

/// Rounds after the stop in which the rings were found empty: one for the last calls, one for the
/// ends that waited for them, one that finds nothing.
const LAST_ROUNDS: u32 = 3;

/// Empties the rings until `stop`, then to their end.
pub fn run(mut rings: Rings, stop: &Arc<AtomicBool>, out: &SyncSender<Message>) {
    let mut held_ends = Vec::new();
    let mut rounds_left = LAST_ROUNDS;
    while rounds_left > 0 {
        // Read before the rings, so that nothing written before the stop is left.
        let stopping = stop.load(Ordering::Acquire);
        let (batch, full) = round(&mut rings, &mut held_ends);
        let idle = batch.is_empty();
        if out.send(Message::Batch(batch)).is_err() {
            return;
        }
        if stopping && !full {
            rounds_left -= 1;
        } else if !full {
            std::thread::sleep(if idle { IDLE } else { BUSY });
        }
    }
}

/// One round; true if the calls did not fit in one batch and more wait.
fn round(rings: &mut Rings, held_ends: &mut Vec<RawLife>) -> (Batch, bool) {
    let mut batch = Batch { complete_until_ns: clock::boot_ns(), ..Batch::default() };
    let full = take_calls(&mut rings.calls, &mut batch);
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
                Ok(life) if life.kind == KIND_EXIT || life.kind == KIND_EXEC => {
                    held_ends.push(life);
                }
                Ok(life) => batch.begins.push(life),
                Err(_) => batch.undecodable += 1,
            },
        }
    }
}
