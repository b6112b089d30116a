//! The interpreters of this machine that stacks are tested with.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

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
    /// Built without the GIL.
    pub free_threaded: bool,
}

impl Python {
    fn ask(path: &Path) -> Option<Self> {
        let script = "import sys, platform, sysconfig\n\
                      assert platform.python_implementation() == 'CPython'\n\
                      gil = not sysconfig.get_config_var('Py_GIL_DISABLED')\n\
                      print(sys.version_info[0], sys.version_info[1], int(gil), sys.executable)";
        let text = printed(path, script)?;
        let mut words = text.splitn(4, ' ');
        let (major, minor) = (words.next()?, words.next()?.parse().ok()?);
        let free_threaded = words.next()? == "0";
        (major == "3").then_some(Self { path: words.next()?.into(), minor, free_threaded })
    }

    /// A copy of it, in a folder, that publishes of itself that it is built without the GIL. It
    /// stands in for such a build where there is none: what it publishes is all that the agent goes
    /// by. `None` where this one publishes nothing (before 3.13).
    pub fn claiming_no_gil(&self, folder: &Path) -> Result<Option<StandIn>> {
        let script = "import os, sys\n\
                      paths = [line.split()[-1] for line in open('/proc/self/maps')]\n\
                      shared = [path for path in paths if '/libpython3.' in path]\n\
                      print((shared + [os.path.realpath(sys.executable)])[0])\n\
                      print(sys.base_prefix)";
        let text = printed(&self.path, script).context("ask an interpreter for its files")?;
        let (file, prefix) = text.split_once('\n').context("two lines of an interpreter")?;
        let file = Path::new(file);
        let mut bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
        let Some(at) = published(&bytes) else { return Ok(None) };
        bytes.splice(at..at + 8, 1_u64.to_ne_bytes());
        let copy = folder.join(file.file_name().context("a file's name")?);
        // A copy has the permissions; then it is written over.
        fs::copy(file, &copy)
            .and_then(|_| fs::write(&copy, bytes))
            .with_context(|| format!("copy to {}", copy.display()))?;
        let is_library = file != fs::canonicalize(&self.path).context("the interpreter's path")?;
        let program = if is_library { self.path.clone() } else { copy };
        Ok(Some(StandIn { program, lib_dir: folder.into(), home: prefix.into() }))
    }
}

/// A changed copy of an interpreter.
#[derive(Clone, Debug)]
pub struct StandIn {
    /// Its executable.
    pub program: PathBuf,
    /// For `LD_LIBRARY_PATH`.
    pub lib_dir: PathBuf,
    /// For `PYTHONHOME`.
    pub home: PathBuf,
}

/// Where `free_threaded` is in a file with CPython's `_Py_DebugOffsets`: behind a cookie and the
/// version.
fn published(bytes: &[u8]) -> Option<usize> {
    let cookies = bytes.windows(16).enumerate().filter(|(_, words)| words.starts_with(b"xdebugpy"));
    let mut tables = cookies.filter(|(_, words)| {
        let version = words.last_chunk().map(|word| u64::from_ne_bytes(*word));
        version.is_some_and(|version| version >> 24 == 3)
    });
    tables.next().map(|(at, _)| at + 16)
}

/// What a script prints.
fn printed(python: &Path, script: &str) -> Option<String> {
    let output = Command::new(python).args(["-c", script]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(text.trim_end().to_owned())
}

/// One interpreter of each supported version that is here, by version, and the versions that are
/// not.
pub fn pythons() -> (Vec<Python>, Vec<u8>) {
    let mut found: BTreeMap<u8, Python> = BTreeMap::new();
    for python in installed() {
        if SUPPORTED.contains(&python.minor) && !python.free_threaded {
            found.entry(python.minor).or_insert(python);
        }
    }
    let missing = SUPPORTED.filter(|minor| !found.contains_key(minor)).collect();
    (found.into_values().collect(), missing)
}

/// The interpreters that are built without the GIL.
pub fn free_threaded() -> Vec<Python> {
    installed().into_iter().filter(|python| python.free_threaded).collect()
}

fn installed() -> Vec<Python> {
    let given = env::var_os(PYTHONS_ENV);
    let paths: Vec<PathBuf> =
        given.map_or_else(candidates, |list| env::split_paths(&list).collect());
    paths.iter().filter_map(|path| Python::ask(path)).collect()
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
