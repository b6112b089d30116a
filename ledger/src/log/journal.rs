//! The journal of one file of one table: an Arrow IPC stream of what is not yet sealed.
//!
//! Batches are written whole, with one call each, so that the death of the agent costs what was
//! not yet written and nothing else; a batch cut by a power failure or a full disk is found by
//! its framing and left out.

use std::{
    fs::File,
    io::{self, BufReader, Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use arrow::{
    array::RecordBatch,
    datatypes::{Schema, SchemaRef},
    ipc::{reader::StreamReader, root_as_message, writer::StreamEncoder},
};

use super::error::{LogError, Result, guard};

/// Writes a journal.
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    encoder: StreamEncoder,
    bytes: Vec<u8>,
    written: u64,
    unsynced: bool,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Journal {
    /// Begins a journal in an empty file.
    pub(crate) fn new(file: File, path: PathBuf, schema: &Schema) -> Result<Self> {
        let encoder = StreamEncoder::try_new(schema)
            .map_err(|e| LogError::arrow("begin journal", &path, e))?;
        Ok(Self { path, file, encoder, bytes: Vec::new(), written: 0, unsynced: false })
    }

    /// Bytes written.
    pub(crate) fn len(&self) -> u64 {
        self.written
    }

    /// Writes a batch through to the operating system. After an error the file ends with the
    /// batch before.
    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        self.check_linked()?;
        let failed = |e| LogError::arrow("encode a batch for journal", &self.path, e);
        self.bytes.clear();
        for buffer in self.encoder.encode(batch).map_err(failed)? {
            self.bytes.extend_from_slice(&buffer);
        }
        if let Err(e) = self.file.write_all(&self.bytes) {
            // Should this fail too, readers find the cut by its framing.
            if let Err(e) = self.file.set_len(self.written) {
                tracing::debug!(path = %self.path.display(), error = %e, "journal not cut back");
            }
            return Err(LogError::io("write journal", &self.path, e));
        }
        self.written += self.bytes.len() as u64;
        self.unsynced = true;
        Ok(())
    }

    /// Makes what was written survive a power cut.
    pub(crate) fn sync(&mut self) -> Result<()> {
        if self.unsynced {
            self.check_linked()?;
            self.file
                .sync_data()
                .map_err(|e| LogError::io("write to disk journal", &self.path, e))?;
            self.unsynced = false;
        }
        Ok(())
    }

    /// Writing to a removed file succeeds, and the rows are gone: find out.
    fn check_linked(&self) -> Result<()> {
        let stat = rustix::fs::fstat(&self.file)
            .map_err(|e| LogError::io("look at journal", &self.path, e))?;
        if stat.st_nlink == 0 {
            return Err(LogError::Vanished { path: self.path.clone() });
        }
        Ok(())
    }
}

/// A journal found on disk: the part of it that is whole.
#[derive(Clone, Debug)]
pub(crate) struct JournalFile {
    pub(crate) path: PathBuf,
    file: Arc<File>,
    /// Length of the whole messages at its start.
    whole: u64,
    /// Bytes after them.
    pub(crate) torn: u64,
    /// Rows in them, schema aside.
    pub(crate) rows: u64,
}

impl JournalFile {
    /// Looks through the framing of an open journal.
    pub(crate) fn scan(file: File, path: &Path) -> Result<Self> {
        let len = file.metadata().map_err(|e| LogError::io("look at", path, e))?.len();
        let (mut whole, mut rows, mut messages) = (0, 0, 0);
        while let Some(message) = guard(path, || next_message(&file, path, whole, len))? {
            // The first message is the schema; without it there is nothing to read.
            if (messages == 0) == message.rows.is_some() {
                break;
            }
            whole = message.end;
            rows += message.rows.unwrap_or(0);
            messages += 1;
        }
        let file = Arc::new(file);
        Ok(Self { path: path.to_owned(), file, whole, torn: len - whole, rows })
    }

    /// The batches, none where not even the schema is whole.
    pub(crate) fn batches(&self) -> Result<Option<JournalBatches>> {
        if self.whole == 0 {
            return Ok(None);
        }
        let bytes = BufReader::with_capacity(
            64 << 10,
            Section { file: Arc::clone(&self.file), pos: 0, end: self.whole },
        );
        let reader = guard(&self.path, || {
            StreamReader::try_new(bytes, None)
                .map_err(|e| LogError::arrow("read journal", &self.path, e))
        })?;
        let schema = reader.schema();
        Ok(Some(JournalBatches { path: self.path.clone(), schema, reader: Some(reader) }))
    }
}

/// Where a message ends, and how many rows it holds (none: a schema).
struct Message {
    end: u64,
    rows: Option<u64>,
}

/// Reads the framing of the message at `start`; `None` where no whole one is left.
fn next_message(file: &File, path: &Path, start: u64, len: u64) -> Result<Option<Message>> {
    let mut prefix = [0; 8];
    if start + 8 > len {
        return Ok(None);
    }
    read_at(file, path, &mut prefix, start)?;
    let [c0, c1, c2, c3, l0, l1, l2, l3] = prefix;
    let head_len = u64::from(u32::from_le_bytes([l0, l1, l2, l3]));
    if [c0, c1, c2, c3] != [0xff; 4] || head_len == 0 || start + 8 + head_len > len {
        return Ok(None);
    }
    let mut head = vec![0; head_len as usize];
    read_at(file, path, &mut head, start + 8)?;
    let Ok(message) = root_as_message(&head) else { return Ok(None) };
    let body = u64::try_from(message.bodyLength()).unwrap_or(u64::MAX);
    let end = (start + 8 + head_len).saturating_add(body);
    let rows = message.header_as_record_batch().map(|batch| batch.length().max(0) as u64);
    let known = rows.is_some() || message.header_as_schema().is_some();
    Ok((end <= len && known).then_some(Message { end, rows }))
}

fn read_at(file: &File, path: &Path, bytes: &mut [u8], at: u64) -> Result<()> {
    file.read_exact_at(bytes, at).map_err(|e| LogError::io("read", path, e))
}

/// Batches of a journal.
pub(crate) struct JournalBatches {
    path: PathBuf,
    schema: SchemaRef,
    /// `None` after the end or an error.
    reader: Option<StreamReader<BufReader<Section>>>,
}

impl JournalBatches {
    /// The columns of the batches.
    pub(crate) fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}

impl Iterator for JournalBatches {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let reader = self.reader.as_mut()?;
        let next = guard(&self.path, || {
            reader.next().transpose().map_err(|e| LogError::arrow("read journal", &self.path, e))
        });
        if !matches!(next, Ok(Some(_))) {
            self.reader = None;
        }
        next.transpose()
    }
}

/// The first bytes of a file, read by position: several readers share one descriptor.
struct Section {
    file: Arc<File>,
    pos: u64,
    end: u64,
}

impl Read for Section {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.pos).unwrap_or(usize::MAX);
        let wanted = bytes.len().min(left);
        let Some(bytes) = bytes.get_mut(..wanted) else { return Ok(0) };
        let read = self.file.read_at(bytes, self.pos)?;
        self.pos += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::{BatchBuilder, Row};
    use crate::rows::AnnotationRow;

    fn batch(first: i64, rows: i64) -> RecordBatch {
        let mut builder = BatchBuilder::new(AnnotationRow::TABLE);
        for ts_ns in first..first + rows {
            builder.append(&AnnotationRow {
                ts_ns,
                text: "x".repeat(ts_ns as usize % 7),
                ..Default::default()
            });
        }
        builder.finish().unwrap()
    }

    /// A journal of two batches of 10 rows, and the length at which the second begins.
    fn two_batches() -> (Vec<u8>, usize) {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let file = temp.reopen().unwrap();
        let schema = AnnotationRow::TABLE.arrow_schema();
        let mut journal = Journal::new(file, temp.path().to_owned(), &schema).unwrap();
        journal.write(&batch(0, 10)).unwrap();
        let first = journal.len() as usize;
        journal.write(&batch(10, 10)).unwrap();
        (std::fs::read(temp.path()).unwrap(), first)
    }

    fn scan(bytes: &[u8]) -> JournalFile {
        let temp = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(temp.path(), bytes).unwrap();
        JournalFile::scan(temp.reopen().unwrap(), temp.path()).unwrap()
    }

    fn rows(journal: &JournalFile) -> Result<usize> {
        let batches = journal.batches()?.into_iter().flatten();
        batches.map(|batch| batch.map(|batch| batch.num_rows())).sum()
    }

    #[test]
    fn cut_at_every_byte_of_its_last_batch_it_keeps_the_others() {
        let (bytes, first) = two_batches();
        for len in first..bytes.len() {
            let journal = scan(&bytes[..len]);
            assert_eq!(rows(&journal).unwrap(), 10, "cut at {len}");
            assert_eq!(journal.rows, 10);
            assert_eq!(journal.torn, (len - first) as u64);
        }
        assert_eq!(rows(&scan(&bytes)).unwrap(), 20);
    }

    #[test]
    fn cut_inside_the_schema_it_is_empty() {
        let (bytes, _) = two_batches();
        for len in [0, 1, 7, 8, 100] {
            assert_eq!(rows(&scan(&bytes[..len])).unwrap(), 0, "cut at {len}");
        }
    }

    #[test]
    fn a_tail_of_zeros_ends_it() {
        let (mut bytes, first) = two_batches();
        bytes[first..].fill(0);
        assert_eq!(rows(&scan(&bytes)).unwrap(), 10);
        let (mut bytes, _) = two_batches();
        bytes.extend([0; 4096]);
        assert_eq!(rows(&scan(&bytes)).unwrap(), 20);
    }

    #[test]
    fn any_flipped_byte_is_an_error_or_other_values_never_a_panic() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let (bytes, _) = two_batches();
        for at in 0..bytes.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] ^= flip;
                let read = scan_damaged(&bytes).and_then(|journal| rows(&journal));
                assert!(read.is_err() || read.is_ok_and(|rows| rows <= 20));
            }
        }
        std::panic::set_hook(hook);
    }

    fn scan_damaged(bytes: &[u8]) -> Result<JournalFile> {
        let temp = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(temp.path(), bytes).unwrap();
        JournalFile::scan(temp.reopen().unwrap(), temp.path())
    }

    #[test]
    fn a_removed_journal_is_noticed() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let file = temp.reopen().unwrap();
        let path = temp.path().to_owned();
        let schema = AnnotationRow::TABLE.arrow_schema();
        let mut journal = Journal::new(file, path, &schema).unwrap();
        journal.write(&batch(0, 1)).unwrap();
        drop(temp);
        assert!(matches!(journal.write(&batch(1, 1)), Err(LogError::Vanished { .. })));
    }
}
