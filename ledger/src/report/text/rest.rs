//! What stands after the devices: failed calls, what was not seen, what to type next.

use super::page::{Page, Style};
use crate::report::{
    clock::Clock,
    findings::Finding,
    model::{Loss, Model, Process, Share},
    names,
    units::{counted, show_bytes, show_count},
};

/// Lines of a section.
const LINES: usize = 20;
/// Processes that are named in a list.
const NAMED: usize = 5;

fn list(all: &[String], many: &str) -> String {
    let first = all.get(..NAMED).unwrap_or(all).join(", ");
    match all.len().saturating_sub(NAMED) {
        0 => first,
        more => format!("{first} and {} more {many}", show_count(more as u64)),
    }
}

/// Processes that were traced and held no device memory, in one line.
pub(super) fn without_memory(page: &mut Page, model: &Model) {
    let none = |process: &&Process| !process.shares.iter().any(Share::has_device_memory);
    let names: Vec<String> =
        model.processes.iter().filter(none).map(|p| names::process(model, p)).collect();
    if !names.is_empty() {
        let text = format!("Without device memory: {}.", list(&names, "processes"));
        page.line(0, Style::Plain, &text);
        page.gap();
    }
}

/// `CUDA_ERROR_DEINITIALIZED`: what libraries clean up after the driver has shut down, at the end of
/// nearly every program. No failure of anybody's; JSON lists them.
const DEINITIALIZED: i32 = 4;

/// Failed calls by process, function and result.
pub(super) fn failed_calls(page: &mut Page, model: &Model, clock: Clock) {
    let mut rows: Vec<_> = model
        .processes
        .iter()
        .flat_map(|process| process.failures.iter().map(move |failure| (process, failure)))
        .filter(|(_, failure)| failure.result != DEINITIALIZED)
        .collect();
    if rows.is_empty() {
        return;
    }
    rows.sort_by_key(|(process, failure)| (std::cmp::Reverse(failure.count), process.pid));
    page.heading("Failed calls");
    let shown = rows.get(..LINES).unwrap_or(&rows);
    let count_width =
        shown.iter().map(|(_, failure)| show_count(failure.count).len()).max().unwrap_or(0);
    let api_width = shown.iter().map(|(_, failure)| failure.api.len()).max().unwrap_or(0);
    for (process, failure) in shown {
        let result = match failure.result_name {
            Some(name) => format!("{name} ({})", failure.result),
            None => format!("CUresult {}", failure.result),
        };
        let text = format!(
            "{:>count_width$} x {:<api_width$}  {result}, pid {}, last at {}",
            show_count(failure.count),
            failure.api,
            process.pid,
            clock.time(failure.last_ns),
        );
        page.line(2, Style::Plain, &text);
    }
    more(page, rows.len() - shown.len(), "kinds of failed calls");
    page.gap();
}

fn more(page: &mut Page, count: usize, what: &str) {
    if count > 0 {
        let text = format!("and {} more {what}; --json lists them all", show_count(count as u64));
        page.line(2, Style::Dim, &text);
    }
}

/// Losses in words, problems of files, what is not known of processes that were met late.
pub(super) fn not_seen(page: &mut Page, model: &Model, clock: Clock) {
    let late: Vec<String> = model
        .processes
        .iter()
        .filter(|process| process.late)
        .map(|process| format!("pid {}", process.pid))
        .collect();
    let unended = model.runs.iter().filter(|run| run.end_ns.is_none()).count() as u64;
    let quiet = late.is_empty() && unended == 0;
    if quiet && model.losses.is_empty() && model.problems.is_empty() && model.warnings.is_empty() {
        return;
    }
    page.heading("Not seen");
    losses(page, &model.losses);
    if !late.is_empty() {
        let text = format!(
            "What {} held before the recording began is one sum (\"before attach\"): no sizes, no \
             functions, no times.",
            list(&late, "processes")
        );
        page.line(2, Style::Plain, &text);
    }
    if unended > 0 {
        let text = format!(
            "{} not ended: it goes on, or was killed. What it had not yet written is not here.",
            counted(unended, "recording has", "recordings have")
        );
        page.line(2, Style::Plain, &text);
    }
    for warning in model.warnings.iter().take(LINES) {
        let whose = warning.pid.map(|pid| format!("pid {pid}: ")).unwrap_or_default();
        let text = format!("{}  {whose}{}", clock.time(warning.ts_ns), warning.text);
        page.line(2, Style::Plain, &text);
    }
    more(page, model.warnings.len().saturating_sub(LINES), "warnings");
    for problem in model.problems.iter().take(LINES) {
        page.line(2, Style::Red, problem);
    }
    more(page, model.problems.len().saturating_sub(LINES), "problems with files");
    page.gap();
}

fn losses(page: &mut Page, losses: &[Loss]) {
    let shown = losses.get(..LINES).unwrap_or(losses);
    let count = |loss: &Loss| show_count(loss.count.unsigned_abs());
    let width = shown.iter().map(|loss| count(loss).len()).max().unwrap_or(0);
    for loss in shown {
        let meaning = loss.meaning.unwrap_or(&loss.reason);
        let whose = loss.pid.map(|pid| format!("pid {pid}: ")).unwrap_or_default();
        let bytes = loss.bytes.map(|bytes| format!(", {}", show_bytes(bytes))).unwrap_or_default();
        let tone = if loss.affects_account { Style::Red } else { Style::Yellow };
        page.line(2, tone, &format!("{:>width$}  {whose}{meaning}{bytes}", count(loss)));
    }
    more(page, losses.len() - shown.len(), "kinds of losses");
}

/// What to type next.
pub(super) fn next(page: &mut Page, model: &Model) {
    let logs: Vec<String> = model.logs.iter().map(|log| quoted(log)).collect();
    let logs = logs.join(" ");
    page.heading("Next");
    for finding in &model.findings {
        match finding {
            Finding::Nothing(nothing) if nothing.empty => empty(page),
            Finding::Nothing(nothing) if nothing.judged == 0 => {
                page.line(2, Style::Plain, "Record for longer, until what is in doubt shows:");
                page.command(4, "sudo vramscope attach PID --duration 10m");
            }
            Finding::Lost(_) if model.losses.iter().any(|loss| loss.reason == "ring_full") => {
                page.line(2, Style::Plain, "Record with a larger kernel buffer:");
                page.command(4, "sudo vramscope attach PID --ring-size 256MiB");
            }
            _ => {}
        }
    }
    let growth = model.findings.iter().find_map(|finding| match finding {
        Finding::Growth(growth) if growth.blocks.is_some() => Some(growth),
        _ => None,
    });
    let leak = model.findings.iter().find_map(|finding| match finding {
        Finding::Leak(leak) => leak.site.as_deref(),
        _ => None,
    });
    let context = model.findings.iter().find_map(|finding| match finding {
        Finding::Context(context) => Some(context),
        _ => None,
    });
    if let Some(context) = context {
        page.line(2, Style::Plain, &context.remedy);
    }
    if let Some(site) = leak {
        page.line(2, Style::Plain, "What is alive of that place, and who refers to it:");
        page.command(4, &format!("vramscope report {logs} --who {}", quoted(site)));
        page.line(2, Style::Plain, "Whole stacks, by what they hold:");
        page.command(4, &format!("vramscope stacks {logs}"));
    }
    if let (Some(growth), [log]) = (growth, model.logs.as_slice()) {
        page.line(2, Style::Plain, "The allocations themselves, with DuckDB:");
        page.command(4, "duckdb -c \"select ts, tid, api, size_bytes");
        page.command(4, &format!("  from '{}/events/**/*.parquet'", log.replace('\'', "''")));
        let filter = format!("  where pid = {} and op = 'alloc' order by seq desc\"", growth.pid);
        page.command(4, &filter);
    }
    if model.runs.iter().any(|run| !run.sealed && run.end_ns.is_none()) {
        page.line(2, Style::Plain, "If the recorder was killed, seal its log for other readers:");
        for log in &model.logs {
            page.command(4, &format!("vramscope recover {}", quoted(log)));
        }
    }
    page.line(2, Style::Plain, "All of this for programs:");
    page.command(4, &format!("vramscope report {logs} --json"));
}

/// What to check where nothing was recorded.
fn empty(page: &mut Page) {
    for hint in [
        "Did the process use the GPU while it was recorded? nvidia-smi lists who does.",
        "Was it the right process? `run` and `attach` record theirs and their children only.",
        "Does it load its own libcuda, in a container? `vramscope doctor` lists the copies.",
    ] {
        page.line(2, Style::Plain, hint);
    }
    page.command(4, "vramscope doctor");
}

/// A path as a shell takes it.
fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%,".contains(c);
    if !path.is_empty() && path.chars().all(plain) {
        return path.to_owned();
    }
    format!("'{}'", path.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn paths_are_safe_to_paste() {
        assert_eq!(
            quoted("./vramscope-node7-20261130T140322"),
            "./vramscope-node7-20261130T140322"
        );
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's; rm -rf"), "'it'\\''s; rm -rf'");
        assert_eq!(quoted(""), "''");
    }
}
