//! What the attaching tells the rest of the agent.

use std::path::PathBuf;

use super::{brake::Braking, guard::Objection};
use crate::probes::Library;

/// What the attaching tells the rest.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A process is followed from here on.
    Following {
        /// Process.
        tgid: u32,
    },
    /// A process had mapped the driver library before the recording began.
    AlreadyMapped {
        /// Process.
        tgid: u32,
    },
    /// Probes are in place.
    Attached {
        /// Process; `None` for every process that maps the file.
        tgid: Option<u32>,
        /// Path as the process sees it.
        path: PathBuf,
        /// Which library it is.
        library: Library,
        /// Functions probed.
        probes: usize,
        /// Functions of the table that the file has.
        available: usize,
        /// When the last probe was in place, `CLOCK_BOOTTIME`.
        at_ns: u64,
    },
    /// A file could not be probed: what its processes do stays unseen.
    Failed {
        /// Process, where one is meant.
        tgid: Option<u32>,
        /// Path as the process sees it.
        path: PathBuf,
        /// Why, the whole chain.
        error: String,
    },
    /// A process is spared: its library is not probed, or not any more.
    Spared {
        /// Process.
        tgid: u32,
        /// Path as the process sees it.
        path: PathBuf,
        /// Why.
        objection: Objection,
        /// It was probed until now.
        was_probed: bool,
    },
    /// The whole host is recorded, but of this library each process gets probes of its own.
    Apart {
        /// The library.
        library: Library,
        /// Why, for the user.
        reason: String,
        /// Processes whose probes were taken out and put in again: calls between are not seen.
        moved: Vec<u32>,
    },
    /// Detail was taken away from a process that paid too much for it.
    Braked(Braking),
    /// A process runs a Python whose frames cannot be walked: why.
    NoPython {
        /// Process.
        tgid: u32,
        /// For the user.
        reason: String,
    },
    /// Mapping events were dropped by the kernel, and everything was looked through again.
    MappingsLost(u64),
}
