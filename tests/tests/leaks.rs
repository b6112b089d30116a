//! Findings by line of code: leaks, stray contexts, and what autograd's own threads allocate.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

use agent_tests::{
    agent::{Agent, vramscope},
    logs::Logged,
    machine,
    sim::truth,
};
use ledger::rows::{SiteUsageRow, StackRow};
use serde_json::Value;

/// The findings of a log's report.
fn findings(log: &Path) -> Vec<Value> {
    let output = vramscope(&["report".as_ref(), "--json".as_ref(), log.as_os_str()]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut model: Value = serde_json::from_slice(&output.stdout).unwrap();
    model["findings"].as_array_mut().map(std::mem::take).unwrap()
}

/// `FILE:LINE` of a site.
fn line_of(site: &Value) -> String {
    let site = site.as_str().unwrap_or("no site");
    site.split(' ').next().unwrap_or_default().to_owned()
}

/// What a finding says of a process, or `None` where it is of none: `leak FILE:LINE`.
fn of_process(finding: &Value) -> Option<(i64, String)> {
    let kind = finding["kind"].as_str().unwrap();
    let said = match kind {
        "leak" => format!("leak {}", line_of(&finding["site"])),
        "nothing" | "lost" => return None,
        _ => format!("{kind}: {}", finding["sentence"]),
    };
    Some((finding["pid"].as_i64().unwrap(), said))
}

#[test]
fn each_leak_is_found_at_its_own_line_and_healthy_programs_have_none() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(200).context_ms(30);
    let recorded = Agent::new(&device).run("leaks/corpus.py", &[]).unwrap();
    assert!(recorded.status.success(), "{}", recorded.said);
    let mut said: BTreeMap<i64, BTreeSet<String>> = BTreeMap::new();
    for (pid, finding) in findings(&recorded.log).iter().filter_map(of_process) {
        said.entry(pid).or_default().insert(finding);
    }
    let cases: Vec<&String> = recorded.lines.iter().filter(|l| l.starts_with("CASE ")).collect();
    let healthy = cases.iter().filter(|case| case.ends_with("leaks=")).count();
    assert!(cases.len() - healthy >= 12 && healthy >= 12, "{cases:?}");
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let leaks = truth::field::<String>(case, "leaks").unwrap();
            let lines = leaks.split(',').filter(|line| !line.is_empty());
            let wanted: BTreeSet<_> = lines.map(|line| format!("leak {line}")).collect();
            let found = said.remove(&truth::field(case, "pid").unwrap()).unwrap_or_default();
            (wanted != found).then(|| format!("{case}: found {found:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}\n{:?}", recorded.open().unwrap().losses());
    assert!(said.is_empty(), "of other processes: {said:?}");
}

#[test]
fn a_stray_context_is_told_with_rank_device_and_line() {
    for mib in ["4", "96"] {
        let Some(device) = machine::gpus().unwrap() else { return };
        let device = device.init_ms(500).context_ms(30);
        let recorded = Agent::new(&device).run("stray_context.py", &["3", mib]).unwrap();
        assert!(recorded.status.success(), "{}", recorded.said);
        let line = recorded.lines.iter().find(|line| line.starts_with("TRUE rank=1 ")).unwrap();
        let found = findings(&recorded.log);
        let contexts: Vec<_> = found.iter().filter(|f| f["kind"] == "context").collect();
        let [context] = contexts[..] else { panic!("{mib} MiB: {found:?}") };
        assert_eq!(context["pid"], truth::field::<i64>(line, "pid").unwrap());
        assert_eq!((&context["rank"], &context["nvml_index"]), (&Value::from(1), &Value::from(0)));
        assert_eq!(line_of(&context["site"]), truth::field::<String>(line, "loads").unwrap());
        assert_eq!(context["main_gpu_uuid"], device.smi().unwrap().gpus[1].uuid);
    }
}

/// What the log says at last of each site of a process.
fn last_by_site(logged: &Logged, proc_id: i64) -> BTreeMap<String, SiteUsageRow> {
    let stacks = logged.rows::<StackRow>().unwrap();
    let sites: HashMap<i64, String> = stacks.into_iter().map(|s| (s.stack_id, s.site)).collect();
    let mut last_by_stack = BTreeMap::new();
    for row in logged.rows::<SiteUsageRow>().unwrap() {
        if row.proc_id == proc_id && sites.contains_key(&row.stack_id) {
            last_by_stack.insert(row.stack_id, row);
        }
    }
    let mut last: BTreeMap<String, SiteUsageRow> = BTreeMap::new();
    for (stack_id, row) in last_by_stack {
        if let Some(sum) = last.get_mut(&sites[&stack_id]) {
            sum.allocs += row.allocs;
            sum.live_bytes += row.live_bytes;
        } else {
            last.insert(sites[&stack_id].clone(), row);
        }
    }
    last
}

#[test]
fn gradients_are_allocated_where_backward_was_called_and_passes_are_numbered() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.init_ms(500).context_ms(30);
    let recorded = Agent::new(&device).run("backward.py", &["40"]).unwrap();
    let logged = recorded.open().unwrap();
    let proc_id = logged.process(recorded.pid().unwrap()).unwrap().proc_id;
    let said = truth::line(&recorded.lines, "TRUE").unwrap();
    let line: String = truth::field(said, "line").unwrap();
    let number = |name| truth::field::<i64>(said, name).unwrap();
    let last = last_by_site(&logged, proc_id);
    let at = |operator: &str| {
        let row = last.get(&format!("{line} step · {operator}"));
        row.unwrap_or_else(|| panic!("no {operator} at {line}: {:?}", last.keys()))
    };
    let kept = at("MulBackward0");
    assert_eq!(kept.allocs, number("gradients"));
    assert_eq!(kept.live_bytes, number("gradients") * number("gradient_bytes"));
    // The pass within each pass has one as well.
    assert_eq!(at("MmBackward0").allocs, 3 * number("passes"));
    let numbers = last.values().filter_map(|row| row.backward_pass);
    assert_eq!(numbers.max(), Some(number("passes")), "a pass within a pass is not one more");

    let stacks = logged.rows::<StackRow>().unwrap();
    let in_operators: Vec<_> = logged
        .events()
        .unwrap()
        .into_iter()
        .filter(|event| event.op == "alloc" && event.level == "device")
        .filter(|event| {
            stacks.iter().any(|s| s.stack_id == event.stack_id && s.site.contains("Backward0"))
        })
        .collect();
    assert!(!in_operators.is_empty(), "no segment of the cache was for a gradient");
    let passes: Vec<_> = in_operators.iter().map(|event| event.backward_pass).collect();
    assert!(passes.iter().all(|pass| pass.is_some_and(|pass| pass >= 1)), "{passes:?}");
    assert!(passes.is_sorted(), "{passes:?}");
    assert!(passes.last().unwrap().is_some_and(|pass| pass > 20), "{passes:?}");
}
