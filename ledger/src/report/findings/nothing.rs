//! Nothing to report, in a sentence that claims only what the data allow.

use serde::Serialize;

use super::growth;
use crate::{
    call::Level,
    report::{
        clock::Clock,
        model::{Model, Of, Process, Trend},
        names,
        units::{counted, show_duration, show_rate},
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
    /// Processes whose live bytes rose although no place of allocation did for certain.
    pub unclear: u64,
    /// Losses forbid to claim that nothing grew.
    pub account_has_losses: bool,
    /// In words.
    pub sentence: String,
}

impl Nothing {
    /// The word in front of the sentence: `OK` only where something was found to be well.
    pub(super) fn tag(&self) -> &'static str {
        let doubt = self.empty || self.account_has_losses || self.unclear > 0;
        if doubt || self.judged == 0 { "NOTE" } else { "OK" }
    }

    /// What the absence of other findings means.
    pub(super) fn check(model: &Model) -> Self {
        let users: Vec<&Process> = model.processes.iter().filter(|p| uses_memory(p)).collect();
        let unclear = unclear(&users);
        let of = |judged: bool| {
            let others = users
                .iter()
                .filter(|process| !unclear.iter().any(|(of, _)| of.proc_id == process.proc_id));
            others.filter(|process| is_judged(process) == judged).count() as u64
        };
        let mut nothing = Self {
            empty: model.events == 0 && users.is_empty(),
            judged: of(true),
            not_judged: of(false),
            unclear: unclear.len() as u64,
            account_has_losses: model.losses.iter().any(|loss| loss.affects_account),
            sentence: String::new(),
        };
        nothing.sentence = nothing.text(model, unclear.first().copied());
        nothing
    }

    fn text(&self, model: &Model, rises: Option<Rises<'_>>) -> String {
        let span = match (model.start_ns, model.end_ns) {
            (Some(start_ns), Some(end_ns)) => show_duration(end_ns.saturating_sub(start_ns)),
            _ => "time".to_owned(),
        };
        if self.empty {
            return format!("No CUDA memory call was recorded over the {span} of this log.");
        }
        let rises = rises.map(|rises| self.doubt(model, rises)).unwrap_or_default();
        let claim = self.claim(&span);
        let claim = format!("{rises}{claim}{}{}", without_detail(model), without_places(model));
        let late = model.processes.iter().filter(|process| process.late).count() as u64;
        if late == 0 {
            return claim;
        }
        let who = counted(late, "process", "processes");
        format!("{claim} What {who} held before the recording began is one sum, not told apart.")
    }

    /// What can be claimed of the rest.
    fn claim(&self, span: &str) -> String {
        let (claim, doubt) = match self.growth(span) {
            Some(growth) => {
                (format!("{growth}, and no allocation was refused"), "neither is certain")
            }
            None => ("No allocation was refused".to_owned(), "that is not certain"),
        };
        if self.account_has_losses {
            format!("{claim}, as far as was seen: with calls missing, {doubt}.")
        } else {
            format!("{claim}.")
        }
    }

    /// What can be claimed of the growth of those that do not rise; `None` where all do.
    fn growth(&self, span: &str) -> Option<String> {
        let (other, anything) =
            if self.unclear > 0 { ("other ", "anything else") } else { ("", "anything") };
        Some(match (self.judged, self.not_judged) {
            (0, 0) if self.unclear > 0 => return None,
            (0, 0) => format!("No process held GPU memory over the {span} recorded"),
            (0, _) => {
                format!("The {span} recorded are too short to tell whether {anything} grows")
            }
            (_, 0) => format!("No {other}process grew over the {span} recorded"),
            (judged, short) => format!(
                "No {other}process that was seen long enough to tell ({judged} of {}) grew over \
                 the {span} recorded",
                judged + short
            ),
        })
    }

    /// That something rises, and that more is not known.
    fn doubt(&self, model: &Model, (process, trend): Rises<'_>) -> String {
        let clock = Clock::new(model.start_ns);
        let more = match self.unclear.saturating_sub(1) {
            0 => String::new(),
            more => {
                format!(" The same holds of {}.", counted(more, "more process", "more processes"))
            }
        };
        format!(
            "The {} of {} rose by {} from {} to {}, but no single place of allocation did for \
             certain: whether it leaks is not known; a longer recording would tell.{more} ",
            words::trend(trend.of),
            names::ranked(model, process),
            show_rate(trend.bytes_per_second),
            clock.time(trend.since_ns),
            clock.time(trend.until_ns),
        )
    }
}

/// A process, and what of it rises fastest.
type Rises<'a> = (&'a Process, Trend);

/// Processes whose live bytes rise although no finding tells of it: none of their places of
/// allocation rises for certain. Fastest first.
fn unclear<'a>(users: &[&'a Process]) -> Vec<Rises<'a>> {
    let fastest = |process: &'a Process| {
        let rising = process.shares.iter().flat_map(growth::growing);
        let fastest = rising.max_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
        fastest.map(|trend| (process, trend))
    };
    let mut found: Vec<Rises> = users.iter().filter_map(|process| fastest(process)).collect();
    found.sort_by(|a, b| b.1.bytes_per_second.total_cmp(&a.1.bytes_per_second));
    found
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
