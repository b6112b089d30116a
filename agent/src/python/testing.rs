//! The interpreters of this machine, for tests.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{Found, Interpreter, LineFormat, find};
use crate::host::Host;

/// Interpreters to test with, separated by colons; else those of pyenv and of the PATH.
const PYTHONS_ENV: &str = "VRAMSCOPE_TEST_PYTHONS";

/// An installed CPython that is supported.
#[derive(Clone, Debug)]
pub(super) struct Python {
    pub(super) path: PathBuf,
    pub(super) minor: u8,
    /// Where its headers would be.
    pub(super) include: Option<PathBuf>,
}

impl Python {
    /// Asks an executable what it is.
    fn ask(path: &Path) -> Option<(u8, u8, Self)> {
        let script = "import sys; from distutils.sysconfig import get_python_inc as inc";
        let script = format!(
            "try:\n import sys, sysconfig\n inc = lambda: sysconfig.get_paths()['include']\n\
             except ImportError:\n {script}\n\
             import sysconfig\n\
             assert not sysconfig.get_config_var('Py_GIL_DISABLED')\n\
             print('%d %d %s' % (sys.version_info[0], sys.version_info[1], sys.executable))\n\
             print(inc())"
        );
        let output = Command::new(path).args(["-c", &script]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let (version, include) = text.trim_end().split_once('\n')?;
        let mut words = version.splitn(3, ' ');
        let mut number = || words.next()?.parse().ok();
        let (major, minor) = (number()?, number()?);
        let path = std::fs::canonicalize(words.next()?).ok()?;
        Some((major, minor, Self { path, minor, include: Some(include.into()) }))
    }

    /// What a script prints.
    pub(super) fn run(&self, script: &str) -> String {
        let output = Command::new(&self.path).args(["-c", script]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The library that holds the interpreter, where the executable does not.
    pub(super) fn library(&self) -> Option<PathBuf> {
        let script = "for line in open('/proc/self/maps'):\n \
                      if 'libpython' in line: print(line.split()[-1]); break";
        let path = PathBuf::from(self.run(script).trim());
        path.exists().then_some(path)
    }

    pub(super) fn format(&self) -> LineFormat {
        match self.minor {
            ..10 => LineFormat::Lnotab,
            10 => LineFormat::Linetable310,
            11.. => LineFormat::Locations,
        }
    }
}

/// All interpreters by version, those that cannot be walked included.
fn installed() -> BTreeMap<(u8, u8, PathBuf), Python> {
    let given = std::env::var_os(PYTHONS_ENV);
    let paths: Vec<PathBuf> =
        given.map_or_else(candidates, |list| std::env::split_paths(&list).collect());
    paths
        .iter()
        .filter_map(|path| Python::ask(path))
        .map(|(major, minor, python)| ((major, minor, python.path.clone()), python))
        .collect()
}

fn candidates() -> Vec<PathBuf> {
    let root = std::env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let versions = root.and_then(|root| root.join("versions").read_dir().ok());
    let mut paths: Vec<PathBuf> = versions
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("bin/python")))
        .collect();
    paths.extend(["/usr/bin/python3".into(), "python3".into()]);
    paths
}

/// The interpreters that can be walked; says which versions are missing.
pub(super) fn pythons() -> Vec<Python> {
    let found = installed();
    for minor in (8..=14).filter(|minor| !found.keys().any(|key| (key.0, key.1) == (3, *minor))) {
        println!("skipped: no CPython 3.{minor} here ({PYTHONS_ENV} may name one)");
    }
    found
        .into_iter()
        .filter(|((major, minor, _), _)| *major == 3 && (8..=14).contains(minor))
        .map(|(_, python)| python)
        .collect()
}

/// The interpreters that are too old.
pub(super) fn old_pythons() -> Vec<Python> {
    installed()
        .into_iter()
        .filter(|((major, minor, _), _)| (*major, *minor) < (3, 8))
        .map(|(_, python)| python)
        .collect()
}

/// An interpreter that runs a script until it waits.
pub(super) struct Sleeper {
    child: Child,
    path: PathBuf,
    /// What it printed before.
    pub(super) printed: Vec<String>,
}

impl Sleeper {
    /// Starts a script, which prints a line `.` right before it waits for input.
    pub(super) fn start(python: &Python, script: &str) -> Self {
        let mut command = Command::new(&python.path);
        command.args(["-c", script]).env("PYTHONIOENCODING", "utf-8");
        Self::start_command(&python.path, command)
    }

    pub(super) fn start_command(path: &Path, mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut printed: Vec<String> = Vec::new();
        let mut ready = false;
        for line in lines.map_while(Result::ok) {
            ready = line == ".";
            if ready {
                break;
            }
            printed.push(line);
        }
        assert!(ready, "{} ended early: {printed:?}", path.display());
        Self { child, path: path.to_owned(), printed }
    }

    pub(super) fn tgid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn find(&self) -> Found {
        let host = Host::live();
        find(&host, self.tgid(), &host.mappings(self.tgid()).unwrap())
    }

    pub(super) fn interpreter(&self) -> Interpreter {
        match self.find() {
            Found::Interpreter(found) => found,
            other => panic!("{}: {other:?}", self.path.display()),
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A line that `testdata/tables.py` printed.
pub(super) struct DumpedTable {
    pub(super) bytes: Vec<u8>,
    pub(super) first_line: i32,
    pub(super) lines: Vec<(u32, Option<i32>)>,
}

impl DumpedTable {
    pub(super) fn parse(line: &str) -> Self {
        let mut words = line.split(' ');
        let hex = words.next().unwrap().trim_start_matches('-');
        let bytes = hex
            .as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap());
        let bytes = bytes.collect();
        let first_line = words.next().unwrap().parse().unwrap();
        let lines = words.filter(|word| !word.is_empty()).map(|word| {
            let (offset, line) = word.split_once(':').unwrap();
            (offset.parse().unwrap(), (line != "-").then(|| line.parse().unwrap()))
        });
        Self { bytes, first_line, lines: lines.collect() }
    }
}
