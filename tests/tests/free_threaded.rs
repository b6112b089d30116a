//! CPython without the GIL: its frames cannot be walked, which is said; its native stacks are there.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests and their helpers may panic, and say what they did not test"
)]

use std::{env, path::Path, process::Command};

use agent_tests::{
    agent::{Agent, Recorded},
    machine::{self, Obstacle},
    pythons::{self, Python},
    sim::SimDevice,
    stacks::Stacks,
};
use ledger::rows::AnnotationRow;

/// GPUs on which the first call of a process takes long enough for it to be looked at before.
fn gpus() -> Option<SimDevice> {
    machine::gpus().unwrap().map(|device| device.init_ms(500))
}

/// Runs the part of `python_stacks.py` that a rank runs.
fn record(
    device: &SimDevice,
    python: &Path,
    log: &str,
    prepare: impl Fn(&mut Command),
) -> Recorded {
    let agent = Agent::new(device).log(&device.folder().join(log));
    let mut command = agent.command("run");
    let script = device.program("python_stacks.py");
    command.arg("--").arg(python).args(script.get_args()).arg("child");
    prepare(&mut command);
    let recorded = agent.trace(command).unwrap().finish().unwrap();
    assert!(recorded.status.success(), "{}", recorded.said);
    recorded
}

/// No Python frame, right or wrong, and words about it: in the log, at each stack, in the report.
fn check(recorded: &Recorded) {
    let logged = recorded.open().unwrap();
    let said: Vec<AnnotationRow> = logged.rows().unwrap();
    let said: Vec<_> = said.iter().filter(|row| row.text.contains("without the GIL")).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].kind == "warning" && said[0].proc_id.is_some(), "{said:?}");
    assert!(recorded.report().unwrap().contains("no Python frames"));
    let stacks = Stacks::read(&logged).unwrap();
    assert_eq!(stacks.allocations().len(), 5);
    for allocation in stacks.allocations() {
        let stack = stacks.of(allocation).unwrap();
        assert_eq!(stack.python(), []);
        let reason = "the interpreter's frames cannot be walked";
        assert_eq!(stack.row.incomplete_reason.as_deref(), Some(reason));
        let functions = stack.functions();
        assert!(functions[0] == "cuMemAlloc_v2" && functions.len() > 8, "{functions:?}");
    }
}

#[test]
fn builds_without_the_gil_have_native_stacks_alone() {
    let builds = pythons::free_threaded();
    if builds.is_empty() {
        machine::skip(&Obstacle::of_the_machine("no CPython that is built without the GIL"));
    }
    for Python { path, minor, .. } in builds {
        let Some(device) = gpus() else { return };
        println!("3.{minor}: {}", path.display());
        check(&record(&device, &path, &format!("log-{minor}"), |_| ()));
    }
}

/// What the headers of 3.13 and 3.14 publish of such a build is a test of the agent's own.
#[test]
fn what_says_of_itself_that_it_is_built_without_the_gil_is_believed() {
    let (found, _) = pythons::pythons();
    let newest = found.iter().max_by_key(|python| python.minor).expect("a CPython");
    let Some(device) = gpus() else { return };
    let Some(stand_in) = newest.claiming_no_gil(device.folder()).unwrap() else {
        return machine::skip(&Obstacle::of_the_machine("no CPython 3.13 or later"));
    };
    let libraries = env::join_paths([&stand_in.lib_dir, device.lib_dir()]).unwrap();
    check(&record(&device, &stand_in.program, "log", |command| {
        command.env("LD_LIBRARY_PATH", &libraries).env("PYTHONHOME", &stand_in.home);
    }));
}
