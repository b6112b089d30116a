//! What NVIDIA's management library says: devices, memory totals, memory of each process.
//!
//! [`GpuReader`] is the question, [`NvmlReader`] NVML's answer, [`Sampler`] the policy that decides
//! what is asked when, [`spawn`] the thread that asks. NVML takes the driver's global lock, which
//! the traced programs need too: so little is asked, and less when answers are slow.
//!
//! "Not available" is `None`: NVML says so by an error, or by all bits set in a number (MPS, vGPU,
//! WSL, missing permission).

mod lane;
mod real;
mod sampler;
mod thread;

pub use self::{
    lane::Lane,
    real::{LIBRARY_ENV, NvmlAbsent, NvmlReader},
    sampler::{ProcessReading, Sample, Sampler, Step},
    thread::{Clock, SamplerThread, SystemClock, Trigger, spawn},
};
use ledger::rows::DeviceRow;

/// A GPU, or a MIG instance of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// NVML's number of the GPU; for a MIG instance the number of the GPU it is a part of.
    pub nvml_index: i32,
    /// Number of a MIG instance inside its GPU.
    pub mig_index: Option<u32>,
    /// UUID with its `GPU-` or `MIG-` prefix.
    pub uuid: String,
    /// Model name.
    pub model: Option<String>,
    /// Memory in all, bytes.
    pub total_bytes: Option<u64>,
    /// PCI address, `00000000:0F:00.0`.
    pub pci_bus_id: Option<String>,
    /// N of the device file `/dev/nvidiaN`.
    pub minor: Option<u32>,
    /// UUID of the GPU that a MIG instance is a part of.
    pub mig_parent_uuid: Option<String>,
}

impl Gpu {
    /// The row of `devices`.
    pub fn row(&self, ts_ns: i64, driver: &Driver, host: &str) -> DeviceRow {
        DeviceRow {
            ts_ns,
            nvml_index: self.nvml_index,
            gpu_uuid: self.uuid.clone(),
            model: self.model.clone(),
            total_bytes: self.total_bytes.and_then(column),
            pci_bus_id: self.pci_bus_id.clone(),
            driver_version: driver.version.clone(),
            cuda_driver_version: driver.cuda_version,
            mig_parent_uuid: self.mig_parent_uuid.clone(),
            host: host.to_owned(),
        }
    }
}

/// Versions of the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Driver {
    /// Of the driver, `580.159.04`.
    pub version: Option<String>,
    /// CUDA version that it speaks, 13000 for 13.0.
    pub cuda_version: Option<i32>,
}

/// Memory of a device, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// In use, without what the driver reserves.
    pub used_bytes: Option<u64>,
    /// Free.
    pub free_bytes: Option<u64>,
    /// In all.
    pub total_bytes: Option<u64>,
    /// Kept by the driver for itself.
    pub reserved_bytes: Option<u64>,
}

/// How busy a device is, percent of its sampling period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Utilization {
    /// Time in which a kernel ran.
    pub gpu_percent: u32,
    /// Time in which memory was read or written.
    pub memory_percent: u32,
}

/// Memory that one process holds on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// Bytes; `None` where NVML lists the process and does not say how much.
    pub used_bytes: Option<u64>,
}

/// Reads GPUs. `slot` is a position in [`GpuReader::devices`]; of an unknown one nothing is known.
/// `None` is "not available".
pub trait GpuReader {
    /// GPUs in NVML's order, each followed by its MIG instances.
    fn devices(&self) -> &[Gpu];
    /// Memory totals.
    fn memory(&self, slot: usize) -> Option<Memory>;
    /// Every process that holds memory, once.
    fn processes(&self, slot: usize) -> Option<Vec<ProcessMemory>>;
    /// How busy it is.
    fn utilization(&self, slot: usize) -> Option<Utilization>;
    /// Core temperature, degrees Celsius.
    fn temperature(&self, slot: usize) -> Option<u32>;
    /// Board power, milliwatts.
    fn power(&self, slot: usize) -> Option<u32>;
}

/// NVML's 64-bit values with "not available" (all bits set) made `None`.
fn known(value: u64) -> Option<u64> {
    (value != u64::MAX).then_some(value)
}

/// A value as the log's signed columns take it; what does not fit is no byte count.
fn column(value: u64) -> Option<i64> {
    i64::try_from(value).ok()
}

#[cfg(test)]
pub(crate) mod testing;
