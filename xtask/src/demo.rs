//! `cargo xtask demo`: vramscope on a machine without a GPU, from a fresh checkout to a report.
//!
//! Builds the agent, builds the simulated GPU, records a Python job that leaks on it and reports
//! what was found. Without root it builds all of that and prints the line to run as root; where the
//! kernel does not permit probes it reports a log that comes with the sources.

use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

/// Long enough for the report to tell growth from a beginning.
const JOB: [&str; 4] = ["python3", "tests/programs/leak_job.py", "--seconds", "16"];
const PACKAGED_LOG: &str = "tests/data/demo-log";
/// `vramscope doctor` exits with this where the kernel or the user's rights forbid probes.
const NOT_PERMITTED: i32 = 3;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where the simulated GPU and the log go, instead of demo/ in the build folder
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let demo = prepare(args)?;
    if !sh::is_root() {
        println!("\nProbes need root. Run this line:\n\n  {}\n", demo.as_root());
        return Ok(ExitCode::SUCCESS);
    }
    let doctor = sh::command(&demo.agent)?
        .args(["doctor", "--quick"])
        .envs(demo.environment.iter().map(|(key, value)| (key, value)))
        .status()
        .with_context(|| format!("run {} doctor --quick", demo.agent.display()))?;
    if doctor.code() == Some(NOT_PERMITTED) {
        return not_permitted(&demo);
    }
    if !doctor.success() {
        bail!("`vramscope doctor --quick` failed: {doctor}");
    }
    sh::run(&mut demo.record()?)?;
    report(&demo.agent, &demo.log)?;
    what_next(&demo);
    Ok(ExitCode::SUCCESS)
}

/// What the demo runs and where.
struct Demo {
    agent: PathBuf,
    log: PathBuf,
    /// What makes a program use the simulated GPU.
    environment: Vec<(String, String)>,
}

fn prepare(args: &Args) -> Result<Demo> {
    let target = sh::target_dir()?;
    let folder = match &args.output {
        Some(folder) => std::path::absolute(folder).context("find the output folder")?,
        None => target.join("demo"),
    };
    let log = folder.join("demo-log");
    if log.exists() {
        // Only what an earlier demo wrote: the folder itself may be the user's.
        fs::remove_dir_all(&log).with_context(|| format!("remove the old {}", log.display()))?;
    }
    let started = Instant::now();
    sh::run(sh::cargo()?.args(["build", "--locked", "-p", "agent"]))?;
    let mut simulator = sh::cargo()?;
    simulator.args(["run", "--locked", "--quiet", "-p", "agent-tests", "--bin", "demo_env", "--"]);
    println!("$ {} {}", sh::line(&simulator), folder.display());
    let environment = environment(&sh::output(simulator.arg(&folder))?)?;
    println!("built in {} s", started.elapsed().as_secs());
    Ok(Demo { agent: target.join("debug/vramscope"), log, environment })
}

/// `KEY=VALUE` lines.
fn environment(text: &str) -> Result<Vec<(String, String)>> {
    let pair = |line: &str| line.split_once('=').map(|(key, value)| (key.into(), value.into()));
    text.lines()
        .map(|line| pair(line).with_context(|| format!("demo_env printed '{line}', not KEY=VALUE")))
        .collect()
}

impl Demo {
    fn record(&self) -> Result<Command> {
        let mut command = sh::command(&self.agent)?;
        command.args(["run", "-o"]).arg(&self.log).arg("--").args(JOB);
        command.envs(self.environment.iter().map(|(key, value)| (key, value)));
        Ok(command)
    }

    fn report(&self) -> Command {
        let mut command = Command::new(&self.agent);
        command.arg("report").arg(&self.log);
        command
    }

    /// One line that records and reports as root, without a cargo that would leave files of root
    /// in the build folder.
    fn as_root(&self) -> String {
        let mut record = Command::new("sudo");
        record.arg("env");
        record.args(self.environment.iter().map(|(key, value)| format!("{key}={value}")));
        record.arg(&self.agent).args(["run", "-o"]).arg(&self.log).arg("--").args(JOB);
        format!("{} && {}", sh::line(&record), sh::line(&self.report()))
    }
}

fn report(agent: &Path, log: &Path) -> Result<()> {
    println!();
    sh::run(sh::command(agent)?.arg("report").arg(log))
}

fn not_permitted(demo: &Demo) -> Result<ExitCode> {
    println!("\nThis machine does not permit eBPF probes to this user:\n");
    // It ends with the code that brought us here.
    sh::command(&demo.agent)?
        .arg("doctor")
        .envs(demo.environment.iter().map(|(key, value)| (key, value)))
        .status()
        .with_context(|| format!("run {} doctor", demo.agent.display()))?;
    println!(
        "\nFor whoever administers it, on the host itself and in this folder:\n\n  {}\n",
        demo.as_root()
    );
    println!("Meanwhile, the report of such a log that was recorded elsewhere:");
    report(&demo.agent, &sh::root()?.join(PACKAGED_LOG))?;
    Ok(ExitCode::SUCCESS)
}

fn what_next(demo: &Demo) {
    let log = demo.log.display();
    println!("\nThe log: {log}");
    println!("The same question in DuckDB (`pip install duckdb-cli`, or https://duckdb.org):\n");
    println!("  {}\n", duckdb(&demo.log));
    println!("Next, on a job of your own:\n");
    println!("  sudo {} run -- python3 train.py", demo.agent.display());
}

/// Bytes that no call ever freed, by the line that allocated them.
fn duckdb(log: &Path) -> String {
    let log = format!("SET VARIABLE vramscope_log = '{}'", log.display());
    let sql = "SELECT level, site, sum(bytes) AS never_freed_bytes FROM leaks \
               GROUP BY ALL ORDER BY 3 DESC LIMIT 5";
    format!("duckdb -cmd \"{log}\" -cmd \".read docs/views.sql\" -c \"{sql}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_for_root_carries_the_environment_and_quotes_it() {
        let demo = Demo {
            agent: "/b/vramscope".into(),
            log: "/b/demo log".into(),
            environment: environment("A=1=2\nB=x y\n").unwrap(),
        };
        assert_eq!(
            demo.as_root(),
            "sudo env A=1=2 'B=x y' /b/vramscope run -o '/b/demo log' -- python3 \
             tests/programs/leak_job.py --seconds 16 && /b/vramscope report '/b/demo log'"
        );
        assert!(environment("nonsense").is_err());
    }
}
