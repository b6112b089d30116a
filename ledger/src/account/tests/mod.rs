//! Rules of the account one by one, and models that check them all together.

mod block_model;
mod context_rules;
pub(crate) mod helpers;
mod kind_rules;
mod rules;
mod speed;
mod vmm_model;
mod vmm_rules;
