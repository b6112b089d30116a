//! How many descriptors the recorder may have.
//!
//! On kernels without links of many probes each probe is a descriptor, some 230 for one copy of the
//! driver in each process that is followed: the usual soft limit of 1,024 is reached with five. That
//! limit is there for programs that use `select`, which this one does not.

use rustix::{
    io,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use tracing::{debug, info};

/// As many as are asked for: probes of some 4,000 processes. It is what the kernel grants at most
/// unless it was told otherwise.
const ENOUGH: u64 = 1 << 20;
/// What the kernel grants to anybody.
const GRANTED: &str = "/proc/sys/fs/nr_open";

/// Raises this process's limit as far as it may. Programs that it started before keep theirs; what is
/// started from here on would inherit the new one.
pub(super) fn raise() {
    let before = getrlimit(Resource::Nofile);
    match raised(before, granted(), |limit| setrlimit(Resource::Nofile, limit)) {
        Ok(now) => debug!(before = ?before.current, now = ?now.current, "open files"),
        Err(error) => info!(%error, limit = ?before.current, "the limit of open files stays"),
    }
}

/// Sets the first limit that is permitted, which it returns. Beyond the hard limit takes
/// `CAP_SYS_RESOURCE`; up to it nothing.
fn raised(
    before: Rlimit,
    granted: u64,
    mut set: impl FnMut(Rlimit) -> io::Result<()>,
) -> io::Result<Rlimit> {
    let within = both(before.maximum);
    let beyond = both(before.maximum.map(|hard| hard.max(ENOUGH.min(granted))));
    if set(beyond).is_ok() {
        return Ok(beyond);
    }
    set(within).map(|()| within)
}

/// The soft limit at the hard one.
const fn both(limit: Option<u64>) -> Rlimit {
    Rlimit { current: limit, maximum: limit }
}

/// Nothing where the kernel does not tell: then the hard limit stays.
fn granted() -> u64 {
    let told = std::fs::read_to_string(GRANTED).unwrap_or_default();
    told.trim().parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(current: u64, maximum: u64) -> Rlimit {
        Rlimit { current: Some(current), maximum: Some(maximum) }
    }

    /// What is set in a process that may go up to `most`.
    fn after(before: Rlimit, granted: u64, most: u64) -> Option<Rlimit> {
        let permit = |limit: Rlimit| match limit.maximum {
            Some(hard) if hard <= most => Ok(()),
            _ => Err(io::Errno::PERM),
        };
        raised(before, granted, permit).ok()
    }

    #[test]
    fn the_hard_limit_is_raised_where_that_is_permitted() {
        let whole = Some(limits(1 << 20, 1 << 20));
        assert_eq!(after(limits(1024, 4096), 1 << 20, u64::MAX), whole);
        assert_eq!(after(limits(1024, 4096), 1 << 30, u64::MAX), whole, "no more than enough");
        assert_eq!(after(limits(1024, 4096), 8192, u64::MAX), Some(limits(8192, 8192)));
        assert_eq!(after(limits(1024, 4096), 0, u64::MAX), Some(limits(4096, 4096)), "not told");
    }

    #[test]
    fn the_soft_limit_is_raised_to_the_hard_one_by_anybody() {
        assert_eq!(after(limits(1024, 4096), 1 << 20, 4096), Some(limits(4096, 4096)));
        assert_eq!(after(limits(1024, 4096), 1 << 20, 0), None);
    }

    #[test]
    fn no_limit_is_lowered() {
        assert_eq!(after(limits(1024, 1 << 25), 1 << 20, 1 << 25), Some(both(Some(1 << 25))));
        let none = both(None);
        assert_eq!(raised(none, 1 << 20, |_| Ok(())), Ok(none));
    }
}
