//! One table's way to disk: buffered rows, the journal, the Parquet file that is being written.

use std::path::PathBuf;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;

use super::Options;
use crate::log::{
    BatchBuilder, Table,
    dir::{Area, LogDir},
    error::{LogError, Result, guard},
    journal::{Journal, JournalFile},
    manifest::Manifest,
    name::{self, ARROWS, FileName, Run8},
    seal::Sealer,
};

/// What all tables of a run share.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) dir: &'a LogDir,
    pub(super) manifest: &'a Manifest,
    pub(super) options: &'a Options,
    pub(super) now_ns: i64,
}

/// A file that has its place in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sealed {
    pub(crate) name: FileName,
    /// Relative to the log.
    pub(crate) relative: PathBuf,
    pub(crate) bytes: u64,
    /// When it was begun.
    pub(crate) since_ns: i64,
    /// First `seq` in it (events), `seq` of the last checkpoint in it (live).
    pub(crate) first_seq: Option<i64>,
}

/// A journal whose Parquet file could not be written; readers use it as it is.
#[derive(Clone, Debug)]
pub(super) struct Leftover {
    pub(super) name: FileName,
    pub(super) rows: u64,
    pub(super) since_ns: i64,
}

/// How a file ended.
#[derive(Debug)]
pub(super) enum Closed {
    Sealed(Sealed),
    Left(Leftover),
}

/// The file that a table's rows go to now.
#[derive(Debug)]
struct Open {
    name: FileName,
    journal: Journal,
    /// `None` once writing it failed; the journal has all rows.
    sealer: Option<Sealer>,
    rows: u64,
    since_ns: i64,
    first_seq: Option<i64>,
}

/// One table of a run.
#[derive(Debug)]
pub(super) struct TableState {
    pub(super) index: usize,
    pub(super) table: &'static Table,
    pub(super) rows: BatchBuilder,
    /// When the oldest buffered row came.
    pub(super) buffered_since_ns: i64,
    /// A batch that could not be written yet.
    stuck: Option<RecordBatch>,
    open: Option<Open>,
    next_seq: u32,
    /// Rows that found no room while the log could not be written.
    pub(super) dropped: u64,
}

/// Whether `limit` has passed since `then`; a clock that was set back counts as passed.
pub(super) fn due(now_ns: i64, then_ns: i64, limit_ns: i64) -> bool {
    now_ns < then_ns || now_ns.saturating_sub(then_ns) >= limit_ns
}

fn day(ts_ns: i64) -> i64 {
    ts_ns.div_euclid(86_400_000_000_000)
}

impl TableState {
    pub(super) fn new(index: usize, table: &'static Table) -> Self {
        Self {
            index,
            table,
            rows: BatchBuilder::new(table),
            buffered_since_ns: 0,
            stuck: None,
            open: None,
            next_seq: 0,
            dropped: 0,
        }
    }

    /// The name of the table's next file.
    pub(super) fn next_name(&mut self, run: Run8) -> FileName {
        let seq = self.next_seq;
        self.next_seq += 1;
        FileName { table: self.index, run, seq }
    }

    /// Bytes of the journal and of the unfinished Parquet file.
    pub(super) fn open_bytes(&self) -> u64 {
        self.open
            .as_ref()
            .map_or(0, |open| open.journal.len() + open.sealer.as_ref().map_or(0, Sealer::bytes))
    }

    /// Bytes held in memory by the unfinished Parquet file.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        let sealer = self.open.as_ref().and_then(|open| open.sealer.as_ref());
        sealer.map_or(0, Sealer::memory)
    }

    /// Writes what is buffered to the journal and the Parquet file.
    ///
    /// # Errors
    ///
    /// Rows that did not reach the journal stay in memory for the next attempt.
    pub(super) fn flush(&mut self, context: &Context<'_>, run: Run8) -> Result<()> {
        if let Some(batch) = self.stuck.take() {
            self.write(batch, context, run)?;
        }
        if self.rows.is_empty() {
            return Ok(());
        }
        let rows = self.rows.len() as u64;
        match self.rows.finish() {
            Ok(batch) => self.write(batch, context, run),
            Err(e) => {
                self.dropped += rows;
                Err(LogError::arrow("build rows for table", self.table.name.as_ref(), e))
            }
        }
    }

    fn write(&mut self, batch: RecordBatch, context: &Context<'_>, run: Run8) -> Result<()> {
        let written = self.journal_batch(&batch, context, run);
        if written.is_err() {
            self.stuck = Some(batch);
            return written;
        }
        let Some(open) = self.open.as_mut() else { return Ok(()) };
        open.rows += batch.num_rows() as u64;
        open.first_seq = open.first_seq.or_else(|| first_seq(&batch));
        let sealed = open.sealer.as_mut().map_or(Ok(()), |sealer| sealer.write(&batch));
        if sealed.is_err() {
            // The writer's state is unknown now; the journal has the rows.
            if let Some(sealer) = open.sealer.take() {
                sealer.abandon(context.dir);
            }
        }
        sealed
    }

    fn journal_batch(
        &mut self,
        batch: &RecordBatch,
        context: &Context<'_>,
        run: Run8,
    ) -> Result<()> {
        if self.open.is_none() {
            let name = self.next_name(run);
            self.open = Some(Open::new(name, &self.rows, context)?);
        }
        self.open.as_mut().map_or(Ok(()), |open| open.journal.write(batch))
    }

    /// Makes the journal survive a power cut.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.open.as_mut().map_or(Ok(()), |open| open.journal.sync())
    }

    /// Whether the file is old, large or of yesterday.
    pub(super) fn wants_seal(&self, context: &Context<'_>) -> bool {
        let Some(open) = self.open.as_ref().filter(|open| open.rows > 0) else { return false };
        let options = context.options;
        open.rows >= options.max_file_rows
            || open.sealer.as_ref().is_some_and(|sealer| sealer.bytes() >= options.max_file_bytes)
            || open.journal.len() >= options.journal_limit()
            || due(context.now_ns, open.since_ns, options.max_file_age_ns)
            || day(context.now_ns) != day(open.since_ns)
    }

    /// Finishes the file. `Ok(None)`: there was none.
    ///
    /// # Errors
    ///
    /// The file could not be finished; its journal stays and is handed back too.
    pub(super) fn seal(&mut self, context: &Context<'_>) -> (Option<Closed>, Result<()>) {
        let Some(open) = self.open.take() else { return (None, Ok(())) };
        let leftover = Leftover { name: open.name, rows: open.rows, since_ns: open.since_ns };
        let Some(parquet) = open.sealer else { return (Some(Closed::Left(leftover)), Ok(())) };
        match parquet.finish(context.dir, &name::date_dir(open.since_ns)) {
            Ok((relative, bytes)) => {
                let removed = context.dir.remove(Area::Journal, &open.name.with(ARROWS));
                let (name, since_ns, first_seq) = (open.name, open.since_ns, open.first_seq);
                let sealed = Sealed { name, relative, bytes, since_ns, first_seq };
                (Some(Closed::Sealed(sealed)), removed)
            }
            Err(e) => (Some(Closed::Left(leftover)), Err(e)),
        }
    }

    /// Lets go of the file without finishing it: its journal stays where it has rows.
    pub(super) fn abandon(&mut self, dir: &LogDir) -> Option<Leftover> {
        let open = self.open.take()?;
        if let Some(sealer) = open.sealer {
            sealer.abandon(dir);
        }
        if open.rows > 0 {
            return Some(Leftover { name: open.name, rows: open.rows, since_ns: open.since_ns });
        }
        if let Err(e) = dir.remove(Area::Journal, &open.name.with(ARROWS)) {
            tracing::debug!(error = %e, "empty journal left behind");
        }
        None
    }
}

impl Open {
    fn new(name: FileName, rows: &BatchBuilder, context: &Context<'_>) -> Result<Self> {
        let (dir, file_name) = (context.dir, name.with(ARROWS));
        let path = dir.path_in(Area::Journal, &file_name);
        let file = dir.create_file(Area::Journal, &file_name)?;
        let journal = Journal::new(file, path, rows.schema())?;
        // Without the Parquet file the rows are still safe; sealing is tried again later.
        let sealer = Sealer::new(dir, context.manifest, name)
            .inspect_err(|e| tracing::debug!(error = %e, "journal only for now"))
            .ok();
        Ok(Self { name, journal, sealer, rows: 0, since_ns: context.now_ns, first_seq: None })
    }
}

fn first_seq(batch: &RecordBatch) -> Option<i64> {
    let column = batch.column_by_name("seq")?.as_primitive_opt::<Int64Type>()?;
    column.values().first().copied()
}

/// Seals a journal that was left, then removes it.
pub(crate) fn reseal(
    dir: &LogDir,
    manifest: &Manifest,
    name: FileName,
    since_ns: i64,
) -> Result<Sealed> {
    let journal_name = name.with(ARROWS);
    let path = dir.path_in(Area::Journal, &journal_name);
    let journal = JournalFile::scan(dir.open_file(Area::Journal, &journal_name)?, &path)?;
    let mut sealer = Sealer::new(dir, manifest, name)?;
    let copied = guard(&path, || {
        let mut seq = None;
        for batch in journal.batches()?.into_iter().flatten() {
            let batch = batch?;
            seq = seq.or_else(|| first_seq(&batch));
            sealer.write(&batch)?;
        }
        Ok(seq)
    });
    let first_seq = match copied {
        Ok(seq) => seq,
        Err(e) => {
            sealer.abandon(dir);
            return Err(e);
        }
    };
    let (relative, bytes) = sealer.finish(dir, &name::date_dir(since_ns))?;
    dir.remove(Area::Journal, &journal_name)?;
    Ok(Sealed { name, relative, bytes, since_ns, first_seq })
}
