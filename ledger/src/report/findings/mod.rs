//! What is worth attention. Each kind is a type with its evidence, a check and a sentence.
//!
//! Sentences say "allocated", "grows", "stays allocated", never "caused by": the code that
//! allocates is often not the code that keeps.

mod context;
mod growth;
mod leak;
mod lost;
mod nothing;
mod refusal;

use std::collections::BTreeMap;

use serde::Serialize;

pub use self::{
    context::Context,
    growth::{Blocks, Growth},
    leak::{Confidence, Leak},
    lost::Lost,
    nothing::Nothing,
    refusal::{Before, Cause, Holder, Refusal},
};
use super::{
    collect::{Contexts, RefusalFacts, RefusalKey},
    model::Model,
    stacks::Stacks,
    suspects::{BySite, Suspect},
};

/// A finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Finding {
    /// Live bytes of one place of allocation grow until the end.
    Leak(Leak),
    /// Live bytes of a process grow until the end; where they were allocated is not known.
    Growth(Growth),
    /// A context on a device that the process does not use.
    Context(Context),
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
            Self::Leak(leak) => leak.tag(),
            Self::Growth(growth) => growth.tag(),
            Self::Context(_) => "CONTEXT",
            Self::OutOfMemory(refusal) => refusal.tag(),
            Self::Lost(_) => "LOST",
            Self::Nothing(nothing) => nothing.tag(),
        }
    }

    /// The finding in one sentence, or two.
    pub fn sentence(&self) -> &str {
        match self {
            Self::Leak(leak) => &leak.sentence,
            Self::Growth(growth) => &growth.sentence,
            Self::Context(context) => &context.sentence,
            Self::OutOfMemory(refusal) => &refusal.sentence,
            Self::Lost(lost) => &lost.sentence,
            Self::Nothing(nothing) => &nothing.sentence,
        }
    }
}

impl Model {
    /// Memory grows until the end of the log or of its process. A leak of low confidence does not
    /// count, nor a cache that grows.
    pub fn leaks(&self) -> bool {
        self.findings.iter().any(|finding| match finding {
            Finding::Leak(leak) => leak.confidence != Confidence::Low,
            Finding::Growth(growth) => !growth.account_has_losses && finding.tag() != "CACHE",
            _ => false,
        })
    }

    /// Allocations were refused that could have fitted, as far as is known.
    pub fn refused(&self) -> bool {
        self.findings.iter().any(|finding| match finding {
            Finding::OutOfMemory(refusal) => {
                refusal.could_ever_fit != Some(false) && !refusal.went_well()
            }
            _ => false,
        })
    }
}

impl Finding {
    /// The process whose memory grows until the end.
    fn grows(&self) -> Option<String> {
        match self {
            Self::Leak(leak) => Some(leak.proc_id.clone()),
            Self::Growth(growth) => Some(growth.proc_id.clone()),
            _ => None,
        }
    }
}

/// What the pass found that is no part of the model.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub(super) refusals: &'a BTreeMap<RefusalKey, RefusalFacts>,
    pub(super) suspects: &'a [Suspect],
    pub(super) by_site: &'a [BySite],
    pub(super) contexts: &'a Contexts,
    pub(super) stacks: &'a Stacks,
}

/// All findings, most important first.
pub(super) fn find(model: &Model, found: &Found<'_>) -> Vec<Finding> {
    let leaks = Leak::check(model, found.suspects);
    let growths = Growth::check(model, &leaks, found.by_site);
    let mut findings: Vec<Finding> = leaks.into_iter().map(Finding::Leak).collect();
    findings.extend(growths.into_iter().map(Finding::Growth));
    let growing: Vec<String> = findings.iter().filter_map(Finding::grows).collect();
    let refusals = Refusal::check(model, found, &growing);
    findings.extend(refusals.into_iter().map(Finding::OutOfMemory));
    let contexts = Context::check(model, found.contexts, found.stacks);
    let nothing = findings.is_empty();
    findings.extend(contexts.into_iter().map(Finding::Context));
    findings.extend(Lost::check(model).map(Finding::Lost));
    if nothing {
        findings.push(Finding::Nothing(Nothing::check(model)));
    }
    findings
}
