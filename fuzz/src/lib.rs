//! Fuzz targets: bytes that others wrote, through the code that reads them.
//!
//! The agent runs as root and reads what traced programs lay out: their stacks, the structures of
//! their interpreters, their files, their names. A target takes bytes, makes of them what such a
//! program could make, and hands it to the agent's code. Nothing may panic, run for ever, or take
//! memory or time out of proportion to the bytes: [`run`] holds every target to that.
//!
//! Two drivers share the targets: `fuzz` (stable Rust, no instrumentation: inputs that are mutated
//! by a seed) and `fuzz-guided` (libFuzzer, guided by coverage; `cargo xtask fuzz` builds it).
#![allow(clippy::expect_used, reason = "a target ends where its own scene cannot be made")]

pub mod input;
pub mod limits;
pub mod mutate;
pub mod scratch;
pub mod targets;

pub use limits::run;
pub use targets::{TARGETS, Target};
