//! The host's own figures: rows of `host_samples` without a container.

use std::path::Path;

use ledger::rows::HostSampleRow;

use super::{Host, TICK_NS, text};

/// Space of a file system, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) used: i64,
    pub(crate) total: i64,
    /// Free for processes without privileges.
    pub(crate) available: i64,
}

impl Space {
    pub(crate) fn of(stat: &rustix::fs::StatVfs) -> Option<Self> {
        let bytes = |blocks: u64| i64::try_from(blocks.checked_mul(stat.f_frsize)?).ok();
        Some(Self {
            used: bytes(stat.f_blocks.checked_sub(stat.f_bfree)?)?,
            total: bytes(stat.f_blocks)?,
            available: bytes(stat.f_bavail)?,
        })
    }

    /// Space of the file system that holds a path of the agent's own.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        Self::of(&rustix::fs::statvfs(path).ok()?)
    }
}

impl Host {
    /// The host's CPU time, memory, `/dev/shm`, and the space left for a log in `log_directory`;
    /// `ts_ns` is the caller's to fill in.
    pub fn sample(&self, log_directory: &Path) -> HostSampleRow {
        let stat = self.read("proc/stat").unwrap_or_default();
        let memory = self.read("proc/meminfo").unwrap_or_default();
        let bytes = |key: &str| text::field(&memory, key)?.parse::<i64>().ok()?.checked_mul(1024);
        let total = bytes("MemTotal");
        let shm = Space::at(&self.path("dev/shm"));
        HostSampleRow {
            cpu_ns: busy_ns(&stat),
            cpus: cpus(&stat),
            memory_used_bytes: total.zip(bytes("MemAvailable")).map(|(all, left)| all - left),
            memory_limit_bytes: total,
            shm_used_bytes: shm.map(|space| space.used),
            shm_limit_bytes: shm.map(|space| space.total),
            log_disk_free_bytes: Space::at(log_directory).map(|space| space.available),
            ..HostSampleRow::default()
        }
    }
}

/// Busy time of all CPUs since boot: user, nice, system, irq, softirq, steal. Idle and iowait are
/// not busy; guest time is in user already.
fn busy_ns(stat: &[u8]) -> Option<i64> {
    let ticks: Vec<u64> = text::values(stat, "cpu")?.map_while(|word| word.parse().ok()).collect();
    let busy = [0, 1, 2, 5, 6, 7].iter().try_fold(0_u64, |sum, at| {
        // The first kernels of this century end the line early.
        sum.checked_add(ticks.get(*at).copied().unwrap_or(0))
    })?;
    (ticks.len() >= 4).then(|| i64::try_from(busy.checked_mul(TICK_NS)?).ok())?
}

/// Online CPUs: lines `cpu0`, `cpu1` and so on.
fn cpus(stat: &[u8]) -> Option<i32> {
    let numbered = |line: &&[u8]| {
        line.strip_prefix(b"cpu").and_then(<[u8]>::first).is_some_and(u8::is_ascii_digit)
    };
    let count = stat.split(|byte| *byte == b'\n').filter(numbered).count();
    i32::try_from(count).ok().filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    #[test]
    fn a_row_of_the_host() {
        let tree = Tree::new();
        tree.write(
            "proc/stat",
            "cpu  100 10 50 9000 500 5 3 2 77 0\ncpu0 1 2 3 4\ncpu1 1 2 3 4\nintr 5\n",
        );
        tree.write("proc/meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  400 kB\n");
        tree.write("dev/shm/x", "");
        let row = tree.host().sample(tree.root());
        assert_eq!(row.container_id, None);
        assert_eq!(row.cpu_ns, Some(170 * 10_000_000));
        assert_eq!(row.cpus, Some(2));
        assert_eq!(row.memory_used_bytes, Some(600 * 1024));
        assert_eq!(row.memory_limit_bytes, Some(1000 * 1024));
        assert!(row.shm_limit_bytes.is_some_and(|bytes| bytes > 0));
        assert!(row.log_disk_free_bytes.is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn what_is_missing_is_null() {
        let row = Tree::new().host().sample(Path::new("/no/such"));
        assert_eq!(row, HostSampleRow::default());
        assert_eq!(busy_ns(b"cpu  1 2 x"), None);
    }

    #[test]
    fn this_host_has_figures() {
        let row = Host::live().sample(Path::new("/"));
        assert!(row.cpu_ns > Some(0) && row.cpus > Some(0) && row.memory_used_bytes > Some(0));
        assert!(row.memory_used_bytes < row.memory_limit_bytes);
    }
}
