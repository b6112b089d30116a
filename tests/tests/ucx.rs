//! Code that somebody else patches: the real UCX, before and after the agent, and a program that
//! patches itself.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use agent_tests::{
    agent::{Agent, Recorded},
    logs::Logged,
    machine,
    sim::{Running, SimDevice, truth},
    ucx,
};
use ledger::rows::AnnotationRow;

const REMEDY: &str = "UCX_MEM_CUDA_HOOK_MODE=reloc";

/// What UCX answers when it is asked for events of CUDA memory.
const HOOKED: &str = "HOOK rc=0";
/// `UCS_ERR_UNSUPPORTED`.
const GAVE_UP: &str = "HOOK rc=-22";

/// A program with UCX's hooks in place.
fn patched(device: &SimDevice) -> Running {
    let mut program = device.start("ucx", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("load").unwrap();
    program.step("init").unwrap();
    assert_eq!(said(&program.step("hook").unwrap(), "HOOK"), HOOKED);
    program
}

fn said(lines: &[String], word: &str) -> String {
    truth::line(lines, word).unwrap_or_default().to_owned()
}

/// One more allocation and free of the program, which its hooks see.
fn hooks_work(program: &mut Running, so_far: u64) {
    let now = so_far + 1;
    assert_eq!(
        said(&program.step("alloc").unwrap(), "HOOKED"),
        format!("HOOKED alloc={now} free={so_far}")
    );
    assert_eq!(
        said(&program.step("free").unwrap(), "HOOKED"),
        format!("HOOKED alloc={now} free={now}")
    );
}

fn ends_well(program: Running) {
    let (_, status) = program.finish().unwrap();
    assert!(status.success(), "{status}");
}

fn events_of(logged: &Logged, pid: u32) -> Vec<(String, i64)> {
    let events = logged.events().unwrap();
    let ours = events.iter().filter(|event| event.pid == pid as i32 && event.op != "ctx");
    ours.map(|event| (event.op.to_string(), event.delta_bytes)).collect()
}

/// The log, the agent's words and the report tell that the process was spared.
fn told(recorded: &Recorded, pid: u32, words: &str) {
    assert!(recorded.said.contains(words), "{}", recorded.said);
    let logged = recorded.open().unwrap();
    let notes = logged.rows::<AnnotationRow>().unwrap();
    let about = notes.iter().find(|note| {
        note.kind == "warning"
            && note.text.contains(&format!("in pid {pid}"))
            && note.text.contains(words)
    });
    assert!(about.is_some(), "{notes:?}");
    let losses = logged.rows::<ledger::rows::LossRow>().unwrap();
    let of = |loss: &ledger::rows::LossRow| (loss.reason.clone(), loss.pid);
    let wanted = ("library_not_probed".to_owned(), Some(pid as i32));
    assert!(losses.iter().any(|loss| of(loss) == wanted), "{losses:?}");
    let report = recorded.report().unwrap();
    assert!(
        report.contains("libraries not probed") && report.contains(&format!("{pid}")),
        "{report}"
    );
}

#[test]
fn ucx_hooks_the_simulated_driver() {
    let Some(device) = ucx::gpus().unwrap() else { return };
    let mut program = patched(&device);
    hooks_work(&mut program, 0);
    ends_well(program);
}

#[test]
fn attach_refuses_a_process_that_ucx_has_patched() {
    let Some(device) = ucx::gpus().unwrap() else { return };
    let mut program = patched(&device);
    let mut command = Agent::new(&device).command("attach");
    let output =
        command.args(["--duration", "20s"]).arg(program.pid().to_string()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains(REMEDY), "{text}");
    hooks_work(&mut program, 0);
    // Told to go on all the same, it goes by what it finds.
    let mut command = Agent::new(&device).log(&device.folder().join("forced")).command("attach");
    let output = command
        .args(["--force", "--duration", "20s"])
        .arg(program.pid().to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("UCX has patched it"), "{text}");
    hooks_work(&mut program, 1);
    ends_well(program);
}

#[test]
fn record_spares_a_patched_process_and_records_the_others() {
    let Some(device) = ucx::gpus().unwrap().map(|device| device.init_ms(300)) else { return };
    let mut program = patched(&device);
    let mut before = device.start("hold", &["1048576", "1"]).unwrap();
    before.until_ready().unwrap();
    let recording = Agent::new(&device).record().unwrap();
    before.step("alloc 2097152").unwrap();
    let mut after = device.start("hold", &["4194304", "1"]).unwrap();
    after.until_ready().unwrap();
    // A child of a process with probes of its own has some too.
    let mut parent = device.start("fork_child", &["before"]).unwrap();
    let lines = parent.until_ready().unwrap();
    let child: u32 = said(&lines, "CHILD").split(' ').nth(1).unwrap().parse().unwrap();
    hooks_work(&mut program, 0);
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    assert_eq!(events_of(&logged, before.pid()), [("alloc".to_owned(), 2_097_152)]);
    assert_eq!(events_of(&logged, after.pid()), [("alloc".to_owned(), 4_194_304)]);
    assert!(!events_of(&logged, child).is_empty(), "{lines:?}");
    assert_eq!(events_of(&logged, program.pid()), []);
    told(&recorded, program.pid(), REMEDY);
    hooks_work(&mut program, 1);
    for program in [program, before, after] {
        ends_well(program);
    }
}

#[test]
fn record_makes_way_for_ucx_that_comes_later() {
    let Some(device) = ucx::gpus().unwrap().map(|device| device.init_ms(300)) else { return };
    let mut hold = device.start("hold", &["1048576", "1"]).unwrap();
    hold.until_ready().unwrap();
    let mut recording = Agent::new(&device).record().unwrap();
    let mut program = device.start("ucx", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("alloc").unwrap();
    hold.step("alloc 2097152").unwrap();
    program.step("load").unwrap();
    recording.wait_for(&format!("tgid={}", program.pid())).unwrap();
    program.step("init").unwrap();
    assert_eq!(said(&program.step("hook").unwrap(), "HOOK"), HOOKED);
    hooks_work(&mut program, 0);
    hold.step("alloc 4194304").unwrap();
    // A second one, which has probes of its own by now.
    let mut second = device.start("ucx", &[]).unwrap();
    second.until_ready().unwrap();
    second.step("alloc").unwrap();
    second.step("load").unwrap();
    recording.wait_for(&format!("tgid={}", second.pid())).unwrap();
    second.step("init").unwrap();
    assert_eq!(said(&second.step("hook").unwrap(), "HOOK"), HOOKED);
    second.step("alloc").unwrap();
    let recorded = recording.stop().unwrap();
    let logged = recorded.open().unwrap();
    for program in [&program, &second] {
        assert_eq!(events_of(&logged, program.pid()), [("alloc".to_owned(), 1_048_576)]);
        told(&recorded, program.pid(), REMEDY);
    }
    let wanted = [("alloc".to_owned(), 2_097_152), ("alloc".to_owned(), 4_194_304)];
    assert_eq!(events_of(&logged, hold.pid()), wanted);
    let losses = logged.losses().unwrap();
    assert_eq!(losses.get("probes_moved"), Some(&1), "{losses:?}");
    hooks_work(&mut program, 1);
    for program in [program, second, hold] {
        ends_well(program);
    }
}

#[test]
fn run_makes_way_for_the_programs_own_ucx() {
    let Some(device) = ucx::gpus().unwrap() else { return };
    let mut program = Agent::new(&device).start("ucx", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("alloc").unwrap();
    program.step("load").unwrap();
    program.wait_for("not probed").unwrap();
    program.step("init").unwrap();
    assert_eq!(said(&program.step("hook").unwrap(), "HOOK"), HOOKED);
    program.step("alloc").unwrap();
    let lines = program.step("free").unwrap();
    assert_eq!(said(&lines, "HOOKED"), "HOOKED alloc=1 free=1");
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);
    let pid = recorded.pid().unwrap();
    let events = events_of(&recorded.open().unwrap(), pid);
    assert_eq!(events[0], ("alloc".to_owned(), 1_048_576));
    // Its end gives back what is known of it.
    assert_eq!(events.len(), 2, "{events:?}");
    told(&recorded, pid, REMEDY);
}

#[test]
fn forced_ucx_gives_up_its_hooks_and_the_program_goes_on() {
    let Some(device) = ucx::gpus().unwrap() else { return };
    let agent = Agent::new(&device).options(&["--force"]);
    let mut program = agent.start("ucx", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("load").unwrap();
    program.step("init").unwrap();
    assert_eq!(said(&program.step("hook").unwrap(), "HOOK"), GAVE_UP);
    let lines = program.step("alloc").unwrap();
    assert_eq!(said(&lines, "HOOKED"), "HOOKED alloc=0 free=0");
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);
    let logged = recorded.open().unwrap();
    assert!(!events_of(&logged, recorded.pid().unwrap()).is_empty());
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn ucx_that_leaves_the_drivers_code_alone_is_recorded() {
    let Some(device) = ucx::gpus().unwrap() else { return };
    let device = device.set("UCX_MEM_CUDA_HOOK_MODE", "reloc");
    let mut program = Agent::new(&device).start("ucx", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("load").unwrap();
    program.step("init").unwrap();
    assert_eq!(said(&program.step("hook").unwrap(), "HOOK"), HOOKED);
    program.step("alloc").unwrap();
    let lines = program.step("free").unwrap();
    assert_eq!(said(&lines, "HOOKED"), "HOOKED alloc=1 free=1");
    let recorded = program.finish().unwrap();
    let logged = recorded.open().unwrap();
    let events = events_of(&logged, recorded.pid().unwrap());
    let pair = [("alloc".to_owned(), 1_048_576), ("free".to_owned(), -1_048_576)];
    assert_eq!(events, pair, "{}", recorded.said);
    assert_eq!(logged.losses().unwrap(), [].into());
}

#[test]
fn a_program_that_patched_itself_is_spared() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let mut program = device.start("patcher", &[]).unwrap();
    program.until_ready().unwrap();
    program.step("patch").unwrap();
    let hooked = |program: &mut Running| said(&program.step("alloc").unwrap(), "HOOKED");
    assert_eq!(hooked(&mut program), "HOOKED alloc=1");

    let mut command = Agent::new(&device).log(&device.folder().join("attach")).command("attach");
    let output =
        command.args(["--duration", "20s"]).arg(program.pid().to_string()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("another tool has patched it"), "{text}");
    assert_eq!(hooked(&mut program), "HOOKED alloc=2");

    let mut hold = device.start("hold", &["1048576", "1"]).unwrap();
    hold.until_ready().unwrap();
    let recording = Agent::new(&device).record().unwrap();
    hold.step("alloc 2097152").unwrap();
    assert_eq!(hooked(&mut program), "HOOKED alloc=3");
    let recorded = recording.stop().unwrap();
    told(&recorded, program.pid(), "another tool has patched it");
    let events = events_of(&recorded.open().unwrap(), hold.pid());
    assert_eq!(events, [("alloc".to_owned(), 2_097_152)]);
    assert_eq!(hooked(&mut program), "HOOKED alloc=4");
    ends_well(program);
}
