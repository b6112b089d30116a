//! Programs with known chains of calls, compiled by the tests that look at their stacks.

use std::{
    fs,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{AddressSpace, End, Modules, NativeFrame, Place, Registers, Symbolizer, Unwinder};
use crate::host::Host;

/// Compiled programs of one test.
pub(super) struct Workshop {
    folder: tempfile::TempDir,
}

impl Workshop {
    /// `None`, saying why, where there is no C compiler.
    pub(super) fn open() -> Option<Self> {
        let compiler = Command::new(compiler()).arg("--version").output();
        if compiler.is_ok_and(|output| output.status.success()) {
            return Some(Self { folder: tempfile::tempdir().unwrap() });
        }
        let mut stderr = std::io::stderr();
        writeln!(stderr, "skipped: no C compiler; install one, or name it in CC").unwrap();
        None
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Compiles `programs/SOURCE.c`; the flags may hold blanks.
    pub(super) fn compile(&self, source: &str, name: &str, flags: &str) -> PathBuf {
        let output = self.path(name);
        let source = format!("{}/src/native/programs/{source}.c", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(compiler());
        command.arg("-o").arg(&output).arg(source).args(flags.split_whitespace()).arg("-w");
        let result = command.output().unwrap();
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
        output
    }
}

/// A copy of a program without symbols.
pub(super) fn strip(program: &Path) -> PathBuf {
    let stripped = program.with_extension("stripped");
    fs::copy(program, &stripped).unwrap();
    assert!(Command::new("strip").arg(&stripped).status().unwrap().success());
    stripped
}

fn compiler() -> String {
    std::env::var("CC").unwrap_or_else(|_| "cc".into())
}

/// What the kernel half would have copied.
#[derive(Clone, Debug)]
pub(super) struct Capture {
    pub(super) regs: Registers,
    pub(super) copy: Vec<u8>,
}

impl Capture {
    /// Writes a word on the copied stack.
    pub(super) fn poke(&mut self, addr: u64, word: u64) {
        let at = (addr - self.regs.sp) as usize;
        self.copy[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
}

/// A running program, killed in the end.
pub(super) struct Program(Child);

impl Program {
    pub(super) fn start(path: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(path);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Python; `None`, saying why, where there is none.
    pub(super) fn python(args: &[&str]) -> Option<Self> {
        let version = Command::new("python3").arg("--version").output();
        if version.is_ok_and(|output| output.status.success()) {
            return Some(Self::start(Path::new("python3"), args));
        }
        writeln!(std::io::stderr(), "skipped: no python3").unwrap();
        None
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits for the program's next stack.
    pub(super) fn capture(&mut self) -> Capture {
        let stdout = self.0.stdout.as_mut().unwrap();
        let mut header = [[0; 8]; 4];
        stdout.read_exact(header.as_flattened_mut()).unwrap();
        let [ip, sp, fp, bytes] = header.map(u64::from_le_bytes);
        let mut copy = vec![0; bytes as usize];
        stdout.read_exact(&mut copy).unwrap();
        Capture { regs: Registers { ip, sp, fp, lr: 0 }, copy }
    }

    /// Lets the program go on to its next stack.
    pub(super) fn go_on(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The agent's side.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) host: Host,
    pub(super) modules: Modules,
    pub(super) unwinder: Unwinder,
    pub(super) symbolizer: Symbolizer,
}

impl Agent {
    pub(super) fn new() -> Self {
        Self {
            host: Host::live(),
            modules: Modules::default(),
            unwinder: Unwinder::default(),
            symbolizer: Symbolizer::default(),
        }
    }

    pub(super) fn space(&mut self, program: &Program) -> AddressSpace {
        AddressSpace::read(&self.host, program.pid(), &mut self.modules).unwrap()
    }

    pub(super) fn unwind(
        &mut self,
        space: &AddressSpace,
        capture: &Capture,
    ) -> (Vec<NativeFrame>, End) {
        let mut frames = Vec::new();
        let end = self.unwinder.unwind(space, capture.regs, &capture.copy, &[], &mut frames);
        (frames, end)
    }

    /// Names of the frames' functions, inlined ones included, `?` where unknown.
    pub(super) fn names(&mut self, space: &AddressSpace, frames: &[NativeFrame]) -> Vec<String> {
        let mut names = Vec::new();
        for frame in frames {
            let symbols = match space.lookup(frame.pc) {
                Some(Place::Module { module, file_offset, .. }) => {
                    self.symbolizer.symbolize(module, file_offset)
                }
                _ => Vec::new(),
            };
            if symbols.is_empty() {
                names.push("?".to_owned());
            }
            names.extend(symbols.into_iter().map(|symbol| symbol.function));
        }
        names
    }
}
