//! `cargo xtask fuzz`: the fuzz targets under libFuzzer, guided by coverage.
//!
//! Stable Rust and a C++ compiler (libFuzzer is built from source) are all that it takes. What it
//! finds stays in `target/fuzz`: inputs that reach new code in `corpus`, those that fail in
//! `crashes`.

use crate::{sh, tally::Tally};
use anyhow::{Context as _, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Memory after which libFuzzer ends: far above what the targets allow themselves.
const MEMORY_MIB: u32 = 4096;
/// Seconds after which an input counts as one that never ends.
const PATIENCE_S: u32 = 30;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long, each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// One of the targets; all without it
    target: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let tally = guided(args.seconds, args.target.as_deref())?;
    println!("{tally}");
    Ok(tally.exit_code())
}

/// The same targets without instrumentation, over inputs that a seed mutates: no build of its own.
pub(crate) fn quick(seconds: u64) -> Result<Tally> {
    let folder = sh::target_dir()?.join("fuzz");
    let mut total = Tally::default();
    for target in targets(None)? {
        let mut command = driver()?;
        command.args(["quick", "--seconds", &seconds.to_string(), &target]);
        total += counted(settled(&mut command, &folder, &target)?)?;
    }
    Ok(total)
}

/// What is missing for the coverage-guided driver.
pub(crate) fn missing() -> Option<String> {
    let reason = "no C++ compiler to build libFuzzer: `apt-get install g++`";
    (!sh::succeeds("c++", &["--version"])).then(|| reason.to_owned())
}

/// Runs targets for so many seconds each.
pub(crate) fn guided(seconds: u64, target: Option<&str>) -> Result<Tally> {
    let folder = sh::target_dir()?.join("fuzz");
    let program = build(&folder)?;
    let mut total = Tally::default();
    for target in targets(target)? {
        let (corpus, crashes) =
            (folder.join("corpus").join(&target), folder.join("crashes").join(&target));
        for made in [&corpus, &crashes] {
            fs::create_dir_all(made).with_context(|| format!("make {}", made.display()))?;
        }
        let mut seeds = driver()?;
        sh::run(settled(seeds.args(["seeds", &target]).arg(&corpus), &folder, &target)?)?;
        let mut command = sh::command(&program)?;
        command
            .arg(&corpus)
            .arg(format!("-artifact_prefix={}/", crashes.display()))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
            .arg(format!("-timeout={PATIENCE_S}"))
            .args(["-max_len=98304", "-print_final_stats=1", "-verbosity=1"])
            .env("VRAMSCOPE_FUZZ_TARGET", &target);
        let tally = counted(settled(&mut command, &folder, &target)?)?;
        if tally.failed > 0 {
            println!("again: cargo run -p fuzz -- repeat {target} FILE (in {})", crashes.display());
        }
        total += tally;
    }
    Ok(total)
}

/// Builds the driver with its instrumentation, beside the ordinary build, and returns its path.
fn build(folder: &Path) -> Result<PathBuf> {
    let mut cargo = sh::cargo()?;
    cargo
        .args(["build", "--locked", "-p", "fuzz", "--features", "guided", "--bin", "fuzz-guided"])
        .arg("--target-dir")
        .arg(folder)
        .env("RUSTC_WRAPPER", sh::root()?.join("fuzz/instrument.sh"));
    sh::run(&mut cargo)?;
    Ok(folder.join("debug/fuzz-guided"))
}

/// The driver that mutates by a seed.
fn driver() -> Result<Command> {
    let mut command = sh::cargo()?;
    command.args(["run", "--locked", "--quiet", "-p", "fuzz", "--"]);
    Ok(command)
}

fn targets(chosen: Option<&str>) -> Result<Vec<String>> {
    if let Some(chosen) = chosen {
        return Ok(vec![chosen.to_owned()]);
    }
    let list = sh::output(driver()?.arg("list"))?;
    Ok(list.lines().map(str::to_owned).collect())
}

/// Gives a run an empty folder of its own, and says where failed inputs go.
fn settled<'a>(command: &'a mut Command, folder: &Path, target: &str) -> Result<&'a mut Command> {
    let scratch = folder.join("scratch").join(target);
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("remove {}", scratch.display()))?;
    }
    let crashes = folder.join("crashes");
    Ok(command.env("VRAMSCOPE_FUZZ_SCRATCH", scratch).env("VRAMSCOPE_FUZZ_CRASHES", crashes))
}

fn counted(command: &mut Command) -> Result<Tally> {
    println!("$ {}", sh::line(command));
    let status = command.status().with_context(|| format!("run {}", sh::line(command)))?;
    Ok(if status.success() { Tally::PASSED } else { Tally::FAILED })
}
