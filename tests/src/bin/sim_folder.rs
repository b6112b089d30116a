//! `sim_folder` builds the simulated GPU and prints its folder, for `cargo xtask test --kernel`.
#![allow(clippy::print_stdout, reason = "what it prints is what it is for")]

use agent_tests::sim::Sim;
use anyhow::{Context as _, Result};

fn main() -> Result<()> {
    let sim = Sim::build()?;
    println!("{}", sim.lib_dir.parent().context("the libraries' folder is in one")?.display());
    Ok(())
}
