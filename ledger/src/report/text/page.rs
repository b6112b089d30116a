//! Lines of at most [`WIDTH`] columns, aligned, coloured where asked.

use crate::report::names::printable;

/// Columns of a page.
pub(super) const WIDTH: usize = 100;
/// Columns of a finding's tag.
const TAG: usize = 9;
/// Columns of a field's label.
const LABEL: usize = 18;

/// The palette.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Bold,
    Dim,
    Red,
    Yellow,
    Green,
}

impl Style {
    const fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Bold => "\x1b[1m",
            Self::Dim => "\x1b[2m",
            Self::Red => "\x1b[1;31m",
            Self::Yellow => "\x1b[1;33m",
            Self::Green => "\x1b[1;32m",
        }
    }
}

/// The text as it grows.
#[derive(Debug)]
pub(super) struct Page {
    text: String,
    color: bool,
}

impl Page {
    pub(super) fn new(color: bool) -> Self {
        Self { text: String::new(), color }
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// An empty line, unless one is there or nothing is.
    pub(super) fn gap(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    /// `head`, styled, in `columns` columns; then `body`, wrapped and indented to where it begins.
    fn hanging(&mut self, head: &str, columns: usize, style: Style, body: &str, tone: Style) {
        let mut lines = wrap(&printable(body), WIDTH - columns).into_iter();
        let head = format!("{head:<columns$}");
        let first = self.paint(tone, &lines.next().unwrap_or_default());
        let head = if first.is_empty() { head.trim_end() } else { head.as_str() };
        let line = self.paint(style, head) + &first;
        self.push(&line);
        for line in lines {
            let line = " ".repeat(columns) + &self.paint(tone, &line);
            self.push(&line);
        }
    }

    fn push(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn paint(&self, style: Style, text: &str) -> String {
        if !self.color || style == Style::Plain || text.is_empty() {
            return text.to_owned();
        }
        // The gap after a heading is not part of it: underlines and backgrounds of themes show.
        let words = text.trim_end();
        format!("{}{words}\x1b[0m{}", style.code(), &text[words.len()..])
    }

    /// A finding or a header: a tag, then text.
    pub(super) fn tagged(&mut self, tag: &str, style: Style, body: &str) {
        let columns = TAG.max(tag.chars().count() + 2);
        self.hanging(tag, columns, style, body, Style::Plain);
    }

    /// A heading.
    pub(super) fn heading(&mut self, text: &str) {
        self.hanging("", 0, Style::Plain, text, Style::Bold);
    }

    /// Text, indented.
    pub(super) fn line(&mut self, indent: usize, style: Style, text: &str) {
        self.hanging("", indent, Style::Plain, text, style);
    }

    /// A command to paste: never wrapped.
    pub(super) fn command(&mut self, indent: usize, text: &str) {
        let line = " ".repeat(indent) + &printable(text);
        self.push(&line);
    }

    /// A label and what is said under it.
    pub(super) fn field(&mut self, indent: usize, label: &str, tone: Style, body: &str) {
        let columns = indent + LABEL;
        let label = format!("{:indent$}{label}", "");
        self.hanging(&label, columns, Style::Dim, body, tone);
    }
}

/// Units stay with their figures.
const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Words of `text`, a figure and its unit being one.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let unit = word.split(['/', ',', ';', ':', '.', ')']).next().unwrap_or_default();
        match words.last_mut() {
            Some(figure)
                if UNITS.contains(&unit) && figure.ends_with(|c: char| c.is_ascii_digit()) =>
            {
                figure.push(' ');
                figure.push_str(word);
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

/// `text` in lines of at most `width` columns, broken at spaces; longer words are cut.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    let mut columns = 0;
    // Leading spaces and runs of them align columns and stay.
    for (index, word) in words(text).iter().enumerate() {
        let word = shorten(word, width);
        let length = word.chars().count();
        if index > 0 && columns + 1 + length > width {
            lines.push(line.trim_end().to_owned());
            line = String::new();
            columns = 0;
        } else if index > 0 {
            line.push(' ');
            columns += 1;
        }
        line.push_str(&word);
        columns += length;
    }
    lines.push(line.trim_end().to_owned());
    lines
}

/// `text` in at most `width` columns, the end cut.
pub(super) fn shorten(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    kept + "\u{2026}"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_keeps_columns_and_cuts_long_words() {
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
        assert_eq!(wrap("a   b", 8), ["a   b"]);
        assert_eq!(wrap("", 8), [""]);
        assert_eq!(wrap("holds 412.0 MiB/s, B", 12), ["holds", "412.0 MiB/s,", "B"]);
        assert_eq!(wrap("abcdefghijkl x", 8), ["abcdefg\u{2026}", "x"]);
    }

    #[test]
    fn colour_is_only_where_asked_and_never_on_gaps() {
        for (color, text) in
            [(false, "OK       fine\n"), (true, "\x1b[1;32mOK\x1b[0m       fine\n")]
        {
            let mut page = Page::new(color);
            page.tagged("OK", Style::Green, "fine");
            assert_eq!(page.into_text(), text);
        }
    }

    #[test]
    fn bodies_hang_under_their_first_line() {
        let mut page = Page::new(false);
        page.field(4, "label", Style::Plain, &"word ".repeat(20));
        let text = page.into_text();
        let mut lines = text.lines();
        assert!(lines.next().unwrap().starts_with("    label             word"));
        assert!(lines.next().unwrap().starts_with("                      word"));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
    }
}
