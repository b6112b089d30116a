//! `vramscope recover`: seals what a killed recorder left in its journal.

use std::{collections::BTreeMap, fmt::Write as _, path::Path, process::ExitCode};

use anyhow::Context as _;
use ledger::log::{Recovered, recover};

use super::print;
use crate::cli::Recover;

/// Seals the journals of the log and says what became of each.
pub(super) fn run(args: &Recover) -> anyhow::Result<ExitCode> {
    let log = args.log.display();
    let recovered =
        recover(&args.log, args.other_hosts).with_context(|| format!("recover the log {log}"))?;
    let (text, complete) = (told(&recovered), recovered.skipped.is_empty());
    print(&format!("{text}next: vramscope report {log}\n"))?;
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What was sealed, a line each, and what was not, a line for each reason.
fn told(recovered: &Recovered) -> String {
    let mut text = String::new();
    let mut say = |line: String| writeln!(text, "{line}").unwrap_or_default();
    for path in &recovered.repaired {
        say(format!("put right after an interrupted compaction: {}", path.display()));
    }
    for path in &recovered.sealed {
        say(format!("sealed {}", path.display()));
    }
    let mut left: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
    for (path, why) in &recovered.skipped {
        left.entry(why).or_default().push(path);
    }
    for (why, paths) in left {
        let more = match paths.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        say(format!("left {}{more}: {why}", paths[0].display()));
    }
    if recovered == &Recovered::default() {
        say("nothing to recover: everything is sealed".to_owned());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_told_of() {
        let nothing = told(&Recovered::default());
        assert_eq!(nothing, "nothing to recover: everything is sealed\n");
        let recovered = Recovered {
            repaired: vec!["live/date=2026-11-30".into()],
            sealed: vec!["events/a.parquet".into()],
            skipped: vec![
                ("journal/b.arrows".into(), "its run is still going on".to_owned()),
                ("journal/c.arrows".into(), "its run is still going on".to_owned()),
                ("journal/d.txt".into(), "not a journal of vramscope".to_owned()),
            ],
        };
        assert_eq!(
            told(&recovered),
            "put right after an interrupted compaction: live/date=2026-11-30\n\
             sealed events/a.parquet\n\
             left journal/b.arrows and 1 more: its run is still going on\n\
             left journal/d.txt: not a journal of vramscope\n"
        );
    }
}
