//! A code object, from the bytes that the kernel half copied to names and lines.

use agent_common::stack::{RawCode, RawPythonFrame};

use super::{
    Interpreter, LineFormat, line_at,
    lines::line_in_part,
    reread::{Table, complete},
    text,
};

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
    /// Where its instructions begin, from `addr` on (3.11 and later).
    start: Option<u32>,
    table: Table,
}

/// Decodes a code object.
///
/// `read_memory` fills a buffer from an address of the process, as [`memory`](super::memory) does.
/// It is asked for what the kernel half could not copy, at once, since code objects are freed. Where
/// that fails, or another object lies there by now, names are empty and lines unknown.
pub fn decode(
    raw: &RawCode,
    interpreter: &Interpreter,
    read_memory: impl FnMut(u64, &mut [u8]) -> bool,
) -> Code {
    let (raw, table) = complete(raw, &interpreter.config, read_memory);
    Code {
        function: text::name(raw.name_text, &raw.name),
        file: text::file(raw.file_text, &raw.file),
        first_line: raw.first_line,
        addr: raw.code,
        format: interpreter.lines,
        start: interpreter.code_start,
        table,
    }
}

impl Code {
    /// The line that a frame of this code object is at, as a traceback says it. `None`: the
    /// instruction has no line, or it is unknown.
    pub fn line_of(&self, frame: &RawPythonFrame) -> Option<i32> {
        // Else another code object took this one's place.
        if frame.code != self.addr {
            return None;
        }
        let find = if self.table.is_cut { line_in_part } else { line_at };
        let line = match u32::try_from(self.offset_of(frame)?) {
            Ok(offset) => find(self.format, &self.table.bytes, self.first_line, offset)?,
            // Nothing of it has run yet.
            Err(_) => self.first_line,
        };
        (line > 0).then_some(line)
    }

    /// Offset of the frame's instruction into the bytecode, in bytes; -1 or -2 before the first.
    fn offset_of(&self, frame: &RawPythonFrame) -> Option<i32> {
        let offset = if let Some(start) = self.start {
            let first = frame.code.checked_add(u64::from(start))?;
            i32::try_from(frame.instruction.wrapping_sub(first) as i64).ok()?
        } else {
            let index = frame.instruction as u32 as i32;
            if self.format == LineFormat::Lnotab { index } else { index.checked_mul(2)? }
        };
        (offset >= -2).then_some(offset)
    }
}

#[cfg(test)]
mod tests {
    use agent_common::stack::{LINES_BYTES, NAME_BYTES};
    use proptest::prelude::*;
    use zerocopy::FromZeros as _;

    use super::*;
    use crate::python::{layout::Layout, reread::TABLE_LIMIT, text::ESCAPED};

    fn interpreter(lines: LineFormat, code_start: Option<u32>) -> Interpreter {
        let config = Layout::of_minor(9).unwrap().config;
        let path = "/usr/bin/python3".into();
        Interpreter { version: (3, 8), config, lines, code_start, path, checked: true }
    }

    fn raw(table: &[u8]) -> RawCode {
        let mut raw = RawCode::new_zeroed();
        (raw.code, raw.first_line) = (0x1000, 10);
        raw.lines[..table.len()].copy_from_slice(table);
        raw.lines_bytes = table.len() as u32;
        raw.lines_copied = LINES_BYTES as u32;
        raw
    }

    fn frame(instruction: u64) -> RawPythonFrame {
        RawPythonFrame { code: 0x1000, instruction, ..RawPythonFrame::default() }
    }

    #[test]
    fn a_frame_before_its_first_instruction_is_at_the_first_line() {
        let table = [0x80 | 11 << 3, 0, 0];
        let code =
            decode(&raw(&table), &interpreter(LineFormat::Locations, Some(0x40)), |_, _| false);
        assert_eq!(code.line_of(&frame(0x1040)), Some(11));
        assert_eq!(code.line_of(&frame(0x103e)), Some(10));
        assert_eq!(code.line_of(&frame(0x1042)), None);
        assert_eq!(code.line_of(&frame(0x1000)), None);
        assert_eq!(code.line_of(&frame(u64::MAX)), None);
        let code = decode(&raw(&[2, 1]), &interpreter(LineFormat::Lnotab, None), |_, _| false);
        assert_eq!(code.line_of(&frame(u64::from(u32::MAX))), Some(10));
        assert_eq!(code.line_of(&frame(1)), Some(10));
        assert_eq!(code.line_of(&frame(2)), Some(11));
    }

    #[test]
    fn an_index_counts_two_bytes_in_3_10() {
        let table = [2, 0, 2, 5];
        let code = decode(&raw(&table), &interpreter(LineFormat::Linetable310, None), |_, _| false);
        let lines = [0, 1, 2].map(|at| code.line_of(&frame(at)));
        assert_eq!(lines, [Some(10), Some(15), None]);
        assert_eq!(code.line_of(&frame(u64::from(u32::MAX))), Some(10));
        assert_eq!(code.line_of(&frame(0x7fff_ffff)), None);
    }

    #[test]
    fn frames_of_another_code_object_have_no_line() {
        let code = decode(&raw(&[2, 1]), &interpreter(LineFormat::Lnotab, None), |_, _| false);
        assert_eq!(code.line_of(&RawPythonFrame { code: 0x2000, ..frame(2) }), None);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(
            bytes in prop::collection::vec(any::<u8>(), size_of::<RawCode>()),
            kinds in any::<[u8; 2]>(),
            lines_bytes in prop_oneof![0_u32..3000, any::<u32>()],
            instruction in any::<u64>(),
            readable in any::<bool>(),
            filled in any::<u8>(),
            start in prop_oneof![Just(None), any::<u32>().prop_map(Some)],
        ) {
            let mut raw: RawCode = zerocopy::transmute!(<[u8; size_of::<RawCode>()]>::try_from(bytes).unwrap());
            (raw.name_text.kind, raw.file_text.kind) = (kinds[0] % 5, kinds[1] % 5);
            raw.lines_bytes = lines_bytes;
            for format in [LineFormat::Lnotab, LineFormat::Linetable310, LineFormat::Locations] {
                let code = decode(&raw, &interpreter(format, start), |_, into| {
                    assert!(into.len() <= TABLE_LIMIT);
                    into.fill(filled);
                    readable
                });
                prop_assert!(code.function.chars().count() <= NAME_BYTES * ESCAPED + 1);
                let frame = RawPythonFrame {
                    code: raw.code,
                    instruction: raw.code.wrapping_add(instruction % 4000),
                    ..RawPythonFrame::default()
                };
                code.line_of(&frame);
                code.line_of(&RawPythonFrame { instruction, ..frame });
            }
        }
    }
}
