//! A code object, from the bytes that the kernel half copied to names and lines.

use agent_common::stack::{RawCode, RawPythonFrame, RawText};

use super::{Interpreter, LineFormat, line_at, lines::line_in_part};
use crate::host::text::clean;

/// Longest line table that is read: 3.13 needs it for some 30,000 lines of dense code.
const TABLE_LIMIT: usize = 256 << 10;
/// Characters that escaping may make of one.
const ESCAPED: usize = 8;
/// Ends a name and begins a file name that was cut.
const CUT: char = '…';

/// What a code object says of the frames that run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Qualified name (3.11 and later), else name; ends in `…` where it was cut, empty where it
    /// could not be read. Control characters are escaped.
    pub function: String,
    /// File as the interpreter names it; begins with `…` where it was cut, empty where it could
    /// not be read. Control characters are escaped.
    pub file: String,
    /// `co_firstlineno`: where the function's first decorator or its `def` stands.
    pub first_line: i32,
    /// Address of the code object.
    addr: u64,
    format: LineFormat,
    code_start: Option<u32>,
    table: Vec<u8>,
    /// `table` is the beginning of the code object's own.
    table_is_cut: bool,
}

/// Decodes a code object.
///
/// `read_memory` fills a buffer from an address of the process, as [`memory`](super::memory) does.
/// It is asked for a line table that was copied in part, at once, since code objects are freed; if
/// that fails or does not begin as the copy does, the lines beyond the copy are unknown.
pub fn decode(
    raw: &RawCode,
    interpreter: &Interpreter,
    read_memory: impl FnMut(u64, &mut [u8]) -> bool,
) -> Code {
    let (table, table_is_cut) = line_table(raw, read_memory);
    Code {
        function: name(&raw.name_text, &raw.name),
        file: file(&raw.file_text, &raw.file),
        first_line: raw.first_line,
        addr: raw.code,
        format: interpreter.lines,
        code_start: interpreter.code_start,
        table,
        table_is_cut,
    }
}

impl Code {
    /// The line that a frame of this code object is at, as a traceback says it. `None`: the
    /// instruction has no line, or it is unknown.
    pub fn line_of(&self, frame: &RawPythonFrame) -> Option<i32> {
        // Else another code object took this one's place.
        if frame.code != self.addr || frame.first_line != self.first_line {
            return None;
        }
        let Ok(offset) = u32::try_from(self.offset_of(frame)?) else {
            // Nothing of it has run: the frame is before its first instruction.
            return Some(self.first_line);
        };
        let find = if self.table_is_cut { line_in_part } else { line_at };
        find(self.format, &self.table, self.first_line, offset).filter(|line| *line > 0)
    }

    /// Offset of the frame's instruction into the bytecode, in bytes; -1 or -2 before the first.
    fn offset_of(&self, frame: &RawPythonFrame) -> Option<i32> {
        let offset = if let Some(start) = self.code_start {
            let first = frame.code.checked_add(u64::from(start))?;
            i32::try_from(frame.instruction.wrapping_sub(first) as i64).ok()?
        } else {
            let index = frame.instruction as u32 as i32;
            if self.format == LineFormat::Lnotab { index } else { index.checked_mul(2)? }
        };
        (offset >= -2).then_some(offset)
    }
}

/// The line table, whole if possible, and whether it is cut.
fn line_table(
    raw: &RawCode,
    mut read_memory: impl FnMut(u64, &mut [u8]) -> bool,
) -> (Vec<u8>, bool) {
    let copied = raw.lines_copied.min(raw.lines_bytes) as usize;
    let copied = raw.lines.get(..copied).unwrap_or(&raw.lines);
    let whole = raw.lines_bytes as usize;
    if copied.len() == whole {
        return (copied.to_vec(), false);
    }
    let mut table = vec![0; whole.min(TABLE_LIMIT)];
    // Memory that was freed and used again begins otherwise.
    if !copied.is_empty() && read_memory(raw.lines_addr, &mut table) && table.starts_with(copied) {
        (table, whole > TABLE_LIMIT)
    } else {
        (copied.to_vec(), true)
    }
}

fn name(text: &RawText, bytes: &[u8]) -> String {
    let (mut shown, cut) = characters(text, bytes, false);
    if cut {
        shown.push(CUT);
    }
    shown
}

fn file(text: &RawText, bytes: &[u8]) -> String {
    let (mut shown, cut) = characters(text, bytes, true);
    if cut {
        shown.insert(0, CUT);
    }
    shown
}

/// The copied characters of a string, and whether there are more of them. What is no character (a
/// lone surrogate, a number too large) becomes U+FFFD.
fn characters(text: &RawText, bytes: &[u8], is_end: bool) -> (String, bool) {
    let size = usize::from(text.kind);
    let copied = bytes.get(..usize::from(text.copied)).unwrap_or(bytes);
    let whole = u64::from(text.length) * size as u64;
    let copied = copied.get(..copied.len().min(whole as usize)).unwrap_or_default();
    // An end may begin amid a character.
    let from = if is_end { copied.len().checked_rem(size).unwrap_or(0) } else { 0 };
    let copied = copied.get(from..).unwrap_or_default();
    let decoded: String = match size {
        1 => copied.iter().map(|byte| char::from(*byte)).collect(),
        2 => copied
            .as_chunks()
            .0
            .iter()
            .map(|pair| character(u16::from_ne_bytes(*pair).into()))
            .collect(),
        4 => copied.as_chunks().0.iter().map(|quad| character(u32::from_ne_bytes(*quad))).collect(),
        _ => return (String::new(), false),
    };
    let is_cut = (decoded.chars().count() as u64) < u64::from(text.length);
    (clean(decoded.as_bytes(), bytes.len() * ESCAPED), is_cut)
}

fn character(number: u32) -> char {
    char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use agent_common::stack::{LINES_BYTES, NAME_BYTES};
    use proptest::prelude::*;
    use zerocopy::FromZeros as _;

    use super::*;

    fn text(kind: u8, length: u32, bytes: &[u8]) -> (RawText, [u8; NAME_BYTES]) {
        let mut copy = [0xee; NAME_BYTES];
        copy[..bytes.len()].copy_from_slice(bytes);
        (RawText { length, kind, ascii: 0, copied: bytes.len() as u16 }, copy)
    }

    fn interpreter(lines: LineFormat, code_start: Option<u32>) -> Interpreter {
        let config = agent_common::python::PythonConfig::default();
        let path = "/usr/bin/python3".into();
        Interpreter { version: (3, 8), config, lines, code_start, path, checked: true }
    }

    fn raw(table: &[u8], lines_bytes: u32) -> RawCode {
        let mut raw = RawCode::new_zeroed();
        (raw.code, raw.first_line) = (0x1000, 10);
        raw.lines[..table.len()].copy_from_slice(table);
        (raw.lines_bytes, raw.lines_copied) = (lines_bytes, table.len() as u32);
        raw
    }

    fn frame(instruction: u64) -> RawPythonFrame {
        RawPythonFrame { code: 0x1000, instruction, first_line: 10, ..RawPythonFrame::default() }
    }

    #[test]
    fn characters_of_each_size() {
        let wide = |units: &[u16]| units.iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        let wider = |units: &[u32]| units.iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        let cases: [(u8, u32, Vec<u8>, &str); 9] = [
            (1, 3, b"f\xfcr".to_vec(), "für"),
            (1, 9, b"abc".to_vec(), "abc…"),
            (1, 2, b"abc".to_vec(), "ab"),
            (1, 4, b"a\n\x1bb".to_vec(), r"a\n\x1bb"),
            (2, 2, wide(&[0x444, 0xdc80]), "ф\u{fffd}"),
            (2, 3, wide(&[0x444, 0x444]), "фф…"),
            (4, 2, wider(&[0x1f600, 0x0011_0000]), "😀\u{fffd}"),
            (0, 3, b"abc".to_vec(), ""),
            (3, 1, b"abc".to_vec(), ""),
        ];
        for (kind, length, bytes, expected) in cases {
            let (text, copy) = text(kind, length, &bytes);
            assert_eq!(name(&text, &copy), expected, "{kind} {length} {bytes:?}");
        }
    }

    #[test]
    fn a_cut_file_begins_with_an_ellipsis_and_a_whole_character() {
        let (whole, copy) = text(1, 4, b"x.py");
        assert_eq!(file(&whole, &copy), "x.py");
        let (cut, copy) = text(1, 400, b"/x.py");
        assert_eq!(file(&cut, &copy), "…/x.py");
        let mut bytes = vec![4];
        bytes.extend("x.py".encode_utf16().flat_map(u16::to_ne_bytes));
        let (cut, copy) = text(2, 400, &bytes);
        assert_eq!(file(&cut, &copy), "…x.py");
    }

    #[test]
    fn a_frame_before_its_first_instruction_is_at_the_first_line() {
        let table = [0x80 | 11 << 3, 0, 0];
        let code =
            decode(&raw(&table, 3), &interpreter(LineFormat::Locations, Some(0x40)), |_, _| false);
        assert_eq!(code.line_of(&frame(0x1040)), Some(11));
        assert_eq!(code.line_of(&frame(0x103e)), Some(10));
        assert_eq!(code.line_of(&frame(0x1042)), None);
        assert_eq!(code.line_of(&frame(0x1000)), None);
        assert_eq!(code.line_of(&frame(u64::MAX)), None);
        let code = decode(&raw(&[2, 1], 2), &interpreter(LineFormat::Lnotab, None), |_, _| false);
        assert_eq!(code.line_of(&frame(u64::from(u32::MAX))), Some(10));
        assert_eq!(code.line_of(&frame(1)), Some(10));
        assert_eq!(code.line_of(&frame(2)), Some(11));
    }

    #[test]
    fn an_index_counts_two_bytes_in_3_10() {
        let table = [2, 0, 2, 5];
        let code =
            decode(&raw(&table, 4), &interpreter(LineFormat::Linetable310, None), |_, _| false);
        let lines = [0, 1, 2].map(|at| code.line_of(&frame(at)));
        assert_eq!(lines, [Some(10), Some(15), None]);
        assert_eq!(code.line_of(&frame(u64::from(u32::MAX))), Some(10));
        assert_eq!(code.line_of(&frame(0x7fff_ffff)), None);
    }

    #[test]
    fn frames_of_another_code_object_have_no_line() {
        let code = decode(&raw(&[2, 1], 2), &interpreter(LineFormat::Lnotab, None), |_, _| false);
        assert_eq!(code.line_of(&RawPythonFrame { code: 0x2000, ..frame(2) }), None);
        assert_eq!(code.line_of(&RawPythonFrame { first_line: 11, ..frame(2) }), None);
    }

    #[test]
    fn a_cut_table_is_read_whole_once_and_within_bounds() {
        let interpreter = interpreter(LineFormat::Lnotab, None);
        let (mut asked, mut bytes) = (0, 0);
        let mut read = |_: u64, into: &mut [u8]| {
            (asked, bytes) = (asked + 1, into.len());
            into.fill(1);
            true
        };
        let code = decode(&raw(&[1; LINES_BYTES], 2000), &interpreter, &mut read);
        assert_eq!(code.line_of(&frame(999)), Some(1009));
        assert_eq!(code.line_of(&frame(5000)), Some(1010));
        let code = decode(&raw(&[1; LINES_BYTES], u32::MAX), &interpreter, &mut read);
        assert_eq!(code.line_of(&frame(999)), Some(1009));
        assert_eq!(code.line_of(&frame(500_000)), None);
        assert_eq!((asked, bytes), (2, TABLE_LIMIT));
        decode(&raw(&[1; LINES_BYTES], LINES_BYTES as u32), &interpreter, |_, _| panic!());
    }

    proptest! {
        #[test]
        fn garbage_never_panics(
            bytes in prop::collection::vec(any::<u8>(), size_of::<RawCode>()),
            kinds in any::<[u8; 2]>(),
            lines_bytes in prop_oneof![0_u32..3000, any::<u32>()],
            instruction in any::<u64>(),
            readable in any::<bool>(),
            start in prop_oneof![Just(None), any::<u32>().prop_map(Some)],
        ) {
            let mut raw: RawCode = zerocopy::transmute!(<[u8; size_of::<RawCode>()]>::try_from(bytes).unwrap());
            (raw.name_text.kind, raw.file_text.kind) = (kinds[0] % 5, kinds[1] % 5);
            raw.lines_bytes = lines_bytes;
            for format in [LineFormat::Lnotab, LineFormat::Linetable310, LineFormat::Locations] {
                let code = decode(&raw, &interpreter(format, start), |_, into| {
                    assert!(into.len() <= TABLE_LIMIT);
                    readable
                });
                prop_assert!(code.function.chars().count() <= NAME_BYTES * ESCAPED + 1);
                let frame = RawPythonFrame {
                    code: raw.code,
                    first_line: raw.first_line,
                    instruction: raw.code.wrapping_add(instruction % 4000),
                    ..RawPythonFrame::default()
                };
                code.line_of(&frame);
                code.line_of(&RawPythonFrame { instruction, ..frame });
            }
        }
    }
}
