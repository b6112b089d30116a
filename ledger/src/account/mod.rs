//! The account: from decoded calls to rows, and from rows to state.
//!
//! [`order::Order`] puts inputs into the order of their effect times, [`Ledger`] turns each into
//! rows of the log, [`state::State`] keeps what rows add up to, and [`breakdown`] holds the sum
//! against NVML. All of it is pure: no clock, no I/O. The live half and the offline reports run the
//! same [`state::State`] over the same rows.

mod asked;
pub mod breakdown;
mod contexts;
mod desk;
mod ledger;
pub mod order;
mod pools;
mod process;
mod shared;
mod slots;
pub mod state;
#[cfg(test)]
pub(crate) mod tests;
mod vmm;

pub use ledger::{Ledger, Loss};
pub use process::DeviceId;
