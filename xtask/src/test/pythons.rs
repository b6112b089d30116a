//! Stacks of a CPython that the distribution may not have: Debian's build of a newer one, unpacked
//! under `target`.

use super::{Args, Part, cargo_test, machine, machine::Obstacle};
use crate::sh;
use anyhow::Result;
use std::{env, path::PathBuf};

const FETCH: &str = "tests/pythons/fetch.py";
/// Where it is unpacked, within the target folder.
const FOLDER: &str = "pythons/debian";
/// Names the interpreters that the tests run, in place of those that they find.
const PYTHONS_ENV: &str = "VRAMSCOPE_TEST_PYTHONS";

const UNIT: [&str; 6] = ["test", "--locked", "-p", "agent", "--lib", "python::"];
const SCENARIOS: [&str; 8] =
    ["test", "--locked", "-p", "agent-tests", "--test", "python_stacks", "--test", "free_threaded"];

pub(super) fn run(args: &Args) -> Part {
    if !args.full {
        let reason = "only with --full, which fetches Debian's CPython 3.14 (14 MB)";
        return Ok(Err(Obstacle::of_the_machine(reason)));
    }
    if env::consts::ARCH != "x86_64" {
        return Ok(Err(Obstacle::of_the_machine("Debian's packages are pinned for x86-64 only")));
    }
    if let Some(obstacle) = machine::probe_obstacle().or_else(machine::compiler_obstacle) {
        return Ok(Err(obstacle));
    }
    let python = fetch()?.display().to_string();
    let agent = machine::build_agent()?.display().to_string();
    let env = [(PYTHONS_ENV, &*python), ("VRAMSCOPE_BIN", &agent)];
    let mut total = cargo_test(&UNIT, args, &env)?;
    let harness = ["--", "--test-threads=1", "--show-output"];
    total += cargo_test(&[&SCENARIOS[..], &harness].concat(), args, &env)?;
    Ok(Ok(total))
}

/// Fetches the interpreter, unless it is there; its path.
pub(super) fn fetch() -> Result<PathBuf> {
    let folder = sh::target_dir()?.join(FOLDER);
    let mut fetch = sh::command("python3")?;
    println!("$ {}", sh::line(fetch.arg(FETCH).arg(folder)));
    Ok(sh::output(&mut fetch)?.trim_end().into())
}
