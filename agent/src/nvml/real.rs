//! NVML itself, opened at run time.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

use nvml_wrapper::{
    Device, Nvml, enum_wrappers::device::TemperatureSensor, enums::device::UsedGpuMemory,
    error::NvmlError, struct_wrappers::device::ProcessInfo,
};

use super::{Driver, Gpu, GpuReader, Memory, ProcessMemory, Utilization, known};

/// Names the library to open in place of `libnvidia-ml.so.1`.
pub const LIBRARY_ENV: &str = "VRAMSCOPE_NVML_LIB";

/// The name that the driver installs for programs; the one without a number is for linkers.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// What every user of the driver opens first.
const CONTROL_FILE: &str = "/dev/nvidiactl";

fn library() -> OsString {
    let named = env::var_os(LIBRARY_ENV).filter(|path| !path.is_empty());
    named.unwrap_or_else(|| OsString::from(LIBRARY))
}

/// Most MIG instances that one GPU is asked for; hardware has at most seven.
const MIG_LIMIT: u32 = 64;

/// Why there is no NVML. The agent goes on without: it still sees every call, but no totals.
#[derive(Debug, thiserror::Error)]
pub enum NvmlAbsent {
    /// The library could not be opened.
    #[error(
        "open {library}: {source}; install the NVIDIA driver, or set {LIBRARY_ENV} to the \
             library's path"
    )]
    NoLibrary {
        /// What was opened.
        library: String,
        /// Why it failed.
        source: NvmlError,
    },
    /// The library is there, the kernel module is not.
    #[error("start NVML ({library}): {source}; load the NVIDIA kernel module")]
    NoDriver {
        /// The library.
        library: String,
        /// What it said.
        source: NvmlError,
    },
    /// The library is of another version than the kernel module.
    #[error(
        "start NVML ({library}): {source}; the driver was upgraded under running programs: \
             reboot, or reload the kernel module"
    )]
    VersionMismatch {
        /// The library.
        library: String,
        /// What it said.
        source: NvmlError,
    },
    /// Whatever else it said.
    #[error("start NVML ({library}): {source}; see whether nvidia-smi works")]
    Refused {
        /// The library.
        library: String,
        /// What it said.
        source: NvmlError,
    },
}

impl NvmlAbsent {
    fn new(library: &OsStr, source: NvmlError) -> Self {
        let library = library.to_string_lossy().into_owned();
        match source {
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => {
                Self::NoLibrary { library, source }
            }
            NvmlError::DriverNotLoaded => Self::NoDriver { library, source },
            NvmlError::LibRmVersionMismatch => Self::VersionMismatch { library, source },
            _ => Self::Refused { library, source },
        }
    }
}

/// Reads GPUs through NVML. The list of devices is that of the start: a GPU that is added or a MIG
/// layout that changes later is seen after a restart.
#[derive(Debug)]
pub struct NvmlReader {
    gpus: Vec<Gpu>,
    handles: Vec<Device<'static>>,
    driver: Driver,
}

impl NvmlReader {
    /// Opens the library that [`LIBRARY_ENV`] names, else `libnvidia-ml.so.1`, and lists devices.
    ///
    /// NVML stays open to the end of the program, once per call: handles point into it.
    pub fn open() -> Result<Self, NvmlAbsent> {
        let library = library();
        let nvml = Nvml::builder()
            .lib_path(&library)
            .init()
            .map_err(|source| NvmlAbsent::new(&library, source))?;
        Self::list(Box::leak(Box::new(nvml))).map_err(|source| NvmlAbsent::new(&library, source))
    }

    /// Has the driver's device files made where they are missing, as after a boot: NVML starts a
    /// helper for that which needs the powers of root. For those who are about to give them up.
    pub fn make_device_files() {
        if !Path::new(CONTROL_FILE).exists() {
            // Opened anew later, where a failure is told.
            drop(Nvml::builder().lib_path(&library()).init());
        }
    }

    /// Versions of the driver.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    fn list(nvml: &'static Nvml) -> Result<Self, NvmlError> {
        let driver = Driver {
            version: nvml.sys_driver_version().ok(),
            cuda_version: nvml.sys_cuda_driver_version().ok(),
        };
        let mut reader = Self { gpus: Vec::new(), handles: Vec::new(), driver };
        for index in 0..nvml.device_count()? {
            match nvml.device_by_index(index) {
                Ok(device) => reader.add_with_instances(index, device),
                Err(error) => tracing::warn!(index, %error, "GPU cannot be read, skipped"),
            }
        }
        Ok(reader)
    }

    /// Adds a GPU, then its MIG instances.
    fn add_with_instances(&mut self, index: u32, device: Device<'static>) {
        // Not a number when MIG is not supported or off.
        let slots = device.mig_device_count().unwrap_or(0).min(MIG_LIMIT);
        let instances: Vec<_> = (0..slots)
            .filter_map(|slot| Some((slot, device.mig_device_by_index(slot).ok()?)))
            .collect();
        let Some(parent) = self.add(index, None, device, None) else { return };
        for (slot, instance) in instances {
            self.add(index, Some(slot), instance, Some(parent.clone()));
        }
    }

    /// Adds one device and gives its UUID; one without a UUID has no identity and is left out.
    fn add(
        &mut self,
        index: u32,
        mig_index: Option<u32>,
        device: Device<'static>,
        mig_parent_uuid: Option<String>,
    ) -> Option<String> {
        let uuid = device
            .uuid()
            .inspect_err(|error| tracing::warn!(index, ?mig_index, %error, "GPU without a UUID"))
            .ok()?;
        self.gpus.push(Gpu {
            nvml_index: i32::try_from(index).ok()?,
            mig_index,
            uuid: uuid.clone(),
            model: device.name().ok(),
            total_bytes: device.memory_info().ok().and_then(|memory| known(memory.total)),
            pci_bus_id: device.pci_info().ok().map(|pci| pci.bus_id),
            minor: device.minor_number().ok(),
            mig_parent_uuid,
        });
        self.handles.push(device);
        Some(uuid)
    }

    /// Asks one device; what fails is "not available", and why goes to the debug log.
    fn ask<T>(
        &self,
        slot: usize,
        what: &'static str,
        question: impl FnOnce(&Device<'static>) -> Result<T, NvmlError>,
    ) -> Option<T> {
        question(self.handles.get(slot)?)
            .inspect_err(|error| tracing::debug!(slot, what, %error, "NVML has no answer"))
            .ok()
    }
}

impl GpuReader for NvmlReader {
    fn devices(&self) -> &[Gpu] {
        &self.gpus
    }

    fn memory(&self, slot: usize) -> Option<Memory> {
        let memory = self.ask(slot, "memory", Device::memory_info)?;
        Some(Memory {
            used_bytes: known(memory.used),
            free_bytes: known(memory.free),
            total_bytes: known(memory.total),
            reserved_bytes: known(memory.reserved),
        })
    }

    /// Compute, graphics and MPS processes: a process that does both stands in two lists with the
    /// same bytes. Without the compute list nothing is known; the others are absent on many GPUs.
    fn processes(&self, slot: usize) -> Option<Vec<ProcessMemory>> {
        let compute = self.ask(slot, "compute processes", Device::running_compute_processes)?;
        let graphics = self.ask(slot, "graphics processes", Device::running_graphics_processes);
        let mps = self.ask(slot, "MPS processes", Device::mps_running_compute_processes);
        let lists = [Some(compute), graphics, mps];
        Some(merge(lists.into_iter().flatten().flatten()))
    }

    fn utilization(&self, slot: usize) -> Option<Utilization> {
        let rates = self.ask(slot, "utilization", Device::utilization_rates)?;
        Some(Utilization { gpu_percent: rates.gpu, memory_percent: rates.memory })
    }

    fn temperature(&self, slot: usize) -> Option<u32> {
        self.ask(slot, "temperature", |device| device.temperature(TemperatureSensor::Gpu))
    }

    fn power(&self, slot: usize) -> Option<u32> {
        self.ask(slot, "power", Device::power_usage)
    }
}

/// One entry for each pid, with the largest figure that any list gives.
fn merge(lists: impl Iterator<Item = ProcessInfo>) -> Vec<ProcessMemory> {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for process in lists {
        let used = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => known(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        let entry = by_pid.entry(process.pid).or_default();
        *entry = (*entry).max(used);
    }
    by_pid.into_iter().map(|(pid, used_bytes)| ProcessMemory { pid, used_bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, used: u64) -> ProcessInfo {
        ProcessInfo {
            pid,
            used_gpu_memory: UsedGpuMemory::from(used),
            gpu_instance_id: None,
            compute_instance_id: None,
        }
    }

    #[test]
    fn a_process_in_two_lists_counts_once() {
        let lists = [process(9, 100), process(7, 50), process(9, 100), process(7, u64::MAX)];
        let merged = merge(lists.into_iter());
        let expected = [(7, Some(50)), (9, Some(100))];
        assert_eq!(merged, expected.map(|(pid, used_bytes)| ProcessMemory { pid, used_bytes }));
    }

    #[test]
    fn all_bits_set_is_not_available() {
        assert_eq!(merge([process(7, u64::MAX)].into_iter())[0].used_bytes, None);
        assert_eq!(known(u64::MAX), None);
        assert_eq!(known(0), Some(0));
    }

    #[test]
    fn reasons_say_what_to_do_next() {
        let library = OsStr::new("libnvidia-ml.so.1");
        let cases = [
            (NvmlError::DriverNotLoaded, "load the NVIDIA kernel module"),
            (NvmlError::LibRmVersionMismatch, "reboot"),
            (NvmlError::FailedToLoadSymbol("x".to_owned()), LIBRARY_ENV),
            (NvmlError::NoPermission, "nvidia-smi"),
        ];
        for (source, remedy) in cases {
            let text = NvmlAbsent::new(library, source).to_string();
            assert!(text.contains("libnvidia-ml.so.1") && text.contains(remedy), "{text}");
        }
    }

    /// Prints what NVML says and how long it took; run by hand on a host with GPUs:
    /// `cargo test -p agent nvml_of_this_host -- --ignored --nocapture`.
    #[test]
    #[ignore = "needs a GPU"]
    fn nvml_of_this_host() {
        let reader = NvmlReader::open().unwrap();
        println!("{:?}", reader.driver());
        let timed = |what: &str, ask: &dyn Fn() -> String| {
            for _ in 0..20 {
                let start = std::time::Instant::now();
                let answer = ask();
                println!("{what} {:?}: {answer}", start.elapsed());
            }
        };
        for (slot, gpu) in reader.devices().iter().enumerate() {
            println!("{gpu:?}");
            timed("memory", &|| format!("{:?}", reader.memory(slot)));
            timed("processes", &|| format!("{:?}", reader.processes(slot)));
            timed("utilization", &|| format!("{:?}", reader.utilization(slot)));
            timed("temperature", &|| format!("{:?}", reader.temperature(slot)));
            timed("power", &|| format!("{:?}", reader.power(slot)));
        }
        assert!(!reader.devices().is_empty());
    }
}
