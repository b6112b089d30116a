//! The same answer in SQL: the query of the README, over the log of the demonstration's job.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use agent_tests::{
    agent::{Agent, vramscope},
    machine::{self, Obstacle},
};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// A Python that has DuckDB: the one of the readers' checks, the system's, or one made here.
fn python() -> Result<PathBuf, Obstacle> {
    let has_duckdb = |python: &Path| {
        let import = Command::new(python).args(["-c", "import duckdb"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    let target = env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
    let own = target.join("venv-scenarios/bin/python");
    let known = [target.join("venv/bin/python"), own.clone(), "python3".into()];
    if let Some(python) = known.into_iter().find(|python| has_duckdb(python)) {
        return Ok(python);
    }
    let pins = fs::read_to_string(root().join("tests/requirements.txt")).unwrap();
    let pin = pins.lines().find(|line| line.starts_with("duckdb==")).unwrap();
    let succeeds = |command: &mut Command| command.output().is_ok_and(|o| o.status.success());
    let folder = target.join("venv-scenarios");
    let made = succeeds(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        && succeeds(Command::new(&own).args(["-m", "pip", "install", "--quiet", pin]));
    if made { Ok(own) } else { Err(Obstacle::avoidable(format!("no Python with {pin}"))) }
}

/// The block of the README whose fence is marked `sql duckdb-demo`.
fn query() -> String {
    let readme = fs::read_to_string(root().join("README.md")).expect("there is a README.md");
    let (_, rest) = readme.split_once("```sql duckdb-demo\n").expect("the README has the query");
    rest.split_once("```").unwrap().0.to_owned()
}

const RUN: &str = r"
import duckdb, json, sys
result = duckdb.sql(sys.argv[1])
print(json.dumps([dict(zip(result.columns, map(str, row))) for row in result.fetchall()]))
";

/// (pid, GPU) and the bytes that the process never freed there.
type Held = BTreeMap<(i64, String), i64>;

fn by_query(python: &Path, log: &Path) -> Held {
    let query = query().replace("LOG", &log.display().to_string());
    let output = Command::new(python).args(["-c", RUN, &query]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<BTreeMap<String, String>> = serde_json::from_slice(&output.stdout).unwrap();
    let held = rows.iter().map(|row| {
        let place = (row["pid"].parse().unwrap(), row["gpu_uuid"].clone());
        (place, row["held_bytes"].parse().unwrap())
    });
    held.collect()
}

/// The same from the report's JSON.
fn by_report(log: &Path) -> Held {
    let output = vramscope(&["report".as_ref(), "--json".as_ref(), log.as_os_str()]).unwrap();
    let model: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut held = Held::new();
    for process in model["processes"].as_array().unwrap() {
        for share in process["shares"].as_array().unwrap() {
            let totals = share["never_freed_totals"].as_array().unwrap();
            let device = totals.iter().find(|total| total["level"] == "device");
            let uuid = share["gpu_uuid"].as_str().unwrap_or("unknown").to_owned();
            if let Some(total) = device {
                let place = (process["pid"].as_i64().unwrap(), uuid);
                held.insert(place, total["bytes"].as_i64().unwrap());
            }
        }
    }
    held
}

#[test]
fn the_readmes_query_and_the_report_agree_to_the_byte() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let python = match python() {
        Ok(python) => python,
        Err(obstacle) => return machine::skip(&obstacle),
    };
    // As long as the real ones take: the ranks are met by the agent only when they start.
    let device = device.gpus(4).init_ms(500).context_ms(30);
    let recorded = Agent::new(&device).run("leak_job.py", &["--seconds", "3"]).unwrap();
    assert!(recorded.status.success(), "{}", recorded.said);
    let (sql, report) = (by_query(&python, &recorded.log), by_report(&recorded.log));
    assert_eq!(sql.len(), 4, "{sql:?}");
    assert!(sql.values().all(|bytes| *bytes > 0), "{sql:?}");
    assert_eq!(sql, report);
}
