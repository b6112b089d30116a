//! vramscope: accounts for every byte of GPU memory on a host and names who allocated it.

use std::process::ExitCode;

use agent::{cli::Cli, cmd};
use clap::Parser as _;

fn main() -> ExitCode {
    let cli = Cli::parse();
    cmd::init_logging(&cli);
    match cmd::dispatch(cli) {
        Ok(code) => code,
        Err(error) => cmd::fail(&error),
    }
}
