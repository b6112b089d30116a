//! Nothing to report, in a sentence that claims only what the data allow.

use serde::Serialize;

use crate::{
    call::Level,
    report::{
        model::{Model, Of, Process},
        units::{counted, show_duration},
        words::{self, Takes},
    },
};

/// No growth and no refusal were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nothing {
    /// Nothing at all was recorded of CUDA.
    pub empty: bool,
    /// Processes that were seen long enough to tell whether they grow.
    pub judged: u64,
    /// Processes that were seen too shortly.
    pub not_judged: u64,
    /// Losses forbid to claim that nothing grew.
    pub account_has_losses: bool,
    /// In words.
    pub sentence: String,
}

impl Nothing {
    /// The word in front of the sentence: `OK` only where something was found to be well.
    pub(super) fn tag(&self) -> &'static str {
        if self.empty || self.account_has_losses || self.judged == 0 { "NOTE" } else { "OK" }
    }

    /// What the absence of other findings means.
    pub(super) fn check(model: &Model) -> Self {
        let users: Vec<&Process> = model.processes.iter().filter(|p| uses_memory(p)).collect();
        let not_judged = users.iter().filter(|process| !is_judged(process)).count() as u64;
        let mut nothing = Self {
            empty: model.events == 0 && users.is_empty(),
            judged: users.len() as u64 - not_judged,
            not_judged,
            account_has_losses: model.losses.iter().any(|loss| loss.affects_account),
            sentence: String::new(),
        };
        nothing.sentence = nothing.text(model);
        nothing
    }

    fn text(&self, model: &Model) -> String {
        let span = match (model.start_ns, model.end_ns) {
            (Some(start_ns), Some(end_ns)) => show_duration(end_ns.saturating_sub(start_ns)),
            _ => "time".to_owned(),
        };
        if self.empty {
            return format!("No CUDA memory call was recorded over the {span} of this log.");
        }
        let growth = match (self.judged, self.not_judged) {
            (0, 0) => format!("No process held GPU memory over the {span} recorded"),
            (0, _) => format!("The {span} recorded are too short to tell whether anything grows"),
            (_, 0) => format!("No process grew over the {span} recorded"),
            (judged, short) => format!(
                "No process that was seen long enough to tell ({judged} of {}) grew over the \
                 {span} recorded",
                judged + short
            ),
        };
        let refused = ", and no allocation was refused";
        let claim = if self.account_has_losses {
            format!(
                "{growth}{refused}, as far as was seen: with calls missing, neither is certain."
            )
        } else {
            format!("{growth}{refused}.")
        };
        let claim = format!("{claim}{}{}", without_detail(model), without_places(model));
        let late = model.processes.iter().filter(|process| process.late).count() as u64;
        if late == 0 {
            return claim;
        }
        let who = counted(late, "process", "processes");
        format!("{claim} What {who} held before the recording began is one sum, not told apart.")
    }
}

/// Processes whose tensors were not recorded: what grows inside PyTorch's cache is not seen there.
fn without_detail(model: &Model) -> String {
    let off = model.processes.iter().filter(|process| process.detail == "off");
    match off.filter(|process| uses_memory(process)).count() as u64 {
        0 => String::new(),
        off => format!(
            " PyTorch's tensors of {} were not recorded (--detail off): what grows inside its \
             cache would not show.",
            counted(off, "process", "processes")
        ),
    }
}

/// Stacks and blocks whose place is not known: a leak there is no course of its own.
fn without_places(model: &Model) -> String {
    let lost = model.losses.iter().filter(|loss| words::takes(&loss.reason) == Takes::Places);
    match lost.map(|loss| loss.count.unsigned_abs()).sum::<u64>() {
        0 => String::new(),
        lost => format!(
            " The places of {} were lost: what grows there may not show.",
            counted(lost, "allocation or stack", "allocations or stacks")
        ),
    }
}

fn uses_memory(process: &Process) -> bool {
    process.shares.iter().any(|share| share.has_device_memory() || !share.levels.is_empty())
}

/// Whether every level with a course was seen long enough. A process that made no call at its
/// device level since the recording began did not grow there.
fn is_judged(process: &Process) -> bool {
    process.shares.iter().all(|share| {
        let needed = [
            (share.level(Level::Device).is_some(), Of::Device),
            (share.level(Level::Pool).is_some(), Of::Pool),
            (share.torch.is_some_and(|torch| torch.allocated_bytes.is_some()), Of::Tensors),
        ];
        needed.into_iter().all(|(used, of)| !used || share.trend(of).is_some())
    })
}
