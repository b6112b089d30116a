//! Stacks of Python programs, held against what the programs say of themselves.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests and their helpers may panic, and say what they did not test"
)]

use agent_tests::{
    agent::{Agent, Recorded},
    machine,
    pythons::{Python, SUPPORTED, pythons},
    sim::SimDevice,
    stacks::{Stack, Stacks},
};
use serde_json::Value;

/// Python frames that are taken at most.
const FRAMES: usize = 128;

/// A line of `STACK`: what Python says of an allocation's stack.
struct Expected {
    scenario: String,
    bytes: i64,
    frames: Vec<(String, String, Option<i32>)>,
}

impl Expected {
    fn parse(line: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(line.strip_prefix("STACK ")?).unwrap();
        let frames = value["frames"].as_array().unwrap().iter().map(|frame| {
            let text = |at: usize| frame[at].as_str().unwrap().to_owned();
            (text(0), text(1), frame[2].as_i64().map(|line| line as i32))
        });
        Some(Self {
            scenario: value["scenario"].as_str().unwrap().to_owned(),
            bytes: value["bytes"].as_i64().unwrap(),
            frames: frames.collect(),
        })
    }

    /// What is wrong with the stack; `None` where it is right.
    fn fault(&self, stack: &Stack) -> Option<String> {
        let found = stack.python();
        let shown = |frames: &[(String, String, Option<i32>)]| -> String {
            let lines = frames.iter().take(12).map(|(function, file, line)| {
                format!("      {function} {file}:{}", line.unwrap_or(-1))
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        let right = if self.frames.len() > FRAMES {
            found.len() == FRAMES && found[..] == self.frames[..FRAMES] && !stack.row.complete
        } else {
            found == self.frames
        };
        (!right).then(|| {
            let (scenario, bytes) = (&self.scenario, self.bytes);
            let (expected, found) = (shown(&self.frames), shown(&found));
            format!("{scenario} ({bytes}): expected\n{expected}\n    but found\n{found}")
        })
    }
}

/// GPUs on which the first call of a process takes long enough for probes to come to a child.
fn gpus() -> Option<SimDevice> {
    machine::gpus().unwrap().map(|device| device.init_ms(400))
}

fn record(device: &SimDevice, python: &Python, log: &str) -> Recorded {
    let agent = Agent::new(device).log(&device.folder().join(log));
    let script = device.program("python_stacks.py");
    let mut command = agent.command("run");
    command.arg("--").arg(&python.path).args(script.get_args());
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let recorded = agent.trace(command).unwrap().finish().unwrap();
    assert!(recorded.status.success(), "{python:?}: {}", recorded.said);
    recorded
}

/// The expectations and the stacks of a run, and the words about what it could not do.
fn outcome(python: &Python, recorded: &Recorded) -> (Vec<Expected>, Stacks) {
    for line in recorded.lines.iter().filter(|line| line.starts_with("MISSED ")) {
        println!("3.{}: {line}", python.minor);
    }
    let expected = recorded.lines.iter().filter_map(|line| Expected::parse(line)).collect();
    let logged = recorded.open().unwrap();
    let mut losses = logged.losses().unwrap();
    losses.remove("exit_without_enter"); // the first call of a child, in which the probes came
    assert_eq!(losses, [].into(), "3.{}: {}", python.minor, recorded.said);
    (expected, Stacks::read(&logged).unwrap())
}

/// Tests with each interpreter; says which are missing.
fn with_each(test: impl Fn(&SimDevice, &Python)) {
    let Some(device) = gpus() else { return };
    let (found, missing) = pythons();
    for minor in missing {
        println!("not tested: CPython 3.{minor}, which is not here");
    }
    assert!(!found.is_empty(), "no CPython 3.{}-3.{}", SUPPORTED.start(), SUPPORTED.end());
    for python in found {
        test(&device, &python);
    }
}

#[test]
fn stacks_are_those_that_python_sees() {
    with_each(|device, python| {
        let begin = std::time::Instant::now();
        let recorded = record(device, python, &format!("log-{}", python.minor));
        let (expected, stacks) = outcome(python, &recorded);
        let faults: Vec<String> = expected
            .iter()
            .filter_map(|expected| match stacks.of_size(expected.bytes) {
                Ok(stack) => expected.fault(stack),
                Err(error) => Some(format!("{}: {error}", expected.scenario)),
            })
            .collect();
        println!("3.{}: {} stacks, {:?}", python.minor, expected.len(), begin.elapsed());
        assert!(faults.is_empty(), "3.{}: {}", python.minor, faults.join("\n"));
    });
}
