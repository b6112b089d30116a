//! Checks in Python that the log reads the same in `DuckDB`, pandas and Polars, and with `--full`
//! in Spark.
//!
//! Each `tests/readers/check_*.py LOG [SAME]` is one check; `SAME` is a log that has the same rows.
//! It exits with 0 when it passed, with 77 when it can't run here (its last line says why), else it
//! failed. The logs are those that the ledger's example `sample_log` writes.

use super::{Part, machine, machine::Obstacle, set_full};
use crate::{sh, tally::Tally};
use anyhow::{Context as _, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const REQUIREMENTS: &str = "tests/requirements.txt";
/// Of the full run, on top.
const FULL_REQUIREMENTS: &str = "tests/requirements-full.txt";
const CHECKS: &str = "tests/readers";
/// The check that only the full run makes.
const FULL_CHECK: &str = "check_spark.py";
const CANT_RUN: i32 = 77;

/// A log to read.
struct SampleLog {
    name: &'static str,
    /// What `sample_log` is told after the folder.
    args: &'static [&'static str],
    /// The log before it that has the same rows.
    same_as: Option<&'static str>,
}

const fn sample_log(
    name: &'static str,
    args: &'static [&'static str],
    same_as: Option<&'static str>,
) -> SampleLog {
    SampleLog { name, args, same_as }
}

/// Rows of a small file, and what makes them.
const SMALL: &str = "--file-rows";

const LOGS: [SampleLog; 6] = [
    sample_log("whole", &["100000"], None),
    sample_log("rotated", &["200000", "--max-disk", "1000000"], None),
    sample_log("pieces", &["60000", SMALL, "4000"], None),
    // As it lies there while it is being written, too: readers see no difference.
    sample_log("killed", &["60000", SMALL, "4000", "--killed"], None),
    sample_log("recovered", &["60000", SMALL, "4000", "--killed", "--recovered"], Some("pieces")),
    sample_log("compacted", &["60000", SMALL, "4000", "--compacted"], Some("pieces")),
];

pub(super) fn run(full: bool) -> Part {
    let mut checks = checks()?;
    let mut total = Tally::default();
    if !full {
        checks.retain(|check| !check.ends_with(FULL_CHECK));
        println!("SKIP {FULL_CHECK}: only with --full, which installs Spark");
        total += Tally::SKIPPED;
    }
    let python = match environment(full)? {
        Ok(python) => python,
        Err(obstacle) => return Ok(Err(obstacle)),
    };
    for sample in LOGS {
        let log = write_log(&sample)?;
        for check in &checks {
            let mut command = sh::command(&python)?;
            command.arg(check).arg(&log).args(sample.same_as.map(|name| log.with_file_name(name)));
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

fn write_log(sample: &SampleLog) -> Result<PathBuf> {
    let log = sh::target_dir()?.join("readers").join(sample.name);
    if log.exists() {
        fs::remove_dir_all(&log).with_context(|| format!("remove the old {}", log.display()))?;
    }
    let mut command = sh::cargo()?;
    command.args(["run", "--locked", "--quiet", "-p", "ledger", "--example", "sample_log", "--"]);
    sh::run(command.arg(&log).args(sample.args))?;
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
fn environment(full: bool) -> Result<Result<PathBuf, Obstacle>> {
    let mut pins = machine::read(REQUIREMENTS)?;
    let mut files = vec!["-r", REQUIREMENTS];
    if full {
        pins += &machine::read(FULL_REQUIREMENTS)?;
        files.extend(["-r", FULL_REQUIREMENTS]);
    }
    let folder = sh::target_dir()?.join("venv");
    let python = folder.join("bin/python");
    let stamp = folder.join("requirements.txt");
    if python.is_file()
        && fs::read_to_string(&stamp).is_ok_and(|installed| installed.starts_with(&pins))
    {
        return Ok(Ok(python));
    }
    if !sh::succeeds("python3", &["-c", "import ensurepip, venv"]) {
        let reason = "python3 can't make virtual environments: `apt-get install python3-venv`";
        return Ok(Err(Obstacle::avoidable(reason)));
    }
    sh::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = sh::command(&python)?;
    // Spark comes as a source archive that only needs to be unpacked.
    pip.args(["-m", "pip", "install", "--quiet", "--only-binary", ":all:"]);
    pip.args(["--no-binary", "pyspark"]).args(files);
    if let Err(error) = sh::run(&mut pip) {
        let reason = format!("no Python packages (is the network there?): {error:#}");
        return Ok(Err(Obstacle::avoidable(reason)));
    }
    fs::write(&stamp, pins).with_context(|| format!("write {}", stamp.display()))?;
    Ok(Ok(python))
}
