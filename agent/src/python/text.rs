//! Strings of Python, from the characters that were copied.

use agent_common::stack::RawText;

use crate::host::text::clean;

/// Characters that escaping may make of one.
pub(super) const ESCAPED: usize = 8;
/// Ends a name and begins a file name that was cut.
const CUT: char = '…';

/// A string whose beginning was copied.
pub(super) fn name(text: RawText, bytes: &[u8]) -> String {
    let (mut shown, cut) = characters(text, bytes, false);
    if cut {
        shown.push(CUT);
    }
    shown
}

/// A string whose end was copied.
pub(super) fn file(text: RawText, bytes: &[u8]) -> String {
    let (mut shown, cut) = characters(text, bytes, true);
    if cut {
        shown.insert(0, CUT);
    }
    shown
}

/// The copied characters of a string, and whether there are more of them. What is no character (a
/// lone surrogate, a number too large) becomes U+FFFD.
fn characters(text: RawText, bytes: &[u8], is_end: bool) -> (String, bool) {
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
    if decoded.is_empty() {
        return (decoded, false);
    }
    let is_cut = (decoded.chars().count() as u64) < u64::from(text.length);
    (clean(decoded.as_bytes(), bytes.len() * ESCAPED), is_cut)
}

fn character(number: u32) -> char {
    char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use agent_common::stack::NAME_BYTES;

    use super::*;

    fn text(kind: u8, length: u32, bytes: &[u8]) -> (RawText, [u8; NAME_BYTES]) {
        let mut copy = [0xee; NAME_BYTES];
        copy[..bytes.len()].copy_from_slice(bytes);
        (RawText { length, kind, ascii: 0, copied: bytes.len() as u16 }, copy)
    }

    #[test]
    fn characters_of_each_size() {
        let wide = |units: &[u16]| units.iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        let wider = |units: &[u32]| units.iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        let cases: [(u8, u32, Vec<u8>, &str); 10] = [
            (1, 3, b"f\xfcr".to_vec(), "für"),
            (1, 9, b"abc".to_vec(), "abc…"),
            (1, 2, b"abc".to_vec(), "ab"),
            (1, 4, b"a\n\x1bb".to_vec(), r"a\n\x1bb"),
            (2, 2, wide(&[0x444, 0xdc80]), "ф\u{fffd}"),
            (2, 3, wide(&[0x444, 0x444]), "фф…"),
            (4, 2, wider(&[0x1f600, 0x0011_0000]), "😀\u{fffd}"),
            (0, 3, b"abc".to_vec(), ""),
            (1, 3, Vec::new(), ""),
            (3, 1, b"abc".to_vec(), ""),
        ];
        for (kind, length, bytes, expected) in cases {
            let (text, copy) = text(kind, length, &bytes);
            assert_eq!(name(text, &copy), expected, "{kind} {length} {bytes:?}");
        }
    }

    #[test]
    fn a_cut_file_begins_with_an_ellipsis_and_a_whole_character() {
        let (whole, copy) = text(1, 4, b"x.py");
        assert_eq!(file(whole, &copy), "x.py");
        let (cut, copy) = text(1, 400, b"/x.py");
        assert_eq!(file(cut, &copy), "…/x.py");
        let mut bytes = vec![4];
        bytes.extend("x.py".encode_utf16().flat_map(u16::to_ne_bytes));
        let (cut, copy) = text(2, 400, &bytes);
        assert_eq!(file(cut, &copy), "…x.py");
    }
}
