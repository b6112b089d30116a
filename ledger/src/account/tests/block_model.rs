//! Threads with overlapping calls on a driver that hands out the address freed last first.

use std::collections::HashMap;

use proptest::prelude::*;

use super::helpers::*;
use crate::{
    account::{
        order::{Order, effect_ns},
        state::Process,
    },
    call::{Action, Call, Input, Level, Space},
};

const THREADS: usize = 4;

/// What a thread is doing.
#[derive(Clone, Copy, Debug)]
enum Doing {
    Nothing,
    /// Inside an allocation that the driver has not granted yet.
    Asking {
        level: Level,
        size: u64,
        enter_ns: i64,
    },
    /// Granted; not returned yet.
    Granted {
        level: Level,
        size: u64,
        addr: u64,
        enter_ns: i64,
    },
    /// Inside a free that the driver has not done yet.
    Freeing {
        block: Block,
        enter_ns: i64,
    },
    /// Done; not returned yet.
    Freed {
        block: Block,
        enter_ns: i64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    addr: u64,
    size: u64,
    level: Level,
    tag: i64,
}

/// The program and its driver.
#[derive(Debug)]
struct Model {
    threads: [Doing; THREADS],
    /// Freed addresses, device and host, last freed last.
    spare: [Vec<u64>; 2],
    next_addr: u64,
    now_ns: i64,
    tags: i64,
    /// Blocks that the program holds.
    held: Vec<Block>,
    /// Records in the order of return, with the tag of the block that each is about.
    records: Vec<(Call, i64)>,
}

fn host(level: Level) -> usize {
    usize::from(level == Level::Host)
}

impl Model {
    fn new() -> Self {
        Self {
            threads: [Doing::Nothing; THREADS],
            spare: [Vec::new(), Vec::new()],
            next_addr: 0x1000,
            now_ns: 1_000,
            tags: 0,
            held: Vec::new(),
            records: Vec::new(),
        }
    }

    /// One thread goes one step on; `choice` decides what it begins.
    fn step(&mut self, thread: usize, choice: u8) {
        self.now_ns += 1 + i64::from(choice % 3);
        let now_ns = self.now_ns;
        self.threads[thread] = match self.threads[thread] {
            Doing::Nothing if choice.is_multiple_of(2) && !self.held.is_empty() => {
                let block = self.held.swap_remove(choice as usize % self.held.len());
                Doing::Freeing { block, enter_ns: now_ns }
            }
            Doing::Nothing => {
                let levels = [Level::Device, Level::Pool, Level::Managed, Level::Host];
                let level = levels[choice as usize / 2 % levels.len()];
                Doing::Asking { level, size: 1 + u64::from(choice), enter_ns: now_ns }
            }
            Doing::Asking { level, size, enter_ns } => {
                let addr = self.spare[host(level)].pop().unwrap_or_else(|| {
                    self.next_addr += 0x100;
                    self.next_addr
                });
                Doing::Granted { level, size, addr, enter_ns }
            }
            Doing::Freeing { block, enter_ns } => {
                self.spare[host(block.level)].push(block.addr);
                Doing::Freed { block, enter_ns }
            }
            Doing::Granted { level, size, addr, enter_ns } => {
                self.tags += 1;
                let block = Block { addr, size, level, tag: self.tags };
                self.held.push(block);
                self.record(thread, alloc_of(level, addr, size), enter_ns, block.tag);
                Doing::Nothing
            }
            Doing::Freed { block, enter_ns } => {
                let space = if host(block.level) == 1 { Space::Host } else { Space::Device };
                let action = Action::Free { addr: block.addr, space };
                self.record(thread, action, enter_ns, block.tag);
                Doing::Nothing
            }
        };
    }

    /// Everybody returns.
    fn finish(&mut self) {
        for thread in 0..THREADS {
            while !matches!(self.threads[thread], Doing::Nothing) {
                self.step(thread, 1);
            }
        }
    }

    fn record(&mut self, thread: usize, action: Action, enter_ns: i64, tag: i64) {
        let stack_id = if matches!(action, Action::Alloc { .. }) { tag } else { 0 };
        let tid = thread as u32;
        let call = Call { tid, stack_id, ..call(action, enter_ns, self.now_ns) };
        self.records.push((call, tag));
    }

    /// A random order of arrival that keeps what did not overlap in order.
    fn shuffled(&self, mut picks: impl Iterator<Item = usize>) -> Vec<Call> {
        let mut left: Vec<Call> = self.records.iter().map(|(call, _)| call.clone()).collect();
        let mut arrival = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let first_exit = left.iter().map(|call| call.exit_ns).min().unwrap();
            let ready: Vec<usize> =
                (0..left.len()).filter(|&index| left[index].enter_ns <= first_exit).collect();
            let pick = ready[picks.next().unwrap_or(0) % ready.len()];
            arrival.push(left.remove(pick));
        }
        arrival
    }

    /// Every free took the block that the driver freed, and what is live is what is held.
    fn check(&self, bench: &mut Bench) {
        let tags: HashMap<(i64, i32), i64> = self
            .records
            .iter()
            .map(|(call, tag)| ((effect_ns(&Input::Call(call.clone())), call.tid as i32), *tag))
            .collect();
        assert_eq!(bench.rows.len(), self.records.len());
        for row in &bench.rows {
            assert_eq!(row.stack_id, tags[&(row.ts_ns, row.tid)], "{row:?}");
            assert!(row.delta_bytes != 0 && row.alloc_id > 0);
        }
        let process = bench.state.process(PROC.0);
        let mut live: Vec<(i64, i64, Level)> = process
            .into_iter()
            .flat_map(Process::live)
            .map(|(_, live)| (live.addr, live.size_bytes.unwrap(), live.level))
            .collect();
        let mut held: Vec<(i64, i64, Level)> = self
            .held
            .iter()
            .map(|block| (block.addr as i64, block.size as i64, block.level))
            .collect();
        live.sort_unstable();
        held.sort_unstable();
        assert_eq!(live, held);
        for level in Level::ALL {
            assert_eq!(bench.sum(level), bench.live_bytes(level));
        }
        assert_eq!(bench.losses(), []);
    }
}

fn ran(steps: &[(usize, u8)]) -> Model {
    let mut model = Model::new();
    for &(thread, choice) in steps {
        model.step(thread, choice);
    }
    model.finish();
    model
}

/// The rows without their numbers, in order of time: what does not depend on arrival.
fn essence(bench: &Bench) -> Vec<(i64, i32, String, i64, i64, i64)> {
    let mut rows: Vec<_> = bench
        .rows
        .iter()
        .map(|row| {
            (row.ts_ns, row.tid, row.op.to_string(), row.addr, row.delta_bytes, row.stack_id)
        })
        .collect();
    rows.sort();
    rows
}

fn steps() -> impl Strategy<Value = Vec<(usize, u8)>> {
    prop::collection::vec((0..THREADS, any::<u8>()), 1..250)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn arrival_does_not_matter(
        steps in steps(),
        picks in prop::collection::vec(any::<usize>(), 0..120),
        window_ns in 0i64..60,
    ) {
        let model = ran(&steps);
        let mut by_return = Bench::default();
        let mut shuffled = Bench::default();
        let mut ordered = Bench::default();
        for (call, _) in &model.records {
            by_return.apply(&Input::Call(call.clone()));
        }
        let mut order = Order::new(64);
        for call in model.shuffled(picks.into_iter()) {
            shuffled.apply(&Input::Call(call.clone()));
            let until_ns = call.exit_ns - window_ns;
            order.push(Input::Call(call));
            order.drain_until(until_ns).for_each(|input| { ordered.apply(&input); });
        }
        order.drain_all().for_each(|input| { ordered.apply(&input); });
        for bench in [&mut by_return, &mut shuffled, &mut ordered] {
            model.check(bench);
        }
        prop_assert_eq!(essence(&by_return), essence(&shuffled));
        prop_assert_eq!(essence(&by_return), essence(&ordered));
        for bench in [&mut by_return, &mut shuffled, &mut ordered] {
            bench.apply(&exit(i64::MAX));
            prop_assert!(Level::ALL.into_iter().all(|level| bench.sum(level) == 0));
        }
    }

    #[test]
    fn lost_records_never_break_the_sums(
        steps in steps(),
        lost in prop::collection::vec(any::<bool>(), 300),
    ) {
        let model = ran(&steps);
        let mut bench = Bench::default();
        let mut dropped = 0;
        for ((call, _), lost) in model.records.iter().zip(lost) {
            if lost {
                dropped += 1;
            } else {
                bench.apply(&Input::Call(call.clone()));
            }
        }
        bench.apply(&at(Action::CtxPop, 1 << 50, 1 << 50));
        for level in Level::ALL {
            prop_assert_eq!(bench.sum(level), bench.live_bytes(level));
        }
        bench.apply(&exit(1 << 51));
        prop_assert!(Level::ALL.into_iter().all(|level| bench.sum(level) == 0));
        prop_assert!(bench.state.process(PROC.0).is_none_or(|process| process.live().count() == 0));
        let losses = bench.losses();
        let of_records = losses.iter().filter(|(reason, ..)| *reason != "start_not_seen");
        let seen: i64 = of_records.map(|(_, count, _)| count).sum();
        prop_assert!(seen <= dropped);
    }

    /// A state that starts from a checkpoint ends where the whole log ends.
    #[test]
    fn a_checkpoint_replaces_what_came_before(steps in steps(), at_record in any::<usize>()) {
        let model = ran(&steps);
        let mut bench = Bench::default();
        let mut resumed = crate::account::state::State::new();
        let cut = at_record % (model.records.len() + 1);
        for (index, (call, _)) in model.records.iter().enumerate() {
            if index == cut {
                bench.ledger.live(call.exit_ns).for_each(|row| resumed.start_from(&row));
            }
            let first = bench.rows.len();
            bench.apply(&Input::Call(call.clone()));
            if index >= cut {
                bench.rows.iter().skip(first).for_each(|row| resumed.apply(row));
            }
        }
        if cut < model.records.len() {
            for level in Level::ALL {
                let live = resumed.process(PROC.0).map_or(0, |process| process.live_bytes(level));
                prop_assert_eq!(live, bench.live_bytes(level));
            }
        }
    }
}
