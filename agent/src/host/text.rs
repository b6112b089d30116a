//! Text that others chose: bounded reads, lossy conversion, escaped control characters.

use std::{fmt::Write as _, fs::File, io::Read as _, path::Path};

/// Reads at most `limit` bytes of a file; `None` where it cannot be opened or read at all.
///
/// A file of a process that ends while it is read gives what came before the error.
pub fn read_bounded(path: &Path, limit: u64) -> Option<Vec<u8>> {
    let file = File::open(path).ok()?;
    let mut bytes = Vec::new();
    match file.take(limit).read_to_end(&mut bytes) {
        Ok(_) => Some(bytes),
        Err(_) if !bytes.is_empty() => Some(bytes),
        Err(_) => None,
    }
}

/// Makes bytes fit to print and to store: UTF-8 (invalid sequences become U+FFFD), control
/// characters as `\n`, `\t` or `\x1b`, bidirectional overrides as `\u{202e}`, at most `limit`
/// characters of the result, an ellipsis as the last one where something was cut off.
pub fn clean(bytes: &[u8], limit: usize) -> String {
    // A character takes four bytes at most: what lies beyond cannot be shown anyway.
    let kept = bytes.get(..limit.saturating_mul(4).saturating_add(4)).unwrap_or(bytes);
    let mut shown = String::with_capacity(kept.len().min(limit));
    let mut count = 0;
    for character in String::from_utf8_lossy(kept).chars() {
        let before = shown.len();
        push_escaped(&mut shown, character);
        count += shown.get(before..).map_or(0, |added| added.chars().count());
        if count > limit {
            shown.truncate(before);
            return cut(shown, limit);
        }
    }
    if kept.len() < bytes.len() { cut(shown, limit) } else { shown }
}

/// Ends a text that was cut off with an ellipsis, inside the limit.
fn cut(mut shown: String, limit: usize) -> String {
    while shown.chars().count() >= limit.max(1) {
        shown.pop();
    }
    if limit > 0 {
        shown.push('…');
    }
    shown
}

fn push_escaped(text: &mut String, character: char) {
    let hidden = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
    if character.is_control() || hidden {
        // Writing to a String cannot fail.
        let _infallible = match character {
            '\n' | '\t' | '\r' | '\u{80}'.. => write!(text, "{}", character.escape_default()),
            _ => write!(text, "\\x{:02x}", character as u32),
        };
    } else {
        text.push(character);
    }
}

/// The first word after `key` on the line that starts with `key` (as in `status`, `meminfo`,
/// `cpu.stat`), the key's colon left out.
pub fn field<'a>(content: &'a [u8], key: &str) -> Option<&'a str> {
    values(content, key)?.next()
}

/// All words after `key` on the line that starts with it.
pub fn values<'a>(content: &'a [u8], key: &str) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
    let line = content.split(|byte| *byte == b'\n').find_map(|line| {
        let rest = line.strip_prefix(key.as_bytes())?;
        matches!(rest.first(), Some(b':' | b' ' | b'\t')).then_some(rest)
    })?;
    let line = line.strip_prefix(b":").unwrap_or(line);
    Some(std::str::from_utf8(line).ok()?.split_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_escaped_and_bounded() {
        let cases: &[(&[u8], usize, &str)] = &[
            (b"python3", 64, "python3"),
            (b"two\nlines\tand \x1b[31mred", 64, "two\\nlines\\tand \\x1b[31mred"),
            (b"\xff\xfeabc", 64, "\u{fffd}\u{fffd}abc"),
            ("r\u{202e}txt".as_bytes(), 64, "r\\u{202e}txt"),
            ("zeilen\u{85}".as_bytes(), 64, "zeilen\\u{85}"),
            (b"abcdefgh", 8, "abcdefgh"),
            (b"abcdefghi", 8, "abcdefg…"),
            ("äöüäöüäöü".as_bytes(), 4, "äöü…"),
            (b"ab\x01", 4, "ab…"),
            (b"x", 0, ""),
        ];
        for (bytes, limit, expected) in cases {
            let shown = clean(bytes, *limit);
            assert_eq!(shown, *expected, "{bytes:?}");
            assert!(shown.chars().count() <= *limit);
        }
        assert_eq!(clean(&vec![b'x'; 1 << 20], 100).chars().count(), 100);
    }

    #[test]
    fn fields_are_found_by_their_whole_key() {
        let status = b"Name:\tx\nUid:\t1000\t1001\nMemTotal:  16 kB\ncpu  1 2\nusage_usec 7\n";
        assert_eq!(field(status, "Uid"), Some("1000"));
        assert_eq!(field(status, "Mem"), None);
        assert_eq!(field(status, "MemTotal"), Some("16"));
        assert_eq!(field(status, "usage_usec"), Some("7"));
        let words: Vec<_> = values(status, "cpu").into_iter().flatten().collect();
        assert_eq!(words, ["1", "2"]);
    }
}
