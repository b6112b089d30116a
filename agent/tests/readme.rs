//! What README shows is what the program prints.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

use std::{path::Path, process::Command};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The fenced block of README whose first line is `fence`.
fn block(fence: &str) -> String {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let (_, rest) = readme.split_once(&format!("```{fence}\n")).unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

#[test]
fn the_sample_report_is_the_packaged_logs() {
    let output = Command::new(env!("CARGO_BIN_EXE_vramscope"))
        .arg("report")
        .arg(root().join("tests/data/demo-log"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = String::from_utf8(output.stdout).unwrap();
    let sample = block("text report-demo");
    assert!(sample.starts_with("LEAK "), "{sample}");
    assert!(report.starts_with(&sample), "README shows\n{sample}\nthe program prints\n{report}");
}

#[test]
fn every_verb_in_the_readme_exists() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let help = Command::new(env!("CARGO_BIN_EXE_vramscope")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let verbs: Vec<&str> = readme
        .split("vramscope ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_lowercase()).next())
        .filter(|verb| {
            ["doctor", "run", "attach", "record", "report", "completions", "man", "schema"]
                .contains(verb)
        })
        .collect();
    assert!(verbs.len() >= 8, "{verbs:?}");
    for verb in verbs {
        assert!(help.contains(&format!("\n  {verb} ")), "{verb} is not in\n{help}");
    }
}
