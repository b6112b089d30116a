//! What is asked of NVML when: memory ten times a second, processes and sensors once.
//!
//! Pure but for the reader and the clock that it is given.

use ledger::rows::{AnnotationRow, DeviceSampleRow};

use super::{Clock, GpuReader, Lane, Memory, Utilization, column};

/// Pace of memory totals.
const MEMORY_NS: u64 = 100_000_000;
/// Pace of process lists and of sensors.
const SECOND_NS: u64 = 1_000_000_000;
/// Sensor values older than this are not put into a row as if they were of its time.
const SENSORS_STALE_NS: u64 = 2_500_000_000;

/// Memory that NVML charges to one process on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessReading {
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// NVML's number of the device.
    pub nvml_index: i32,
    /// UUID of the device or MIG instance.
    pub gpu_uuid: String,
    /// Bytes; `None` where NVML does not say.
    pub used_bytes: Option<u64>,
    /// When the call began, nanoseconds since the epoch. What happened until `ts_ns + read_ns` may
    /// or may not be in the figure.
    pub ts_ns: i64,
    /// Time that the call took.
    pub read_ns: i64,
}

/// What the sampler found.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// Totals of a device: when its used bytes changed, and once a second.
    Device(DeviceSampleRow),
    /// All processes of one device; a process that is not among them holds nothing there. `None`
    /// where the device has no list to give.
    Processes {
        /// Position of the device in [`GpuReader::devices`].
        slot: usize,
        /// When the call began, nanoseconds since the epoch.
        ts_ns: i64,
        /// Time that the call took.
        read_ns: i64,
        /// Bytes in use on the device and reserved by its driver, where these were the same before
        /// and after the call.
        device_bytes: Option<(u64, Option<u64>)>,
        /// The readings.
        readings: Option<Vec<ProcessReading>>,
    },
    /// The pace changed.
    Note(AnnotationRow),
}

/// What one step gave.
#[derive(Debug, Default)]
pub struct Step {
    /// What was found.
    pub samples: Vec<Sample>,
    /// When the next step is due, by the monotonic clock.
    pub next_ns: u64,
}

/// Sensors of one device, when they were last read.
#[derive(Clone, Copy, Debug, Default)]
struct Sensors {
    at_ns: Option<u64>,
    utilization: Option<Utilization>,
    temperature: Option<u32>,
    power: Option<u32>,
}

/// The row last given for one device.
#[derive(Clone, Copy, Debug)]
struct Given {
    at_ns: u64,
    used_bytes: Option<u64>,
}

/// Decides what is due, asks, and turns answers into rows.
#[derive(Debug)]
pub struct Sampler<R> {
    reader: R,
    memory: Lane,
    processes: Lane,
    sensors: Lane,
    triggered: bool,
    read: Vec<Sensors>,
    given: Vec<Option<Given>>,
    /// Slots whose processes are asked for: a GPU in MIG mode only repeats its instances.
    listed: Vec<usize>,
}

impl<R: GpuReader> Sampler<R> {
    /// A sampler for which everything is due.
    pub fn new(reader: R) -> Self {
        let gpus = reader.devices();
        let parents: Vec<_> = gpus.iter().filter_map(|gpu| gpu.mig_parent_uuid.as_ref()).collect();
        let listed = (0..gpus.len())
            .filter(|slot| gpus.get(*slot).is_some_and(|gpu| !parents.contains(&&gpu.uuid)))
            .collect();
        let count = gpus.len();
        Self {
            reader,
            memory: Lane::new("memory totals", MEMORY_NS),
            processes: Lane::new("process lists", SECOND_NS),
            sensors: Lane::new("sensors", SECOND_NS),
            triggered: false,
            read: vec![Sensors::default(); count],
            given: vec![None; count],
            listed,
        }
    }

    /// The devices and what reads them.
    pub fn reader(&self) -> &R {
        &self.reader
    }

    /// Has the process lists asked for soon: a context appeared, an allocation failed.
    pub fn trigger(&mut self) {
        self.triggered = true;
    }

    /// Asks what is due now.
    pub fn step(&mut self, clock: &impl Clock) -> Step {
        let mut samples = Vec::new();
        if self.sensors.due(clock.monotonic_ns()) {
            self.read_sensors(clock);
        }
        if self.memory.due(clock.monotonic_ns()) {
            self.read_memory(clock, &mut samples);
        }
        let now = clock.monotonic_ns();
        if self.processes.due(now) || (self.triggered && now >= self.processes.trigger_ns()) {
            self.triggered = false;
            self.read_processes(clock, &mut samples);
        }
        let now = clock.monotonic_ns();
        for lane in [&mut self.memory, &mut self.processes, &mut self.sensors] {
            samples.extend(lane.note(now).map(|text| note(clock, text)));
        }
        Step { samples, next_ns: self.next_ns() }
    }

    fn next_ns(&self) -> u64 {
        let processes =
            if self.triggered { self.processes.trigger_ns() } else { self.processes.next_ns() };
        self.memory.next_ns().min(self.sensors.next_ns()).min(processes)
    }

    fn read_sensors(&mut self, clock: &impl Clock) {
        let mut slowest = 0;
        for (slot, read) in self.read.iter_mut().enumerate() {
            let reader = &self.reader;
            *read = Sensors {
                at_ns: Some(clock.monotonic_ns()),
                utilization: timed(clock, &mut slowest, || reader.utilization(slot)),
                temperature: timed(clock, &mut slowest, || reader.temperature(slot)),
                power: timed(clock, &mut slowest, || reader.power(slot)),
            };
        }
        self.sensors.asked(clock.monotonic_ns(), slowest);
    }

    fn read_memory(&mut self, clock: &impl Clock, samples: &mut Vec<Sample>) {
        let mut slowest = 0;
        for slot in 0..self.given.len() {
            let (ts_ns, mut took) = (clock.epoch_ns(), 0);
            let memory = timed(clock, &mut took, || self.reader.memory(slot)).unwrap_or_default();
            slowest = slowest.max(took);
            let now = clock.monotonic_ns();
            if self.is_news(slot, memory.used_bytes, now) {
                let row = self.device_row(slot, ts_ns, now, memory);
                let read_ns = took as i64;
                samples.extend(row.map(|row| Sample::Device(DeviceSampleRow { read_ns, ..row })));
            }
        }
        self.memory.asked(clock.monotonic_ns(), slowest);
    }

    /// Whether a row is due: used bytes changed, or the last row is a second old. A little less
    /// than a second, so that ten steps of a tenth make one.
    fn is_news(&mut self, slot: usize, used_bytes: Option<u64>, at_ns: u64) -> bool {
        let Some(given) = self.given.get_mut(slot) else { return false };
        let old = given.is_some_and(|given| {
            given.used_bytes == used_bytes
                && at_ns.saturating_sub(given.at_ns) < SECOND_NS - MEMORY_NS / 2
        });
        if !old {
            *given = Some(Given { at_ns, used_bytes });
        }
        !old
    }

    fn device_row(
        &self,
        slot: usize,
        ts_ns: i64,
        now_ns: u64,
        memory: Memory,
    ) -> Option<DeviceSampleRow> {
        let gpu = self.reader.devices().get(slot)?;
        let sensors = self.read.get(slot).copied().filter(|sensors| {
            sensors.at_ns.is_some_and(|at| now_ns.saturating_sub(at) <= SENSORS_STALE_NS)
        });
        let sensors = sensors.unwrap_or_default();
        let percent = |of: fn(Utilization) -> u32| {
            sensors.utilization.and_then(|utilization| i32::try_from(of(utilization)).ok())
        };
        Some(DeviceSampleRow {
            ts_ns,
            nvml_index: gpu.nvml_index,
            gpu_uuid: gpu.uuid.clone(),
            used_bytes: memory.used_bytes.and_then(column),
            free_bytes: memory.free_bytes.and_then(column),
            total_bytes: memory.total_bytes.and_then(column),
            reserved_bytes: memory.reserved_bytes.and_then(column),
            utilization_percent: percent(|utilization| utilization.gpu_percent),
            memory_utilization_percent: percent(|utilization| utilization.memory_percent),
            temperature_celsius: sensors.temperature.and_then(|celsius| celsius.try_into().ok()),
            power_milliwatts: sensors.power.map(i64::from),
            read_ns: 0,
        })
    }

    fn read_processes(&mut self, clock: &impl Clock, samples: &mut Vec<Sample>) {
        let mut slowest = 0;
        for &slot in &self.listed {
            let Some(gpu) = self.reader.devices().get(slot) else { continue };
            // What is asked slowly already is not asked here as well.
            let quick = self.memory.is_quick();
            let memory = || if quick { self.reader.memory(slot) } else { None };
            let before = memory();
            let (ts_ns, mut took) = (clock.epoch_ns(), 0);
            let processes = timed(clock, &mut took, || self.reader.processes(slot));
            slowest = slowest.max(took);
            let read_ns = took as i64;
            let after = memory();
            let steady = before.filter(|_| before == after).unwrap_or_default();
            let device_bytes = steady.used_bytes.map(|used| (used, steady.reserved_bytes));
            let reading = |process: super::ProcessMemory| ProcessReading {
                pid: process.pid,
                nvml_index: gpu.nvml_index,
                gpu_uuid: gpu.uuid.clone(),
                used_bytes: process.used_bytes,
                ts_ns,
                read_ns,
            };
            let readings = processes.map(|list| list.into_iter().map(reading).collect());
            samples.push(Sample::Processes { slot, ts_ns, read_ns, device_bytes, readings });
        }
        self.processes.asked(clock.monotonic_ns(), slowest);
    }
}

/// Asks, and raises `slowest_ns` to the time that it took.
fn timed<T>(clock: &impl Clock, slowest_ns: &mut u64, ask: impl FnOnce() -> T) -> T {
    let start = clock.monotonic_ns();
    let answer = ask();
    *slowest_ns = (*slowest_ns).max(clock.monotonic_ns().saturating_sub(start));
    answer
}

fn note(clock: &impl Clock, text: String) -> Sample {
    Sample::Note(AnnotationRow {
        ts_ns: clock.epoch_ns(),
        proc_id: None,
        kind: "warning".to_owned(),
        text,
        value: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml::testing::{FakeClock, FakeReader};

    const MS: u64 = 1_000_000;

    /// Steps whenever a step is due until `end_ns`; gives all found.
    fn drive(
        sampler: &mut Sampler<FakeReader>,
        clock: &FakeClock,
        end_ns: u64,
        mut at: impl FnMut(u64, &FakeReader),
    ) -> Vec<Sample> {
        let mut found = Vec::new();
        loop {
            at(clock.monotonic_ns(), sampler.reader());
            let step = sampler.step(clock);
            found.extend(step.samples);
            if step.next_ns >= end_ns {
                return found;
            }
            clock.set(step.next_ns.max(clock.monotonic_ns()));
        }
    }

    fn devices(found: &[Sample]) -> Vec<&DeviceSampleRow> {
        let mut rows = Vec::new();
        for sample in found {
            if let Sample::Device(row) = sample {
                rows.push(row);
            }
        }
        rows
    }

    fn lists(found: &[Sample]) -> usize {
        found.iter().filter(|sample| matches!(sample, Sample::Processes { .. })).count()
    }

    fn sampler(gpus: usize) -> (Sampler<FakeReader>, FakeClock) {
        let clock = FakeClock::default();
        (Sampler::new(FakeReader::new(gpus, &clock)), clock)
    }

    #[test]
    fn still_memory_gives_a_row_a_second() {
        let (mut sampler, clock) = sampler(2);
        let found = drive(&mut sampler, &clock, 10_000 * MS, |_, _| {});
        let rows = devices(&found).len();
        assert!((20..=22).contains(&rows), "{rows} rows of 2 devices in 10 s");
        assert_eq!(lists(&found), 20);
        let asked = sampler.reader().memory_calls();
        // Ten times a second, and before and after each list.
        assert!((235..=245).contains(&asked), "{asked} calls for 2 devices in 10 s");
    }

    #[test]
    fn changes_are_told_at_once() {
        let (mut sampler, clock) = sampler(1);
        let found = drive(&mut sampler, &clock, 5_000 * MS, |now, reader| {
            reader.set_used(0, Some(now / (200 * MS)));
        });
        let used: Vec<_> = devices(&found).iter().filter_map(|row| row.used_bytes).collect();
        let mut distinct = used.clone();
        distinct.dedup();
        assert_eq!(distinct, (0..=24).collect::<Vec<i64>>());
        assert_eq!(used.len(), distinct.len());
    }

    #[test]
    fn not_available_is_null_and_never_zero() {
        let (mut sampler, clock) = sampler(1);
        sampler.reader().set_used(0, None);
        sampler.reader().hide_all();
        let found = drive(&mut sampler, &clock, 3_000 * MS, |_, _| {});
        let rows = devices(&found);
        assert!(rows.len() >= 3);
        for row in rows {
            assert_eq!((row.used_bytes, row.total_bytes, row.reserved_bytes), (None, None, None));
            assert_eq!((row.utilization_percent, row.temperature_celsius), (None, None));
            assert_eq!(row.power_milliwatts, None);
        }
        let nothing = |sample: &&Sample| matches!(sample, Sample::Processes { readings: None, .. });
        assert_eq!(found.iter().filter(nothing).count(), lists(&found));
    }

    #[test]
    fn rows_carry_sensors_and_readings_their_device() {
        let (mut sampler, clock) = sampler(1);
        sampler.reader().set_processes(0, &[(42, Some(7)), (43, None)]);
        let step = sampler.step(&clock);
        let row = devices(&step.samples)[0];
        assert_eq!((row.utilization_percent, row.memory_utilization_percent), (Some(50), Some(20)));
        assert_eq!((row.temperature_celsius, row.power_milliwatts), (Some(40), Some(300_000)));
        assert_eq!((row.gpu_uuid.as_str(), row.nvml_index), ("GPU-0", 0));
        assert!(row.read_ns > 0 && row.ts_ns > 0);
        let Some(Sample::Processes { readings: Some(readings), .. }) = step.samples.last() else {
            panic!("no process list in {step:?}");
        };
        let told: Vec<_> = readings.iter().map(|r| (r.pid, r.used_bytes)).collect();
        assert_eq!(told, [(42, Some(7)), (43, None)]);
        assert_eq!((readings[0].gpu_uuid.as_str(), readings[0].read_ns), ("GPU-0", row.read_ns));
    }

    #[test]
    fn triggers_are_rate_limited() {
        let (mut sampler, clock) = sampler(1);
        sampler.step(&clock);
        let mut count = 0;
        for _ in 0..2000 {
            clock.set(clock.monotonic_ns() + MS);
            sampler.trigger();
            count += lists(&sampler.step(&clock).samples);
        }
        assert!((18..=21).contains(&count), "{count} lists in 2 s of constant triggers");
    }

    #[test]
    fn a_trigger_is_served_before_the_second_is_over() {
        let (mut sampler, clock) = sampler(1);
        clock.set(MS);
        sampler.step(&clock);
        clock.set(300 * MS);
        sampler.step(&clock);
        sampler.trigger();
        clock.set(301 * MS);
        assert_eq!(lists(&sampler.step(&clock).samples), 1);
    }

    #[test]
    fn slow_memory_calls_slow_memory_only_and_are_noted() {
        let (mut sampler, clock) = sampler(1);
        sampler.reader().set_memory_ns(3 * MS);
        let found = drive(&mut sampler, &clock, 120_000 * MS, |_, _| {});
        let asked = sampler.reader().memory_calls();
        assert!(asked < 20, "{asked} calls of 3 ms in two minutes");
        assert!(lists(&found) > 110);
        let notes = found.iter().filter(|sample| matches!(sample, Sample::Note(_))).count();
        assert!((1..=12).contains(&notes), "{notes}");
    }

    #[test]
    fn stale_sensors_are_left_out() {
        let (mut sampler, clock) = sampler(1);
        sampler.reader().set_sensor_ns(5 * MS);
        let found = drive(&mut sampler, &clock, 60_000 * MS, |_, _| {});
        let rows = devices(&found);
        assert!(rows.iter().any(|row| row.temperature_celsius.is_none()));
        assert!(rows.iter().any(|row| row.temperature_celsius.is_some()));
    }

    #[test]
    fn a_gpu_in_mig_mode_lists_its_instances_only() {
        let clock = FakeClock::default();
        let mut sampler = Sampler::new(FakeReader::with_mig(&clock));
        let step = sampler.step(&clock);
        let slots: Vec<_> = step
            .samples
            .iter()
            .filter_map(|sample| match sample {
                Sample::Processes { slot, .. } => Some(*slot),
                _ => None,
            })
            .collect();
        assert_eq!(slots, [1, 2], "0 is the parent");
        assert_eq!(devices(&step.samples).len(), 3);
    }
}
