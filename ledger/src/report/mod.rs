//! What a log tells: who holds what, what grew, what was refused, what was not seen.
//!
//! [`Model::read`] makes one pass over the tables (memory is bounded by what is live and by the
//! number of processes), [`Model::text`] prints it for people, serde prints it for programs. Needs
//! no root and no GPU, and reads running and crashed logs as they are.

mod breakdown;
mod build;
mod clock;
mod collect;
mod findings;
mod growth;
mod listing;
mod model;
mod names;
mod read;
mod rise;
mod shares;
mod stacks;
mod suspects;
#[cfg(test)]
mod tests;
mod text;
mod units;
mod who;
mod words;
mod work;

pub use findings::{
    Before, Blocks, Cause, Confidence, Context, Finding, Growth, Holder, Leak, Lost, Nothing,
    Refusal,
};
pub use listing::{StackChoice, StackOrder};
pub use model::{
    Breakdown, Device, Failure, GROUPS, Group, LevelTotal, LevelUse, Loss, Model, Of, Part,
    Process, Reading, Run, SCHEMA, Share, StackShare, Torch, Trend, Warning,
};
pub use units::show_bytes;
pub use who::who;
