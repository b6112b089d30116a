//! `cargo xtask lint`: everything about the text of the sources; runs no test.

mod rules;

use crate::{ebpf, sh, tally::Tally};
use anyhow::{Context as _, Result, bail};
use std::process::ExitCode;

/// How a check ended, if not in an error.
enum Outcome {
    Passed,
    Skipped(String),
}

type Check = fn() -> Result<Outcome>;

const CHECKS: [(&str, Check); 9] = [
    ("format", || cargo(&["fmt", "--all", "--check"], None)),
    ("clippy, user half", || {
        cargo(
            &["clippy", "--locked", "--workspace", "--exclude", "agent-ebpf", "--all-targets"],
            Some("-Dwarnings"),
        )
    }),
    ("clippy, reading logs without the feature `live`", || {
        cargo(&["clippy", "--locked", "-p", "agent", "--no-default-features"], Some("-Dwarnings"))
    }),
    ("clippy, kernel half", kernel_half),
    ("docs", docs),
    ("layers", layers),
    ("house rules", rules::check),
    ("licences and sources of dependencies", deny),
    ("spelling", spelling),
];

pub(crate) fn run() -> Result<ExitCode> {
    let mut total = Tally::default();
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        println!("== lint: {name}");
        total += match check() {
            Ok(Outcome::Passed) => Tally::PASSED,
            Ok(Outcome::Skipped(reason)) => {
                println!("skipped: {reason}");
                Tally::SKIPPED
            }
            Err(error) => {
                println!("failed: {error:#}");
                failed.push(name);
                Tally::FAILED
            }
        };
    }
    println!("== lint: objects of the kernel half");
    let objects = ebpf::check()?;
    if objects.failed > 0 {
        failed.push("objects of the kernel half");
    }
    total += objects;
    if !failed.is_empty() {
        println!("failed: {}", failed.join("; "));
    }
    println!("{total}");
    Ok(total.exit_code())
}

fn cargo(args: &[&str], to_the_tool: Option<&str>) -> Result<Outcome> {
    let mut command = sh::cargo()?;
    command.args(args);
    if let Some(flag) = to_the_tool {
        command.args(["--", flag]);
    }
    sh::run(&mut command)?;
    Ok(Outcome::Passed)
}

fn kernel_half() -> Result<Outcome> {
    Ok(match ebpf::clippy()? {
        Ok(()) => Outcome::Passed,
        Err(missing) => Outcome::Skipped(missing),
    })
}

fn docs() -> Result<Outcome> {
    let mut command = sh::cargo()?;
    command
        .args(["doc", "--locked", "--no-deps", "--workspace", "--exclude", "agent-ebpf"])
        .env("RUSTDOCFLAGS", "-Dwarnings");
    sh::run(&mut command)?;
    Ok(Outcome::Passed)
}

/// Crates that a package must not reach, and why.
struct Layer {
    package: &'static str,
    args: &'static [&'static str],
    forbidden: &'static [&'static str],
    why: &'static str,
}

const LAYERS: [Layer; 3] = [
    Layer {
        package: "ledger",
        args: &[],
        forbidden: &["aya", "aya-obj", "nvml-wrapper", "tokio", "agent", "agent-common"],
        why: "the ledger is pure: no root, no kernel, no GPU",
    },
    Layer {
        package: "agent",
        args: &["--no-default-features"],
        forbidden: &["aya", "aya-obj", "nvml-wrapper", "tokio", "agent-common"],
        why: "without `live` the program only reads logs",
    },
    Layer {
        package: "agent-common",
        args: &[],
        forbidden: &["ledger", "agent", "aya", "aya-ebpf", "serde"],
        why: "both halves share it",
    },
];

fn layers() -> Result<Outcome> {
    for layer in LAYERS {
        let mut tree = sh::cargo()?;
        tree.args(["tree", "--locked", "--package", layer.package, "--prefix", "none"])
            .args(["--edges", "normal,build", "--no-dedupe", "--format", "{p}"])
            .args(layer.args);
        let tree = sh::output(&mut tree)?;
        // The first line is the package itself.
        let reached = tree.lines().skip(1).filter_map(|line| line.split(' ').next());
        let mut found: Vec<_> = reached.filter(|name| layer.forbidden.contains(name)).collect();
        found.sort_unstable();
        found.dedup();
        if !found.is_empty() {
            bail!("{} depends on {}, but {}", layer.package, found.join(", "), layer.why);
        }
    }
    Ok(Outcome::Passed)
}

/// Advisories need a copy of the public database, so only what the lock file decides is checked.
fn deny() -> Result<Outcome> {
    if !sh::succeeds("cargo-deny", &["--version"]) {
        return Ok(Outcome::Skipped(
            "cargo-deny is not installed: `cargo install cargo-deny --locked`".into(),
        ));
    }
    cargo(&["deny", "--locked", "check", "bans", "licenses", "sources"], None)
}

fn spelling() -> Result<Outcome> {
    if !sh::succeeds("typos", &["--version"]) {
        return Ok(Outcome::Skipped(
            "typos is not installed: `pip install typos` or `cargo install typos-cli`".into(),
        ));
    }
    sh::run(&mut sh::command("typos")?).context("correct the word or list it in typos.toml")?;
    Ok(Outcome::Passed)
}
