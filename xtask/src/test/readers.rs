//! Checks in Python that the log reads the same in `DuckDB`, pandas and Polars.
//!
//! Each `tests/readers/check_*.py LOG` is one check. It exits with 0 when it passed, with 77 when
//! it can't run here (its last line says why), else it failed. The logs are those that the
//! ledger's example `sample_log` writes.

use super::{Part, machine, machine::Obstacle, set_full};
use crate::{sh, tally::Tally};
use anyhow::{Context as _, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const REQUIREMENTS: &str = "tests/requirements.txt";
const CHECKS: &str = "tests/readers";
const CANT_RUN: i32 = 77;

/// Logs to read, each with what `sample_log` is told after the folder: the number of events and,
/// for a log whose old files were deleted, the bytes it may keep.
const LOGS: [(&str, &[&str]); 2] = [("whole", &["100000"]), ("rotated", &["200000", "1000000"])];

pub(super) fn run(full: bool) -> Part {
    let checks = checks()?;
    let python = match environment()? {
        Ok(python) => python,
        Err(obstacle) => return Ok(Err(obstacle)),
    };
    let mut total = Tally::default();
    for (name, args) in LOGS {
        let log = write_log(name, args)?;
        for check in &checks {
            let mut command = sh::command(&python)?;
            command.arg(check).arg(&log);
            set_full(&mut command, full);
            total += run_check(&mut command)?;
        }
    }
    Ok(Ok(total))
}

fn run_check(command: &mut Command) -> Result<Tally> {
    println!("$ {}", sh::line(command));
    let status = command.status().with_context(|| format!("run {}", sh::line(command)))?;
    Ok(match status.code() {
        Some(0) => Tally::PASSED,
        Some(CANT_RUN) => Tally::SKIPPED,
        _ => {
            println!("failed: {status}");
            Tally::FAILED
        }
    })
}

fn write_log(name: &str, args: &[&str]) -> Result<PathBuf> {
    let log = sh::target_dir()?.join("readers").join(name);
    if log.exists() {
        fs::remove_dir_all(&log).with_context(|| format!("remove the old {}", log.display()))?;
    }
    let mut command = sh::cargo()?;
    command.args(["run", "--locked", "--quiet", "-p", "ledger", "--example", "sample_log", "--"]);
    sh::run(command.arg(&log).args(args))?;
    Ok(log)
}

fn checks() -> Result<Vec<PathBuf>> {
    let folder = sh::root()?.join(CHECKS);
    let entries = fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))?;
    let paths = entries.flatten().map(|entry| Path::new(CHECKS).join(entry.file_name()));
    let is_check = |path: &PathBuf| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        stem.starts_with("check_") && path.extension().is_some_and(|extension| extension == "py")
    };
    let mut checks: Vec<_> = paths.filter(is_check).collect();
    checks.sort();
    Ok(checks)
}

/// The Python of a virtual environment with the pinned readers, made once per set of pins.
fn environment() -> Result<Result<PathBuf, Obstacle>> {
    let pins = machine::read(REQUIREMENTS)?;
    let folder = sh::target_dir()?.join("venv");
    let python = folder.join("bin/python");
    let stamp = folder.join("requirements.txt");
    if python.is_file() && fs::read_to_string(&stamp).is_ok_and(|installed| installed == pins) {
        return Ok(Ok(python));
    }
    if !sh::succeeds("python3", &["-c", "import ensurepip, venv"]) {
        let reason = "python3 can't make virtual environments: `apt-get install python3-venv`";
        return Ok(Err(Obstacle::avoidable(reason)));
    }
    sh::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = sh::command(&python)?;
    pip.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "-r", REQUIREMENTS]);
    if let Err(error) = sh::run(&mut pip) {
        let reason = format!("no Python packages (is the network there?): {error:#}");
        return Ok(Err(Obstacle::avoidable(reason)));
    }
    fs::write(&stamp, pins).with_context(|| format!("write {}", stamp.display()))?;
    Ok(Ok(python))
}
