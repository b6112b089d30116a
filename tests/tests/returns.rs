//! What return probes do to processes under a seccomp filter is tried, not guessed.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    io::Write as _,
    os::unix::process::ExitStatusExt as _,
    process::{Command, ExitStatus, Stdio},
};

use agent_tests::{
    agent::{Agent, binary, vramscope},
    machine,
};

const SIGSYS: i32 = 31;

/// How the child of the trial ends, without any probe.
fn filtered(options: &[&str], input: &[u8]) -> ExitStatus {
    let mut command = Command::new(binary());
    command.arg("__filtered").args(options).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait().unwrap()
}

#[test]
fn the_filter_of_the_trial_kills_for_what_it_does_not_allow() {
    assert!(filtered(&[], b"x").success());
    assert_eq!(filtered(&["--forbidden"], b"x").signal(), Some(SIGSYS));
    assert_eq!(filtered(&[], b"").code(), Some(1), "it must not go on before the probe is there");
}

#[test]
fn this_kernel_was_tried() {
    if let Some(obstacle) = machine::probe_obstacle() {
        return machine::skip(&obstacle);
    }
    let output = vramscope(&["doctor", "--json"].map(AsRef::as_ref)).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let at = text.find("\"seccomp and return probes\"").unwrap();
    let check: String = text[at..].chars().take(200).collect();
    assert!(check.contains("tried: ") || std::env::consts::ARCH != "x86_64", "{check}");
}

#[test]
fn a_filtered_program_is_recorded_where_that_is_harmless() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let output = vramscope(&["doctor"].map(AsRef::as_ref)).unwrap();
    if !String::from_utf8_lossy(&output.stdout).contains("tried: a filtered process lives") {
        return println!("SKIP this kernel kills filtered processes: they are spared");
    }
    // A filter that kills for the system calls by which probed functions return.
    let agent = Agent::new(&device);
    let mut command = agent.command("run");
    let hold = device.program("hold").get_program().to_owned();
    let script = "import ctypes, os, struct, sys\n\
                  libc = ctypes.CDLL(None, use_errno=True)\n\
                  word = lambda code, jt, jf, k: struct.pack('=HBBI', code, jt, jf, k)\n\
                  kill, allow = word(6, 0, 0, 0x80000000), word(6, 0, 0, 0x7fff0000)\n\
                  returns = word(0x15, 2, 0, 335) + word(0x15, 1, 0, 336)\n\
                  program = word(0x20, 0, 0, 0) + returns + allow + kill\n\
                  code = ctypes.create_string_buffer(program)\n\
                  prog = struct.pack('=H6xQ', 5, ctypes.addressof(code))\n\
                  assert libc.prctl(38, 1, 0, 0, 0) == 0\n\
                  assert libc.prctl(22, 2, prog) == 0\n\
                  os.execv(sys.argv[1], sys.argv[1:])";
    command.args(["--", "python3", "-c", script]).arg(hold);
    let mut program = agent.trace(command).unwrap();
    program.until_ready().unwrap();
    program.step("free").unwrap();
    let recorded = program.finish().unwrap();
    assert_eq!(recorded.status.code(), Some(0), "{}", recorded.said);
    let events = recorded.open().unwrap().events().unwrap();
    let seen: Vec<&str> = events.iter().map(|event| &*event.op).collect();
    assert_eq!(seen, ["ctx", "alloc", "free"]);
}
