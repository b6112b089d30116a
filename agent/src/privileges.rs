//! What the agent may do, and what it gives up once it records.
//!
//! To start takes more than to record. [`NEEDED`] says what is for what; what stays is [`Kept`], and
//! [`give_up`] drops the rest for good. Linux keeps capabilities by thread, so that is done *before*
//! the threads that record are made: they inherit what is left. The log's thread is older and reduces
//! itself. docs/privileges.md has the table for users.

use std::io;

use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, capabilities_secure_bits,
    capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    set_no_new_privs,
};
use tracing::{info, warn};

/// A capability and what the agent wants it for.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// The capability.
    pub capability: CapabilitySet,
    /// Its name.
    pub name: &'static str,
    /// Nothing works without it.
    pub required: bool,
    /// What for.
    pub purpose: &'static str,
}

impl Need {
    const fn new(
        capability: CapabilitySet,
        name: &'static str,
        required: bool,
        purpose: &'static str,
    ) -> Self {
        Self { capability, name, required, purpose }
    }

    /// Whether this set has it. The old all-powerful one stands for those that were split off from
    /// it.
    pub fn is_in(&self, set: CapabilitySet) -> bool {
        let of_admin = CapabilitySet::BPF | CapabilitySet::PERFMON;
        let of_admin = of_admin | CapabilitySet::CHECKPOINT_RESTORE;
        set.contains(self.capability)
            || (of_admin.contains(self.capability) && set.contains(CapabilitySet::SYS_ADMIN))
    }
}

/// What a recording wants of every machine, the required first.
pub const NEEDED: [Need; 6] = [
    Need::new(CapabilitySet::BPF, "CAP_BPF", true, "load programs"),
    Need::new(CapabilitySet::PERFMON, "CAP_PERFMON", true, "attach probes"),
    Need::new(CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE", true, "see what others have mapped"),
    Need::new(
        CapabilitySet::DAC_READ_SEARCH,
        "CAP_DAC_READ_SEARCH",
        false,
        "read libraries, memory and environment of other users' processes",
    ),
    Need::new(
        CapabilitySet::CHECKPOINT_RESTORE,
        "CAP_CHECKPOINT_RESTORE",
        false,
        "open mapped files that were deleted",
    ),
    Need::new(
        CapabilitySet::SYS_ADMIN,
        "CAP_SYS_ADMIN",
        false,
        "see other agents and try return probes, at the start only",
    ),
];

/// Looking at processes of other users.
const LOOKING: CapabilitySet = CapabilitySet::SYS_PTRACE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::CHECKPOINT_RESTORE);
/// What putting in a probe may take, the least first. Which of them it is depends on the kernel.
const ATTACHING: [CapabilitySet; 5] = [
    CapabilitySet::empty(),
    CapabilitySet::BPF,
    CapabilitySet::BPF.union(CapabilitySet::PERFMON),
    CapabilitySet::SYS_ADMIN,
    CapabilitySet::SYS_ADMIN.union(CapabilitySet::BPF).union(CapabilitySet::PERFMON),
];

/// What every recording agent has: by this one it is known from a user's process.
pub const OF_AGENTS: CapabilitySet = CapabilitySet::SYS_PTRACE;

/// What is in effect for this thread; nothing where the kernel does not tell.
pub fn effective() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// What this process lacks of [`NEEDED`].
pub fn missing(required: bool) -> Vec<&'static Need> {
    let effective = effective();
    NEEDED.iter().filter(|need| need.required == required && !need.is_in(effective)).collect()
}

/// `CAP_BPF (load programs), ...`
pub fn listed<'a>(needs: impl IntoIterator<Item = &'a Need>) -> String {
    let told = needs.into_iter().map(|need| format!("{} ({})", need.name, need.purpose));
    told.collect::<Vec<_>>().join(", ")
}

/// Tells once what a recording will do without.
pub fn tell_missing() {
    let missing = missing(false);
    if !missing.is_empty() {
        warn!("recording without {}: see docs/privileges.md", listed(missing));
    }
}

/// What stays while recording.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Signals are passed on to a program that may be another user's (`run`).
    pub signals: bool,
}

impl Kept {
    /// The set of every thread but the log's; `attach` tells whether a probe could be put in by the
    /// thread that it is called in.
    fn set(self, permitted: CapabilitySet, attach: impl Fn() -> bool + Sync) -> CapabilitySet {
        let mut kept = LOOKING | least(permitted, attach);
        if self.signals {
            kept |= CapabilitySet::KILL;
        }
        if !permitted.contains(CapabilitySet::CHECKPOINT_RESTORE) {
            kept |= CapabilitySet::SYS_ADMIN;
        }
        kept & permitted
    }
}

/// The least of [`ATTACHING`] with which probes can be put in on this kernel, by trying.
fn least(permitted: CapabilitySet, attach: impl Fn() -> bool + Sync) -> CapabilitySet {
    let mut tried = ATTACHING.into_iter().filter(|set| permitted.contains(*set));
    tried.find(|set| works_with(*set, &attach)).unwrap_or_else(|| {
        // It may have failed for another reason: what is not understood is not given up.
        info!("which capability a probe needs was not found out");
        ATTACHING.into_iter().fold(CapabilitySet::empty(), CapabilitySet::union)
    })
}

/// Whether `act` works in a thread that has these in effect.
fn works_with(set: CapabilitySet, act: &(impl Fn() -> bool + Sync)) -> bool {
    let trial = || {
        let permitted = capabilities(None)?.permitted;
        let sets =
            CapabilitySets { effective: set, permitted, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets)?;
        io::Result::Ok(act())
    };
    std::thread::scope(|scope| scope.spawn(trial).join()).is_ok_and(|done| done.unwrap_or(false))
}

/// Gives up what recording does not need, for this thread and those that it will make. `attach` tells
/// whether a probe could be put in.
pub fn record_with(kept: Kept, attach: impl Fn() -> bool + Sync) {
    let permitted = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted);
    let set = kept.set(permitted, attach);
    give_up(set);
    info!(kept = %names(set), "capabilities that recording does not need are given up");
}

/// A part of giving up, told what is kept.
type Step = fn(CapabilitySet) -> io::Result<()>;

/// Gives up everything but `kept`, for good: no program that this thread may start gets any back. What
/// the kernel refuses is told once, and the rest is done.
pub fn give_up(kept: CapabilitySet) {
    let steps: [(&str, Step); 6] = [
        ("raise what is permitted", raise),
        ("empty the bounding set", |_| empty_bounding_set()),
        ("lock the secure bits", |_| lock_secure_bits()),
        ("clear the ambient set", |_| Ok(clear_ambient_capability_set()?)),
        ("keep some capabilities only", keep),
        ("gain no privileges by executing", |_| Ok(set_no_new_privs(true)?)),
    ];
    for (what, step) in steps {
        if let Err(error) = step(kept) {
            info!(%error, "the kernel does not let this agent {what}: it keeps more than it needs");
        }
    }
}

/// A thread that took on another user's rights has nothing in effect, but may still have it.
fn raise(_: CapabilitySet) -> io::Result<()> {
    let sets = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { effective: sets.permitted, ..sets })?)
}

/// Every number that the kernel knows, also those that came after this was written.
fn empty_bounding_set() -> io::Result<()> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match capability_is_in_bounding_set(capability) {
            Ok(true) => remove_capability_from_bounding_set(capability)?,
            Ok(false) => {}
            // The first number that it does not know.
            Err(_) => break,
        }
    }
    Ok(())
}

/// Being root gives no capabilities any more, neither by executing a program nor by changing users.
fn lock_secure_bits() -> io::Result<()> {
    use CapabilitiesSecureBits as Bits;
    let set = Bits::NO_ROOT | Bits::NO_SETUID_FIXUP | Bits::NO_CAP_AMBIENT_RAISE;
    let locks = Bits::NO_ROOT_LOCKED
        | Bits::NO_SETUID_FIXUP_LOCKED
        | Bits::NO_CAP_AMBIENT_RAISE_LOCKED
        | Bits::KEEP_CAPS_LOCKED;
    let before = capabilities_secure_bits()?;
    Ok(set_capabilities_secure_bits(before | set | locks)?)
}

fn keep(kept: CapabilitySet) -> io::Result<()> {
    let left = capabilities(None)?.permitted & kept;
    let inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: left, permitted: left, inheritable })?)
}

/// `CAP_KILL CAP_SYS_PTRACE`
fn names(set: CapabilitySet) -> String {
    let names = set.iter_names().map(|(name, _)| format!("CAP_{name}"));
    names.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ALL: CapabilitySet = CapabilitySet::all();

    #[test]
    fn the_old_all_powerful_one_stands_for_its_parts_only() {
        let admin = |name| {
            let need = NEEDED.iter().find(|need| need.name == name).unwrap();
            (need.is_in(CapabilitySet::SYS_ADMIN), need.is_in(need.capability))
        };
        assert_eq!(admin("CAP_BPF"), (true, true));
        assert_eq!(admin("CAP_SYS_PTRACE"), (false, true));
        assert_eq!(admin("CAP_DAC_READ_SEARCH"), (false, true));
    }

    #[test]
    fn what_is_kept_depends_on_the_verb_and_on_what_there_is() {
        let (quiet, signals) = (Kept { signals: false }, Kept { signals: true });
        assert_eq!(quiet.set(ALL, || true), LOOKING);
        assert_eq!(signals.set(ALL, || true), LOOKING | CapabilitySet::KILL);
        let old = CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
        assert_eq!(quiet.set(old, || true), old);
        // What can't be tried is kept.
        let attaching = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_ADMIN;
        assert_eq!(quiet.set(ALL, || false), LOOKING | attaching);
        assert_eq!(quiet.set(CapabilitySet::empty(), || true), CapabilitySet::empty());
    }

    #[test]
    fn the_least_that_works_is_kept() {
        let permitted = capabilities(None).unwrap().permitted;
        if !permitted.contains(ATTACHING[4]) {
            return println!("SKIP no capabilities to do without");
        }
        let wants = |set: CapabilitySet| least(permitted, move || effective().contains(set));
        for set in ATTACHING {
            assert_eq!(wants(set), set);
        }
    }

    #[test]
    fn what_is_given_up_is_gone_for_good() {
        // In a thread of its own: this one's go with it.
        let after = std::thread::spawn(|| {
            give_up(LOOKING);
            fs::read_to_string("/proc/thread-self/status").unwrap()
        });
        let after = after.join().unwrap();
        let value = |key: &str| {
            let line = after.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap()
        };
        let had = capabilities(None).unwrap();
        assert_eq!(value("NoNewPrivs"), 1);
        assert_eq!(value("CapPrm"), (had.permitted & LOOKING).bits());
        assert_eq!((value("CapInh"), value("CapAmb")), (0, 0));
        if had.effective.contains(CapabilitySet::SETPCAP) {
            assert_eq!(value("CapBnd"), 0);
        }
    }

    #[test]
    fn names_are_the_kernels() {
        assert_eq!(names(CapabilitySet::BPF | CapabilitySet::KILL), "CAP_KILL CAP_BPF");
        for need in NEEDED {
            assert_eq!(names(need.capability), need.name);
        }
    }
}
