//! What was not seen is counted: seen + lost = made, always.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use agent_tests::{
    agent::{Agent, vramscope},
    machine,
};

#[test]
fn a_burst_that_overflows_the_ring_is_counted_to_the_last_call() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device).options(&["--ring-size", "64KiB", "--max-overhead", "none"]);
    let recorded = agent.run("burst", &["300000"]).unwrap();
    let (logged, made) = (recorded.open().unwrap(), recorded.made().unwrap());
    let mut seen = 0;
    let calls = ["cuMemAlloc_v2", "cuMemFree_v2"];
    logged.each_event(|event| seen += i64::from(calls.contains(&&*event.api))).unwrap();
    let losses = logged.losses().unwrap();
    let lost = losses.get("ring_full").copied().unwrap_or(0);
    assert!(lost > 0, "nothing was lost: the test shows nothing");
    assert_eq!(seen + lost, (made.allocs + made.frees) as i64, "{losses:?}");
    assert!(recorded.said.contains("LOST"), "{}", recorded.said);

    // The kernel's losses are charged to the process.
    let pid = recorded.pid().unwrap() as i32;
    for row in logged.rows::<ledger::rows::LossRow>().unwrap() {
        assert_eq!(row.pid, Some(pid), "{row:?}");
        assert_eq!(row.proc_id, Some(logged.process(pid as u32).unwrap().proc_id), "{row:?}");
    }
}

#[test]
fn a_report_over_losses_says_so_and_does_not_clear_anybody() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let agent = Agent::new(&device).options(&["--ring-size", "64KiB", "--max-overhead", "none"]);
    let recorded = agent.run("burst", &["300000"]).unwrap();
    let report = recorded.report().unwrap();
    let text = report.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("LOST") && text.contains("the kernel buffer was full"), "{text}");
    let json = vramscope(&["report".as_ref(), "--json".as_ref(), recorded.log.as_ref()]).unwrap();
    let model: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let findings = model["findings"].as_array().unwrap();
    let lost = findings.iter().find(|finding| finding["kind"] == "lost").unwrap();
    assert!(lost["account_count"].as_i64().unwrap() > 0);
    for finding in findings {
        assert_ne!(finding["kind"], "growth", "{finding}");
        if finding["kind"] == "nothing" {
            assert_eq!(finding["account_has_losses"], true);
            let sentence = finding["sentence"].as_str().unwrap();
            assert!(sentence.contains("neither is certain"), "{sentence}");
        }
    }
}
