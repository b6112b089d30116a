//! What the kernel half could not copy of a code object, read from the process while it runs.
//!
//! The kernel half reads fixed lengths without waiting for pages: a string at the end of what is
//! mapped, or on a page that is not resident, comes without characters.

use agent_common::{
    python::{CODE_READ_BYTES, PythonConfig},
    stack::{FILE_BYTES, NAME_BYTES, RawCode, RawText},
};

/// Longest line table that is read: enough for some 30,000 lines of dense code.
pub(super) const TABLE_LIMIT: usize = 256 << 10;

/// A line table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) bytes: Vec<u8>,
    /// Only the beginning of the code object's table.
    pub(super) is_cut: bool,
}

/// Completes a code object from memory, where it is still the same one: a freed one would give
/// another's names and lines.
pub(super) fn complete(
    raw: &RawCode,
    config: &PythonConfig,
    read: impl FnMut(u64, &mut [u8]) -> bool,
) -> (RawCode, Table) {
    let copied = copied_table(raw);
    let is_whole = has_text(raw.name_text, NAME_BYTES)
        && has_text(raw.file_text, FILE_BYTES)
        && !copied.is_cut;
    let completed = if is_whole { None } else { Reader { config, read }.complete(raw, &copied) };
    let (mut done, table) = completed.unwrap_or((*raw, copied));
    if !has_text(done.file_text, FILE_BYTES) {
        // What was copied is not the end of the name.
        done.file_text.copied = 0;
    }
    (done, table)
}

/// Whether the characters of a string came along. (Kind 0: not even its length could be read.)
fn has_text(text: RawText, room: usize) -> bool {
    let whole = u64::from(text.length) * u64::from(text.kind);
    text.kind != 0 && u64::from(text.copied) >= whole.min(room as u64)
}

/// The part of the table that was copied. A length of 0 without a copy may be an unknown length.
fn copied_table(raw: &RawCode) -> Table {
    let copied = raw.lines_copied.min(raw.lines_bytes) as usize;
    let bytes = raw.lines.get(..copied).unwrap_or(&raw.lines).to_vec();
    let is_cut = raw.lines_copied == 0 || bytes.len() < raw.lines_bytes as usize;
    Table { bytes, is_cut }
}

/// Reads the memory of the process.
struct Reader<'a, F> {
    config: &'a PythonConfig,
    read: F,
}

impl<F: FnMut(u64, &mut [u8]) -> bool> Reader<'_, F> {
    /// `None` where the code object is not the same one any more, before or after.
    fn complete(&mut self, raw: &RawCode, copied: &Table) -> Option<(RawCode, Table)> {
        let object = self.object(raw)?;
        let mut done = *raw;
        if !has_text(raw.name_text, NAME_BYTES)
            && let Some(text) = self.text(object.name, &mut done.name, false)
        {
            done.name_text = text;
        }
        if !has_text(raw.file_text, FILE_BYTES)
            && let Some(text) = self.text(object.file, &mut done.file, true)
        {
            done.file_text = text;
        }
        let table = if copied.is_cut { self.table(raw, copied, object.lines) } else { None };
        let table = table.unwrap_or_else(|| copied.clone());
        (self.object(raw)? == object).then_some((done, table))
    }

    /// The pointers of the code object, if it is the one that was met.
    fn object(&mut self, raw: &RawCode) -> Option<Object> {
        let config = self.config;
        let mut copy = [0; CODE_READ_BYTES];
        let copy = copy.get_mut(..config.code_bytes as usize)?;
        if !(self.read)(raw.code.checked_add(config.code_from.into())?, copy) {
            return None;
        }
        let word = |at: u32| Some(u64::from_ne_bytes(*copy.get(at as usize..)?.first_chunk()?));
        let first_line = copy.get(config.code_first_line as usize..)?.first_chunk()?;
        let object = Object {
            name: word(config.code_name)?,
            file: word(config.code_file)?,
            lines: word(config.code_lines)?,
        };
        let data = object.lines.checked_add(config.bytes_data.into())?;
        (i32::from_ne_bytes(*first_line) == raw.first_line && data == raw.lines_addr)
            .then_some(object)
    }

    /// Copies the beginning or the end of a string. Only a whole copy changes the buffer.
    fn text(&mut self, addr: u64, into: &mut [u8], is_end: bool) -> Option<RawText> {
        let length = self.word(addr, self.config.text_length)?;
        let state = self.word(addr, self.config.text_state)? as u32;
        let (kind, is_compact, is_ascii) = (state >> 2 & 7, state >> 5 & 1, state >> 6 & 1);
        if is_compact == 0 || !matches!(kind, 1 | 2 | 4) {
            return None;
        }
        let length = u32::try_from(length).ok()?;
        let bytes = u64::from(length) * u64::from(kind);
        let copied = bytes.min(into.len() as u64);
        let skipped = if is_end { bytes - copied } else { 0 };
        let from = if is_ascii == 1 { self.config.text_ascii } else { self.config.text_compact };
        let mut copy = vec![0; copied as usize];
        if !(self.read)(addr.checked_add(from.into())?.checked_add(skipped)?, &mut copy) {
            return None;
        }
        into.get_mut(..copy.len())?.copy_from_slice(&copy);
        let (kind, ascii) = (kind as u8, is_ascii as u8);
        Some(RawText { length, kind, ascii, copied: copied as u16 })
    }

    /// The line table, which must be as long as was said and begin as the copy does.
    fn table(&mut self, raw: &RawCode, copied: &Table, lines: u64) -> Option<Table> {
        let length = self.word(lines, self.config.bytes_size)?;
        let is_known = raw.lines_bytes != 0 || raw.lines_copied != 0;
        if is_known && length != u64::from(raw.lines_bytes) {
            return None;
        }
        let mut bytes = vec![0; length.min(TABLE_LIMIT as u64) as usize];
        let is_same = (self.read)(raw.lines_addr, &mut bytes) && bytes.starts_with(&copied.bytes);
        is_same.then_some(Table { bytes, is_cut: length > TABLE_LIMIT as u64 })
    }

    fn word(&mut self, base: u64, offset: u32) -> Option<u64> {
        let mut bytes = [0; 8];
        (self.read)(base.checked_add(offset.into())?, &mut bytes).then(|| u64::from_ne_bytes(bytes))
    }
}

/// Addresses that a code object holds.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Object {
    name: u64,
    file: u64,
    lines: u64,
}
