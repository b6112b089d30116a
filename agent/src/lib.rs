//! vramscope, the agent: everything that is live, and the command line.

#[cfg(feature = "live")]
pub mod attach;
#[cfg(feature = "live")]
pub mod decode;
#[cfg(feature = "live")]
pub mod kernel;
#[cfg(feature = "live")]
pub mod probes;
#[cfg(feature = "live")]
pub mod clock;
#[cfg(feature = "live")]
pub mod live;
#[cfg(feature = "live")]
pub mod host;
pub mod units;
