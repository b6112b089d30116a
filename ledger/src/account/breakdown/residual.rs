//! What NVML charges beyond every known block: contexts, code, and the rest, unexplained.
//!
//! No call tells the size of a context or of loaded code. What appears in NVML's figure around the
//! call that makes one is taken for it; everything else stays unexplained.

use std::collections::{HashSet, VecDeque};

use crate::{account::state::PoolUse, rows::EventRow};

/// Memory that a pool takes at a time (measured on an H200, driver 580).
const CHUNK_BYTES: i64 = 32 << 20;
/// No pool is said to keep more beyond its blocks than it ever had in them, or than this.
const LEAST_SLACK_BYTES: i64 = 64 << 20;
/// Readings that are remembered: a call is shorter than this many.
const SETTLED: usize = 32;

/// What was done since the last reading that may show in the next one.
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    /// When the first of these calls entered.
    since_ns: i64,
    /// When the last returned.
    until_ns: i64,
    /// Contexts made.
    contexts: i64,
    /// NVML lists the process for the first time: it has a context, or is making one.
    listed: bool,
    /// A limit of a context was set.
    limit: bool,
    /// A context may have ended.
    ended: bool,
    /// Code was loaded or unloaded.
    code: bool,
}

/// One process on one device.
#[derive(Debug, Default)]
pub(super) struct Residual {
    /// What appeared with contexts, and how many were made.
    context_bytes: i64,
    contexts: i64,
    /// What appeared when limits were set.
    limit_bytes: i64,
    /// What appeared with code.
    code_bytes: i64,
    has_code: bool,
    known: HashSet<i64>,
    /// Code that was loaded or asked for: asking again loads nothing.
    known_code: HashSet<i64>,
    /// What pools keep beyond what is known, and what they had handed out at the last reading.
    pool_bytes: i64,
    pool_allocs: u64,
    pending: Option<Pending>,
    /// Ends of readings, with what was unexplained then, oldest first.
    settled: VecDeque<(i64, i64)>,
    /// What was told last.
    last: Option<Parts>,
}

/// NVML's figure, less every known block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    /// When the reading began and ended.
    pub(super) ts_ns: i64,
    pub(super) end_ns: i64,
    pub(super) bytes: i64,
    /// The process was attached to late: what was there then is no part of `bytes`.
    pub(super) late: bool,
    pub(super) pools: PoolUse,
}

/// The rest, told apart, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    /// `None`: its contexts are from before attach.
    pub(super) context: Option<i64>,
    pub(super) code: i64,
    /// What stream-ordered pools keep beyond what is known of them.
    pub(super) pools: i64,
    pub(super) unexplained: i64,
}

impl Residual {
    /// Takes in a row about a context (`ctx`) or code (`module`).
    pub(super) fn note(&mut self, row: &EventRow) {
        let (mut contexts, mut limit, mut ended) = (0, false, false);
        if row.op == "ctx" {
            limit = row.api.contains("Limit");
            let makes = ["Create", "Retain", "FromGreen"].iter().any(|word| row.api.contains(word));
            if makes {
                contexts = i64::from(self.known.insert(row.addr));
            } else if !limit {
                self.known.remove(&row.addr);
                ended = true;
            }
            if contexts == 0 && !limit && !ended {
                return;
            }
        } else if row.api.contains("Unload") {
            self.known_code.remove(&row.addr);
        } else if !self.known_code.insert(row.addr) {
            return;
        }
        let enter_ns = row.ts_ns.saturating_sub(row.duration_ns);
        let pending = self.pending.get_or_insert(Pending {
            since_ns: enter_ns,
            until_ns: row.ts_ns,
            ..Pending::default()
        });
        pending.since_ns = pending.since_ns.min(enter_ns);
        pending.until_ns = pending.until_ns.max(row.ts_ns);
        pending.contexts += contexts;
        pending.limit |= limit;
        pending.ended |= ended;
        pending.code |= row.op == "module";
    }

    /// Tells the rest apart. `bare_bytes` is the smallest context that was seen on the device; a
    /// smaller one is put there.
    pub(super) fn parts(&mut self, rest: Rest, bare_bytes: &mut Option<i64>) -> Parts {
        let first = self.settled.is_empty();
        let told = self.context_bytes + self.limit_bytes + self.code_bytes + self.pool_bytes;
        let mut left = rest.bytes - told;
        if first && !rest.late {
            // NVML lists who has a context: the call that makes it may be under way, or unseen.
            let pending = self.pending.get_or_insert_default();
            pending.since_ns = i64::MIN;
            pending.listed = true;
        }
        left -= self.pools(left, &rest);
        if let Some(pending) = self.pending.filter(|_| !(first && rest.late)) {
            left -= self.assign(&pending, left - self.before(pending.since_ns), bare_bytes);
        }
        if self.pending.is_some_and(|pending| pending.until_ns <= rest.ts_ns) {
            self.pending = None;
        }
        if self.settled.len() == SETTLED {
            self.settled.pop_front();
        }
        self.settled.push_back((rest.end_ns, left));
        let parts = self.told(left, rest.late, *bare_bytes);
        self.last = Some(parts);
        parts
    }

    /// What was told at the last reading.
    pub(super) fn last(&self) -> Option<Parts> {
        self.last
    }

    /// A pool takes memory in chunks, and keeps what its blocks leave of them, as far as its threshold goes.
    /// What NVML shows more since the last reading, in which blocks were handed out, is taken for
    /// that; beside code that was loaded meanwhile, only whole chunks are. Gives how much.
    fn pools(&mut self, left: i64, rest: &Rest) -> i64 {
        let handed_out =
            rest.pools.allocs != std::mem::replace(&mut self.pool_allocs, rest.pools.allocs);
        let last = self.settled.back().map_or(0, |(_, left)| *left);
        let step = left - last;
        if step < 0 && self.pending.is_some() {
            return 0; // Contexts and code give back first.
        }
        if step < 0 {
            let back = (-step).min(self.pool_bytes);
            self.pool_bytes -= back;
            return -back;
        }
        // A context takes more than a pool's first chunk.
        let context = self.pending.is_some_and(|pending| pending.contexts > 0 || pending.listed);
        if !handed_out || context || (self.settled.is_empty() && rest.late) {
            return 0;
        }
        let whole = if self.pending.is_some() { step / CHUNK_BYTES * CHUNK_BYTES } else { step };
        let most = rest.pools.peak_bytes.max(LEAST_SLACK_BYTES) - self.pool_bytes;
        let taken = whole.min(most.max(0));
        self.pool_bytes += taken;
        taken
    }

    /// What was unexplained at the last reading before a moment.
    fn before(&self, ns: i64) -> i64 {
        let before = self.settled.iter().rfind(|(end_ns, _)| *end_ns <= ns);
        // A process that is seen from its start began with nothing.
        before.or(self.settled.front()).map_or(0, |(_, left)| *left)
    }

    /// Puts a step of NVML's figure where it belongs; gives how much of it.
    fn assign(&mut self, pending: &Pending, step: i64, bare_bytes: &mut Option<i64>) -> i64 {
        if step < 0 {
            return self.give_back(pending, step);
        }
        let mut left = step;
        if pending.contexts > 0 || pending.listed {
            // Further contexts of a process take less than its first.
            let is_first = self.contexts == 0;
            self.contexts += pending.contexts;
            let most = self.most_context(*bare_bytes).saturating_sub(self.context_bytes);
            let context = left.min(most.max(0));
            self.context_bytes += context;
            left -= context;
            if is_first && self.contexts > 0 && self.context_bytes > 0 {
                let each = self.context_bytes / self.contexts;
                *bare_bytes = Some(bare_bytes.map_or(each, |bare| bare.min(each)));
            }
        }
        let rest = if pending.limit {
            &mut self.limit_bytes
        } else if pending.code {
            &mut self.code_bytes
        } else {
            return step - left;
        };
        *rest += left;
        self.has_code |= pending.code;
        step
    }

    /// A step down: code is gone first, and all of it with its context.
    fn give_back(&mut self, pending: &Pending, step: i64) -> i64 {
        let mut left = -step;
        let mut take = |from: &mut i64| {
            let taken = left.min(*from).max(0);
            *from -= taken;
            left -= taken;
        };
        if pending.code || pending.ended {
            take(&mut self.code_bytes);
        }
        if pending.limit || pending.ended {
            take(&mut self.limit_bytes);
        }
        if pending.ended {
            take(&mut self.context_bytes);
        }
        step + left
    }

    /// Bytes that the process's contexts take at most.
    fn most_context(&self, bare_bytes: Option<i64>) -> i64 {
        bare_bytes.map_or(i64::MAX, |bare| bare.saturating_mul(self.contexts.max(1)))
    }

    /// No context is said to be larger than the smallest that was seen; what is above is code, if any
    /// was loaded.
    fn told(&self, left: i64, late: bool, bare_bytes: Option<i64>) -> Parts {
        let context = self.context_bytes.min(self.most_context(bare_bytes));
        let above = self.context_bytes - context;
        let (code, unexplained) = if self.has_code { (above, 0) } else { (0, above) };
        Parts {
            context: (!late || self.contexts > 0).then_some(context + self.limit_bytes),
            code: self.code_bytes + code,
            pools: self.pool_bytes,
            unexplained: left + unexplained,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    /// A process on a device, with readings every 100 ms.
    #[derive(Default)]
    struct Bench {
        residual: Residual,
        bare: Option<i64>,
        late: bool,
        at_ms: i64,
        pools: PoolUse,
    }

    impl Bench {
        /// A call that lasts for 5 ms, soon after the last reading.
        fn row(&mut self, op: &'static str, api: &'static str, addr: i64) {
            self.call(op, api, addr, (self.at_ms + 10, self.at_ms + 15));
        }

        fn call(
            &mut self,
            op: &'static str,
            api: &'static str,
            addr: i64,
            (enter_ms, exit_ms): (i64, i64),
        ) {
            self.residual.note(&EventRow {
                op: op.into(),
                api: api.into(),
                addr,
                ts_ns: exit_ms * MS,
                duration_ns: (exit_ms - enter_ms) * MS,
                ..EventRow::default()
            });
        }

        /// (context, code, unexplained)
        fn read(&mut self, bytes: i64) -> (Option<i64>, i64, i64) {
            self.at_ms += 100;
            let ts_ns = self.at_ms * MS;
            let pools = self.pools;
            let rest = Rest { ts_ns, end_ns: ts_ns + MS, bytes, late: self.late, pools };
            let parts = self.residual.parts(rest, &mut self.bare);
            (parts.context, parts.code, parts.unexplained)
        }
    }

    #[test]
    fn what_comes_with_a_context_is_the_context() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        assert_eq!(bench.read(518), (Some(518), 0, 0));
        assert_eq!(bench.read(518), (Some(518), 0, 0));
        assert_eq!(bench.read(600), (Some(518), 0, 82), "nothing was called");
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        assert_eq!(bench.read(700), (Some(518), 0, 182), "the same context once more");
        bench.row("ctx", "cuCtxCreate_v4", 8);
        assert_eq!(bench.read(800), (Some(618), 0, 182));
    }

    #[test]
    fn what_comes_with_code_is_code_and_goes_with_it() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        bench.read(500);
        bench.read(510);
        bench.row("module", "cuLibraryLoadData", 9);
        assert_eq!(bench.read(590), (Some(500), 80, 10));
        bench.row("module", "cuLibraryUnload", 9);
        assert_eq!(bench.read(560), (Some(500), 50, 10));
        bench.row("ctx", "cuDevicePrimaryCtxReset", 7);
        assert_eq!(bench.read(10), (Some(0), 0, 10));
    }

    #[test]
    fn a_call_that_lasts_over_a_reading_is_one_step() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        bench.read(500);
        // It takes memory bit by bit, and is told when it returns.
        assert_eq!(bench.read(540), (Some(500), 0, 40));
        assert_eq!(bench.read(560), (Some(500), 0, 60));
        bench.call("module", "cuModuleLoadData", 9, (110, 360));
        assert_eq!(bench.read(570), (Some(500), 70, 0));
    }

    #[test]
    fn a_context_is_at_most_the_smallest_that_was_seen() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        bench.row("module", "cuLibraryLoadData", 9);
        assert_eq!(bench.read(600), (Some(600), 0, 0));
        bench.bare = Some(500);
        bench.row("module", "cuLibraryLoadData", 10);
        assert_eq!(bench.read(620), (Some(500), 120, 0));
        let mut other = Bench { bare: Some(500), ..Bench::default() };
        other.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        assert_eq!(other.read(530), (Some(500), 0, 30), "no code was loaded");
    }

    #[test]
    fn a_context_that_is_being_made_grows_until_the_call_returns() {
        let mut bench = Bench::default();
        assert_eq!(bench.read(60), (Some(60), 0, 0), "NVML lists it already");
        assert_eq!((bench.read(300), bench.bare), ((Some(60), 0, 240), None));
        bench.call("ctx", "cuDevicePrimaryCtxRetain", 7, (90, 350));
        bench.at_ms += 100;
        assert_eq!((bench.read(518), bench.bare), ((Some(518), 0, 0), Some(518)));
    }

    #[test]
    fn what_pools_take_in_chunks_is_theirs() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        bench.read(500);
        bench.pools = PoolUse { floor_bytes: 0, peak_bytes: CHUNK_BYTES, allocs: 1 };
        assert_eq!(bench.read(500 + CHUNK_BYTES), (Some(500), 0, 0));
        assert_eq!(bench.residual.last().unwrap().pools, CHUNK_BYTES);
        assert_eq!(bench.read(510 + CHUNK_BYTES), (Some(500), 0, 10), "nothing was handed out");
        bench.pools.allocs = 2;
        bench.row("module", "cuLibraryLoadData", 9);
        assert_eq!(bench.read(530 + 2 * CHUNK_BYTES), (Some(500), 20, 10));
        bench.pools.allocs = 3;
        assert_eq!(bench.read(530 + 4 * CHUNK_BYTES), (Some(500), 20, 10 + 2 * CHUNK_BYTES));
        assert_eq!(bench.residual.last().unwrap().pools, 2 * CHUNK_BYTES, "no more than it had");
        assert_eq!(bench.read(530), (Some(500), 20, 10), "what the pool gives back");
        let pools = PoolUse { floor_bytes: 0, peak_bytes: CHUNK_BYTES, allocs: 1 };
        let mut other = Bench { pools, ..Bench::default() };
        other.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        assert_eq!(other.read(2 * CHUNK_BYTES), (Some(2 * CHUNK_BYTES), 0, 0), "a context first");
    }

    #[test]
    fn code_that_is_asked_for_again_loads_nothing() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        bench.read(500);
        bench.row("module", "cuLibraryGetKernel", 9);
        assert_eq!(bench.read(510), (Some(500), 10, 0));
        bench.row("module", "cuLibraryGetKernel", 9);
        assert_eq!(bench.read(520), (Some(500), 10, 10));
    }

    #[test]
    fn limits_take_memory_of_the_context() {
        let mut bench = Bench::default();
        bench.row("ctx", "cuDevicePrimaryCtxRetain", 7);
        bench.read(500);
        bench.row("ctx", "cuCtxSetLimit", 2);
        assert_eq!(bench.read(564), (Some(564), 0, 0));
        bench.bare = Some(400);
        assert_eq!(bench.read(564), (Some(464), 0, 100));
    }

    #[test]
    fn of_a_late_process_only_what_comes_later_is_told() {
        let mut bench = Bench { late: true, ..Bench::default() };
        assert_eq!(bench.read(0), (None, 0, 0));
        bench.row("module", "cuLibraryLoadData", 9);
        assert_eq!(bench.read(30), (None, 30, 0));
        bench.row("ctx", "cuCtxCreate_v4", 8);
        assert_eq!(bench.read(90), (Some(60), 30, 0));
    }
}
