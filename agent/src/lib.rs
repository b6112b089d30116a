//! The live half of vramscope and its command line.

#[cfg(feature = "live")]
pub mod host;
#[cfg(feature = "live")]
pub mod nvml;
