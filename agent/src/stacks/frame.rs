//! Frames before symbols are known, and their content hashes.

use std::{path::Path, sync::Arc};

use xxhash_rust::xxh3::Xxh3;

use crate::native::Module;

/// A frame of a merged stack.
#[derive(Clone, Debug)]
pub enum Frame {
    /// Python code.
    Python {
        /// Qualified name (3.11 and later), else name.
        function: Arc<str>,
        /// As the interpreter names it.
        file: Arc<str>,
        /// `None` where the instruction has no line, or it is unknown.
        line: Option<i32>,
    },
    /// Code in a file.
    Native {
        /// The file.
        module: Arc<Module>,
        /// Where in it.
        file_offset: u64,
    },
    /// Code that was written at run time.
    Jit,
    /// An address where nothing is known to be.
    Unknown,
}

impl Frame {
    /// Content hash: equal wherever the same code ran.
    pub fn id(&self) -> i64 {
        let mut hash = Xxh3::new();
        match self {
            Self::Python { function, file, line } => {
                hash.update(b"python");
                for text in [file, function] {
                    hash.update(&(text.len() as u64).to_le_bytes());
                    hash.update(text.as_bytes());
                }
                hash.update(&line.unwrap_or(0).to_le_bytes());
            }
            Self::Native { module, file_offset } => {
                hash.update(b"native");
                // Without a build id the name is the best that is known to be equal elsewhere.
                let name = file_name(&module.path);
                let identity = module.build_id.as_deref().unwrap_or(&name);
                hash.update(identity.as_bytes());
                hash.update(&file_offset.to_le_bytes());
            }
            Self::Jit => hash.update(b"jit"),
            Self::Unknown => hash.update(b"unknown"),
        }
        nonzero(hash.digest())
    }
}

/// Whether two stacks credit what they allocated to the same lines: their Python frames are the same;
/// where there are none, all frames. A key takes in little of the native stack below Python frames,
/// so calls from one line that differ only further out share it.
pub fn same_lines(one: &[Frame], other: &[Frame]) -> bool {
    let ids = |frames: &[Frame], all: bool| -> Vec<i64> {
        let meant = frames.iter().filter(|frame| all || matches!(frame, Frame::Python { .. }));
        meant.map(Frame::id).collect()
    };
    let (first, second) = (ids(one, false), ids(other, false));
    first == second && (!first.is_empty() || ids(one, true) == ids(other, true))
}

/// Id of the `depth`-th function that was inlined at a frame.
pub fn inlined_id(frame: i64, depth: usize) -> i64 {
    let mut hash = Xxh3::new();
    hash.update(&frame.to_le_bytes());
    hash.update(&depth.to_le_bytes());
    nonzero(hash.digest())
}

/// Id of a stack, from the ids of its frames.
pub fn stack_id(frames: &[Frame], complete: bool) -> i64 {
    let mut hash = Xxh3::new();
    for frame in frames {
        hash.update(&frame.id().to_le_bytes());
    }
    // A stack that was cut is not the whole one.
    hash.update(&[complete.into()]);
    nonzero(hash.digest())
}

/// 0 means "none" in the log.
fn nonzero(hash: u64) -> i64 {
    if hash == 0 { 1 } else { hash as i64 }
}

/// The last component of a path, for people.
pub fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// By its name a file holds an interpreter: `libpython3.12.so.1.0`, `python3.11`, `python`.
pub fn is_interpreter(file_name: &str) -> bool {
    let named = file_name.strip_prefix("lib").unwrap_or(file_name).strip_prefix("python");
    named.is_some_and(|rest| {
        rest.is_empty() || rest.starts_with(|c: char| c == '.' || c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn python(function: &str, file: &str, line: i32) -> Frame {
        Frame::Python { function: function.into(), file: file.into(), line: Some(line) }
    }

    #[test]
    fn interpreters_are_told_by_their_files_names() {
        for name in ["python", "python3", "python3.13t", "libpython3.12.so.1.0", "libpython2.7.so"]
        {
            assert!(is_interpreter(name), "{name}");
        }
        for name in ["pythonic", "libpython_ops.so", "mypython", "libpy", "boost_python.so"] {
            assert!(!is_interpreter(name), "{name}");
        }
    }

    #[test]
    fn content_decides() {
        let frame = python("f", "a.py", 3);
        assert_eq!(frame.id(), python("f", "a.py", 3).id());
        let others = [python("g", "a.py", 3), python("f", "b.py", 3), python("f", "a.py", 4)];
        assert!(others.iter().all(|other| other.id() != frame.id()));
        assert_ne!(python("ab", "c", 1).id(), python("b", "ca", 1).id());
    }

    #[test]
    fn native_frames_do_not_change_the_lines() {
        let (f, g) = (python("f", "a.py", 3), python("g", "a.py", 9));
        let with = |native: Frame| [native, f.clone(), g.clone()];
        assert!(same_lines(&with(Frame::Jit), &with(Frame::Unknown)));
        assert!(!same_lines(&with(Frame::Jit), &[Frame::Jit, g.clone(), f.clone()]));
        assert!(!same_lines(&with(Frame::Jit), &[Frame::Jit, f.clone()]));
        assert!(same_lines(&[Frame::Jit], &[Frame::Jit]));
        assert!(!same_lines(&[Frame::Jit], &[Frame::Unknown]));
        assert!(!same_lines(&[Frame::Jit], &with(Frame::Jit)));
    }

    #[test]
    fn order_and_completeness_make_another_stack() {
        let (a, b) = (python("f", "a.py", 3), python("g", "a.py", 9));
        let there = [a.clone(), b.clone()];
        let back = [b, a];
        assert_ne!(stack_id(&there, true), stack_id(&back, true));
        assert_ne!(stack_id(&there, true), stack_id(&there, false));
        assert_ne!(stack_id(&[], true), 0);
    }
}
