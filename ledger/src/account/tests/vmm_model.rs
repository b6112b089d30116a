//! A driver with reference counts: handles, maps and retains in any order, frees that come late.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::helpers::*;
use crate::call::{Action, Input, Level};

#[derive(Clone, Copy, Debug)]
struct Object {
    handle: u64,
    size: u64,
    refs: u32,
    maps: u32,
    imported: bool,
    mapped_once: bool,
}

#[derive(Debug, Default)]
struct Driver {
    objects: Vec<Object>,
    maps: BTreeMap<u64, u64>,
    spare: Vec<u64>,
    made: u64,
}

impl Driver {
    fn live(&self, imported: bool) -> i64 {
        let of_kind = self.objects.iter().filter(|object| object.imported == imported);
        let sized = of_kind.filter(|object| !object.imported || object.mapped_once);
        sized.map(|object| object.size as i64).sum()
    }

    fn object(&mut self, handle: u64) -> &mut Object {
        self.objects.iter_mut().find(|object| object.handle == handle).unwrap()
    }

    fn sweep(&mut self) {
        let spare = &mut self.spare;
        self.objects.retain(|object| {
            let alive = object.refs + object.maps > 0;
            if !alive {
                spare.push(object.handle);
            }
            alive
        });
    }

    /// What the program does next, done.
    fn step(&mut self, kind: u8, pick: usize) -> Option<Action> {
        let with_refs: Vec<u64> =
            self.objects.iter().filter(|object| object.refs > 0).map(|o| o.handle).collect();
        let one = |from: &[u64]| (!from.is_empty()).then(|| from[pick % from.len()]);
        let addrs: Vec<u64> = self.maps.keys().copied().collect();
        let action = match kind % 8 {
            0 | 1 => {
                self.made += 1;
                let handle = self.spare.pop().unwrap_or(self.made);
                let size = 0x100;
                let imported = kind % 8 == 1;
                let made = Object { handle, size, refs: 1, maps: 0, imported, mapped_once: false };
                self.objects.push(made);
                if imported { Action::VmmImport { handle } } else { create(handle, size) }
            }
            2 | 3 => {
                let handle = one(&with_refs)?;
                let addr = 0x1_0000 + 0x100 * (pick as u64 % 16);
                if self.maps.contains_key(&addr) {
                    return None;
                }
                self.maps.insert(addr, handle);
                let object = self.object(handle);
                object.maps += 1;
                object.mapped_once = true;
                Action::VmmMap { addr, size_bytes: 0x100, handle }
            }
            4 => {
                let addr = one(&addrs)?;
                let handle = self.maps[&addr];
                self.object(handle).refs += 1;
                Action::VmmRetain { handle, addr }
            }
            5 | 6 => {
                let handle = one(&with_refs)?;
                self.object(handle).refs -= 1;
                Action::VmmRelease { handle }
            }
            _ => {
                let addr = one(&addrs)?;
                let size_bytes = 0x100 * (1 + pick as u64 % 3);
                for at in (addr..addr + size_bytes).step_by(0x100) {
                    if let Some(handle) = self.maps.remove(&at) {
                        self.object(handle).maps -= 1;
                    }
                }
                Action::VmmUnmap { addr, size_bytes }
            }
        };
        self.sweep();
        Some(action)
    }
}

fn takes_away(action: &Action) -> bool {
    matches!(action, Action::VmmRelease { .. } | Action::VmmUnmap { .. })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn live_bytes_follow_the_references(
        steps in prop::collection::vec((any::<u8>(), any::<usize>()), 1..200),
    ) {
        let (mut driver, mut bench, mut now) = (Driver::default(), Bench::default(), 0);
        for (kind, pick) in steps {
            let Some(action) = driver.step(kind, pick) else { continue };
            now += 10;
            bench.apply(&at(action, now, now + 1));
            prop_assert_eq!(bench.live_bytes(Level::Device), driver.live(false));
            prop_assert_eq!(bench.live_bytes(Level::Imported), driver.live(true));
            prop_assert_eq!(bench.sum(Level::Device), driver.live(false));
            prop_assert_eq!(bench.sum(Level::Imported), driver.live(true));
        }
        prop_assert_eq!(bench.ledger.unknown_frees(PROC), 0);
        prop_assert_eq!(bench.losses(), []);
    }

    #[test]
    fn late_records_of_releases_and_unmaps_change_nothing(
        steps in prop::collection::vec((any::<u8>(), any::<usize>(), 0u8..12), 1..200),
    ) {
        let (mut driver, mut bench, mut now) = (Driver::default(), Bench::default(), 0);
        let mut slow: Vec<(u8, Input)> = Vec::new();
        for (kind, pick, delay) in steps {
            let Some(action) = driver.step(kind, pick) else { continue };
            now += 10;
            if takes_away(&action) {
                slow.push((delay, at(action, now, now + 10 * i64::from(delay))));
            } else {
                bench.apply(&at(action, now, now + 1));
            }
            for (delay, _) in &mut slow {
                *delay = delay.saturating_sub(1);
            }
            for (_, input) in slow.extract_if(.., |(delay, _)| *delay == 0) {
                bench.apply(&input);
            }
        }
        for (_, input) in slow {
            bench.apply(&input);
        }
        prop_assert_eq!(bench.sum(Level::Device), driver.live(false));
        prop_assert_eq!(bench.sum(Level::Imported), driver.live(true));
        prop_assert_eq!(bench.live_bytes(Level::Device), driver.live(false));
        prop_assert_eq!(bench.ledger.unknown_frees(PROC), 0);
        prop_assert_eq!(bench.losses(), []);
    }
}
