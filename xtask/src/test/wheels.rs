//! Real wheels of PyTorch: each function of its libraries that is probed must be there, by its name, in
//! every version. Names are mangled with the types of their arguments, so a version may change them.

use super::{Args, Part, cargo_test, machine::Obstacle};
use crate::sh;

const FETCH: &str = "tests/wheels/fetch.py";
/// Where the libraries are, within the target folder.
const FOLDER: &str = "wheels";
/// Names the libraries to the test.
const WHEELS_ENV: &str = "VRAMSCOPE_TEST_WHEELS";

const TEST: [&str; 9] = [
    "test",
    "--locked",
    "-p",
    "agent",
    "--lib",
    "attach::elf::",
    "--",
    "--ignored",
    // What was found in which version.
    "--nocapture",
];

pub(super) fn run(args: &Args) -> Part {
    if !args.full && !args.wheels {
        let reason = "only with --wheels or --full, which fetches libraries of PyTorch (850 MB)";
        return Ok(Err(Obstacle::of_the_machine(reason)));
    }
    let mut fetch = sh::command("python3")?;
    println!("$ {}", sh::line(fetch.arg(FETCH).arg(sh::target_dir()?.join(FOLDER))));
    let libraries = match sh::output(&mut fetch) {
        Ok(libraries) => libraries,
        Err(error) => {
            let reason = format!("no wheels of PyTorch (is the network there?): {error:#}");
            return Ok(Err(Obstacle::avoidable(reason)));
        }
    };
    Ok(Ok(cargo_test(&TEST, args, &[(WHEELS_ENV, libraries.trim_end())])?))
}
