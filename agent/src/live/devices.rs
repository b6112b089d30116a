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
