//! What it costs a program to meet a probe at all, measured in this one.

use std::{
    ffi::CStr,
    hint::black_box,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use perf_event::{
    Builder, Counter,
    events::{Event, EventData},
};
use perf_event_open_sys::bindings::perf_event_attr;

use crate::host::{Host, Mapping};

/// This program, whatever became of its path.
pub(super) const ITSELF: &CStr = c"/proc/self/exe";
/// Calls that are timed at once.
const CALLS: u32 = 500;
/// Times that this is done: the median counts.
const ROUNDS: usize = 5;

/// Where a probe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// At the function's first instruction.
    Entry,
    /// At its return.
    Return,
}

/// A probe in this program's own [`probed`], as an event that counts.
pub(super) struct OwnProbe {
    kind: u32,
    offset: u64,
    when: When,
}

impl OwnProbe {
    /// Says where it would be; nothing is probed yet.
    pub(super) fn new(when: When) -> io::Result<Self> {
        let kind = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let kind = kind.trim().parse().map_err(io::Error::other)?;
        let offset = offset_of_probed()
            .ok_or_else(|| io::Error::other("this program's own mapping was not found"))?;
        Ok(Self { kind, offset, when })
    }

    /// Probes a process that runs this program, and counts its hits.
    pub(super) fn counter(self, pid: u32) -> io::Result<Counter> {
        let mut counter = Builder::new(self).observe_pid(pid as i32).any_cpu().build()?;
        counter.enable()?;
        Ok(counter)
    }
}

/// Whether the kernel lets the calling thread make a probe that is an event.
pub(super) fn may_probe() -> bool {
    let probe = OwnProbe::new(When::Return);
    probe.is_ok_and(|probe| Builder::new(probe).observe_self().any_cpu().build().is_ok())
}

impl Event for OwnProbe {
    fn update_attrs(self, attr: &mut perf_event_attr) {
        self.update_attrs_with_data(attr);
    }

    fn update_attrs_with_data(self, attr: &mut perf_event_attr) -> Option<Arc<dyn EventData>> {
        attr.type_ = self.kind;
        // `format/retprobe` of the events' source.
        attr.config = u64::from(self.when == When::Return);
        attr.uprobe_path = ITSELF.as_ptr() as u64;
        attr.probe_offset = self.offset;
        // The path is no part of this value.
        None
    }
}

/// Where [`probed`] is in this program's file.
fn offset_of_probed() -> Option<u64> {
    let address = probed as *const () as u64;
    let mappings = Host::live().mappings(std::process::id())?;
    let within = |map: &&Mapping| (map.start..map.end).contains(&address);
    let mapping = mappings.iter().find(within)?;
    (address - mapping.start).checked_add(mapping.offset)
}

/// The function that is probed.
#[inline(never)]
pub(super) extern "C" fn probed(value: u64) -> u64 {
    black_box(value) + 1
}

/// What a call costs more for being probed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trap {
    /// At its entry, nanoseconds.
    pub entry_ns: f64,
    /// At its return, nanoseconds.
    pub return_ns: f64,
}

impl Default for Trap {
    /// What an H200's host takes: `docs/measured.md`.
    fn default() -> Self {
        Self { entry_ns: 550.0, return_ns: 550.0 }
    }
}

impl Trap {
    /// Measures it on the calling thread, in a few milliseconds. Not for a process under a seccomp
    /// filter, which some kernels kill for a return probe ([`super::returns`]).
    pub fn measure() -> io::Result<Self> {
        let alone = median_ns();
        let with = |when: When| -> io::Result<f64> {
            let mut counter =
                OwnProbe::new(when)?.counter(rustix::thread::gettid().as_raw_pid() as u32)?;
            let probed = median_ns();
            if counter.read()? == 0 {
                return Err(io::Error::other("the probe was not met"));
            }
            Ok((probed - alone).max(0.0))
        };
        Ok(Self { entry_ns: with(When::Entry)?, return_ns: with(When::Return)? })
    }
}

/// What a call of [`probed`] takes now.
fn median_ns() -> f64 {
    let mut rounds: Vec<Duration> = (0..ROUNDS).map(|_| time()).collect();
    rounds.sort_unstable();
    rounds.get(ROUNDS / 2).map_or(0.0, |round| round.as_nanos() as f64 / f64::from(CALLS))
}

fn time() -> Duration {
    let begin = Instant::now();
    for call in 0..CALLS {
        black_box(probed(black_box(u64::from(call))));
    }
    begin.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probed_function_is_found_in_this_program() {
        assert!(offset_of_probed().is_some());
        assert_eq!(probed(1), 2);
    }
}
