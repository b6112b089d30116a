//! Which GPU a process means by the number it uses: from what it was given at exec.
//!
//! One of three sources (the others: the process's own `cuDeviceGetUuid` calls, and the GPU on which
//! NVML lists it), so an unsure answer is `None`, never a guess.

use std::path::Path;

use super::{Env, Host};
use crate::nvml::Gpu;

/// For each CUDA ordinal of a process the position of its device in `gpus`, `None` where the
/// environment alone does not tell. `gpus` are the devices that the process may open, in NVML's
/// order.
///
/// `CUDA_VISIBLE_DEVICES` lists numbers, prefixes of UUIDs that fit one device only, or `MIG-` and
/// more; the first entry that names no device ends the list. Numbers count in the order of
/// `CUDA_DEVICE_ORDER`: `PCI_BUS_ID`, or by default the fastest first, which is PCI order where all
/// are of one model and cannot be known from here where they are not.
pub fn ordinal_map(env: &Env, gpus: &[Gpu]) -> Vec<Option<usize>> {
    let numbered = enumeration(env, gpus);
    let Some(visible) = env.get("CUDA_VISIBLE_DEVICES") else {
        return numbered;
    };
    let mut map = Vec::new();
    for entry in visible.split(',').map(str::trim) {
        match resolve(entry, &numbered, gpus) {
            Entry::Device(device) => map.push(device),
            Entry::Nothing => break,
        }
    }
    let known: Vec<_> = map.iter().flatten().collect();
    let twice = known.iter().enumerate().any(|(at, device)| known[..at].contains(device));
    // NVIDIA does not say what a device that is listed twice does to the list.
    if twice || slurm_renumbers(env, visible, gpus) { vec![None; map.len()] } else { map }
}

enum Entry {
    /// A device, `None` where it is not known which.
    Device(Option<usize>),
    /// Nothing that exists.
    Nothing,
}

fn resolve(entry: &str, numbered: &[Option<usize>], gpus: &[Gpu]) -> Entry {
    let is_number = !entry.is_empty() && entry.bytes().all(|byte| byte.is_ascii_digit());
    if is_number {
        let device = entry.parse().ok().and_then(|number: usize| numbered.get(number));
        return device.map_or(Entry::Nothing, |device| Entry::Device(*device));
    }
    if !(entry.starts_with("GPU-") || entry.starts_with("MIG-")) {
        return Entry::Nothing;
    }
    let mut fitting = (0..gpus.len())
        .filter(|slot| gpus.get(*slot).is_some_and(|gpu| gpu.uuid.starts_with(entry)));
    match (fitting.next(), fitting.next()) {
        (Some(slot), None) => Entry::Device(visible_part(slot, gpus)),
        _ => Entry::Nothing,
    }
}

/// The devices in CUDA's order without `CUDA_VISIBLE_DEVICES`.
fn enumeration(env: &Env, gpus: &[Gpu]) -> Vec<Option<usize>> {
    let mut whole: Vec<(usize, &Gpu)> =
        gpus.iter().enumerate().filter(|(_, gpu)| gpu.mig_parent_uuid.is_none()).collect();
    whole.sort_by_key(|(slot, gpu)| (gpu.pci_bus_id.clone(), *slot));
    let by_pci = env.get("CUDA_DEVICE_ORDER") == Some("PCI_BUS_ID");
    let one_model = whole.windows(2).all(|pair| match pair {
        [(_, a), (_, b)] => a.model.is_some() && a.model == b.model,
        _ => true,
    });
    if by_pci || one_model {
        whole.iter().map(|(slot, _)| visible_part(*slot, gpus)).collect()
    } else {
        vec![None; whole.len()]
    }
}

/// What a process gets that asks for a device: itself, or of a GPU in MIG mode an instance, known
/// if it has only one.
fn visible_part(slot: usize, gpus: &[Gpu]) -> Option<usize> {
    let uuid = &gpus.get(slot)?.uuid;
    let mut instances = (0..gpus.len()).filter(|other| {
        gpus.get(*other).is_some_and(|gpu| gpu.mig_parent_uuid.as_ref() == Some(uuid))
    });
    match (instances.next(), instances.next()) {
        (None, _) => Some(slot),
        (only, None) => only,
        _ => None,
    }
}

/// Whether numbers may count from the job's first GPU in place of the host's: Slurm, where it
/// confines jobs to their devices (`ConstrainDevices`), renumbers them, and where it does not, not.
/// Device files tell nothing then: access is refused on open.
fn slurm_renumbers(env: &Env, visible: &str, gpus: &[Gpu]) -> bool {
    let entries = visible.split(',').count();
    let numbers = visible.trim_start().starts_with(|c: char| c.is_ascii_digit());
    env.get("SLURM_JOB_ID").is_some() && numbers && entries < gpus.len()
}

impl Host {
    /// [`ordinal_map`] over the GPUs whose device files the process can see, with positions in all
    /// of `gpus`: a container has the files of its own GPUs only, and CUDA counts those.
    pub fn process_ordinals(&self, pid: u32, env: &Env, gpus: &[Gpu]) -> Vec<Option<usize>> {
        let slots = self.accessible(pid, gpus);
        let own: Vec<Gpu> = slots.iter().filter_map(|slot| gpus.get(*slot).cloned()).collect();
        let in_all = |slot: Option<usize>| slots.get(slot?).copied();
        ordinal_map(env, &own).into_iter().map(in_all).collect()
    }

    /// Positions of the GPUs whose `/dev/nvidiaN` the process can see; of all where it sees none
    /// (WSL has no such files).
    fn accessible(&self, pid: u32, gpus: &[Gpu]) -> Vec<usize> {
        let has_file = |index: i32| {
            let minor = gpus
                .iter()
                .find(|gpu| gpu.nvml_index == index && gpu.mig_index.is_none())
                .and_then(|gpu| gpu.minor);
            minor.is_some_and(|minor| {
                self.find_in_root(pid, Path::new(&format!("dev/nvidia{minor}"))).is_some()
            })
        };
        let seen: Vec<usize> = gpus
            .iter()
            .enumerate()
            .filter(|(_, gpu)| has_file(gpu.nvml_index))
            .map(|(slot, _)| slot)
            .collect();
        if seen.is_empty() { (0..gpus.len()).collect() } else { seen }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host::testing::Tree,
        nvml::testing::{gpu, mig},
    };

    /// Four GPUs with UUIDs that share beginnings; PCI order is NVML's.
    fn four() -> Vec<Gpu> {
        let uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb11", "GPU-cc11"];
        let named =
            |(index, uuid): (usize, &&str)| Gpu { uuid: (*uuid).to_owned(), ..gpu(index as i32) };
        uuids.iter().enumerate().map(named).collect()
    }

    fn env(variables: &[(&str, &str)]) -> Env {
        let entries: Vec<_> =
            variables.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let text = entries.join("\0");
        Env::parse(text.as_bytes())
    }

    fn visible(list: &str) -> Env {
        env(&[("CUDA_VISIBLE_DEVICES", list)])
    }

    #[test]
    fn lists_of_equal_gpus() {
        let cases: &[(&str, &[Option<usize>])] = &[
            ("", &[]),
            ("0", &[Some(0)]),
            ("3,1", &[Some(3), Some(1)]),
            (" 2 , 0", &[Some(2), Some(0)]),
            ("1,-1,2", &[Some(1)]),
            ("-1", &[]),
            ("0,4,1", &[Some(0)]),
            ("0,,1", &[Some(0)]),
            ("NoDevFiles", &[]),
            ("1,x", &[Some(1)]),
            ("99999999999999999999", &[]),
            ("GPU-bb", &[Some(2)]),
            ("GPU-bb11,GPU-aa22", &[Some(2), Some(1)]),
            ("GPU-cc11,0", &[Some(3), Some(0)]),
            ("GPU-aa", &[]),
            ("GPU-", &[]),
            ("0,GPU-zz,1", &[Some(0)]),
            ("bb11", &[]),
            ("MIG-bb11", &[]),
            ("1,1", &[None, None]),
            ("2,GPU-bb11", &[None, None]),
        ];
        for (list, expected) in cases {
            assert_eq!(ordinal_map(&visible(list), &four()), *expected, "{list:?}");
        }
        let all = [Some(0), Some(1), Some(2), Some(3)];
        assert_eq!(ordinal_map(&env(&[]), &four()), all);
    }

    #[test]
    fn numbers_of_different_models_are_unknown_without_pci_order() {
        let mut gpus = four();
        gpus[2].model = Some("NVIDIA T4".to_owned());
        assert_eq!(ordinal_map(&env(&[]), &gpus), [None; 4]);
        assert_eq!(ordinal_map(&visible("1,0"), &gpus), [None; 2]);
        assert_eq!(ordinal_map(&visible("GPU-bb"), &gpus), [Some(2)], "a UUID needs no order");
        assert_eq!(ordinal_map(&visible("7"), &gpus), []);
        let pci = [("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "2,1")];
        assert_eq!(ordinal_map(&env(&pci), &gpus), [Some(2), Some(1)]);
        assert_eq!(ordinal_map(&env(&[]), &gpus[2..3]), [Some(0)], "one device");
        gpus[2].model = None;
        gpus[1].model = None;
        assert_eq!(ordinal_map(&env(&[]), &gpus[1..3]), [None; 2], "unknown models are not equal");
    }

    #[test]
    fn numbers_count_in_pci_order() {
        let mut gpus = four();
        gpus.reverse();
        assert_eq!(ordinal_map(&visible("0,3"), &gpus), [Some(3), Some(0)]);
    }

    #[test]
    fn mig_instances() {
        let gpus = [gpu(0), mig(0, 0), mig(0, 1), gpu(1), mig(1, 0)];
        let cases: &[(&str, &[Option<usize>])] = &[
            ("MIG-0-1", &[Some(2)]),
            ("MIG-0-0,MIG-1", &[Some(1), Some(4)]),
            ("MIG-0", &[]),
            ("0", &[None]),
            ("1", &[Some(4)]),
            ("GPU-1", &[Some(4)]),
        ];
        for (list, expected) in cases {
            assert_eq!(ordinal_map(&visible(list), &gpus), *expected, "{list:?}");
        }
    }

    #[test]
    fn slurm_numbers_are_unknown_unless_the_job_has_every_gpu() {
        let of_job = |list| env(&[("SLURM_JOB_ID", "7"), ("CUDA_VISIBLE_DEVICES", list)]);
        assert_eq!(ordinal_map(&of_job("0,1"), &four()), [None, None]);
        assert_eq!(ordinal_map(&of_job("GPU-bb11"), &four()), [Some(2)]);
        let all = [Some(0), Some(1), Some(2), Some(3)];
        assert_eq!(ordinal_map(&of_job("0,1,2,3"), &four()), all);
    }

    #[test]
    fn a_container_counts_its_own_gpus() {
        let tree = Tree::new();
        tree.write("proc/42/root/dev/nvidia1", "");
        tree.write("proc/42/root/dev/nvidia3", "");
        tree.write("proc/43/root/dev/null", "");
        let host = tree.host();
        assert_eq!(host.process_ordinals(42, &env(&[]), &four()), [Some(1), Some(3)]);
        assert_eq!(host.process_ordinals(42, &visible("1"), &four()), [Some(3)]);
        assert_eq!(host.process_ordinals(42, &visible("2"), &four()), []);
        assert_eq!(host.process_ordinals(43, &visible("2"), &four()), [Some(2)], "no files seen");
    }
}
