//! `vramscope compact`: merges the many small files of runs that have ended.

use std::{fmt::Write as _, process::ExitCode};

use anyhow::Context as _;
use ledger::{
    log::{Compacted, Compaction, Merged, compact},
    report::show_bytes,
};

use super::print;
use crate::cli::Compact;

/// Merges, or says what would be merged.
pub(super) fn run(args: &Compact) -> anyhow::Result<ExitCode> {
    let log = args.log.display();
    let options = Compaction {
        target_bytes: args.target_size,
        dry_run: args.dry_run,
        other_hosts: args.other_hosts,
    };
    let compacted =
        compact(&args.log, options).with_context(|| format!("compact the log {log}"))?;
    let next = match (args.dry_run, args.other_hosts) {
        (false, _) => "report",
        (true, false) => "compact",
        (true, true) => "compact --other-hosts",
    };
    print(&format!("{}next: vramscope {next} {log}\n", told(&compacted)))?;
    Ok(if compacted.left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What was merged, a line a table, and what was not, with the reason.
fn told(compacted: &Compacted) -> String {
    let mut text = String::new();
    let mut say = |line: String| writeln!(text, "{line}").unwrap_or_default();
    for path in &compacted.repaired {
        say(format!("put right after an interrupted compaction: {}", path.display()));
    }
    let mut all = Merged { bytes_after: Some(0), ..Merged::default() };
    for (table, merged) in &compacted.tables {
        say(format!("{table}: {}", sizes(merged)));
        all.add(*merged);
    }
    if compacted.tables.len() > 1 {
        say(format!("in all: {}", sizes(&all)));
    }
    for (run, why) in &compacted.waiting {
        say(format!("left the run {run}: {why}"));
    }
    for (path, why) in &compacted.left {
        say(format!("left {}: {why}", path.display()));
    }
    if compacted.tables.is_empty() {
        say("nothing to compact: no run that has ended has several small files of a day".to_owned());
    }
    text
}

fn sizes(merged: &Merged) -> String {
    let Merged { files_before, files_after, rows, .. } = merged;
    let bytes = |bytes: u64| show_bytes(bytes as i64);
    let before = bytes(merged.bytes_before);
    match merged.bytes_after {
        Some(after) => format!(
            "{files_before} files, {before} -> {files_after}, {}; {rows} rows as before",
            bytes(after)
        ),
        None => format!("{files_before} files, {before} -> {files_after}; {rows} rows"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_and_everything_left_is_told_of() {
        let merged = |bytes_after| Merged {
            files_before: 60,
            files_after: 1,
            bytes_before: 3 << 20,
            bytes_after,
            rows: 400,
        };
        let mut compacted = Compacted::default();
        assert!(told(&compacted).starts_with("nothing to compact"));
        compacted.tables.insert("events", merged(Some(2 << 20)));
        compacted.tables.insert("stacks", merged(Some(1 << 20)));
        compacted.left.push(("events/notes.txt".into(), "its name is foreign".to_owned()));
        compacted.repaired.push("live/date=2026-11-30".into());
        assert_eq!(
            told(&compacted),
            "put right after an interrupted compaction: live/date=2026-11-30\n\
             events: 60 files, 3.0 MiB -> 1, 2.0 MiB; 400 rows as before\n\
             stacks: 60 files, 3.0 MiB -> 1, 1.0 MiB; 400 rows as before\n\
             in all: 120 files, 6.0 MiB -> 2, 3.0 MiB; 800 rows as before\n\
             left events/notes.txt: its name is foreign\n"
        );
        assert_eq!(sizes(&merged(None)), "60 files, 3.0 MiB -> 1; 400 rows");
    }
}
