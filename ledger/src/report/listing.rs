//! Whole stacks as a list: who holds most, frame by frame.

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf};

use super::{
    collect::Collector,
    names::printable,
    read,
    stacks::described,
    units::{counted, show_bytes, show_count},
};
use crate::{call::Level, log::LogError};

/// What the list is sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum StackOrder {
    /// Bytes alive at the end, or when the process ended.
    #[default]
    Live,
    /// Bytes allocated in all.
    Allocated,
    /// Blocks alive at the end; where these are not counted, allocations.
    Count,
}

/// Which stacks are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackChoice {
    /// How many, at most.
    pub top: usize,
    /// Of one level only.
    pub level: Option<Level>,
    /// Sorted by what.
    pub by: StackOrder,
    /// Of one process only, by its host pid.
    pub pid: Option<i32>,
}

/// What one stack holds, in all processes together: levels are never added up.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    live_bytes: i64,
    live_count: Option<i64>,
    allocated_bytes: i64,
    allocs: i64,
    processes: u64,
}

impl StackChoice {
    /// The list, as text.
    ///
    /// # Errors
    ///
    /// A directory cannot be listed, or none of them holds a log.
    pub fn list(&self, dirs: &[PathBuf]) -> Result<String, LogError> {
        Ok(self.text(&read::read(dirs)?))
    }

    pub(super) fn text(&self, pass: &Collector) -> String {
        let sums = self.sums(pass);
        let mut sums: Vec<((i64, Level), Sum)> = sums.into_iter().collect();
        sums.sort_by_key(|(key, sum)| (std::cmp::Reverse(self.weight(sum)), *key));
        let mut text = share(pass);
        for ((stack_id, level), sum) in sums.iter().take(self.top) {
            text.push('\n');
            stack(&mut text, pass, (*stack_id, *level), sum);
        }
        let more = sums.len().saturating_sub(self.top);
        if more > 0 {
            let more = counted(more as u64, "more stack", "more stacks");
            text.extend([format!("\nand {more} (--top)\n")]);
        }
        if sums.is_empty() && pass.stacks.counts().0 > 0 {
            text += "No stack allocated what was asked for.\n";
        }
        pass.problems.iter().for_each(|problem| text.extend([format!("{}\n", printable(problem))]));
        text
    }

    fn weight(&self, sum: &Sum) -> i64 {
        match self.by {
            StackOrder::Live => sum.live_bytes,
            StackOrder::Allocated => sum.allocated_bytes,
            StackOrder::Count => sum.live_count.unwrap_or(sum.allocs),
        }
    }

    fn sums(&self, pass: &Collector) -> BTreeMap<(i64, Level), Sum> {
        let mut sums: BTreeMap<(i64, Level), Sum> = BTreeMap::new();
        for now in &pass.sites.stacks {
            let pid = pass.processes.get(&now.holder.proc_id).map(|facts| facts.pid);
            if self.level.is_some_and(|level| level != now.holder.level)
                || self.pid.is_some_and(|of| pid != Some(of))
            {
                continue;
            }
            let first = Sum { live_count: Some(0), ..Sum::default() };
            let sum = sums.entry((now.stack_id, now.holder.level)).or_insert(first);
            sum.live_bytes = sum.live_bytes.saturating_add(now.bytes);
            sum.live_count = sum.live_count.zip(now.count).map(|(sum, now)| sum + now);
            sum.allocated_bytes = sum.allocated_bytes.saturating_add(now.allocated_bytes);
            sum.allocs = sum.allocs.saturating_add(now.allocs);
            sum.processes += 1;
        }
        sums
    }
}

/// `46 stacks, 44 of them complete (95.7 %); not complete: 2 x no unwind table.`
fn share(pass: &Collector) -> String {
    let (taken, complete) = pass.stacks.counts();
    if taken == 0 {
        return "No stacks were recorded.\n".to_owned();
    }
    let percent = complete as f64 / taken as f64 * 100.0;
    let stacks = counted(taken, "stack", "stacks");
    let mut text = format!("{stacks}, {} of them complete ({percent:.1} %)", show_count(complete));
    let reasons = pass.stacks.reasons();
    let reasons: Vec<String> = reasons
        .iter()
        .map(|(reason, count)| format!("{} x {}", show_count(*count), printable(reason)))
        .collect();
    if !reasons.is_empty() {
        text.extend([format!("; not complete: {}", reasons.join(", "))]);
    }
    text + ".\n"
}

fn stack(text: &mut String, pass: &Collector, (stack_id, level): (i64, Level), sum: &Sum) {
    let count = sum.live_count.and_then(|count| u64::try_from(count).ok());
    let count = count.map_or("an unknown number of blocks".to_owned(), |count| {
        counted(count, "block", "blocks")
    });
    let processes = match sum.processes {
        1 => String::new(),
        many => format!(" in {}", counted(many, "process or device", "processes or devices")),
    };
    let site = pass.stacks.site(stack_id).unwrap_or("a stack that is not in the log");
    let mut line = format!(
        "{} {} alive in {count}{processes}, {} allocated in {}: {}\n  stack {stack_id}",
        show_bytes(sum.live_bytes),
        level.as_str(),
        show_bytes(sum.allocated_bytes),
        counted(sum.allocs.max(0) as u64, "call", "calls"),
        printable(site),
    );
    let Some(stack) = pass.stacks.get(stack_id) else {
        line.push('\n');
        return text.push_str(&line);
    };
    if !stack.complete {
        let reason = stack.incomplete_reason.as_deref().unwrap_or("not said why");
        line.extend([format!(", incomplete: {}", printable(reason))]);
    }
    line.push('\n');
    text.push_str(&line);
    for frame in pass.stacks.frames(stack) {
        // Writing to a String cannot fail.
        writeln!(text, "    {}", described(frame)).unwrap_or_default();
    }
}
