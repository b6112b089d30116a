//! `/proc/PID/stat`: start time, CPU time, resident memory.

use super::{Host, TICK_NS, text};

/// The fields of `/proc/PID/stat` that vramscope uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Name of the main thread.
    pub comm: String,
    /// `R`, `S`, `D`, `Z` and so on, as `proc_pid_stat(5)` has them.
    pub state: char,
    /// Parent's process id.
    pub ppid: u32,
    /// Clock ticks from boot to the start of the process: with the pid and the boot id, its
    /// identity.
    pub start_ticks: u64,
    /// What the process used so far.
    pub usage: ProcessUsage,
}

/// What a process used on the host side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// CPU time of all threads since the start, user and system, nanoseconds.
    pub cpu_ns: i64,
    /// Resident memory, bytes.
    pub rss_bytes: i64,
}

impl Host {
    /// Reads `/proc/PID/stat`.
    pub fn stat(&self, pid: u32) -> Option<Stat> {
        parse(&self.read_process(pid, "stat", 4096)?)
    }

    /// When a process started, `CLOCK_BOOTTIME` nanoseconds, exact to a tick of 10 ms.
    pub fn start_boot_ns(&self, pid: u32) -> Option<u64> {
        self.stat(pid)?.start_ticks.checked_mul(TICK_NS)
    }

    /// CPU time and resident memory of a process now.
    pub fn process_usage(&self, pid: u32) -> Option<ProcessUsage> {
        self.stat(pid).map(|stat| stat.usage)
    }
}

/// Parses one line of `stat`. The name is between the first `(` and the *last* `)`: it may hold
/// any character, brackets and newlines too.
pub(super) fn parse(line: &[u8]) -> Option<Stat> {
    let open = line.iter().position(|byte| *byte == b'(')?;
    let close = line.iter().rposition(|byte| *byte == b')')?;
    let comm = text::clean(line.get(open + 1..close)?, 64);
    let rest = std::str::from_utf8(line.get(close + 1..)?).ok()?;
    // Numbers as in proc_pid_stat(5), where the state behind the name is field 3.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let ticks = number(14)?.checked_add(number(15)?)?;
    let pages = number(24)?;
    let usage = ProcessUsage {
        cpu_ns: i64::try_from(ticks.checked_mul(TICK_NS)?).ok()?,
        rss_bytes: i64::try_from(pages.checked_mul(rustix::param::page_size() as u64)?).ok()?,
    };
    let state = fields.first()?.chars().next()?;
    let ppid = u32::try_from(number(4)?).ok()?;
    Some(Stat { comm, state, ppid, start_ticks: number(22)?, usage })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_may_hold_brackets_and_newlines() {
        let line =
            b"42 (a) R 1 (b\n) S 7 1 1 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 1 0 98765 4096 3 \
                     18446744073709551615 1 1";
        let stat = parse(line).unwrap();
        assert_eq!(stat.comm, "a) R 1 (b\\n");
        assert_eq!((stat.state, stat.ppid), ('S', 7));
        assert_eq!(stat.start_ticks, 98765);
        assert_eq!(stat.usage.cpu_ns, 2_000_000_000);
        assert_eq!(stat.usage.rss_bytes, 3 * rustix::param::page_size() as i64);
    }

    #[test]
    fn broken_lines_are_none() {
        let lines: &[&[u8]] = &[b"", b"1", b"1 (x", b"1 )x(", b"1 (x) S", b"1 (x) S 1 \xff"];
        for line in lines {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn this_process_has_a_stat() {
        let stat = Host::live().stat(std::process::id()).unwrap();
        assert!(stat.start_ticks > 0);
        assert!(stat.usage.rss_bytes > 0);
    }
}
