//! The event log: one schema, a journal against crashes, Parquet files for everybody.
//!
//! [`Writer`] takes rows of [`crate::rows`] and keeps a directory of sealed Parquet files that any
//! reader may open at any moment; [`Log`] reads one or several such directories back, running,
//! crashed or finished; [`recover`] seals what a killed agent left in its journal; [`compact`]
//! merges the files of runs that have ended. [`TABLES`] says what the tables mean, [`markdown`]
//! says it in `docs/event-log.md`.

mod build;
mod cell;
mod check;
mod compact;
mod dir;
mod error;
mod journal;
mod manifest;
mod markdown;
mod name;
mod reader;
mod recover;
mod schema;
mod seal;
#[cfg(test)]
pub(crate) mod testing;
mod writer;

pub use build::{BatchBuilder, ColumnBuilder};
pub use cell::{Cell, Field};
pub use check::Checked;
pub use compact::{Compacted, Compaction, Merged, TARGET_BYTES, compact};
pub use error::LogError;
pub use manifest::{ClockAnchor, Manifest, RunInfo, SCHEMA_VERSION};
pub use markdown::markdown;
pub use name::Run8;
pub use reader::{BatchRows, Checkpoint, Events, Gap, Log, Problem, ProblemKind, RunEvent};
pub use recover::{Recovered, recover};
pub(crate) use schema::TableIndex;
pub use schema::{Column, ColumnType, Row, TABLES, Table, table_index};
pub use writer::{LOG_WRITE_FAILED, Options, Tick, Writer};
