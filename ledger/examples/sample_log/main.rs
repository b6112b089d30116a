//! `cargo run -p ledger --example sample_log DIR [EVENTS] [FLAGS]` writes a log to try readers on:
//! `--max-disk BYTES` deletes its oldest files, `--file-rows ROWS` makes small ones, `--killed` ends
//! as a killed recorder does, `--recovered` and `--compacted` do to the log what these verbs do.

mod sample;

use std::{path::PathBuf, process::ExitCode};

use ledger::log::{Compaction, LogError, Options, compact, recover};

const USAGE: &str = "usage: sample_log DIR [EVENTS] [--max-disk BYTES] [--file-rows ROWS] \
                     [--killed [--recovered]] [--compacted]";

/// What is asked for.
struct Args {
    dir: PathBuf,
    events: i64,
    options: Options,
    killed: bool,
    recovered: bool,
    compacted: bool,
}

impl Args {
    fn parse(mut words: impl Iterator<Item = String>) -> Option<Self> {
        let mut args = Self {
            dir: words.next()?.into(),
            events: 100_000,
            options: Options::default(),
            killed: false,
            recovered: false,
            compacted: false,
        };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--max-disk" => args.options.max_disk_bytes = Some(words.next()?.parse().ok()?),
                "--file-rows" => args.options.max_file_rows = words.next()?.parse().ok()?,
                "--killed" => args.killed = true,
                "--recovered" => args.recovered = true,
                "--compacted" => args.compacted = true,
                events => args.events = events.parse().ok()?,
            }
        }
        Some(args)
    }

    fn write(&self) -> Result<i64, LogError> {
        let events = sample::write(&self.dir, self.events, self.options, !self.killed)?;
        if self.recovered {
            recover(&self.dir, true)?;
        }
        if self.compacted {
            compact(&self.dir, Compaction { other_hosts: true, ..Compaction::default() })?;
        }
        Ok(events)
    }
}

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]
fn main() -> ExitCode {
    let Some(args) = Args::parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match args.write() {
        Ok(events) => {
            println!("{events} events in {}", args.dir.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
