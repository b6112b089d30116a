//! What runs while a job runs: threads and bounded channels between them.
//!
//! ```text
//! rings ── reader ── Batch ──┐
//! perf, life ── attach ── Notice ──┤
//! NVML ── sampler ── Sample ──┼── Message ── books (order, ledger, state) ── rows ── sink (log)
//! host sampler ── rows ───────┤                │
//! timer ──────────────────────┘                └── life ── attach
//! ```

pub mod books;
mod brake;
mod breakdown;
mod bystanders;
mod descriptors;
mod devices;
mod lives;
mod oom;
mod polled;
mod processes;
mod ranks;
pub mod reader;
mod readings;
mod session;
pub mod sink;
mod sites;
pub mod spares;
mod stacks;

use std::sync::mpsc::Sender;

pub use session::{Options, SelfTest, Session, Summary, Target};

use crate::{attach::Notice, nvml::Sample};

/// What the books are told. One bounded channel: when it is full the senders wait, the ring fills,
/// and the kernel half counts what it cannot take.
#[derive(Debug)]
pub enum Message {
    /// From the rings.
    Batch(reader::Batch),
    /// From the attaching.
    Notice(Notice),
    /// From NVML.
    Sample(Sample),
    /// Finished rows of other samplers.
    Rows(Vec<sink::AnyRow>),
    /// The log rotates and wants the live set.
    Checkpoint,
    /// The log can be written again after a failure: who is who must be said again.
    LogRecovered,
    /// The recording ends: all that was seen before is applied, then this is answered.
    Stop(Sender<books::Closed>),
}
