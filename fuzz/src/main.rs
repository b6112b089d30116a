//! `fuzz`: the targets over inputs that a seed mutates; no instrumentation, no nightly.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a developer's tool: what it prints is what it is for"
)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::{Parser, Subcommand};
use fuzz::{
    TARGETS, Target, limits,
    mutate::{Random, mutated},
    scratch, targets,
};

/// Where inputs that failed are kept; by default beside the build.
const CRASHES_ENV: &str = "VRAMSCOPE_FUZZ_CRASHES";
/// Inputs that failed once.
const REGRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/regressions");
/// Wall time after which an input counts as one that never ends.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs fuzz targets.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Names the targets
    List,
    /// Mutates inputs for a while
    Quick {
        /// How long, each target
        #[arg(long, default_value_t = 3)]
        seconds: u64,
        /// The same seed makes the same inputs
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// One of them; all without it
        target: Option<String>,
    },
    /// Writes the inputs that a target begins with
    Seeds {
        /// The target
        target: String,
        /// Where to
        folder: PathBuf,
    },
    /// Runs one input again
    Repeat {
        /// The target
        target: String,
        /// The input
        file: PathBuf,
    },
}

/// What runs now and since when, for the watchdog.
static RUNNING: Mutex<Option<(&Target, Vec<u8>, Instant)>> = Mutex::new(None);

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    limits::note_panics();
    thread::spawn(watch);
    let result = match cli.command {
        Command::List => Ok(list()),
        Command::Quick { seconds, seed, target } => {
            let chosen: Vec<&Target> = match target {
                Some(name) => vec![find(&name)?],
                None => TARGETS.iter().collect(),
            };
            let failures = chosen.iter().filter(|target| !quick(target, seconds, seed)).count();
            Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Seeds { target, folder } => write_seeds(find(&target)?, &folder),
        Command::Repeat { target, file } => repeat(find(&target)?, &file),
    };
    scratch::remove();
    result
}

fn find(name: &str) -> Result<&'static Target> {
    targets::target(name).with_context(|| format!("{name} is no target; `list` names them"))
}

fn list() -> ExitCode {
    for target in &TARGETS {
        println!("{}", target.name);
    }
    ExitCode::SUCCESS
}

/// Whether nothing failed within the time.
fn quick(target: &'static Target, seconds: u64, seed: u64) -> bool {
    let (begun, time) = (Instant::now(), Duration::from_secs(seconds));
    let regressions = regressions(target);
    let seeds: Vec<Vec<u8>> = regressions.into_iter().chain((target.seeds)()).collect();
    let mut random = Random::new(seed);
    let mut count = 0_usize;
    while count < seeds.len() || begun.elapsed() < time {
        let made = || mutated(&mut random, &seeds, target.longest);
        let data = seeds.get(count).cloned().unwrap_or_else(made);
        count += 1;
        if let Err(fault) = watched(target, &data) {
            println!(
                "{}: input {count} of seed {seed}: {fault}\n{}",
                target.name,
                keep(target, &data)
            );
            return false;
        }
    }
    let rate = count as f64 / begun.elapsed().as_secs_f64();
    println!("{}: {count} inputs, {rate:.0} a second, {} caught", target.name, limits::caught());
    true
}

fn watched(target: &'static Target, data: &[u8]) -> Result<(), String> {
    let now = |value| *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) = value;
    now(Some((target, data.to_vec(), Instant::now())));
    let result = limits::run(target, data);
    now(None);
    result
}

/// Ends the program where an input does not end.
fn watch() {
    loop {
        thread::sleep(Duration::from_secs(1));
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((target, data, since)) = &*running
            && since.elapsed() > PATIENCE
        {
            println!("{}: an input does not end\n{}", target.name, keep(target, data));
            std::process::abort();
        }
    }
}

/// Keeps an input; the words that say how to run it again.
fn keep(target: &Target, data: &[u8]) -> String {
    let folder =
        env::var_os(CRASHES_ENV).map_or_else(|| "target/fuzz/crashes".into(), PathBuf::from);
    let folder = folder.join(target.name);
    let path = folder.join(format!("quick-{:016x}", hash(data)));
    match fs::create_dir_all(&folder).and_then(|()| fs::write(&path, data)) {
        Ok(()) => format!("again: cargo run -p fuzz -- repeat {} {}", target.name, path.display()),
        Err(error) => format!("not kept in {}: {error}; the input is {data:?}", path.display()),
    }
}

/// FNV-1a: names of files need no more.
fn hash(data: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    data.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn regressions(target: &Target) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(Path::new(REGRESSIONS).join(target.name));
    let mut paths: Vec<_> = entries.into_iter().flatten().flatten().map(|e| e.path()).collect();
    paths.sort();
    paths.iter().filter_map(|path| fs::read(path).ok()).collect()
}

fn write_seeds(target: &Target, folder: &Path) -> Result<ExitCode> {
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    for data in regressions(target).into_iter().chain((target.seeds)()) {
        let path = folder.join(format!("seed-{:016x}", hash(&data)));
        fs::write(&path, data).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn repeat(target: &'static Target, file: &Path) -> Result<ExitCode> {
    let data = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    match watched(target, &data) {
        Ok(()) => println!("{}: nothing wrong, {} caught", target.name, limits::caught()),
        Err(fault) => bail!("{}: {fault}", target.name),
    }
    Ok(ExitCode::SUCCESS)
}
