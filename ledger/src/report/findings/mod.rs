//! What is worth attention. Each kind is a type with its evidence, a check and a sentence.
//!
//! Sentences say "allocated", "grows", "stays allocated", never "caused by": the code that
//! allocates is often not the code that keeps.

mod growth;
mod lost;
mod nothing;
mod refusal;

use std::collections::BTreeMap;

use serde::Serialize;

pub use self::{
    growth::{Blocks, Growth},
    lost::Lost,
    nothing::Nothing,
    refusal::Refusal,
};
use super::{
    collect::{RefusalFacts, RefusalKey},
    model::Model,
};

/// A finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Finding {
    /// Live bytes grow until the end.
    Growth(Growth),
    /// Allocations were refused.
    OutOfMemory(Refusal),
    /// Data is missing.
    Lost(Lost),
    /// Nothing of the above, and what that means.
    Nothing(Nothing),
}

impl Finding {
    /// The word in front of the sentence.
    pub fn tag(&self) -> &'static str {
        match self {
            Self::Growth(growth) => growth.tag(),
            Self::OutOfMemory(_) => "OOM",
            Self::Lost(_) => "LOST",
            Self::Nothing(nothing) => nothing.tag(),
        }
    }

    /// The finding in one sentence, or two.
    pub fn sentence(&self) -> &str {
        match self {
            Self::Growth(growth) => &growth.sentence,
            Self::OutOfMemory(refusal) => &refusal.sentence,
            Self::Lost(lost) => &lost.sentence,
            Self::Nothing(nothing) => &nothing.sentence,
        }
    }
}

/// All findings, most important first.
pub(super) fn find(model: &Model, refusals: &BTreeMap<RefusalKey, RefusalFacts>) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        Growth::check(model).into_iter().map(Finding::Growth).collect();
    findings.extend(Refusal::check(model, refusals).into_iter().map(Finding::OutOfMemory));
    let nothing = findings.is_empty();
    findings.extend(Lost::check(model).map(Finding::Lost));
    if nothing {
        findings.push(Finding::Nothing(Nothing::check(model)));
    }
    findings
}
