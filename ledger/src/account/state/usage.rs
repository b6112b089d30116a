//! Totals of one level, on one device, in one process.

use std::collections::BTreeMap;

/// Refused calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// Calls.
    pub count: u64,
    /// Bytes asked for, where known.
    pub bytes_asked: i64,
    /// When the last one returned, nanoseconds since the epoch.
    pub last_ns: i64,
    /// Calls by `CUresult`; 2 is out of memory.
    pub by_result: BTreeMap<i32, u64>,
}

/// Totals. Bytes of allocations whose size is not known count as 0 and show in the counts only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes alive.
    pub live_bytes: i64,
    /// Allocations alive.
    pub live_count: u64,
    /// Highest `live_bytes`.
    pub peak_bytes: i64,
    /// When it was reached first, nanoseconds since the epoch.
    pub peak_ns: i64,
    /// Bytes allocated since the first row.
    pub allocated_bytes: i64,
    /// Bytes freed since then, by calls or not.
    pub freed_bytes: i64,
    /// Allocations since then.
    pub allocs: u64,
    /// Frees of known allocations since then.
    pub frees: u64,
    /// Frees of what is not in the books.
    pub unknown_frees: u64,
    /// Refused calls.
    pub failures: Failures,
}

impl Usage {
    /// `bytes` more are alive since `ts_ns`.
    pub(super) fn raise(&mut self, ts_ns: i64, bytes: i64) {
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        if self.live_bytes > self.peak_bytes {
            self.peak_bytes = self.live_bytes;
            self.peak_ns = ts_ns;
        }
    }

    /// An allocation of `bytes` is gone.
    pub(super) fn drop_one(&mut self, bytes: i64) {
        self.live_bytes = self.live_bytes.saturating_sub(bytes);
        self.live_count = self.live_count.saturating_sub(1);
    }

    pub(super) fn fail(&mut self, ts_ns: i64, result: i32, size_bytes: Option<i64>) {
        let failures = &mut self.failures;
        failures.count += 1;
        failures.bytes_asked = failures.bytes_asked.saturating_add(size_bytes.unwrap_or(0));
        failures.last_ns = failures.last_ns.max(ts_ns);
        *failures.by_result.entry(result).or_insert(0) += 1;
    }
}
