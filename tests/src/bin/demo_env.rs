//! `demo_env DIR` builds the simulated GPU, puts four fresh GPUs' state into DIR and prints the
//! environment of programs that use them, a `KEY=VALUE` a line. For `cargo xtask demo`.
#![allow(clippy::print_stdout, reason = "what it prints is what it is for")]

use std::{env, fs, os::unix::fs::PermissionsExt, path::PathBuf};

use agent_tests::sim::Sim;
use anyhow::{Context, Result};

/// The ranks of the demonstration's job.
const GPUS: u32 = 4;

fn main() -> Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from).context("usage: demo_env DIR")?;
    let sim = Sim::build()?;
    let state = folder.join("gpus");
    // The sizes and contents of an earlier demonstration would otherwise stay.
    if state.exists() {
        fs::remove_dir_all(&state).with_context(|| format!("remove {}", state.display()))?;
    }
    fs::create_dir_all(&state).with_context(|| format!("make {}", state.display()))?;
    // The job runs as the user even where root prepared this.
    fs::set_permissions(&state, fs::Permissions::from_mode(0o777))
        .with_context(|| format!("open {} to other users", state.display()))?;
    println!("SIM_GPUS={GPUS}");
    println!("SIM_STATE={}", state.join("state").display());
    println!("LD_LIBRARY_PATH={}", sim.lib_dir.display());
    for (name, value) in sim.python_env() {
        println!("{name}={value}");
    }
    Ok(())
}
