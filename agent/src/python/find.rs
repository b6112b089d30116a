//! Finds the CPython of a process: which version it is and where its runtime lies.

use std::path::{Path, PathBuf};

use agent_common::python::{NONE, PythonConfig};

use super::{
    LineFormat,
    image::Image,
    layout::{Layout, PUBLISHED_BYTES},
    memory::Memory,
};
use crate::host::{Host, LibKind, Mapping};

/// What `_Py_DebugOffsets` begins with (3.13 and later).
const COOKIE: &[u8] = b"xdebugpy";
/// Versions whose frames can be walked.
const OLDEST: (u8, u8) = (3, 8);
/// The newest of them.
const NEWEST: (u8, u8) = (3, 14);
/// The first that publishes its offsets.
const FIRST_PUBLISHED: (u8, u8) = (3, 13);

/// Files of one process that are looked into: an executable, a library and a stub of it are usual.
const MAX_FILES: usize = 8;
/// How often the structures of a running interpreter are read before they count as others than
/// expected: they change while they are read.
const CHECKS: usize = 32;
/// Threads and frames that one such check looks at.
const CHECKED_THREADS: usize = 16;
const CHECKED_FRAMES: usize = 4;

/// Whether a process runs Python.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It has no CPython (or has not loaded it yet).
    None,
    /// It has one that can be walked.
    Interpreter(Interpreter),
    /// It has one whose frames cannot be walked; why, for the user.
    Unsupported(String),
}

/// The CPython of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// Major and minor version.
    pub version: (u8, u8),
    /// For the kernel half.
    pub config: PythonConfig,
    /// How its code objects store line numbers.
    pub lines: LineFormat,
    /// Where the instructions of a code object begin, in bytes; `None` where they are counted from
    /// 0 (before 3.11).
    pub code_start: Option<u32>,
    /// The file that holds it, in the mount namespace of the process.
    pub path: PathBuf,
    /// The layout was held against the structures of the running interpreter. `false`: it was not
    /// yet initialised, so that nothing could be checked.
    pub checked: bool,
}

/// Looks for a CPython in a process, given what it has mapped. Cheap where no mapped file has
/// "python" in its name: a program that embeds the interpreter statically under another name is
/// not found.
pub fn find(host: &Host, tgid: u32, mappings: &[Mapping]) -> Found {
    let files = candidates(host, tgid, mappings);
    if files.is_empty() {
        return Found::None;
    }
    let memory = Memory::open(host, tgid);
    let mut results: Vec<_> = files
        .into_iter()
        .filter_map(|file| look(host, tgid, mappings, file, &memory).transpose())
        .collect();
    // A static executable may load the library as well, for an extension: one of them is in use.
    let best = results
        .iter()
        .position(|result| result.as_ref().is_ok_and(|found| found.checked))
        .or_else(|| results.iter().position(Result::is_ok))
        .unwrap_or(0);
    match (!results.is_empty()).then(|| results.swap_remove(best)) {
        None => Found::None,
        Some(Ok(found)) => Found::Interpreter(found),
        Some(Err(reason)) => Found::Unsupported(reason),
    }
}

/// One mapping of each file that may hold an interpreter: by name, and the main executable where
/// Python is about.
fn candidates<'a>(host: &Host, tgid: u32, mappings: &'a [Mapping]) -> Vec<&'a Mapping> {
    let mut files: Vec<&Mapping> = Vec::new();
    let mut seen_python = false;
    for mapping in mappings {
        let name = mapping.file_name();
        seen_python |= name.windows(6).any(|part| part == b"python");
        let is_new = || !files.iter().any(|known| known.same_file(mapping));
        let named = name.starts_with(b"python") || name.starts_with(b"libpython");
        if named && files.len() < MAX_FILES && is_new() {
            files.push(mapping);
        }
    }
    let has_library = files.iter().any(|file| file.file_name().starts_with(b"lib"));
    if seen_python && let Some(main) = main_executable(host, tgid, mappings) {
        let named = main.file_name().windows(6).any(|part| part == b"python");
        if (named || has_library) && !files.iter().any(|known| known.same_file(main)) {
            files.insert(0, main);
        }
    }
    files
}

/// The mapping of what the process executes.
fn main_executable<'a>(host: &Host, tgid: u32, mappings: &'a [Mapping]) -> Option<&'a Mapping> {
    let target = host.process_path(tgid, "exe").read_link().ok()?;
    let named = target.as_os_str().as_encoded_bytes();
    let named = named.strip_suffix(b" (deleted)").unwrap_or(named);
    mappings.iter().find(|mapping| mapping.path.as_os_str().as_encoded_bytes() == named)
}

/// Looks into one file. `None`: it is no interpreter.
fn look(
    host: &Host,
    tgid: u32,
    mappings: &[Mapping],
    file: &Mapping,
    memory: &Memory,
) -> Result<Option<Interpreter>, String> {
    let path = &file.path;
    let shown = path.display();
    let Some(image) = host.open_mapped(tgid, file).and_then(Image::read) else {
        // The process may have ended.
        return Ok(None);
    };
    let name = file.file_name();
    if image.code_type.is_some() && image.oldest_minor.is_none() && !image.imports {
        return Err(format!("{shown} is a CPython before 3.8, so its frames cannot be walked"));
    }
    let Some(runtime) = image.runtime else {
        let executable =
            name.starts_with(b"python") && LibKind::of_file_name(name) == Some(LibKind::Python);
        // The launcher of a shared build and the stable ABI's stub hold none.
        let holds_one = image.code_type.is_some() || executable;
        if image.imports || !holds_one {
            return Ok(None);
        }
        return Err(format!("{shown} exports no _PyRuntime, so its interpreter cannot be found"));
    };
    let same: Vec<&Mapping> = mappings.iter().filter(|other| other.same_file(file)).collect();
    let Some(bias) = image.bias(&same) else {
        return Err(format!("{shown} is mapped otherwise than its segments say"));
    };
    let place = |addr: u64| addr.wrapping_add(bias);
    let target = Target { memory, path, runtime: place(runtime) };
    let by_file =
        image.version.and_then(|addr| version_of(memory.word(place(addr))?)).or_else(|| {
            Some((3, image.oldest_minor.filter(|minor| *minor < 10).or(minor_of_name(name))?))
        });
    target.interpreter(by_file, image.code_type.map(place)).map(Some)
}

/// `PY_VERSION_HEX`; `None` where it is none.
fn version_of(hex: u64) -> Option<(u8, u8)> {
    let (major, minor) = ((hex >> 24) as u8, (hex >> 16) as u8);
    (hex >> 32 == 0 && major == 3).then_some((major, minor))
}

/// `12` of `python3.12`, `libpython3.12.so.1.0`.
fn minor_of_name(name: &[u8]) -> Option<u8> {
    let name = std::str::from_utf8(name).ok()?;
    let (_, rest) = name.split_once("python3.")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| rest.split_at(end).0);
    digits.parse().ok()
}

/// A runtime that was found in a process.
struct Target<'a> {
    memory: &'a Memory,
    path: &'a Path,
    /// Address of `_PyRuntime`.
    runtime: u64,
}

impl Target<'_> {
    /// Its interpreter, by the version that it publishes itself, else by the one that its file
    /// tells. `code_type` is the address of `PyCode_Type`.
    fn interpreter(
        &self,
        by_file: Option<(u8, u8)>,
        code_type: Option<u64>,
    ) -> Result<Interpreter, String> {
        let shown = self.path.display();
        let mut offsets = [0; PUBLISHED_BYTES];
        if !self.memory.read(self.runtime, &mut offsets) {
            return Err(format!("the memory of the process that runs {shown} cannot be read"));
        }
        let publishes = offsets.starts_with(COOKIE);
        let word = |at: usize| {
            offsets
                .get(at..)
                .and_then(|rest| rest.first_chunk())
                .map(|word| u64::from_ne_bytes(*word))
        };
        let version = if publishes { word(8).and_then(version_of) } else { by_file };
        let Some(version) = version else {
            return Err(format!("the version of CPython of {shown} cannot be told"));
        };
        let (major, minor) = version;
        let refused = |why: &str| {
            Err(format!("CPython {major}.{minor} of {shown} {why}, so its frames cannot be walked"))
        };
        if version < OLDEST {
            return refused("is older than 3.8");
        }
        if version > NEWEST {
            return refused("is newer than 3.14, the newest that is known");
        }
        if publishes && word(16) != Some(0) {
            return refused("is built without a GIL");
        }
        let layout = match (publishes, version >= FIRST_PUBLISHED) {
            (true, true) => Layout::published(minor, &offsets),
            (false, false) => Layout::of_minor(minor),
            _ => None,
        };
        let Some(mut layout) = layout else { return refused("has an unknown layout") };
        layout.config.runtime = self.runtime;
        let checked = match self.check(&layout, code_type) {
            Check::Passed => true,
            Check::NotYet => false,
            Check::Failed => return refused("has other structures than that version's"),
        };
        let Layout { config, lines, code_start, .. } = layout;
        Ok(Interpreter { version, config, lines, code_start, path: self.path.into(), checked })
    }

    /// Holds the layout against the running interpreter.
    fn check(&self, layout: &Layout, code_type: Option<u64>) -> Check {
        let checks = (0..CHECKS).map(|_| self.check_once(layout, code_type));
        checks.into_iter().find(|check| *check != Check::Failed).unwrap_or(Check::Failed)
    }

    fn check_once(&self, layout: &Layout, code_type: Option<u64>) -> Check {
        let config = &layout.config;
        let word = |base: u64, offset: u32| self.memory.word(base.wrapping_add(u64::from(offset)));
        let Some(interpreter) = word(self.runtime, config.interpreters_head) else {
            return Check::Failed;
        };
        if interpreter == 0 {
            return Check::NotYet;
        }
        let Some(mut thread) = word(interpreter, config.interpreter_threads) else {
            return Check::Failed;
        };
        if thread == 0 {
            return Check::NotYet;
        }
        let mut frames = Check::NotYet;
        for _ in 0..CHECKED_THREADS {
            if word(thread, layout.thread_interp) != Some(interpreter) {
                return Check::Failed;
            }
            match self.check_frames(layout, thread, code_type) {
                Check::Passed => return Check::Passed,
                Check::Failed => frames = Check::Failed,
                Check::NotYet => {}
            }
            match word(thread, config.thread_next) {
                Some(next) if next != 0 => thread = next,
                Some(_) => break,
                None => return Check::Failed,
            }
        }
        // A thread without frames proves nothing, but its link to the interpreter does.
        if frames == Check::Failed { Check::Failed } else { Check::Passed }
    }

    /// Whether the innermost frame of a thread runs a code object.
    fn check_frames(&self, layout: &Layout, thread: u64, code_type: Option<u64>) -> Check {
        let config = &layout.config;
        let word = |base: u64, offset: u32| self.memory.word(base.wrapping_add(u64::from(offset)));
        let Some(code_type) = code_type else { return Check::NotYet };
        let mut frame = word(thread, config.thread_frame);
        if config.cframe_current != NONE && frame != Some(0) {
            frame = frame.and_then(|cframe| word(cframe, config.cframe_current));
        }
        for _ in 0..CHECKED_FRAMES {
            let Some(at) = frame else { return Check::Failed };
            if at == 0 {
                return Check::NotYet;
            }
            let mut owner = [0];
            if config.frame_owner != NONE {
                let addr = at.wrapping_add(u64::from(config.frame_owner));
                if !self.memory.read(addr, &mut owner) {
                    return Check::Failed;
                }
            }
            if u32::from(owner[0]) < config.shim_owner {
                // The lowest bits of a reference are flags (3.14).
                let code = word(at, config.frame_code).map(|code| code & !7);
                let is_code =
                    code.and_then(|code| word(code, layout.object_type)) == Some(code_type);
                return if is_code { Check::Passed } else { Check::Failed };
            }
            frame = word(at, config.frame_previous);
        }
        Check::NotYet
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// Nothing is there to be checked.
    NotYet,
    Passed,
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    /// Structures of an interpreter in this process's own memory.
    struct Fake(Vec<u64>);

    impl Fake {
        /// A runtime that publishes version 3.`minor` and offsets of 0.
        fn publishing(minor: u64) -> Self {
            let mut words = vec![0; 1000];
            words[0] = u64::from_ne_bytes(*b"xdebugpy");
            words[1] = 3 << 24 | minor << 16 | 0xf0;
            Self(words)
        }

        fn addr(&self, word: usize) -> u64 {
            (&raw const self.0[word]) as u64
        }

        fn find(&self, by_file: Option<(u8, u8)>) -> Result<Interpreter, String> {
            let memory = Memory::open(&Host::live(), std::process::id());
            let path = Path::new("/usr/bin/python3");
            let target = Target { memory: &memory, path, runtime: self.addr(0) };
            target.interpreter(by_file, Some(7))
        }

        fn refusal(&self, by_file: Option<(u8, u8)>) -> String {
            self.find(by_file).unwrap_err()
        }
    }

    #[test]
    fn versions_that_cannot_be_walked_are_refused_with_a_reason() {
        assert!(Fake::publishing(15).refusal(None).contains("3.15 of /usr/bin/python3 is newer"));
        assert!(Fake::publishing(12).refusal(None).contains("unknown layout"));
        let mut free_threaded = Fake::publishing(13);
        free_threaded.0[2] = 1;
        assert!(free_threaded.refusal(None).contains("without a GIL"));
        let silent = Fake(vec![0; 1000]);
        assert!(silent.refusal(None).contains("version"));
        assert!(silent.refusal(Some((3, 7))).contains("older"));
        assert!(silent.refusal(Some((3, 13))).contains("unknown layout"));
    }

    #[test]
    fn an_interpreter_that_is_not_initialised_is_found_unchecked() {
        let fake = Fake(vec![0; 1000]);
        let found = fake.find(Some((3, 11))).unwrap();
        assert_eq!((found.version, found.checked), ((3, 11), false));
        assert_eq!(found.config.runtime, fake.addr(0));
    }

    #[test]
    fn structures_of_another_version_are_refused() {
        let mut fake = Fake(vec![0; 1000]);
        // 3.9: the head of interpreters at 32, of threads at 8; interp at 16, frame at 24.
        let (interpreter, thread, frame, code) = (100, 200, 300, 400);
        fake.0[4] = fake.addr(interpreter);
        assert!(!fake.find(Some((3, 9))).unwrap().checked);
        fake.0[interpreter + 1] = fake.addr(thread);
        assert!(fake.refusal(Some((3, 9))).contains("other structures"));
        fake.0[thread + 2] = fake.addr(interpreter);
        assert!(fake.find(Some((3, 9))).unwrap().checked);
        fake.0[thread + 3] = fake.addr(frame);
        fake.0[frame + 4] = fake.addr(code);
        assert!(fake.refusal(Some((3, 9))).contains("other structures"));
        fake.0[code + 1] = 7;
        assert!(fake.find(Some((3, 9))).unwrap().checked);
        fake.0[thread + 1] = 1;
        assert!(fake.find(Some((3, 9))).unwrap().checked);
    }

    #[test]
    fn memory_that_cannot_be_read_is_said() {
        let memory = Memory::open(&Host::live(), std::process::id());
        let target = Target { memory: &memory, path: Path::new("/x"), runtime: 8 };
        assert!(target.interpreter(Some((3, 8)), None).unwrap_err().contains("cannot be read"));
    }

    #[test]
    fn names_of_versions() {
        let cases: [(&[u8], Option<u8>); 6] = [
            (b"python3.12", Some(12)),
            (b"libpython3.8.so.1.0", Some(8)),
            (b"python3.13t", Some(13)),
            (b"python3", None),
            (b"python3.999", None),
            (b"python3.\xff", None),
        ];
        for (name, minor) in cases {
            assert_eq!(minor_of_name(name), minor);
        }
        assert_eq!(version_of(0x030b_07f0), Some((3, 11)));
        assert_eq!(version_of(0x020b_07f0), None);
        assert_eq!(version_of(0x0001_030b_07f0), None);
    }

    #[test]
    fn files_are_looked_into_by_name() {
        let tree = Tree::new();
        tree.link("/opt/app (deleted)", "proc/1/exe");
        let mapping = |path: &str| Mapping {
            start: 0x1000,
            end: 0x2000,
            executable: true,
            offset: 0,
            dev: (8, 1),
            inode: path.bytes().map(u64::from).sum(),
            path: path.into(),
            deleted: false,
        };
        let names = |paths: &[&str]| -> Vec<String> {
            let mappings: Vec<_> = paths.iter().map(|path| mapping(path)).collect();
            let files = candidates(&tree.host(), 1, &mappings);
            files.iter().map(|file| file.path.display().to_string()).collect()
        };
        assert!(names(&["/opt/app", "/usr/lib/libc.so.6"]).is_empty());
        assert!(names(&["/opt/app", "/x/boost_python.so"]).is_empty());
        assert_eq!(names(&["/opt/app", "/x/libpython3.8.so"]), ["/opt/app", "/x/libpython3.8.so"]);
        assert_eq!(names(&["/bin/python3.8", "/bin/python3.8"]), ["/bin/python3.8"]);
        let many: Vec<String> = (0..100).map(|n| format!("/x/{n}/libpython3.{n}.so")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(names(&many).len(), MAX_FILES);
    }
}
