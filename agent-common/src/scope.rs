//! Whose calls the probes of an attachment report: the values of the map `ARMED`, by the cookie's slot.
//! Anything else is the one process.

/// Nobody's yet: not all probes are in place.
pub const NOBODY: u32 = 0;
/// Those of every process.
pub const ANYBODY: u32 = u32::MAX;
