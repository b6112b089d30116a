//! vramscope's account of GPU memory, pure: no root, no eBPF, no GPU, no clock.
//!
//! [`call`] is what the live half hands in, [`account`] turns calls into [`rows`] and rows into
//! state, [`log`] stores rows as Parquet and reads them back. Data flows one way: call -> row ->
//! log -> row -> state -> report; live screens and offline reports run the same code.

pub mod account;
pub mod call;
pub mod log;
pub mod report;
pub mod rows;
mod table;
