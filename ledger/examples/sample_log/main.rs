//! `cargo run -p ledger --example sample_log DIR [EVENTS [MAX_DISK_BYTES]]` writes a log to try
//! readers on.

mod sample;

use std::{path::PathBuf, process::ExitCode};

use ledger::log::Options;

#[allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]
fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let dir = args.next().map(PathBuf::from);
    let events = args.next().map_or(Ok(100_000), |text| text.parse::<i64>());
    let max_disk_bytes = args.next().map(|text| text.parse::<u64>()).transpose();
    let (Some(dir), Ok(events), Ok(max_disk_bytes)) = (dir, events, max_disk_bytes) else {
        eprintln!("usage: sample_log DIR [EVENTS [MAX_DISK_BYTES]]");
        return ExitCode::from(2);
    };
    match sample::write(&dir, events, Options { max_disk_bytes, ..Options::default() }) {
        Ok(events) => {
            println!("{events} events in {}", dir.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
