//! The thread that asks NVML.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use super::{GpuReader, Sample, Sampler};

/// Two clocks: one that never jumps, to decide what is due, and the wall clock of the log.
pub trait Clock {
    /// Nanoseconds of a clock that never jumps.
    fn monotonic_ns(&self) -> u64;
    /// Nanoseconds since the epoch.
    fn epoch_ns(&self) -> i64;
}

/// The clocks of the system.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn monotonic_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn epoch_ns(&self) -> i64 {
        crate::clock::epoch_ns()
    }
}

#[derive(Debug, Default)]
struct Signals {
    stop: AtomicBool,
    trigger: AtomicBool,
    dropped: AtomicU64,
}

/// A running sampler. Dropping it stops the thread without waiting for it.
#[derive(Debug)]
pub struct SamplerThread {
    signals: Arc<Signals>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a thread that hands each sample to `sink`, which says whether it took it. `sink` must
/// not wait: a full queue refuses (`try_send(sample).is_ok()`), and the refused sample is counted.
///
/// # Errors
/// Where the system cannot start a thread.
pub fn spawn<R, S>(sampler: Sampler<R>, sink: S) -> io::Result<SamplerThread>
where
    R: GpuReader + Send + 'static,
    S: FnMut(Sample) -> bool + Send + 'static,
{
    let signals = Arc::new(Signals::default());
    let shared = Arc::clone(&signals);
    let thread = thread::Builder::new()
        .name("nvml".to_owned())
        .spawn(move || run(sampler, sink, &SystemClock::default(), &shared))?;
    Ok(SamplerThread { signals, thread: Some(thread) })
}

/// Steps whenever a step is due until told to stop.
fn run<R: GpuReader>(
    mut sampler: Sampler<R>,
    mut sink: impl FnMut(Sample) -> bool,
    clock: &impl Clock,
    signals: &Signals,
) {
    while !signals.stop.load(Relaxed) {
        if signals.trigger.swap(false, Relaxed) {
            sampler.trigger();
        }
        let step = sampler.step(clock);
        for sample in step.samples {
            if !sink(sample) {
                signals.dropped.fetch_add(1, Relaxed);
            }
        }
        // Ends early, at a trigger or stop, or for no reason: then nothing is due and it waits on.
        let wait = step.next_ns.saturating_sub(clock.monotonic_ns());
        thread::park_timeout(Duration::from_nanos(wait));
    }
}

/// Hastens a sampler's process lists.
#[derive(Clone, Debug)]
pub struct Trigger {
    signals: Arc<Signals>,
    thread: Thread,
}

impl Trigger {
    /// Has the process lists asked for soon; cheap, and may be called for every event.
    pub fn pull(&self) {
        if !self.signals.trigger.swap(true, Relaxed) {
            self.thread.unpark();
        }
    }
}

impl SamplerThread {
    /// What hastens it.
    pub fn trigger(&self) -> Option<Trigger> {
        let thread = self.thread.as_ref()?.thread().clone();
        Some(Trigger { signals: Arc::clone(&self.signals), thread })
    }

    /// Samples that the sink refused so far.
    pub fn dropped(&self) -> u64 {
        self.signals.dropped.load(Relaxed)
    }

    /// Stops the thread and waits for the call into NVML that it may be in.
    pub fn stop(mut self) {
        self.tell_to_stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the NVML thread had panicked; samples since then are missing");
        }
    }

    fn tell_to_stop(&self) {
        self.signals.stop.store(true, Relaxed);
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for SamplerThread {
    fn drop(&mut self) {
        self.tell_to_stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::nvml::testing::{FakeClock, FakeReader};

    const PATIENCE: Duration = Duration::from_secs(20);

    fn sampler() -> Sampler<FakeReader> {
        Sampler::new(FakeReader::new(1, &FakeClock::default()))
    }

    #[test]
    fn samples_arrive_triggers_hasten_and_stop_ends() {
        let (sender, receiver) = mpsc::sync_channel(1000);
        let running = spawn(sampler(), move |sample| sender.try_send(sample).is_ok()).unwrap();
        let list = |sample: &Sample| matches!(sample, Sample::Processes { .. });
        let next_list = || loop {
            if list(&receiver.recv_timeout(PATIENCE).unwrap()) {
                return Instant::now();
            }
        };
        let first = next_list();
        running.trigger().unwrap().pull();
        let second = next_list();
        assert!(second.duration_since(first) < Duration::from_millis(900));
        assert_eq!(running.dropped(), 0);
        running.stop();
        while receiver.recv_timeout(PATIENCE).is_ok() {}
        assert_eq!(receiver.recv(), Err(mpsc::RecvError), "the thread has ended");
    }

    #[test]
    fn what_the_sink_refuses_is_counted() {
        let running = spawn(sampler(), |_| false).unwrap();
        let start = Instant::now();
        while running.dropped() < 2 && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(running.dropped() >= 2);
        running.stop();
    }
}
