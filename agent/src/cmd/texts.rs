//! Verbs that print text about the program: schema, completions, manual page.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::CommandFactory as _;
use ledger::log::{Column, SCHEMA_VERSION, TABLES};

use super::print;
use crate::cli::{Cli, Completions, Schema};

/// `vramscope schema`.
pub(super) fn schema(args: &Schema) -> anyhow::Result<ExitCode> {
    print(&if args.json { schema_json()? } else { schema_text() })?;
    Ok(ExitCode::SUCCESS)
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
