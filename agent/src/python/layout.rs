//! Where each CPython keeps what the kernel half reads: member offsets of the builds with a GIL.
//!
//! Up to 3.12 they come from a table, since they are fixed within a minor version; from 3.13 on the
//! interpreter publishes most of them in `_Py_DebugOffsets`, at the beginning of `_PyRuntime`.
//! The tests compile `layout_probe.c` against the headers of every CPython that is installed.

use agent_common::python::{CODE_READ_BYTES, FRAME_GRANULE, FRAME_READ_BYTES, NONE, PythonConfig};

use super::LineFormat;

/// Bytes of `_Py_DebugOffsets` that [`Layout::published`] needs.
pub(super) const PUBLISHED_BYTES: usize = 648;

/// `FRAME_OWNED_BY_CSTACK` of 3.12 and 3.13; 3.14 calls it `FRAME_OWNED_BY_INTERPRETER`, and its
/// `FRAME_OWNED_BY_CSTACK` is one more.
const SHIM_OWNER: u32 = 3;

/// What the agent and the kernel half know about the structures of one interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// What the kernel half is told; `runtime` is 0 until the interpreter is found.
    pub(super) config: PythonConfig,
    /// How line numbers are stored.
    pub(super) lines: LineFormat,
    /// `PyCodeObject.co_code_adaptive`, where the instructions begin (3.11 on); `None` where
    /// instructions are counted from 0.
    pub(super) code_start: Option<u32>,
    /// `PyThreadState.interp`.
    pub(super) thread_interp: u32,
    /// `PyObject.ob_type`.
    pub(super) object_type: u32,
}

/// Offsets of members within their structures, as the headers give them; named as in
/// [`PythonConfig`].
#[derive(Clone, Copy)]
struct Members {
    interpreters_head: u32,
    interpreter_next: u32,
    interpreter_threads: u32,
    thread_next: u32,
    thread_interp: u32,
    thread_id: u32,
    thread_frame: u32,
    thread_cframe: u32,
    cframe_current: u32,
    cframe_previous: u32,
    frame_previous: u32,
    frame_code: u32,
    frame_instruction: u32,
    frame_owner: u32,
    shim_owner: u32,
    code_first_line: u32,
    code_file: u32,
    code_name: u32,
    code_lines: u32,
    code_start: u32,
    text_length: u32,
    text_hash: u32,
    text_state: u32,
    text_ascii: u32,
    text_compact: u32,
    bytes_size: u32,
    bytes_data: u32,
    object_type: u32,
}

/// CPython 3.8 and 3.9.
const MEMBERS_3_8: Members = Members {
    interpreters_head: 32,
    interpreter_next: 0,
    interpreter_threads: 8,
    thread_next: 8,
    thread_interp: 16,
    thread_id: 176,
    thread_frame: 24,
    thread_cframe: NONE,
    cframe_current: NONE,
    cframe_previous: NONE,
    frame_previous: 24,
    frame_code: 32,
    frame_instruction: 104,
    frame_owner: NONE,
    shim_owner: 255,
    code_first_line: 40,
    code_file: 104,
    code_name: 112,
    code_lines: 120,
    code_start: NONE,
    text_length: 16,
    text_hash: 24,
    text_state: 32,
    text_ascii: 48,
    text_compact: 72,
    bytes_size: 16,
    bytes_data: 32,
    object_type: 8,
};

/// CPython 3.10: frames are shorter, and evaluations are linked on the C stack.
const MEMBERS_3_10: Members =
    Members { thread_cframe: 48, cframe_previous: 8, frame_instruction: 96, ..MEMBERS_3_8 };

/// CPython 3.11: frames are no objects any more. `frame_owner` is `is_entry`.
const MEMBERS_3_11: Members = Members {
    interpreters_head: 40,
    interpreter_threads: 16,
    thread_id: 152,
    thread_frame: 56,
    thread_cframe: 56,
    cframe_current: 8,
    cframe_previous: 16,
    frame_previous: 48,
    frame_instruction: 56,
    frame_owner: 68,
    code_first_line: 72,
    code_file: 112,
    code_name: 128,
    code_lines: 136,
    code_start: 184,
    ..MEMBERS_3_10
};

/// CPython 3.12: shims on the C stack, strings without `wchar_t`.
const MEMBERS_3_12: Members = Members {
    interpreter_threads: 72,
    thread_id: 136,
    cframe_current: 0,
    cframe_previous: 8,
    frame_previous: 8,
    frame_code: 0,
    frame_owner: 70,
    shim_owner: SHIM_OWNER,
    code_first_line: 68,
    code_start: 192,
    text_ascii: 40,
    text_compact: 56,
    ..MEMBERS_3_11
};

/// Where `_Py_DebugOffsets` holds each offset, by the headers of that minor version.
struct Published {
    interpreters_head: usize,
    interpreter_next: usize,
    interpreter_threads: usize,
    thread_next: usize,
    thread_interp: usize,
    thread_frame: usize,
    thread_id: usize,
    frame_previous: usize,
    frame_code: usize,
    frame_instruction: usize,
    frame_owner: usize,
    code_file: usize,
    code_name: usize,
    code_lines: usize,
    code_first_line: usize,
    code_start: usize,
    object_type: usize,
    bytes_size: usize,
    bytes_data: usize,
    text_state: usize,
    text_length: usize,
    text_ascii: usize,
}

const PUBLISHED_3_13: Published = Published {
    interpreters_head: 40,
    interpreter_next: 64,
    interpreter_threads: 72,
    thread_next: 168,
    thread_interp: 176,
    thread_frame: 184,
    thread_id: 192,
    frame_previous: 232,
    frame_code: 240,
    frame_instruction: 248,
    frame_owner: 264,
    code_file: 280,
    code_name: 296,
    code_lines: 304,
    code_first_line: 312,
    code_start: 344,
    object_type: 360,
    bytes_size: 520,
    bytes_data: 528,
    text_state: 544,
    text_length: 552,
    text_ascii: 560,
};

const PUBLISHED_3_14: Published = Published {
    interpreters_head: 40,
    interpreter_next: 64,
    interpreter_threads: 72,
    thread_next: 192,
    thread_interp: 200,
    thread_frame: 208,
    thread_id: 216,
    frame_previous: 256,
    frame_code: 264,
    frame_instruction: 272,
    frame_owner: 288,
    code_file: 320,
    code_name: 336,
    code_lines: 344,
    code_first_line: 352,
    code_start: 384,
    object_type: 408,
    bytes_size: 600,
    bytes_data: 608,
    text_state: 624,
    text_length: 632,
    text_ascii: 640,
};

impl Layout {
    /// The layout of CPython 3.8 to 3.12; `None` for other versions of CPython 3.
    pub(super) fn of_minor(minor: u8) -> Option<Self> {
        match minor {
            8 | 9 => Self::of_members(&MEMBERS_3_8, LineFormat::Lnotab),
            10 => Self::of_members(&MEMBERS_3_10, LineFormat::Linetable310),
            11 => Self::of_members(&MEMBERS_3_11, LineFormat::Locations),
            12 => Self::of_members(&MEMBERS_3_12, LineFormat::Locations),
            _ => None,
        }
    }

    /// The layout of CPython 3.13 or 3.14, out of the beginning of its `_PyRuntime`. `None` for
    /// other versions, and where the offsets make no sense.
    pub(super) fn published(minor: u8, offsets: &[u8]) -> Option<Self> {
        let at = match minor {
            13 => &PUBLISHED_3_13,
            14 => &PUBLISHED_3_14,
            _ => return None,
        };
        let read = |position: usize| {
            let bytes = offsets.get(position..)?.first_chunk()?;
            u32::try_from(u64::from_ne_bytes(*bytes)).ok().filter(|offset| *offset < 1 << 24)
        };
        let members = Members {
            interpreters_head: read(at.interpreters_head)?,
            interpreter_next: read(at.interpreter_next)?,
            interpreter_threads: read(at.interpreter_threads)?,
            thread_next: read(at.thread_next)?,
            thread_interp: read(at.thread_interp)?,
            thread_frame: read(at.thread_frame)?,
            thread_id: read(at.thread_id)?,
            thread_cframe: NONE,
            cframe_current: NONE,
            cframe_previous: NONE,
            frame_previous: read(at.frame_previous)?,
            frame_code: read(at.frame_code)?,
            frame_instruction: read(at.frame_instruction)?,
            frame_owner: read(at.frame_owner)?,
            code_file: read(at.code_file)?,
            code_name: read(at.code_name)?,
            code_lines: read(at.code_lines)?,
            code_first_line: read(at.code_first_line)?,
            code_start: read(at.code_start)?,
            object_type: read(at.object_type)?,
            bytes_size: read(at.bytes_size)?,
            bytes_data: read(at.bytes_data)?,
            text_state: read(at.text_state)?,
            text_length: read(at.text_length)?,
            text_ascii: read(at.text_ascii)?,
            // The others are not published.
            ..MEMBERS_3_12
        };
        Self::of_members(&members, LineFormat::Locations)
    }

    /// Adds what one read of a frame and one of a code object take; `None` where that is more than
    /// the kernel half's buffers hold.
    fn of_members(members: &Members, lines: LineFormat) -> Option<Self> {
        let is_index = members.code_start == NONE;
        let instruction_end = members.frame_instruction + if is_index { 4 } else { 8 };
        let owner_end = if members.frame_owner == NONE { 0 } else { members.frame_owner + 1 };
        let pointers_end = members.frame_previous.max(members.frame_code) + 8;
        let pointers = [members.code_file, members.code_name, members.code_lines];
        let first = pointers.into_iter().fold(members.code_first_line, u32::min);
        // Pointers stay aligned within the copy.
        let code_from = first & !7;
        let code_end = pointers
            .into_iter()
            .fold(members.code_first_line + 4, |end, pointer| end.max(pointer + 8));
        let config = PythonConfig {
            runtime: 0,
            interpreters_head: members.interpreters_head,
            interpreter_next: members.interpreter_next,
            interpreter_threads: members.interpreter_threads,
            thread_next: members.thread_next,
            thread_id: members.thread_id,
            thread_frame: members.thread_frame,
            cframe_current: members.cframe_current,
            thread_cframe: members.thread_cframe,
            cframe_previous: members.cframe_previous,
            frame_bytes: pointers_end.max(instruction_end).max(owner_end),
            // Frames are no objects any more where code objects hold their instructions (3.11).
            frame_granule_mask: if is_index { 0 } else { FRAME_GRANULE as u32 - 1 },
            frame_previous: members.frame_previous,
            frame_code: members.frame_code,
            frame_instruction: members.frame_instruction,
            instruction_is_index: u32::from(is_index),
            frame_owner: members.frame_owner,
            shim_owner: members.shim_owner,
            code_from,
            code_bytes: code_end - code_from,
            code_first_line: members.code_first_line - code_from,
            code_name: members.code_name - code_from,
            code_file: members.code_file - code_from,
            code_lines: members.code_lines - code_from,
            text_length: members.text_length,
            text_hash: members.text_hash,
            text_state: members.text_state,
            text_ascii: members.text_ascii,
            text_compact: members.text_compact,
            bytes_size: members.bytes_size,
            bytes_data: members.bytes_data,
        };
        let fits = config.frame_bytes as usize <= FRAME_READ_BYTES
            && config.code_bytes as usize <= CODE_READ_BYTES;
        fits.then_some(Self {
            config,
            lines,
            code_start: (!is_index).then_some(members.code_start),
            thread_interp: members.thread_interp,
            object_type: members.object_type,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, process::Command};

    use super::*;
    use crate::{
        host::Host,
        python::{
            Memory,
            testing::{self, Python},
        },
    };

    /// What the layout says, by the names that the probe prints.
    fn told(layout: &Layout) -> HashMap<&'static str, u32> {
        let config = &layout.config;
        HashMap::from([
            ("interpreters_head", config.interpreters_head),
            ("interpreter_next", config.interpreter_next),
            ("interpreter_threads", config.interpreter_threads),
            ("thread_next", config.thread_next),
            ("thread_interp", layout.thread_interp),
            ("thread_id", config.thread_id),
            ("thread_frame", config.thread_frame),
            ("cframe_current", config.cframe_current),
            ("thread_cframe", config.thread_cframe),
            ("cframe_previous", config.cframe_previous),
            ("frame_previous", config.frame_previous),
            ("frame_code", config.frame_code),
            ("frame_instruction", config.frame_instruction),
            ("instruction_is_index", config.instruction_is_index),
            ("frame_owner", config.frame_owner),
            ("shim_owner", config.shim_owner),
            ("code_first_line", config.code_from + config.code_first_line),
            ("code_name", config.code_from + config.code_name),
            ("code_file", config.code_from + config.code_file),
            ("code_lines", config.code_from + config.code_lines),
            ("code_start", layout.code_start.unwrap_or(NONE)),
            ("text_length", config.text_length),
            ("text_hash", config.text_hash),
            ("text_state", config.text_state),
            ("text_ascii", config.text_ascii),
            ("text_compact", config.text_compact),
            ("bytes_size", config.bytes_size),
            ("bytes_data", config.bytes_data),
            ("object_type", layout.object_type),
        ])
    }

    /// What the headers say, with these options of the compiler; `None` without headers or a
    /// compiler.
    fn by_headers(python: &Python, options: &[&str]) -> Option<HashMap<String, u32>> {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("probe.c"), folder.path().join("probe"));
        std::fs::write(&source, include_str!("layout_probe.c")).unwrap();
        let include = python.include.as_ref().filter(|path| path.join("Python.h").exists())?;
        let mut compiler = Command::new("cc");
        compiler.args(options).arg("-o").arg(&program).arg(&source).arg("-I").arg(include);
        // Debian's headers refer to those of the architecture beside them.
        compiler.arg("-I").arg(include.parent()?);
        let built = compiler.output().ok()?;
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let printed = Command::new(&program).output().unwrap().stdout;
        let lines = String::from_utf8(printed).unwrap();
        Some(
            lines
                .lines()
                .map(|line| {
                    let (name, value) = line.split_once(' ').unwrap();
                    (name.to_owned(), value.parse().unwrap())
                })
                .collect(),
        )
    }

    #[test]
    fn the_layouts_are_those_of_the_headers() {
        for python in testing::pythons() {
            let Some(expected) = by_headers(&python, &[]) else {
                println!("skipped: no headers of {} or no cc", python.path.display());
                continue;
            };
            let layout = if python.minor < 13 {
                Layout::of_minor(python.minor).unwrap()
            } else {
                let running = testing::Sleeper::start(&python, "print('.', flush=True); input()");
                let memory = Memory::open(&Host::live(), running.tgid());
                let mut offsets = [0; PUBLISHED_BYTES];
                assert!(memory.read(running.interpreter().config.runtime, &mut offsets));
                Layout::published(python.minor, &offsets).unwrap()
            };
            let told = told(&layout);
            assert_eq!(told.len(), expected.len());
            for (name, value) in told {
                assert_eq!(value, expected[name], "{name} of {}", python.path.display());
            }
        }
    }

    #[test]
    fn a_build_without_the_gil_says_so_where_it_is_looked_for() {
        let pythons = testing::pythons().into_iter().filter(|python| python.minor >= 13);
        for python in pythons {
            let Some(told) = by_headers(&python, &["-DPy_GIL_DISABLED=1"]) else {
                println!("skipped: no headers of {} or no cc", python.path.display());
                continue;
            };
            assert_eq!((told["free_threaded_at"], told["free_threaded"]), (16, 1));
        }
    }

    #[test]
    fn reads_hold_every_member() {
        for minor in 8..=12 {
            let config = Layout::of_minor(minor).unwrap().config;
            assert!(config.frame_bytes as usize <= FRAME_READ_BYTES);
            assert!(config.code_bytes as usize <= CODE_READ_BYTES);
            assert!(config.frame_instruction + 4 <= config.frame_bytes);
            assert!(config.frame_owner == NONE || config.frame_owner < config.frame_bytes);
            for pointer in [config.code_name, config.code_file, config.code_lines] {
                assert!(pointer + 8 <= config.code_bytes && pointer % 8 == 0);
            }
        }
        assert_eq!(Layout::of_minor(7), None);
        assert_eq!(Layout::of_minor(13), None);
    }

    #[test]
    fn offsets_that_make_no_sense_are_refused() {
        let zeros = [0; PUBLISHED_BYTES];
        assert!(Layout::published(13, &zeros).is_some() && Layout::published(14, &zeros).is_some());
        assert_eq!(Layout::published(15, &zeros), None);
        assert_eq!(Layout::published(14, &zeros[1..]), None);
        assert_eq!(Layout::published(14, &[0xff; PUBLISHED_BYTES]), None);
        let mut far = zeros;
        far[256..264].copy_from_slice(&105_u64.to_ne_bytes());
        assert_eq!(Layout::published(14, &far), None);
        far[256..264].copy_from_slice(&104_u64.to_ne_bytes());
        assert!(Layout::published(14, &far).is_some());
    }
}
