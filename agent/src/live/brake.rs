//! What the probes cost each process, and which detail it loses where that is too much.
//!
//! Cost = hits x measured nanoseconds a hit ([`HitCost`]). Hits cost nothing to count: calls are
//! counted by their records and losses, `PyTorch`'s blocks by their totals.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::mpsc::Sender,
    time::{Duration, Instant},
};

use agent_common::{cookie::Kind, quota::Quota};

use super::books::Books;
use crate::{
    attach::{
        brake::{Braking, Step},
        worker::Command,
    },
    cli::MaxOverhead,
    clock,
    kernel::{CostMeter, HitCost},
    probes::{self, PROBES},
};

/// Pace of the looks.
const PERIOD: Duration = Duration::from_secs(1);
/// Looks that count: a short burst within what so long a time allows costs nothing.
const LOOKS: usize = 5;
/// Looks after a step until the next can be made.
const SETTLING: usize = 2;
/// That time, nanoseconds.
const WINDOW_NS: f64 = LOOKS as f64 * 1e9;

/// What was counted of a process between two looks.
#[derive(Clone, Debug, Default, PartialEq)]
struct Look {
    /// By row of the probe table.
    calls: Vec<(u8, u64)>,
    /// Calls of which only the loss is known.
    lost: u64,
    /// Blocks of `PyTorch` that came or went.
    blocks: u64,
    /// CPU time of the process.
    cpu_ns: u64,
}

/// What is counted of a process.
struct Meter {
    /// Calls since the last look, by row.
    rows: Box<[u64; 256]>,
    looks: VecDeque<Look>,
    /// As of the last look: sums since the process began.
    lost: u64,
    blocks: u64,
    cpu_ns: Option<u64>,
    totals_only: bool,
    /// Looks that do not count yet: after a step, what was under way before it still comes in.
    settling: usize,
}

impl Meter {
    fn new(totals_only: bool) -> Self {
        let rows = Box::new([0; 256]);
        let looks = VecDeque::new();
        Self { rows, looks, lost: 0, blocks: 0, cpu_ns: None, totals_only, settling: 0 }
    }

    /// Takes in what was counted since the last look; `sums` are since the process began.
    fn look(&mut self, sums: Sums) {
        let calls = (0..=u8::MAX).zip(self.rows.iter_mut()).filter(|(_, count)| **count > 0);
        let calls = calls.map(|(row, count)| (row, std::mem::take(count))).collect();
        let since = |now: u64, before: &mut u64| now.saturating_sub(std::mem::replace(before, now));
        let cpu_ns = sums.cpu_ns.saturating_sub(*self.cpu_ns.get_or_insert(sums.cpu_ns));
        self.cpu_ns = Some(sums.cpu_ns);
        let lost = since(sums.lost, &mut self.lost);
        let blocks = since(sums.blocks, &mut self.blocks);
        if self.settling > 0 {
            self.settling -= 1;
            return;
        }
        self.looks.push_back(Look { calls, lost, blocks, cpu_ns });
        if self.looks.len() > LOOKS {
            self.looks.pop_front();
        }
    }

    /// A step was made.
    fn stepped(&mut self, step: &Step) {
        self.looks.clear();
        self.settling = SETTLING;
        self.totals_only |= *step == Step::Totals;
    }

    fn judge(&self, hit: &HitCost, cap: f64) -> Option<Verdict> {
        judge(self.looks.iter(), self.totals_only, hit, cap)
    }
}

/// Sums of a process since it began.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    lost: u64,
    blocks: u64,
    cpu_ns: u64,
}

/// What a process pays, and what it is spared.
#[derive(Clone, Debug, PartialEq)]
struct Verdict {
    /// Share of its time.
    share: f64,
    step: Step,
}

/// What is to be taken away. The cost is held against the process's CPU time, or against the time that
/// passed where that is more: it may sleep, or run on many CPUs.
fn judge<'a>(
    looks: impl Iterator<Item = &'a Look>,
    totals_only: bool,
    hit: &HitCost,
    cap: f64,
) -> Option<Verdict> {
    let mut by_row: HashMap<u8, f64> = HashMap::new();
    let (mut lost, mut blocks, mut cpu_ns) = (0, 0, 0);
    for look in looks {
        for (row, count) in &look.calls {
            *by_row.entry(*row).or_default() += *count as f64;
        }
        lost += look.lost;
        blocks += look.blocks;
        cpu_ns += look.cpu_ns;
    }
    let calls: f64 = by_row.values().sum();
    // Those that were lost are most likely of the same functions.
    let scale = if calls > 0.0 { 1.0 + lost as f64 / calls } else { 0.0 };
    for count in by_row.values_mut() {
        *count *= scale * hit.call_ns();
    }
    let block_ns = if totals_only { hit.totals_ns() } else { hit.block_ns() };
    let of_blocks = blocks as f64 * block_ns;
    let cost = by_row.values().sum::<f64>() + of_blocks;
    let time_ns = (cpu_ns as f64).max(WINDOW_NS);
    if cost <= cap * time_ns {
        return None;
    }
    let step = if !totals_only && of_blocks * 2.0 >= cost {
        Step::Totals
    } else {
        // Blocks that still have lines lose those first.
        by_row.extend(tensor_row().filter(|_| totals_only).map(|row| (row, of_blocks)));
        Step::Rows(hottest(by_row, cost, cap * time_ns / 2.0))
    };
    Some(Verdict { share: cost / time_ns, step })
}

/// The rows that cost most, until what is left costs no more than `enough`.
fn hottest(by_row: HashMap<u8, f64>, mut cost: f64, enough: f64) -> Vec<u8> {
    let mut rows: Vec<(u8, f64)> = by_row.into_iter().collect();
    rows.sort_by(|(row, cost), (other, more)| more.total_cmp(cost).then(row.cmp(other)));
    let mut hottest = Vec::new();
    for (row, its) in rows {
        if cost <= enough {
            break;
        }
        cost -= its;
        hottest.push(row);
    }
    hottest.sort_unstable();
    hottest
}

fn tensor_row() -> Option<u8> {
    probes::rows().find(|(_, probe)| probe.kind() == Kind::Tensor).map(|(row, _)| row)
}

/// What limits the probes and the users.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// How much of a process's time the probes may take.
    pub(super) max_overhead: MaxOverhead,
    /// No more than the totals of `PyTorch`'s blocks is recorded of any process.
    pub(super) totals_only: bool,
    /// Size of the ring of calls.
    pub(super) ring_bytes: u32,
}

/// The brake of a recording.
pub(super) struct Brake {
    /// Share of a process's time that the probes may take; `None` = as much as they do.
    cap: Option<f64>,
    /// No more than the totals of `PyTorch`'s blocks is recorded of any process.
    totals_only: bool,
    cost: CostMeter,
    commands: Sender<Command>,
    meters: HashMap<u32, Meter>,
    /// Processes some of whose calls are not recorded any more.
    blind: HashSet<u32>,
    looked: Instant,
    /// The limits of a user while there are several.
    quota: Quota,
    several_users: bool,
}

impl Brake {
    pub(super) fn new(limits: Limits, cost: CostMeter, commands: Sender<Command>) -> Self {
        Self {
            cap: limits.max_overhead.share(),
            totals_only: limits.totals_only,
            cost,
            commands,
            meters: HashMap::new(),
            blind: HashSet::new(),
            looked: Instant::now(),
            quota: Quota::of_ring(limits.ring_bytes),
            several_users: false,
        }
    }

    /// Whether what a process holds is not known, since calls are not recorded.
    pub(super) fn is_blind(&self, tgid: u32) -> bool {
        self.blind.contains(&tgid)
    }

    /// A call was recorded.
    pub(super) fn call(&mut self, tgid: u32, row: u8) {
        if self.cap.is_none() {
            return;
        }
        let totals_only = self.totals_only;
        let meter = self.meters.entry(tgid).or_insert_with(|| Meter::new(totals_only));
        meter.rows[usize::from(row)] += 1;
    }

    /// A process ended.
    pub(super) fn forget(&mut self, tgid: u32) {
        self.meters.remove(&tgid);
        self.blind.remove(&tgid);
    }

    /// Tells the attaching thread.
    pub(super) fn command(&self, command: Command) {
        // It lives as long as the recording.
        self.commands.send(command).unwrap_or_default();
    }
}

impl Books {
    /// Looks, once a second, at what the probes cost each process.
    pub(super) fn look_at_costs(&mut self) {
        let Some(cap) = self.brake.cap else { return };
        if self.brake.looked.elapsed() < PERIOD {
            return;
        }
        self.brake.looked = Instant::now();
        let mut sums = self.polled.hits();
        for tgid in self.brake.meters.keys() {
            sums.entry(*tgid).or_default();
        }
        let hit = self.brake.cost.now();
        for (tgid, (lost, blocks)) in sums {
            // One that ended pays nothing any more.
            let Some(usage) = self.opening.host.process_usage(tgid) else { continue };
            let totals_only = self.brake.totals_only;
            let meter = self.brake.meters.entry(tgid).or_insert_with(|| Meter::new(totals_only));
            meter.look(Sums { lost, blocks, cpu_ns: usage.cpu_ns.max(0) as u64 });
            if let Some(verdict) = meter.judge(&hit, cap) {
                meter.stepped(&verdict.step);
                let why = why(tgid, &verdict, cap);
                self.brake.command(Command::Brake(Braking { tgid, step: verdict.step, why }));
            }
        }
    }
}

impl Books {
    /// Detail was taken away from a process.
    pub(super) fn braked(&mut self, braking: Braking) {
        let Braking { tgid, step, why } = braking;
        let (reason, count, detail) = match step {
            Step::Totals => {
                // The last of what is known.
                self.write_sites(Some(tgid));
                self.polled.stop_sites(tgid, clock::boot_ns());
                let reason = if self.opening.every_tensor { "brake" } else { "brake_lines" };
                (reason, 1, Some("totals"))
            }
            Step::Rows(rows) => {
                self.brake.blind.insert(tgid);
                let tensors = tensor_row().is_some_and(|row| rows.contains(&row));
                if tensors {
                    self.polled.stop_totals(tgid);
                }
                ("brake", rows.len() as i64, tensors.then_some("off"))
            }
        };
        self.lost(Some(tgid), reason, count, None);
        let Some(life) = self.lives.current(tgid) else { return };
        life.detail = detail.or(life.detail);
        let proc_id = life.proc_id;
        self.annotate(Some(proc_id.0), "brake", why, Some(count));
        self.write_process(proc_id);
    }

    /// While several users' processes are recorded, none may fill the ring alone.
    pub(super) fn share_ring(&mut self) {
        let users = self.lives.running().filter_map(|life| life.row.as_ref()?.uid);
        let several = users.collect::<HashSet<i32>>().len() > 1;
        if std::mem::replace(&mut self.brake.several_users, several) != several {
            let quota = if several { self.brake.quota } else { Quota::NONE };
            self.brake.command(Command::Quota(quota));
        }
    }
}

/// For the user.
fn why(tgid: u32, verdict: &Verdict, cap: f64) -> String {
    let loses = match &verdict.step {
        Step::Totals => {
            "of PyTorch's memory only totals are recorded in it any more, no lines".to_owned()
        }
        Step::Rows(rows) => {
            let apis = rows.iter().filter_map(|row| PROBES.get(usize::from(*row)));
            let apis: Vec<&str> = apis.map(probes::Probe::api).collect();
            let apis = apis.join(", ");
            format!("its calls of {apis} are not recorded any more: what it holds is not known")
        }
    };
    format!(
        "the probes cost pid {tgid} {:.1} % of its time, more than {:.1} %: {loses} (raise \
         --max-overhead to keep them)",
        verdict.share * 100.0,
        cap * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2,100 ns a call, 1,750 a block, 730 in the totals.
    fn hit() -> HitCost {
        HitCost::default()
    }

    fn calls(calls: &[(u8, u64)]) -> Look {
        Look { calls: calls.to_vec(), ..Look::default() }
    }

    #[test]
    fn what_costs_little_is_left_alone() {
        // 2 % of five seconds are 100 ms: 47,619 calls, or 57,142 blocks.
        let look = calls(&[(1, 20_000), (2, 20_000)]);
        assert_eq!(judge([look].iter(), false, &hit(), 0.02), None);
        let look = Look { blocks: 57_000, ..Look::default() };
        assert_eq!(judge([look].iter(), false, &hit(), 0.02), None);
        assert_eq!(judge([].iter(), false, &hit(), 0.02), None);
    }

    #[test]
    fn the_hottest_functions_go_until_half_of_the_cap_is_free() {
        let look = calls(&[(1, 500_000), (2, 500_000), (3, 100), (4, 10_000)]);
        let verdict = judge([look].iter(), false, &hit(), 0.02).unwrap();
        assert_eq!(verdict.step, Step::Rows(vec![1, 2]));
        assert!((verdict.share - 1_010_100.0 * 2100.0 / 5e9).abs() < 1e-9, "{}", verdict.share);
    }

    #[test]
    fn lost_calls_count_as_those_that_were_seen() {
        let look = Look { lost: 1_000_000, ..calls(&[(1, 10), (2, 10)]) };
        let verdict = judge([look].iter(), false, &hit(), 0.02).unwrap();
        assert_eq!(verdict.step, Step::Rows(vec![1, 2]));
    }

    #[test]
    fn a_process_on_many_cpus_may_pay_more() {
        let look = Look { cpu_ns: 80_000_000_000, ..calls(&[(1, 500_000)]) };
        assert_eq!(judge([look].iter(), false, &hit(), 0.02), None);
    }

    #[test]
    fn blocks_lose_their_lines_first_and_then_their_probe() {
        let look = || Look { blocks: 1_000_000, ..calls(&[(1, 1000)]) };
        let step = |totals_only| judge([look()].iter(), totals_only, &hit(), 0.02).unwrap().step;
        assert_eq!(step(false), Step::Totals);
        assert_eq!(step(true), Step::Rows(vec![tensor_row().unwrap()]));
        // Of a process whose calls cost more, those go, and the blocks are judged anew.
        let both = Look { blocks: 900_000, ..calls(&[(1, 1_000_000)]) };
        let verdict = judge([both].iter(), false, &hit(), 0.02).unwrap();
        assert_eq!(verdict.step, Step::Rows(vec![1]));
    }

    #[test]
    fn only_the_last_looks_count_and_none_twice() {
        let mut meter = Meter::new(false);
        for second in 1..=20 {
            meter.rows[7] += 1000;
            meter.look(Sums { lost: second * 5, blocks: second * 10, cpu_ns: second * 1000 });
        }
        meter.stepped(&Step::Totals);
        for _ in 0..=SETTLING {
            assert_eq!(judge(meter.looks.iter(), true, &hit(), 1e-9), None);
            meter.rows[7] += 1000;
            meter.look(Sums { lost: 100, blocks: 200, cpu_ns: 20_000 });
        }
        assert_eq!(meter.looks.len(), 1);
        for second in 21..=25 {
            meter.rows[7] += 1000;
            meter.look(Sums { lost: second * 5, blocks: second * 10, cpu_ns: second * 1000 });
        }
        let all = Look { calls: vec![(7, 1000)], lost: 5, blocks: 10, cpu_ns: 1000 };
        assert_eq!(Vec::from(meter.looks), vec![all; LOOKS]);
    }
}
