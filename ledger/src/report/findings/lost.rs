//! Data that is missing, and what can therefore not be claimed.

use serde::Serialize;

use crate::report::{model::Model, units::show_count};

/// Processes that the sentence names.
const NAMED: usize = 3;

/// Something was not seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// Losses by which what is held and what grew may be wrong.
    pub account_count: i64,
    /// Other losses: readings, totals, facts about processes.
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
        let sentence = sentence(account_count, other_count, &pids, any_process);
        Some(Self { account_count, other_count, pids, any_process, sentence })
    }
}

fn sentence(account: i64, other: i64, pids: &[i32], any_process: bool) -> String {
    let count = |count: i64| show_count(count.unsigned_abs());
    if account == 0 {
        return format!(
            "{} readings, totals or facts about processes were not seen; the account of \
             allocations is whole.",
            count(other)
        );
    }
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
        count(account)
    )
}
