//! Stacks of Python programs, held against what the programs say of themselves.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests and their helpers may panic, and say what they did not test"
)]

use std::collections::{BTreeMap, BTreeSet};

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
        let wrong = self.frames.iter().zip(&found).position(|(said, found)| said != found);
        let wrong = wrong.unwrap_or(found.len().min(self.frames.len()));
        let right = if self.frames.len() > FRAMES {
            found.len() == FRAMES && found[..] == self.frames[..FRAMES] && !stack.row.complete
        } else {
            found == self.frames
        };
        (!right).then(|| {
            let (expected, actual) = (self.frames.get(wrong), found.get(wrong));
            format!(
                "{} ({}): frame {wrong} of {} is {actual:?}, not {expected:?}; {:?}",
                self.scenario,
                self.bytes,
                self.frames.len(),
                stack.row.incomplete_reason,
            )
        })
    }
}

/// GPUs on which the first call of a process takes long enough for probes to come to a child.
fn gpus() -> Option<SimDevice> {
    machine::gpus().unwrap().map(|device| device.init_ms(500))
}

fn record(device: &SimDevice, python: &Python, log: &str) -> Recorded {
    let log = format!("{log}-{}", python.minor);
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
    losses.remove("start_not_seen"); // when probes come to a child is another test's affair
    assert_eq!(losses, [].into(), "3.{}: {}", python.minor, recorded.said);
    (expected, Stacks::read(&logged).unwrap())
}

/// The interpreters that are here; says which are missing.
fn interpreters() -> Vec<Python> {
    let (found, missing) = pythons();
    for minor in missing {
        println!("not tested: CPython 3.{minor}, which is not here");
    }
    assert!(!found.is_empty(), "no CPython 3.{}-3.{}", SUPPORTED.start(), SUPPORTED.end());
    found
}

#[test]
fn stacks_are_those_that_python_sees() {
    let Some(device) = gpus() else { return };
    let pythons = interpreters();
    for python in &pythons {
        let (expected, stacks) = outcome(python, &record(&device, python, "log"));
        let wrong = faults(&expected, &stacks);
        assert!(wrong.is_empty(), "3.{}: {}", python.minor, wrong.join("\n"));
        assert_complete(python, &expected, &stacks);
        assert_ranks_share(&expected, &stacks);
        if python == &pythons[0] {
            let again = outcome(python, &record(&device, python, "again"));
            let (first, second) = (steady_ids(&expected, &stacks), steady_ids(&again.0, &again.1));
            assert_eq!(first, second);
        }
    }
}

fn faults(expected: &[Expected], stacks: &Stacks) -> Vec<String> {
    let fault = |expected: &Expected| match stacks.of_size(expected.bytes) {
        Ok(stack) => expected.fault(stack),
        Err(error) => Some(format!("{}: {error}", expected.scenario)),
    };
    expected.iter().filter_map(fault).collect()
}

/// At least 99 of 100 stacks reach their threads' starts. Those that are deeper than what is taken
/// are not meant to.
fn assert_complete(python: &Python, expected: &[Expected], stacks: &Stacks) {
    let mut incomplete = BTreeMap::new();
    let (mut all, mut complete) = (0, 0);
    for expected in expected.iter().filter(|expected| expected.frames.len() <= FRAMES) {
        let row = &stacks.of_size(expected.bytes).unwrap().row;
        all += 1;
        complete += usize::from(row.complete);
        if let Some(reason) = &row.incomplete_reason {
            *incomplete.entry((&expected.scenario, reason)).or_insert(0) += 1;
        }
    }
    println!("3.{}: {complete} of {all} stacks are complete", python.minor);
    assert!(complete * 100 >= all * 99, "3.{}: {incomplete:?}", python.minor);
}

/// The same code has the same stacks in both ranks.
fn assert_ranks_share(expected: &[Expected], stacks: &Stacks) {
    let of_rank = |rank: i64| -> BTreeSet<i64> {
        let own = expected.iter().filter(|expected| expected.bytes >> 24 == 3 + rank);
        own.map(|expected| stacks.of_size(expected.bytes).unwrap().row.stack_id).collect()
    };
    assert_eq!(of_rank(0).len(), 1);
    assert_eq!(of_rank(0), of_rank(1));
}

/// Ids of stacks by bytes, of those that are the same each time. (Whether a deep stack is met again
/// before the agent has asked for more of it is chance, and so is which addresses come again.)
fn steady_ids(expected: &[Expected], stacks: &Stacks) -> BTreeMap<i64, i64> {
    let is_chance = |expected: &&Expected| {
        ["recursion_50", "recursion_300", "reused", "alike"].contains(&&*expected.scenario)
    };
    let steady = expected.iter().filter(|expected| !is_chance(expected));
    let ids: BTreeMap<i64, i64> = steady
        .map(|expected| (expected.bytes, stacks.of_size(expected.bytes).unwrap().row.stack_id))
        .collect();
    assert!(ids.values().collect::<BTreeSet<_>>().len() > 40);
    ids
}
