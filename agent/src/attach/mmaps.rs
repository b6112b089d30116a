//! New executable mappings of every process, from perf's side band: one event a CPU, no system call
//! is traced. Where the kernel refuses, the caller polls `/proc` instead.

use std::{io, path::PathBuf};

use perf_event::{Builder, Counter, Sampler, data::Record, events::Software};

/// A file was mapped executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMapping {
    /// Process.
    pub tgid: u32,
    /// Path as the process sees it.
    pub path: PathBuf,
}

/// The side band of every CPU.
#[expect(missing_debug_implementations, reason = "perf's sampler has none")]
pub struct MappingEvents {
    samplers: Vec<Sampler>,
}

/// Bytes of each CPU's buffer: some hundred mappings.
const BUFFER_BYTES: usize = 1 << 17;

impl MappingEvents {
    /// Opens the events of the CPUs that are online.
    pub fn open(cpus: &[usize]) -> io::Result<Self> {
        let samplers = cpus.iter().map(|cpu| open_cpu(*cpu)).collect::<io::Result<_>>()?;
        Ok(Self { samplers })
    }

    /// The events, to wait on.
    pub fn counters(&self) -> impl Iterator<Item = &Counter> {
        self.samplers.iter().map(Sampler::as_counter)
    }

    /// Takes what has come, without waiting. The second value is how many records the kernel
    /// dropped; after a drop the caller must look for itself.
    pub fn drain(&mut self) -> (Vec<NewMapping>, u64) {
        let (mut mappings, mut lost) = (Vec::new(), 0);
        for sampler in &mut self.samplers {
            while let Some(record) = sampler.next_record() {
                match record.parse_record() {
                    Ok(Record::Mmap2(map)) => mappings
                        .push(NewMapping { tgid: map.pid, path: PathBuf::from(map.filename_os()) }),
                    Ok(Record::Mmap(map)) => mappings
                        .push(NewMapping { tgid: map.pid, path: PathBuf::from(map.filename_os()) }),
                    Ok(Record::Lost(record)) => lost += record.lost,
                    _ => {}
                }
            }
        }
        (mappings, lost)
    }
}

fn open_cpu(cpu: usize) -> io::Result<Sampler> {
    let mut counter = Builder::new(Software::DUMMY)
        .any_pid()
        .one_cpu(cpu)
        .mmap(true)
        .mmap2(true)
        .wakeup_watermark(1)
        .build()?;
    counter.enable()?;
    counter.sampled(BUFFER_BYTES)
}
