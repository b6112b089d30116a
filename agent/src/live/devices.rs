//! The host's GPUs, and what a process's numbers for them mean.

use std::collections::{HashMap, HashSet};

use ledger::{account::DeviceId, call::ProcId};

use crate::{
    host::{Env, Host},
    nvml::Gpu,
};

/// GPUs and the processes' maps from CUDA ordinal to GPU.
#[derive(Debug, Default)]
pub(super) struct Devices {
    gpus: Vec<Gpu>,
    maps: HashMap<ProcId, HashMap<i32, Option<DeviceId>>>,
    disputed: HashSet<(ProcId, i32)>,
}

impl Devices {
    /// The GPUs that NVML lists.
    pub(super) fn new(gpus: Vec<Gpu>) -> Self {
        Self { gpus, ..Self::default() }
    }

    /// The GPUs.
    pub(super) fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// What the environment at exec makes of the ordinals; `None` for one that it does not settle.
    pub(super) fn by_environment(
        &mut self,
        host: &Host,
        tgid: u32,
        proc_id: ProcId,
        env: &Env,
    ) -> Vec<(i32, Option<DeviceId>)> {
        let map: Vec<_> = (0..)
            .zip(host.process_ordinals(tgid, env, &self.gpus))
            .map(|(ordinal, slot)| (ordinal, slot.and_then(|slot| self.id(slot))))
            .collect();
        self.maps.insert(proc_id, map.iter().cloned().collect());
        map
    }

    /// Which ordinals are which devices is not known: what the process was given and what it has now
    /// disagree, and which of them held when it counted its devices was not seen.
    pub(super) fn unsettle(&mut self, proc_id: ProcId) {
        self.maps.insert(proc_id, HashMap::new());
    }

    /// The process asked the driver for the UUID of `ordinal`. Where it disagrees with what the
    /// environment said, the ordinal is unknown: a wrong device is worse than none.
    pub(super) fn by_uuid(
        &mut self,
        proc_id: ProcId,
        ordinal: i32,
        uuid: [u8; 16],
    ) -> Option<DeviceId> {
        let text = uuid_text(uuid);
        let slot = self.gpus.iter().position(|gpu| suffix(&gpu.uuid) == text);
        self.told(proc_id, ordinal, slot)
    }

    /// The same by the device's PCI address. A MIG instance has its GPU's address, so of a GPU that
    /// is cut into instances it tells nothing.
    pub(super) fn by_bus_id(
        &mut self,
        proc_id: ProcId,
        ordinal: i32,
        text: [u8; 16],
    ) -> Option<DeviceId> {
        let asked = bus_id(str::from_utf8(&text).ok()?.split('\0').next()?)?;
        let at = |gpu: &Gpu| gpu.pci_bus_id.as_deref().and_then(bus_id) == Some(asked);
        let mut slots = (0..self.gpus.len()).filter(|slot| self.gpus.get(*slot).is_some_and(at));
        let (slot, other) = (slots.next(), slots.next());
        self.told(proc_id, ordinal, slot.filter(|_| other.is_none()))
    }

    fn told(&mut self, proc_id: ProcId, ordinal: i32, slot: Option<usize>) -> Option<DeviceId> {
        let told = slot.and_then(|slot| self.id(slot));
        let map = self.maps.entry(proc_id).or_default();
        let known = map.get(&ordinal).cloned().flatten();
        match (known, told) {
            (Some(known), Some(told)) if known != told => {
                self.disputed.insert((proc_id, ordinal));
                None
            }
            _ if self.disputed.contains(&(proc_id, ordinal)) => None,
            (known, told) => {
                let settled = told.or(known);
                map.insert(ordinal, settled.clone());
                settled
            }
        }
    }

    /// Forgets an ended process.
    pub(super) fn forget(&mut self, proc_id: ProcId) {
        self.maps.remove(&proc_id);
        self.disputed.retain(|(of, _)| *of != proc_id);
    }

    /// The GPU that a process means by `ordinal`.
    pub(super) fn of(&self, proc_id: ProcId, ordinal: i32) -> Option<DeviceId> {
        if self.disputed.contains(&(proc_id, ordinal)) {
            return None;
        }
        self.maps.get(&proc_id)?.get(&ordinal).cloned().flatten()
    }

    /// All that is known of a process's ordinals.
    pub(super) fn all(&self, proc_id: ProcId) -> Vec<(i32, Option<DeviceId>)> {
        let ordinals = self.maps.get(&proc_id).into_iter().flat_map(HashMap::keys).copied();
        ordinals.map(|ordinal| (ordinal, self.of(proc_id, ordinal))).collect()
    }

    /// The number that a process uses for a GPU.
    pub(super) fn ordinal_of(&self, proc_id: ProcId, uuid: &str) -> Option<i32> {
        let map = self.maps.get(&proc_id)?;
        map.keys().copied().find(|ordinal| {
            self.of(proc_id, *ordinal).is_some_and(|device| device.gpu_uuid == uuid)
        })
    }

    fn id(&self, slot: usize) -> Option<DeviceId> {
        let gpu = self.gpus.get(slot)?;
        Some(DeviceId { nvml_index: gpu.nvml_index, gpu_uuid: gpu.uuid.clone() })
    }
}

/// A UUID without its `GPU-` or `MIG-`.
fn suffix(uuid: &str) -> &str {
    uuid.split_once('-').map_or(uuid, |(_, rest)| rest)
}

/// Domain, bus, device and function of a PCI address; the domain has four digits in CUDA's words
/// and eight in NVML's.
fn bus_id(text: &str) -> Option<(u32, u32, u32, u32)> {
    let (rest, function) = text.rsplit_once('.')?;
    let mut parts = rest.split(':').map(|part| u32::from_str_radix(part, 16).ok());
    let (domain, bus, device) = (parts.next()??, parts.next()??, parts.next()??);
    let function = u32::from_str_radix(function, 16).ok()?;
    parts.next().is_none().then_some((domain, bus, device, function))
}

/// The 16 bytes as NVML writes them: 8-4-4-4-12 hexadecimal digits.
fn uuid_text(uuid: [u8; 16]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).unwrap_or('0');
    let hex: String = uuid.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect();
    [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &hex[range]).join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_as_nvml_writes_them() {
        let uuid = [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0, 1, 2, 3, 4, 5, 6, 0xff];
        assert_eq!(uuid_text(uuid), "01234567-89ab-cdef-0001-0203040506ff");
        assert_eq!(suffix("GPU-01234567-89ab"), "01234567-89ab");
    }

    #[test]
    fn pci_addresses_are_equal_however_long_their_domain() {
        assert_eq!(bus_id("0000:1B:00.0"), bus_id("00000000:1b:00.0"));
        assert_ne!(bus_id("0000:1b:00.0"), bus_id("0000:1c:00.0"));
        for bad in ["", "1b:00.0", "0000:1b:00", "x:1b:00.0", "0:0:0:0.0"] {
            assert_eq!(bus_id(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_pci_address_tells_a_device_as_a_uuid_does() {
        let gpu = |nvml_index, bus: &str| Gpu {
            nvml_index,
            uuid: format!("GPU-{nvml_index}"),
            pci_bus_id: Some(bus.to_owned()),
            ..Gpu::default()
        };
        let (near, far) = ("00000000:1B:00.0", "00000000:2B:00.0");
        let mut devices = Devices::new(vec![gpu(0, near), gpu(1, far), gpu(2, far)]);
        let mut text = [0; 16];
        text[..12].copy_from_slice(b"0000:1b:00.0");
        assert_eq!(devices.by_bus_id(ProcId(7), 5, text).map(|device| device.nvml_index), Some(0));
        text[..12].copy_from_slice(b"0000:2b:00.0");
        assert_eq!(devices.by_bus_id(ProcId(7), 6, text), None, "two devices have it");
    }

    #[test]
    fn a_uuid_that_contradicts_the_environment_makes_the_ordinal_unknown() {
        let gpu =
            |nvml_index, uuid: &str| Gpu { nvml_index, uuid: uuid.to_owned(), ..Gpu::default() };
        let first = "GPU-00000000-0000-0000-0000-000000000001";
        let second = "GPU-00000000-0000-0000-0000-000000000002";
        let mut devices = Devices::new(vec![gpu(0, first), gpu(1, second)]);
        let process = ProcId(7);
        let mut bytes = [0; 16];
        bytes[15] = 2;
        assert_eq!(devices.by_uuid(process, 0, bytes).unwrap().gpu_uuid, second);
        bytes[15] = 1;
        assert_eq!(devices.by_uuid(process, 0, bytes), None);
        bytes[15] = 2;
        assert_eq!(devices.by_uuid(process, 0, bytes), None);
    }
}
