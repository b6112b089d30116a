//! From captured stacks to merged, interned and named ones.
//!
//! ```text
//! reader ── Batch with raw stacks ── resolver (unwind, merge, content hash) ── Batch ── books
//!                                        └── new stacks ── namer (symbols, site) ── rows ── log
//! ```
//!
//! A stack's id is the hash of its content: build ids and offsets, Python files, functions and
//! lines. It is known before any symbol is looked up, and equal on every rank and host.

pub mod frame;
mod linked;
pub mod merge;
pub mod namer;
mod owner;
pub mod resolver;
pub mod site;

pub use frame::Frame;
