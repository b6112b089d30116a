//! Stacks of C and C++ programs, held against the chains of calls that they say they make.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
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
    machine::gpus().unwrap().map(|device| device.init_ms(500))
}

/// Runs the program with these arguments to its end.
fn record(device: &SimDevice, program: &Path, args: &[&str]) -> Recorded {
    let log = format!("log-of-{}", program.file_name().unwrap().display());
    let agent = Agent::new(device).log(&device.folder().join(log));
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

fn outcome(recorded: &Recorded) -> Outcome {
    let expected = recorded.lines.iter().filter_map(|line| {
        let mut words = line.strip_prefix("STACK ")?.split(' ');
        let (scenario, bytes) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some(Expected { scenario, bytes, chain: words.map(str::to_owned).collect() })
    });
    let expected: Vec<Expected> = expected.collect();
    assert!(!expected.is_empty(), "{:?}", recorded.lines);
    let logged = recorded.open().unwrap();
    let mut losses = logged.losses().unwrap();
    losses.remove("start_not_seen"); // when probes come to a child is another test's affair
    assert_eq!(losses, [].into(), "{}", recorded.said);
    let stacks = Stacks::read(&logged).unwrap();
    Outcome { expected, stacks, lines: recorded.lines.clone() }
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

/// What a program said, and what the log says.
struct Outcome {
    expected: Vec<Expected>,
    stacks: Stacks,
    lines: Vec<String>,
}

impl Outcome {
    /// The stacks of a scenario, in their order; there are some.
    fn of<'a>(&'a self, scenario: &'a str) -> Vec<(&'a Expected, &'a Stack)> {
        let own = self.expected.iter().filter(|expected| expected.scenario == scenario);
        let found: Vec<_> = own.map(|own| (own, self.stacks.of_size(own.bytes).unwrap())).collect();
        assert!(!found.is_empty(), "{scenario}: {:?}", self.lines);
        found
    }

    /// The stacks of a scenario are complete and name the chains.
    fn assert_all(&self, scenario: &str) {
        for (expected, stack) in self.of(scenario) {
            assert_chain(expected, stack);
            assert!(stack.row.complete, "{scenario}: {:?}", stack.row);
        }
    }
}

/// One recording of a program that deletes itself and then runs every scenario. (To start the agent
/// takes longer than they do.)
fn everything() -> Option<&'static Outcome> {
    static OUTCOME: OnceLock<Option<Outcome>> = OnceLock::new();
    let make = || {
        let device = gpus()?;
        let program = own_copy(&device, "native_stacks", "deleted_program");
        let libraries = [
            own_copy(&device, "libfirst.so", "libuser.so"),
            own_copy(&device, "libother.so", "libuser.so.new"),
            compiled(&device, "libfirst.so"),
            compiled(&device, "libother.so"),
        ];
        let [user, new, first, other] = libraries.each_ref().map(|path| path.to_str().unwrap());
        let calm = ["fork", "deleted", "chain", "lines", "deep", "thread", "pending"];
        let args = [&calm[..], &["replaced", user, new, "reopened", first, other]].concat();
        let recorded = record(&device, &program, &args);
        assert!(!program.exists());
        Some(outcome(&recorded))
    };
    OUTCOME.get_or_init(make).as_ref()
}

#[test]
fn executables_however_they_are_linked() {
    let Some(device) = gpus() else { return };
    for name in ["native_stacks_fixed", "native_stacks_stripped"] {
        outcome(&record(&device, &compiled(&device, name), &["chain"])).assert_all("chain");
    }
}

#[test]
fn an_executable_that_was_deleted() {
    let Some(everything) = everything() else { return };
    everything.assert_all("chain");
}

#[test]
fn deep_stacks_of_driver_calls_are_whole_at_once_as_far_as_the_large_copy_goes() {
    let Some(everything) = everything() else { return };
    everything.assert_all("deep");
    for (at, (expected, stack)) in everything.of("deeper").into_iter().enumerate() {
        assert!(!stack.row.complete, "{at}: {:?}", stack.row);
        let reason = Some("the stack goes on above the part that was copied");
        assert_eq!(stack.row.incomplete_reason.as_deref(), reason);
        let found = stack.functions();
        assert!(found.len() > 50, "{at}: {} frames", found.len());
        let is_chain = found[1..].iter().zip(&expected.chain).all(|(found, said)| found == said);
        assert!(is_chain, "{found:?}");
    }
}

#[test]
fn two_lines_of_one_function_are_two_places() {
    let Some(everything) = everything() else { return };
    let ids = |scenario: &str| -> BTreeSet<i64> {
        everything.assert_all(scenario);
        everything.of(scenario).into_iter().map(|(_, stack)| stack.row.stack_id).collect()
    };
    let (first, second) = (ids("first_line"), ids("second_line"));
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_ne!(first, second);
}

#[test]
fn a_deep_stack_of_blocks_is_whole_when_it_is_met_again() {
    let Some(device) = gpus() else { return };
    let agent = Agent::new(&device).log(&device.folder().join("log-of-blocks"));
    let mut command = agent.command("run");
    command.args(["--detail", "events", "--"]);
    command.arg(compiled(&device, "native_stacks")).arg("blocks");
    let recorded = agent.trace(command).unwrap().finish().unwrap();
    assert!(recorded.status.success(), "{}", recorded.said);
    let logged = recorded.open().unwrap();
    let stacks = Stacks::read(&logged).unwrap();
    let mut blocks = logged.events().unwrap();
    blocks.retain(|event| event.level == "tensor" && event.op == "alloc");
    assert!(blocks.len() >= 15, "{} blocks", blocks.len());
    let first = stacks.of(&blocks[0]).unwrap();
    let reason = Some("the stack goes on above the part that was copied");
    assert_eq!(first.row.incomplete_reason.as_deref(), reason);
    let last = stacks.of(&blocks[blocks.len() - 1]).unwrap();
    assert!(last.row.complete, "{:?}", last.row);
    let depth = last.functions().iter().filter(|name| name.starts_with("deep_block")).count();
    assert_eq!(depth, 29, "{:?}", last.functions());
}

#[test]
fn a_thread_from_its_start() {
    let Some(everything) = everything() else { return };
    everything.assert_all("thread");
}

#[test]
fn a_forked_child_has_its_parents_code() {
    let Some(everything) = everything() else { return };
    everything.assert_all("parent");
    everything.assert_all("child");
}

#[test]
fn a_library_that_was_replaced_on_disk() {
    let Some(everything) = everything() else { return };
    everything.assert_all("replaced");
}

#[test]
fn a_library_that_took_the_place_of_another() {
    let Some(everything) = everything() else { return };
    assert!(!everything.lines.iter().any(|line| line == "MOVED"), "the test tests nothing");
    everything.assert_all("reopened");
}

#[test]
fn a_return_probe_that_waits_on_the_stack() {
    let Some(everything) = everything() else { return };
    everything.assert_all("pending");
    for (_, stack) in everything.of("pending") {
        let functions = stack.functions();
        let place = |name: &str| functions.iter().position(|function| *function == name);
        let (outer, main) = (place("cuMemAllocManaged"), place("main"));
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
    outcome(&recorded).assert_all("thrown");
    assert!(recorded.lines.iter().any(|line| line == "CAUGHT 20"), "{:?}", recorded.lines);
    assert!(!recorded.lines.iter().any(|line| line == "FAILED"));
}
