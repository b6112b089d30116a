//! vramscope, the agent: everything that is live, and the command line.

#[cfg(feature = "live")]
pub mod attach;
pub mod cli;
#[cfg(feature = "live")]
pub mod clock;
pub mod cmd;
#[cfg(feature = "live")]
pub mod decode;
#[cfg(feature = "live")]
pub mod doctor;
#[cfg(feature = "live")]
pub mod environ;
#[cfg(feature = "live")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "live")]
pub mod host;
#[cfg(feature = "live")]
pub mod kernel;
#[cfg(feature = "live")]
pub mod live;
#[cfg(feature = "live")]
pub mod native;
#[cfg(feature = "live")]
pub mod nvml;
#[cfg(feature = "live")]
pub mod privileges;
#[cfg(feature = "live")]
pub mod probes;
#[cfg(feature = "live")]
pub mod python;
#[cfg(feature = "live")]
pub mod stacks;
#[cfg(feature = "live")]
pub mod stop_file;
pub mod units;
