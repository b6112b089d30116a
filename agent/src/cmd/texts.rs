//! Verbs that print text about the program: schema, completions, manual page.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::CommandFactory as _;
use ledger::log::{Checked, Column, Log, SCHEMA_VERSION, TABLES};

use super::print;
use crate::cli::{Cli, Completions, Schema};

/// `vramscope schema`.
pub(super) fn schema(args: &Schema) -> anyhow::Result<ExitCode> {
    if let Some(log) = &args.check {
        return check(log);
    }
    print(&if args.json { schema_json()? } else { schema_text() })?;
    Ok(ExitCode::SUCCESS)
}

/// `vramscope schema --check DIR`.
fn check(dir: &Path) -> anyhow::Result<ExitCode> {
    let log = Log::open(&[dir.to_owned()]).context("read the log")?;
    let checked = log.check();
    print(&checked_text(&checked))?;
    Ok(if checked.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A line a difference, and a last one that sums up.
fn checked_text(checked: &Checked) -> String {
    let mut text = String::new();
    let mut say = |what: &str, list: &[(PathBuf, String)]| {
        for (path, why) in list {
            writeln!(text, "{what} {}: {why}", path.display()).unwrap_or_default();
        }
    };
    say("wrong", &checked.wrong);
    say("note", &checked.of_other_versions);
    let count = |list: &[(PathBuf, String)]| {
        let mut paths: Vec<_> = list.iter().map(|(path, _)| path).collect();
        paths.sort_unstable();
        paths.dedup();
        paths.len()
    };
    let (files, wrong) = (checked.files, count(&checked.wrong));
    let others = count(&checked.of_other_versions);
    writeln!(
        text,
        "{files} files checked against schema version {SCHEMA_VERSION}: {wrong} do not fit, {others} \
         of other versions are read all the same"
    )
    .unwrap_or_default();
    text
}

fn schema_json() -> anyhow::Result<String> {
    let column = |column: &Column| {
        serde_json::json!({
            "name": column.name,
            "type": column.ty.as_str(),
            "nullable": column.nullable,
            "meaning": column.doc.trim(),
        })
    };
    let tables: Vec<_> = TABLES
        .iter()
        .map(|table| {
            let columns: Vec<_> = table.columns().map(column).collect();
            serde_json::json!({ "name": table.name, "meaning": table.doc.trim(), "columns": columns })
        })
        .collect();
    let schema = serde_json::json!({ "schema_version": SCHEMA_VERSION, "tables": tables });
    Ok(serde_json::to_string_pretty(&schema).context("write the schema as JSON")? + "\n")
}

fn schema_text() -> String {
    let mut text = String::new();
    for table in TABLES {
        text.extend([table.name, "\n  ", table.doc.trim(), "\n"]);
        text.extend(table.columns().map(column_text));
        text.push('\n');
    }
    text
}

fn column_text(column: &Column) -> String {
    let nullable = if column.nullable { "?" } else { "" };
    let ty = format!("{}{nullable}", column.ty.as_str());
    format!("    {:<28} {ty:<20} {}\n", column.name, column.doc.trim())
}

/// `vramscope completions`.
pub(super) fn completions(args: &Completions) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vramscope", &mut text);
    print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

/// `vramscope man`.
pub(super) fn man() -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut text).context("render the manual page")?;
    print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_is_a_line_and_files_are_counted_once() {
        let line = |path: &str, why: &str| (PathBuf::from(path), why.to_owned());
        let checked = Checked {
            files: 5,
            wrong: vec![line("a", "no column x"), line("a", "no column y")],
            of_other_versions: vec![line("b", "a column z")],
        };
        assert_eq!(
            checked_text(&checked),
            "wrong a: no column x\nwrong a: no column y\nnote b: a column z\n\
             5 files checked against schema version 1: 1 do not fit, 1 of other versions are read \
             all the same\n"
        );
    }
}
