//! From an instruction to a line, in the three formats that CPython has used.

/// How a code object stores its line numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LineFormat {
    /// `co_lnotab` of 3.8 and 3.9: pairs of an address step and a line step.
    /// <https://github.com/python/cpython/blob/v3.9.18/Objects/lnotab_notes.txt>
    Lnotab,
    /// `co_linetable` of 3.10: pairs of a range's length and a line step; a range may have no line.
    /// <https://github.com/python/cpython/blob/v3.10.13/Objects/lnotab_notes.txt>
    Linetable310,
    /// `co_linetable` of 3.11 and later: entries of several bytes.
    /// <https://github.com/python/cpython/blob/v3.11.7/Objects/locations.md>
    Locations,
}

/// A line step that means: this range has no line (3.10).
const NO_LINE: i8 = -128;

/// The line of the instruction at an offset into the bytecode, in bytes (in 3.10 that is twice
/// `f_lasti`). `None` where the table says that there is none, or does not reach so far.
///
/// Exact for every offset within the code. Takes time in proportion to the table.
pub fn line_at(
    format: LineFormat,
    table: &[u8],
    first_line: i32,
    offset_bytes: u32,
) -> Option<i32> {
    match find(format, table, first_line, offset_bytes) {
        Place::Line(line) | Place::LastLine(line) => Some(line),
        Place::NoLine => None,
    }
}

/// As [`line_at`] for the beginning of a table: what depends on the rest is `None`.
pub(crate) fn line_in_part(
    format: LineFormat,
    part: &[u8],
    first_line: i32,
    offset_bytes: u32,
) -> Option<i32> {
    // An entry that was cut in two tells another step than the whole one.
    let whole = match format {
        LineFormat::Lnotab | LineFormat::Linetable310 => part.len() & !1,
        LineFormat::Locations => part.iter().rposition(|byte| byte & 0x80 != 0).unwrap_or(0),
    };
    match find(format, part.get(..whole)?, first_line, offset_bytes) {
        Place::Line(line) => Some(line),
        Place::LastLine(_) | Place::NoLine => None,
    }
}

/// What a table tells about an offset.
enum Place {
    /// The line of the range that holds it.
    Line(i32),
    /// The line at the table's end, which goes on for ever (before 3.10).
    LastLine(i32),
    /// No line, or beyond the table.
    NoLine,
}

fn find(format: LineFormat, table: &[u8], first_line: i32, offset: u32) -> Place {
    match format {
        LineFormat::Lnotab => by_lnotab(table, first_line, offset),
        LineFormat::Linetable310 => by_linetable(table, first_line, offset),
        LineFormat::Locations => by_locations(table, first_line, offset),
    }
}

fn by_lnotab(table: &[u8], first_line: i32, offset: u32) -> Place {
    let (mut address, mut line) = (0_u32, first_line);
    for [step, lines] in table.as_chunks().0 {
        address = address.saturating_add(u32::from(*step));
        if address > offset {
            return Place::Line(line);
        }
        line = line.wrapping_add(i32::from(*lines as i8));
    }
    Place::LastLine(line)
}

fn by_linetable(table: &[u8], first_line: i32, offset: u32) -> Place {
    let (mut end, mut line) = (0_u32, first_line);
    for [length, lines] in table.as_chunks().0 {
        end = end.saturating_add(u32::from(*length));
        let lines = *lines as i8;
        if lines != NO_LINE {
            line = line.wrapping_add(i32::from(lines));
        }
        if offset < end {
            return if lines == NO_LINE { Place::NoLine } else { Place::Line(line) };
        }
    }
    Place::NoLine
}

fn by_locations(table: &[u8], first_line: i32, offset: u32) -> Place {
    let (mut end, mut line, mut rest) = (0_u32, first_line, table);
    while let Some((head, after)) = rest.split_first() {
        let code = head >> 3 & 15;
        line = line.wrapping_add(match code {
            10..=12 => i32::from(code) - 10,
            13 | 14 => signed_varint(after),
            _ => 0,
        });
        end = end.saturating_add((u32::from(head & 7) + 1) * 2);
        if offset < end {
            return if code == 15 { Place::NoLine } else { Place::Line(line) };
        }
        // Only the first byte of an entry has its highest bit set.
        let next = after.iter().position(|byte| byte & 0x80 != 0).unwrap_or(after.len());
        rest = after.get(next..).unwrap_or_default();
    }
    Place::NoLine
}

/// Six bits a byte, the lowest first; bit 6: another byte follows. Bit 0 of the number is the sign.
fn signed_varint(bytes: &[u8]) -> i32 {
    let mut value = 0_u32;
    for (byte, shift) in bytes.iter().zip((0..u32::BITS).step_by(6)) {
        // The next entry begins here: the number was cut.
        if byte & 0x80 != 0 {
            break;
        }
        value |= u32::from(byte & 63) << shift;
        if byte & 64 == 0 {
            break;
        }
    }
    let magnitude = (value >> 1) as i32;
    if value & 1 == 1 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::python::testing;

    const FORMATS: [LineFormat; 3] =
        [LineFormat::Lnotab, LineFormat::Linetable310, LineFormat::Locations];

    #[test]
    fn every_instruction_has_the_line_that_its_interpreter_says() {
        for python in testing::pythons() {
            let tables = python.run(include_str!("testdata/tables.py"));
            let (mut codes, mut instructions, mut without) = (0, 0, 0);
            for dumped in tables.lines() {
                let table = testing::DumpedTable::parse(dumped);
                for (offset, line) in &table.lines {
                    let got = line_at(python.format(), &table.bytes, table.first_line, *offset);
                    assert_eq!(got, *line, "{} {offset} {dumped}", python.path.display());
                    instructions += 1;
                    without += usize::from(line.is_none());
                }
                codes += 1;
            }
            println!(
                "{}: {codes} codes, {instructions} instructions, {without} without a line",
                python.path.display()
            );
            assert!(codes > 500 && instructions > 20_000, "{codes} {instructions}");
        }
    }

    #[test]
    fn a_part_of_a_table_tells_the_right_line_or_none() {
        for python in testing::pythons() {
            let tables = python.run(include_str!("testdata/tables.py"));
            let mut told = 0;
            for (number, dumped) in tables.lines().enumerate().filter(|(n, _)| n % 5 == 0) {
                let table = testing::DumpedTable::parse(dumped);
                let part = &table.bytes[..(number * 7) % (table.bytes.len() + 1)];
                for (offset, line) in &table.lines {
                    let got = line_in_part(python.format(), part, table.first_line, *offset);
                    assert!(got.is_none() || got == *line, "{got:?} {line:?} {offset} {dumped}");
                    told += usize::from(got.is_some());
                }
            }
            assert!(told > 500);
        }
    }

    #[test]
    fn an_empty_table_has_the_first_line_only_before_3_10() {
        assert_eq!(line_at(LineFormat::Lnotab, &[], 7, 0), Some(7));
        assert_eq!(line_at(LineFormat::Linetable310, &[], 7, 0), None);
        assert_eq!(line_at(LineFormat::Locations, &[], 7, 0), None);
        assert_eq!(line_in_part(LineFormat::Lnotab, &[], 7, 0), None);
    }

    #[test]
    fn ranges_without_a_line_do_not_change_the_running_line() {
        let table = [4, 2, 4, 0x80, 4, 1];
        let lines = [0, 4, 8, 12].map(|at| line_at(LineFormat::Linetable310, &table, 10, at));
        assert_eq!(lines, [Some(12), None, Some(13), None]);
        // Two units two lines on, one without a line, one unit with a step of -32.
        let table = [0x80 | 12 << 3 | 1, 0, 0, 0x80 | 15 << 3, 0x80 | 13 << 3, 1 | 64, 1];
        let lines = [0, 2, 4, 6, 8].map(|at| line_at(LineFormat::Locations, &table, 100, at));
        assert_eq!(lines, [Some(102), Some(102), None, Some(70), None]);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(
            table in prop::collection::vec(any::<u8>(), 0..300),
            first in any::<i32>(),
            offset in prop_oneof![0_u32..2000, any::<u32>()],
        ) {
            for format in FORMATS {
                let whole = line_at(format, &table, first, offset);
                let part = line_in_part(format, &table, first, offset);
                prop_assert!(part.is_none() || part == whole);
            }
        }
    }
}
