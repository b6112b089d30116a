//! Stacks of C and C++ programs, held against the chains of calls that they say they make.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use agent_tests::{
    agent::{Agent, Recorded},
    machine::{self, Obstacle},
    sim::SimDevice,
    stacks::{Stack, Stacks},
};

/// A line of `STACK`: functions from the innermost one.
struct Expected {
    scenario: String,
    bytes: i64,
    chain: Vec<String>,
}

/// GPUs on which the first call of a process takes long enough for probes to come to a child.
fn gpus() -> Option<SimDevice> {
    machine::gpus().unwrap().map(|device| device.init_ms(300))
}

/// Runs the program with these arguments to its end.
fn record(device: &SimDevice, program: &Path, args: &[&str]) -> Recorded {
    let agent = Agent::new(device);
    let mut command = agent.command("run");
    command.arg("--").arg(program).args(args);
    let recorded = agent.trace(command).unwrap().finish().unwrap();
    assert!(recorded.status.success(), "{}", recorded.said);
    recorded
}

/// A compiled program or library.
fn compiled(device: &SimDevice, name: &str) -> PathBuf {
    device.program(name).get_program().into()
}

/// A copy of it that the test may destroy.
fn own_copy(device: &SimDevice, name: &str, as_name: &str) -> PathBuf {
    let copy = device.folder().join(as_name);
    fs::copy(compiled(device, name), &copy).unwrap();
    copy
}

fn stacks(recorded: &Recorded) -> (Vec<Expected>, Stacks) {
    let expected = recorded.lines.iter().filter_map(|line| {
        let mut words = line.strip_prefix("STACK ")?.split(' ');
        let (scenario, bytes) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some(Expected { scenario, bytes, chain: words.map(str::to_owned).collect() })
    });
    let expected: Vec<Expected> = expected.collect();
    assert!(!expected.is_empty(), "{:?}", recorded.lines);
    let logged = recorded.open().unwrap();
    assert_eq!(logged.losses().unwrap(), [].into(), "{}", recorded.said);
    (expected, Stacks::read(&logged).unwrap())
}

/// The stack names the driver's function and then the chain.
fn assert_chain(expected: &Expected, stack: &Stack) {
    let functions = stack.functions();
    let (traced, rest) = functions.split_first().unwrap();
    let names: Vec<&str> = rest.iter().map(|name| name.split('(').next().unwrap()).collect();
    let wanted: Vec<&str> = expected.chain.iter().map(String::as_str).collect();
    let (scenario, bytes) = (&expected.scenario, expected.bytes);
    assert!(traced.starts_with("cuMemAlloc"), "{scenario} {bytes}: {functions:?}");
    let inner = &names[..wanted.len().min(names.len())];
    assert_eq!(inner, wanted, "{scenario} {bytes}: {:?}", stack.row);
}

/// All stacks are complete and name the chains.
fn assert_all(recorded: &Recorded) {
    let (expected, stacks) = stacks(recorded);
    for expected in &expected {
        let stack = stacks.of_size(expected.bytes).unwrap();
        assert_chain(expected, stack);
        assert!(stack.row.complete, "{}: {:?}", expected.scenario, stack.row);
    }
}

#[test]
fn executables_however_they_are_linked() {
    let Some(device) = gpus() else { return };
    for name in ["native_stacks", "native_stacks_fixed", "native_stacks_stripped"] {
        assert_all(&record(&device, &compiled(&device, name), &["chain"]));
    }
}

#[test]
fn a_stack_deeper_than_the_copy_is_whole_when_it_is_met_again() {
    let Some(device) = gpus() else { return };
    let recorded = record(&device, &compiled(&device, "native_stacks"), &["deep"]);
    let (expected, stacks) = stacks(&recorded);
    let of = |scenario: &str| -> Vec<(&Expected, &Stack)> {
        let of_it = expected.iter().filter(|expected| expected.scenario == scenario);
        of_it.map(|expected| (expected, stacks.of_size(expected.bytes).unwrap())).collect()
    };
    let reason = "the stack goes on above the part that was copied";
    for (at, (expected, stack)) in of("deep").into_iter().enumerate() {
        if at == 0 {
            assert!(!stack.row.complete);
            assert_eq!(stack.row.incomplete_reason.as_deref(), Some(reason));
        } else if at >= 3 {
            // By then the agent has asked for more, however slow the machine is.
            assert!(stack.row.complete, "{at}: {:?}", stack.row);
            assert_chain(expected, stack);
        }
    }
    for (at, (expected, stack)) in of("deeper").into_iter().enumerate() {
        assert!(!stack.row.complete, "{at}: {:?}", stack.row);
        assert_eq!(stack.row.incomplete_reason.as_deref(), Some(reason));
        let found = stack.functions();
        let whole = if at >= 3 { 50 } else { 13 };
        assert!(found.len() > whole, "{at}: {} frames", found.len());
        let is_chain = found[1..].iter().zip(&expected.chain).all(|(found, said)| found == said);
        assert!(is_chain, "{found:?}");
    }
}

#[test]
fn a_thread_from_its_start() {
    let Some(device) = gpus() else { return };
    assert_all(&record(&device, &compiled(&device, "native_stacks"), &["thread"]));
}

#[test]
fn a_forked_child_has_its_parents_code() {
    let Some(device) = gpus() else { return };
    assert_all(&record(&device, &compiled(&device, "native_stacks"), &["fork"]));
}

#[test]
fn an_executable_that_was_deleted() {
    let Some(device) = gpus() else { return };
    let own = own_copy(&device, "native_stacks", "deleted_program");
    assert_all(&record(&device, &own, &["deleted"]));
    assert!(!own.exists());
}

#[test]
fn a_library_that_was_replaced_on_disk() {
    let Some(device) = gpus() else { return };
    let (first, other) = (
        own_copy(&device, "libfirst.so", "libuser.so"),
        own_copy(&device, "libother.so", "libuser.so.new"),
    );
    let args = ["replaced", first.to_str().unwrap(), other.to_str().unwrap()];
    assert_all(&record(&device, &compiled(&device, "native_stacks"), &args));
}

#[test]
fn a_library_that_took_the_place_of_another() {
    let Some(device) = gpus() else { return };
    let libraries = ["libfirst.so", "libother.so"].map(|name| compiled(&device, name));
    let args = ["reopened", libraries[0].to_str().unwrap(), libraries[1].to_str().unwrap()];
    let recorded = record(&device, &compiled(&device, "native_stacks"), &args);
    assert!(!recorded.lines.iter().any(|line| line == "MOVED"), "the test tests nothing");
    assert_all(&recorded);
}

#[test]
fn a_return_probe_that_waits_on_the_stack() {
    let Some(device) = gpus() else { return };
    let recorded = record(&device, &compiled(&device, "native_stacks"), &["pending"]);
    assert_all(&recorded);
    let (expected, stacks) = stacks(&recorded);
    for expected in expected {
        let stack = stacks.of_size(expected.bytes).unwrap();
        let functions = stack.functions();
        let outer = functions.iter().position(|name| *name == "cuMemAllocManaged");
        let main = functions.iter().position(|name| *name == "main");
        assert!(outer.is_some() && outer < main, "{functions:?}");
    }
}

#[test]
fn exceptions_pass_between_traced_calls() {
    let Some(device) = gpus() else { return };
    let program = device.folder().join("native_throw");
    let library = device.lib_dir().join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/native_throw.cc");
    let mut compiler = Command::new("g++");
    compiler.args(["-O2", "-fomit-frame-pointer", "-g"]).arg(source).arg(library).arg("-o");
    match compiler.arg(&program).status() {
        Err(error) => {
            let reason = format!("no C++ compiler (g++: {error})");
            return machine::skip(&Obstacle::avoidable(reason));
        }
        Ok(status) => assert!(status.success(), "{compiler:?}"),
    }
    let recorded = record(&device, &program, &[]);
    assert_all(&recorded);
    assert!(recorded.lines.iter().any(|line| line == "CAUGHT 20"), "{:?}", recorded.lines);
    assert!(!recorded.lines.iter().any(|line| line == "FAILED"));
}
