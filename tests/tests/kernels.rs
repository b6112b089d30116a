//! What `doctor` says of the kernel that these tests run on, and what an old one gets to hear.
//! `cargo xtask test --kernel` runs them, and the other scenarios, on several.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{collections::BTreeMap, ffi::OsStr};

use agent_tests::{
    agent::{Agent, vramscope},
    machine::{self, COOKIES_SINCE, Obstacle, kernel_version},
    sim::Sim,
};
use serde_json::Value;

/// Since when links of many probes have a filter that works. Stable kernels of older series may
/// have it too.
const MULTI_LINKS_SINCE: (u32, u32) = (6, 10);
/// The first kernels that have such links.
const MULTI_LINKS_BEGIN: (u32, u32) = (6, 6);

/// Names of the checks, with their status and what was found.
fn doctor() -> BTreeMap<String, (String, String)> {
    let output = vramscope(&["doctor", "--json"].map(OsStr::new)).unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let text = |check: &Value, field: &str| check[field].as_str().unwrap().to_owned();
    let found = checks.iter().map(|check| {
        let words = format!("{} -> {}", text(check, "value"), check["remedy"]);
        (text(check, "name"), (text(check, "status"), words))
    });
    found.collect()
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        machine::skip(&Obstacle::avoidable("not root: the kernel tells it alone"));
    }
    is_root
}

#[test]
fn doctor_says_what_this_kernel_lacks() {
    if !is_root() {
        return;
    }
    let (version, found) = (kernel_version(), doctor());
    for sound in ["kernel", "uprobes", "BTF", "ring buffer"] {
        assert_eq!(found[sound].0, "ok", "{found:?}");
    }
    let cookies = &found["attach cookies"];
    let expected = if version < COOKIES_SINCE { "fail" } else { "ok" };
    assert_eq!(cookies.0, expected, "{cookies:?}");
    assert_eq!(cookies.1.contains("5.15"), version < COOKIES_SINCE, "{cookies:?}");
    let links = &found["many probes a link"];
    if version >= MULTI_LINKS_SINCE {
        assert_eq!(links.0, "ok", "{links:?}");
    } else if version < MULTI_LINKS_BEGIN {
        assert_eq!(links.0, "warn", "{links:?}");
        assert!(links.1.contains("6.10") && links.1.contains("seconds"), "{links:?}");
    }
}

#[test]
fn a_kernel_that_is_too_old_is_said_to_be_and_the_program_does_not_run() {
    if !is_root() {
        return;
    }
    if kernel_version() >= COOKIES_SINCE {
        machine::skip(&Obstacle::of_the_machine("this kernel is not too old"));
        return;
    }
    let device = Sim::build().unwrap().device().unwrap();
    let agent = Agent::new(&device);
    let mut record = agent.command("record");
    record.args(["--duration", "1s"]);
    for mut command in [agent.run_command("hold", &[]), record] {
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("needs kernel 5.15 or later"), "{said}");
        assert!(!said.contains("Verifier output"), "{said}");
        assert!(output.stdout.is_empty(), "the program said something");
    }
}
