//! The interpreters of this machine that stacks are tested with.

use std::{collections::BTreeMap, env, path::PathBuf, process::Command};

/// Interpreters to test with, separated by colons; else those of pyenv and of the PATH.
const PYTHONS_ENV: &str = "VRAMSCOPE_TEST_PYTHONS";
/// The minor versions of CPython 3 whose frames can be walked.
pub const SUPPORTED: std::ops::RangeInclusive<u8> = 8..=14;

/// An interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Python {
    /// Its executable.
    pub path: PathBuf,
    /// Of CPython 3.
    pub minor: u8,
}

impl Python {
    fn ask(path: &PathBuf) -> Option<Self> {
        let script = "import sys, platform; assert platform.python_implementation() == 'CPython'; \
                      print(sys.version_info[0], sys.version_info[1], sys.executable)";
        let output = Command::new(path).args(["-c", script]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let mut words = text.trim_end().splitn(3, ' ');
        let (major, minor) = (words.next()?, words.next()?.parse().ok()?);
        (major == "3").then_some(Self { path: words.next()?.into(), minor })
    }
}

/// One interpreter of each supported version that is here, by version, and the versions that are
/// not.
pub fn pythons() -> (Vec<Python>, Vec<u8>) {
    let given = env::var_os(PYTHONS_ENV);
    let paths: Vec<PathBuf> =
        given.map_or_else(candidates, |list| env::split_paths(&list).collect());
    let mut found: BTreeMap<u8, Python> = BTreeMap::new();
    for python in paths.iter().filter_map(Python::ask) {
        if SUPPORTED.contains(&python.minor) {
            found.entry(python.minor).or_insert(python);
        }
    }
    let missing = SUPPORTED.filter(|minor| !found.contains_key(minor)).collect();
    (found.into_values().collect(), missing)
}

fn candidates() -> Vec<PathBuf> {
    let root = env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".pyenv")));
    let versions = root.and_then(|root| root.join("versions").read_dir().ok());
    let mut paths: Vec<PathBuf> = versions
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("bin/python")))
        .collect();
    paths.sort();
    paths.extend(["/usr/bin/python3".into(), "python3".into()]);
    paths
}
