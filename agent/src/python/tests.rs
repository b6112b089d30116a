//! Whole stacks of real interpreters, walked as the kernel half walks them.

use std::process::Command;

use agent_common::{
    python::{FRAME_READ_BYTES, NONE, PythonConfig},
    stack::{FILE_BYTES, KIND_CODE, LINES_BYTES, NAME_BYTES, RawCode, RawPythonFrame, RawText},
};
use zerocopy::FromZeros as _;

use super::{
    Code, Interpreter, Memory, decode, memory,
    testing::{self, Python, Sleeper},
};
use crate::host::Host;

/// Threads and frames that a test has at most.
const MANY: usize = 1000;

type Reader<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> bool;

/// A process whose structures are read.
struct Walk {
    interpreter: Interpreter,
    memory: Memory,
    tgid: u32,
}

impl Walk {
    fn of(sleeper: &Sleeper) -> Self {
        let memory = Memory::open(&Host::live(), sleeper.tgid());
        Self { interpreter: sleeper.interpreter(), memory, tgid: sleeper.tgid() }
    }

    fn config(&self) -> &PythonConfig {
        &self.interpreter.config
    }

    fn word(&self, base: u64, offset: u32) -> u64 {
        self.memory.word(base + u64::from(offset)).unwrap()
    }

    fn half(&self, base: u64, offset: u32) -> u32 {
        let mut bytes = [0; 4];
        assert!(self.memory.read(base + u64::from(offset), &mut bytes));
        u32::from_ne_bytes(bytes)
    }

    /// The thread state of a `pthread_self()`.
    fn thread(&self, id: u64) -> u64 {
        let config = self.config();
        let mut interpreter = self.word(config.runtime, config.interpreters_head);
        while interpreter != 0 {
            let mut thread = self.word(interpreter, config.interpreter_threads);
            while thread != 0 {
                if self.word(thread, config.thread_id) == id {
                    return thread;
                }
                thread = self.word(thread, config.thread_next);
            }
            interpreter = self.word(interpreter, config.interpreter_next);
        }
        panic!("no thread {id}");
    }

    /// The frames of a thread, innermost first, shims left out.
    fn frames(&self, thread: u64) -> Vec<RawPythonFrame> {
        let config = self.config();
        let mut addr = self.word(thread, config.thread_frame);
        if config.cframe_current != NONE {
            addr = self.word(addr, config.cframe_current);
        }
        let mut frames = Vec::new();
        while addr != 0 && frames.len() < MANY {
            let mut copy = [0; FRAME_READ_BYTES];
            assert!(self.memory.read(addr, &mut copy[..config.frame_bytes as usize]));
            let word = |at: u32| u64::from_ne_bytes(*copy[at as usize..].first_chunk().unwrap());
            let half = |at: u32| u32::from_ne_bytes(*copy[at as usize..].first_chunk().unwrap());
            let owner =
                if config.frame_owner == NONE { 0 } else { copy[config.frame_owner as usize] };
            if u32::from(owner) < config.shim_owner {
                let code = word(config.frame_code) & !7;
                let instruction = match config.instruction_is_index {
                    1 => half(config.frame_instruction).into(),
                    _ => word(config.frame_instruction),
                };
                let owner = owner.into();
                frames.push(RawPythonFrame { addr, code, instruction, definition: 1, owner });
            }
            addr = word(config.frame_previous);
        }
        frames
    }

    /// A copy of a string's beginning or end: all of the buffer or nothing.
    fn text(&self, addr: u64, into: &mut [u8], is_end: bool) -> RawText {
        let config = self.config();
        let length = self.word(addr, config.text_length) as u32;
        let state = self.half(addr, config.text_state);
        let (kind, ascii) = ((state >> 2 & 7) as u8, (state >> 6 & 1) as u8);
        assert_eq!(state >> 5 & 1, 1, "a compact string");
        let from = if ascii == 1 { config.text_ascii } else { config.text_compact };
        let bytes = length as usize * usize::from(kind);
        let skipped = if is_end { bytes.saturating_sub(into.len()) } else { 0 };
        let copied = self.copy(addr + u64::from(from) + skipped as u64, into);
        RawText { length, kind, ascii, copied: copied as u16 }
    }

    fn copy(&self, addr: u64, into: &mut [u8]) -> usize {
        if self.memory.read(addr, into) { into.len() } else { 0 }
    }

    /// A copy of a code object.
    fn code(&self, addr: u64) -> RawCode {
        let config = self.config();
        let mut raw = RawCode::new_zeroed();
        (raw.kind, raw.tgid, raw.definition, raw.code) = (KIND_CODE, self.tgid, 1, addr);
        let member = |offset: u32| self.word(addr, config.code_from + offset);
        raw.first_line = self.half(addr, config.code_from + config.code_first_line) as i32;
        raw.name_text = self.text(member(config.code_name), &mut raw.name, false);
        raw.file_text = self.text(member(config.code_file), &mut raw.file, true);
        let lines = member(config.code_lines);
        raw.lines_addr = lines + u64::from(config.bytes_data);
        raw.lines_bytes = self.word(lines, config.bytes_size) as u32;
        raw.lines_copied = self.copy(raw.lines_addr, &mut raw.lines) as u32;
        raw
    }

    fn decoded(&self, frame: &RawPythonFrame) -> Code {
        decode(&self.code(frame.code), &self.interpreter, memory(self.tgid))
    }
}

/// Whether a decoded text is the whole one, or says which end of it was cut.
fn is_shown(shown: &str, whole: &str, limit_bytes: usize) -> bool {
    let kept = shown.trim_matches('…');
    let cut = kept.len() < shown.len();
    let least = limit_bytes / 4 - 1;
    let cut_well = kept.chars().count() >= least
        && (shown.ends_with('…') && whole.starts_with(kept)
            || shown.starts_with('…') && whole.ends_with(kept));
    if cut { cut_well } else { shown == whole }
}

/// Holds the stacks of a script against what it printed of them.
fn compare(python: &Python, script: &str) -> usize {
    let sleeper = Sleeper::start(python, script);
    let walk = Walk::of(&sleeper);
    assert!(walk.interpreter.checked);
    assert_eq!(walk.interpreter.version, (3, python.minor));
    let mut compared = 0;
    for stack in sleeper.printed.join("\n").split("thread ").filter(|stack| !stack.is_empty()) {
        let mut lines = stack.lines();
        let thread = walk.thread(lines.next().unwrap().parse().unwrap());
        let frames = walk.frames(thread);
        let expected: Vec<&str> = lines.collect();
        assert_eq!(frames.len(), expected.len(), "{}: {stack}", python.path.display());
        for (frame, expected) in frames.iter().zip(expected) {
            let code = walk.decoded(frame);
            let [name, file, line] = *expected.split('\t').collect::<Vec<_>>() else { panic!() };
            let told = (&code.function, &code.file, code.line_of(frame));
            assert!(is_shown(&code.function, name, NAME_BYTES), "{told:?} {expected}");
            assert!(is_shown(&code.file, file, FILE_BYTES), "{told:?} {expected}");
            assert_eq!(
                code.line_of(frame),
                line.parse().ok(),
                "{} {expected}",
                python.path.display()
            );
            compared += 1;
        }
    }
    compared
}

#[test]
fn stacks_are_those_of_the_traceback() {
    for python in testing::pythons() {
        let compared = compare(&python, include_str!("testdata/stacks.py"));
        assert!(compared > 50, "{compared}");
        println!("{}: {compared} frames", python.path.display());
    }
}

#[test]
fn a_table_that_was_copied_in_part_gives_no_wrong_line() {
    for python in testing::pythons() {
        let sleeper = Sleeper::start(&python, include_str!("testdata/stacks.py"));
        let walk = Walk::of(&sleeper);
        let id =
            sleeper.printed.iter().rev().find_map(|line| line.strip_prefix("thread ")).unwrap();
        let frames = walk.frames(walk.thread(id.parse().unwrap()));
        let frame = frames.iter().find(|frame| walk.decoded(frame).function == "spread").unwrap();
        let raw = walk.code(frame.code);
        assert!(raw.lines_bytes as usize > LINES_BYTES);
        let whole = decode(&raw, &walk.interpreter, memory(walk.tgid));
        assert!(whole.line_of(frame).is_some());
        let start = frame.code + u64::from(walk.interpreter.code_start.unwrap_or(0));
        let first = if walk.interpreter.code_start.is_some() { start + 16 } else { 8 };
        let early = RawPythonFrame { instruction: first, ..*frame };
        let mut alive = memory(walk.tgid);
        let table = |addr: u64| addr == raw.lines_addr;
        let readers: [Reader; 3] = [
            // A process that ended, another object in its place, another table.
            &mut |_, _| false,
            &mut |_, into| {
                into.fill(7);
                true
            },
            &mut |addr, into| {
                let read = alive(addr, into);
                if table(addr) {
                    into[LINES_BYTES / 2] ^= 1;
                }
                read
            },
        ];
        for reader in readers {
            let part = decode(&raw, &walk.interpreter, reader);
            assert_eq!(part.line_of(frame), None);
            assert_eq!(part.line_of(&early), whole.line_of(&early));
            assert!(part.line_of(&early).is_some());
        }
    }
}

#[test]
fn what_was_not_copied_is_read_again_while_the_object_is_there() {
    for python in testing::pythons() {
        let sleeper = Sleeper::start(&python, include_str!("testdata/stacks.py"));
        let walk = Walk::of(&sleeper);
        let id =
            sleeper.printed.iter().rev().find_map(|line| line.strip_prefix("thread ")).unwrap();
        for frame in walk.frames(walk.thread(id.parse().unwrap())) {
            let (expected, raw) = (walk.decoded(&frame), walk.code(frame.code));
            let mut bare = raw;
            (bare.name_text.copied, bare.file_text.copied, bare.lines_copied) = (0, 0, 0);
            assert_eq!(decode(&bare, &walk.interpreter, memory(walk.tgid)), expected);
            let unknown = decode(&bare, &walk.interpreter, |_, _| false);
            assert_eq!((unknown.function.as_str(), unknown.file.as_str()), ("", ""));
            assert_eq!(unknown.line_of(&frame), None);
            bare = raw;
            (bare.name_text, bare.file_text) = (RawText::default(), RawText::default());
            (bare.lines_bytes, bare.lines_copied) = (0, 0);
            assert_eq!(decode(&bare, &walk.interpreter, memory(walk.tgid)), expected);
            bare.first_line += 1;
            let other = decode(&bare, &walk.interpreter, memory(walk.tgid));
            assert_eq!((other.function.as_str(), other.file.as_str()), ("", ""));
        }
    }
}

#[test]
fn interpreters_that_cannot_be_walked_say_why() {
    for python in testing::old_pythons() {
        let script = "import sys, os; os.write(1, b'.\\n'); os.read(0, 1)";
        let sleeper = Sleeper::start(&python, script);
        let super::Found::Unsupported(reason) = sleeper.find() else { panic!("{python:?}") };
        assert!(reason.contains("before 3.8") && reason.contains("python"), "{reason}");
    }
}

#[test]
fn an_interpreter_that_never_rests_passes_its_checks() {
    let script = "
import threading
def work(n):
    return [work(n - 1) for _ in range(2)] if n else sorted([2, 1], key=lambda x: -x)
def forever():
    while True: threading.Thread(target=work, args=(3,)).start(); work(4)
print('.', flush=True)
forever()
";
    for python in testing::pythons() {
        let sleeper = Sleeper::start(&python, script);
        for _ in 0..20 {
            assert!(sleeper.interpreter().checked);
        }
    }
}

#[test]
fn a_static_interpreter_is_taken_though_a_library_is_loaded() {
    let (statics, shared): (Vec<_>, Vec<_>) =
        testing::pythons().into_iter().partition(|python| python.library().is_none());
    if statics.is_empty() || shared.is_empty() {
        println!("skipped: no CPython with a library and one without");
    }
    for (python, other) in statics.iter().flat_map(|one| shared.iter().map(move |two| (one, two))) {
        let library = other.library().unwrap();
        let script = format!(
            "import ctypes, sys\nctypes.CDLL({:?})\nprint('.', flush=True)\nsys.stdin.read()",
            library.display()
        );
        let found = Sleeper::start(python, &script).interpreter();
        assert_eq!((found.version, found.path), ((3, python.minor), python.path.clone()));
    }
}

#[test]
fn a_program_without_python_is_none() {
    let mut command = Command::new("sh");
    command.args(["-c", "echo .; read x"]);
    assert_eq!(Sleeper::start_command("sh".as_ref(), command).find(), super::Found::None);
}
