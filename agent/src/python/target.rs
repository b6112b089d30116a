//! A runtime that was found in a process: its version, its layout, and whether that is true.

use std::path::Path;

use agent_common::python::NONE;

use super::{
    Interpreter,
    layout::{Layout, PUBLISHED_BYTES},
    memory::Memory,
};
use crate::host::text::clean;

/// What `_Py_DebugOffsets` begins with (3.13 and later).
const COOKIE: &[u8] = b"xdebugpy";
/// Versions whose frames can be walked.
const OLDEST: (u8, u8) = (3, 8);
/// The newest of them.
const NEWEST: (u8, u8) = (3, 14);

/// How often the structures of a running interpreter are read before they count as others than
/// expected: they change while they are read.
const CHECKS: usize = 32;
/// Threads that one such check looks at.
const CHECKED_THREADS: usize = 16;
/// Frames of each.
const CHECKED_FRAMES: usize = 4;

/// Characters of a path that messages show.
const SHOWN_PATH: usize = 256;

/// A path as messages show it: the process chose it.
pub(super) fn shown(path: &Path) -> String {
    clean(path.as_os_str().as_encoded_bytes(), SHOWN_PATH)
}

/// `PY_VERSION_HEX`; `None` where it is none of CPython 3.
pub(super) fn version_of(hex: u64) -> Option<(u8, u8)> {
    let (major, minor) = ((hex >> 24) as u8, (hex >> 16) as u8);
    (hex >> 32 == 0 && major == 3).then_some((major, minor))
}

/// A runtime that was found in a process.
pub(super) struct Target<'a> {
    pub(super) memory: &'a Memory,
    pub(super) path: &'a Path,
    /// Address of `_PyRuntime`.
    pub(super) runtime: u64,
    /// The version that the file tells.
    pub(super) version: Option<(u8, u8)>,
    /// Address of `PyCode_Type`.
    pub(super) code_type: Option<u64>,
}

impl Target<'_> {
    /// Its interpreter, else why its frames cannot be walked.
    pub(super) fn interpreter(&self) -> Result<Interpreter, String> {
        let shown = shown(self.path);
        let mut begin = [0; PUBLISHED_BYTES];
        if !self.memory.read(self.runtime, &mut begin) {
            return Err(format!("the memory of the process that runs {shown} cannot be read"));
        }
        let Some(version) = self.version_by(&begin) else {
            return Err(format!("{shown} does not tell which CPython it is"));
        };
        let (major, minor) = version;
        let told = layout_of(version, &begin).and_then(|layout| match self.check(&layout) {
            Check::Passed => Ok((layout, true)),
            Check::NotYet => Ok((layout, false)),
            Check::Failed => Err("has other structures than that version".into()),
        });
        let (Layout { mut config, lines, code_start, .. }, checked) = told.map_err(|why| {
            format!("CPython {major}.{minor} of {shown} {why}, so its frames cannot be walked")
        })?;
        config.runtime = self.runtime;
        Ok(Interpreter { version, config, lines, code_start, path: self.path.into(), checked })
    }

    /// The version that the runtime publishes, else the one that its file tells.
    fn version_by(&self, begin: &[u8; PUBLISHED_BYTES]) -> Option<(u8, u8)> {
        if begin.starts_with(COOKIE) { version_of(word_at(begin, 8)?) } else { self.version }
    }

    /// Holds the layout against the running interpreter.
    fn check(&self, layout: &Layout) -> Check {
        let mut checks = (0..CHECKS).map(|_| self.check_once(layout).unwrap_or(Check::Failed));
        checks.find(|check| *check != Check::Failed).unwrap_or(Check::Failed)
    }

    /// `None`: something could not be read.
    fn check_once(&self, layout: &Layout) -> Option<Check> {
        let config = &layout.config;
        let interpreter = self.word(self.runtime, config.interpreters_head)?;
        if interpreter == 0 {
            return Some(Check::NotYet);
        }
        let mut thread = self.word(interpreter, config.interpreter_threads)?;
        let (mut seen, mut frames) = (0, Check::NotYet);
        while thread != 0 && seen < CHECKED_THREADS {
            if self.word(thread, layout.thread_interp)? != interpreter {
                return None;
            }
            match self.check_frames(layout, thread) {
                Some(Check::NotYet) => {}
                Some(Check::Passed) => return Some(Check::Passed),
                Some(Check::Failed) | None => frames = Check::Failed,
            }
            thread = self.word(thread, config.thread_next)?;
            seen += 1;
        }
        // Threads without frames prove nothing of frames, but their links to the interpreter do.
        Some(if frames == Check::NotYet && seen > 0 { Check::Passed } else { frames })
    }

    /// Whether the innermost frame of a thread that is no shim runs a code object.
    fn check_frames(&self, layout: &Layout, thread: u64) -> Option<Check> {
        let (config, Some(code_type)) = (&layout.config, self.code_type) else {
            return Some(Check::NotYet);
        };
        let mut frame = self.word(thread, config.thread_frame)?;
        if config.cframe_current != NONE && frame != 0 {
            frame = self.word(frame, config.cframe_current)?;
        }
        for _ in 0..CHECKED_FRAMES {
            if frame == 0 {
                break;
            }
            if self.owner(layout, frame)? < config.shim_owner {
                // The lowest bits of a reference are flags (3.14).
                let code = self.word(frame, config.frame_code)? & !7;
                let is_code = self.word(code, layout.object_type)? == code_type;
                return Some(if is_code { Check::Passed } else { Check::Failed });
            }
            frame = self.word(frame, config.frame_previous)?;
        }
        Some(Check::NotYet)
    }

    fn owner(&self, layout: &Layout, frame: u64) -> Option<u32> {
        let offset = layout.config.frame_owner;
        let mut owner = [0];
        let is_known =
            offset == NONE || self.memory.read(frame.checked_add(offset.into())?, &mut owner);
        is_known.then_some(u32::from(owner[0]))
    }

    fn word(&self, base: u64, offset: u32) -> Option<u64> {
        self.memory.word(base.checked_add(offset.into())?)
    }
}

/// The layout of a version, else why there is none.
fn layout_of(version: (u8, u8), begin: &[u8; PUBLISHED_BYTES]) -> Result<Layout, String> {
    let (major, minor) = NEWEST;
    if version < OLDEST {
        return Err("is too old".into());
    }
    if version > NEWEST {
        return Err(format!("is newer than {major}.{minor}, the newest that is known"));
    }
    let publishes = begin.starts_with(COOKIE);
    if publishes && word_at(begin, 16) != Some(0) {
        return Err("is built without the GIL".into());
    }
    let layout =
        if publishes { Layout::published(version.1, begin) } else { Layout::of_minor(version.1) };
    layout.ok_or_else(|| "has an unknown layout".into())
}

fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
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
    use crate::host::Host;

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
            let (runtime, code_type) = (self.addr(0), Some(7));
            let target = Target { memory: &memory, path, runtime, version: by_file, code_type };
            target.interpreter()
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
        assert!(free_threaded.refusal(None).contains("without the GIL"));
        let silent = Fake(vec![0; 1000]);
        assert!(silent.refusal(None).contains("which CPython"));
        assert!(silent.refusal(Some((3, 7))).contains("too old"));
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
        let (path, version) = (Path::new("/x\n"), Some((3, 8)));
        let target = Target { memory: &memory, path, runtime: 8, version, code_type: None };
        let reason = target.interpreter().unwrap_err();
        assert!(reason.contains("cannot be read") && reason.contains(r"/x\n"), "{reason}");
    }

    #[test]
    fn versions_are_those_of_cpython_3() {
        assert_eq!(version_of(0x030b_07f0), Some((3, 11)));
        assert_eq!(version_of(0x020b_07f0), None);
        assert_eq!(version_of(0x0001_030b_07f0), None);
    }
}
