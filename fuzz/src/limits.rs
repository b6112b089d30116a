//! What no input may do, and how it is noticed.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use peak_alloc::PeakAlloc;
use rustix::time::{ClockId, clock_gettime};

use crate::Target;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// What an input may cost: `base` for what is there without it, so much more for each byte.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Whatever the input.
    pub base: u64,
    /// For each byte of it.
    pub per_byte: u64,
}

impl Cost {
    const fn of(self, bytes: usize) -> u64 {
        self.base + self.per_byte * bytes as u64
    }
}

/// Panics in code that is not this project's, under a net that the agent spans for them.
static CAUGHT: AtomicU64 = AtomicU64::new(0);
/// The first panic in this project's code since the last input, caught or not.
static FAULT: Mutex<Option<String>> = Mutex::new(None);

/// Sources of other projects, by their paths in a message.
const OTHERS: &str = "/registry/src/";

/// Notes panics in place of printing them. The agent catches those of the libraries that unwind and
/// name frames, and that costs one stack; one of its own is a fault wherever it is caught.
pub fn note_panics() {
    panic::set_hook(Box::new(|info| {
        if info.location().is_some_and(|location| location.file().contains(OTHERS)) {
            CAUGHT.fetch_add(1, Ordering::Relaxed);
        } else {
            let mut fault = FAULT.lock().unwrap_or_else(PoisonError::into_inner);
            fault.get_or_insert_with(|| info.to_string());
        }
    }));
}

/// How many panics of other projects' code the agent caught.
pub fn caught() -> u64 {
    CAUGHT.load(Ordering::Relaxed)
}

fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Runs a target over an input; what was wrong, if something was. ([`note_panics`] comes first.)
pub fn run(target: &Target, data: &[u8]) -> Result<(), String> {
    let data = data.get(..target.longest).unwrap_or(data);
    HEAP.reset_peak_usage();
    let (held, began) = (HEAP.current_usage(), cpu_ns());
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    let (took, peak) = (cpu_ns() - began, HEAP.peak_usage().saturating_sub(held) as u64);
    let fault = FAULT.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(fault) = fault {
        return Err(fault);
    }
    if outcome.is_err() {
        return Err("a panic of a library that nothing catches".to_owned());
    }
    let (bytes, time) = (target.memory.of(data.len()), target.time_ns.of(data.len()));
    if peak > bytes {
        return Err(format!("{peak} bytes of memory for {} of input, at most {bytes}", data.len()));
    }
    if took > time {
        return Err(format!("{took} ns for {} bytes of input, at most {time}", data.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(run: fn(&[u8])) -> Target {
        Target {
            name: "made up",
            run,
            seeds: Vec::new,
            longest: 10,
            memory: Cost { base: 1 << 22, per_byte: 0 },
            time_ns: Cost { base: 100_000_000, per_byte: 0 },
        }
    }

    #[test]
    fn what_an_input_may_not_do_is_noticed() {
        note_panics();
        let fault = |target: fn(&[u8])| run(&self::target(target), &[7; 20]).unwrap_err();
        assert_eq!(run(&target(|data| assert_eq!(data, [7; 10])), &[7; 20]), Ok(()));
        assert!(fault(|data| assert_eq!(data.len(), 20)).contains("limits.rs"));
        // Under a net of the agent's own.
        let hidden = fault(|_| drop(panic::catch_unwind(|| unreachable!("never comes"))));
        assert!(hidden.contains("never comes"), "{hidden}");
        let taken = fault(|_| drop(std::hint::black_box(vec![0_u8; 1 << 24])));
        assert!(taken.contains("bytes of memory"), "{taken}");
        let slow = fault(|_| {
            let begun = cpu_ns();
            while cpu_ns() - begun < 200_000_000 {}
        });
        assert!(slow.contains("ns for 10 bytes"), "{slow}");
    }
}
