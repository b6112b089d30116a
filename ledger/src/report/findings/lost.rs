//! Data that is missing, and what can therefore not be claimed.

use serde::Serialize;

use crate::report::{
    model::{Loss, Model},
    units::{counted, show_count},
    words::{self, Takes},
};

/// Processes that the sentence names.
const NAMED: usize = 3;

/// Something was not seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// Losses by which what is held and what grew may be wrong.
    pub account_count: i64,
    /// Other losses: readings, facts about processes, PyTorch's totals, lines.
    pub other_count: i64,
    /// Processes whose account may be wrong; all of them where it cannot be told.
    pub pids: Vec<i32>,
    /// Some losses cannot be told to a process.
    pub any_process: bool,
    /// In words.
    pub sentence: String,
}

impl Lost {
    /// The losses together, if there are any.
    pub(super) fn check(model: &Model) -> Option<Self> {
        let sum = |account: bool| {
            let losses = model.losses.iter().filter(|loss| loss.affects_account == account);
            losses.map(|loss| loss.count).fold(0, i64::saturating_add)
        };
        let (account_count, other_count) = (sum(true), sum(false));
        if account_count == 0 && other_count == 0 {
            return None;
        }
        let account = || model.losses.iter().filter(|loss| loss.affects_account);
        let mut pids: Vec<i32> = account().filter_map(|loss| loss.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        let any_process = account().any(|loss| loss.pid.is_none());
        let sentence = if account_count == 0 {
            beside(&model.losses)
        } else {
            sentence(account_count, &pids, any_process)
        };
        Some(Self { account_count, other_count, pids, any_process, sentence })
    }
}

/// What is missing where the account is whole, and what it means.
fn beside(losses: &[Loss]) -> String {
    let of = |takes: Takes| {
        let its = losses.iter().filter(|loss| words::takes(&loss.reason) == takes);
        its.map(|loss| loss.count.unsigned_abs()).sum::<u64>()
    };
    let told = |takes: Takes, text: fn(u64) -> String| Some(of(takes)).filter(|n| *n > 0).map(text);
    let parts = [
        told(Takes::Readings, |n| {
            let what = counted(n, "reading or fact", "readings or facts");
            format!("{what} about processes {} not seen", were(n))
        }),
        told(Takes::TensorTotals, |n| {
            let what = counted(n, "report", "reports");
            format!("{what} of PyTorch's totals {} not counted: these may be wrong", were(n))
        }),
        told(Takes::Places, |n| {
            let what = counted(n, "allocation or stack", "allocations or stacks");
            format!("{what} {} not told to a line: what a line holds may be wrong", were(n))
        }),
        told(Takes::Credit, |n| {
            format!(
                "{} that {} verified did not match what it was counted under: some allocations \
                 may be credited to another line",
                counted(n, "stack", "stacks"),
                were(n)
            )
        }),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let mut text = parts.join("; ");
    text.push_str("; the account of allocations is whole.");
    text
}

const fn were(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}

fn sentence(account: i64, pids: &[i32], any_process: bool) -> String {
    let named: Vec<String> = pids.iter().take(NAMED).map(|pid| format!("pid {pid}")).collect();
    let more = match pids.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let whose = match (any_process, pids.is_empty()) {
        (true, _) => "any process".to_owned(),
        (false, _) => format!("{}{more}", named.join(", ")),
    };
    format!(
        "{} calls or other records were not seen: what {whose} holds may be wrong, and growth \
         cannot be ruled out there. \"Not seen\" below says what is missing.",
        show_count(account.unsigned_abs())
    )
}
