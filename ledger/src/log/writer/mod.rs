//! Writing a log: rows in, sealed files out, and going on when the disk does not.

pub(crate) mod failure;
mod options;
mod retention;
pub(crate) mod table;
#[cfg(test)]
mod tests;

use std::{fs::File, path::Path};

use self::{
    failure::Failure,
    retention::Retention,
    table::{Closed, Context, Leftover, Sealed, TableState, due},
};
pub use self::{failure::LOG_WRITE_FAILED, options::Options};
use super::{
    BatchBuilder, Row, TABLES,
    dir::{Area, LogDir},
    error::{LogError, Result},
    manifest::{ClockAnchor, Manifest, RunInfo},
    name::{self, Run8},
    seal::{CHECKPOINT_SEQ, Sealer},
};
use crate::rows::{AnnotationRow, EventRow, LiveRow};

/// Borrows what the tables share without borrowing the tables.
macro_rules! context {
    ($writer:ident) => {
        Context {
            dir: &$writer.dir,
            manifest: &$writer.manifest,
            options: &$writer.options,
            now_ns: $writer.now_ns,
        }
    };
}

/// Free space below which starting a log is worth a warning.
const LOW_SPACE_BYTES: u64 = 256 << 20;
/// A sealed file of a few rows, which is larger than their journal; the manifest is smaller.
const SMALL_FILE_BYTES: u64 = 6 << 10;

/// What the owner of a [`Writer`] should do after a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick {
    /// A file of events was sealed: call [`Writer::checkpoint`] with the live set.
    pub checkpoint_due: bool,
    /// The log can be written again after a failure: rows that say who is who (processes,
    /// devices, stacks) may have been dropped and should be pushed again.
    pub recovered: bool,
}

/// Writes one run of a log. Belongs to one thread; [`Writer::push`] writes to disk only when
/// [`Options::batch_rows`] rows are there, everything else happens in [`Writer::tick`].
///
/// Nothing here panics or gives up: when the disk does not take rows, the writer holds
/// [`Options::batch_rows`] rows of each table, counts the ones it must drop after that
/// ([`Writer::dropped`]), and tries again every few seconds.
#[derive(Debug)]
pub struct Writer {
    dir: LogDir,
    run: Run8,
    manifest: Manifest,
    options: Options,
    tables: Vec<TableState>,
    now_ns: i64,
    last_sync_ns: i64,
    failure: Option<Failure>,
    leftovers: Vec<Leftover>,
    /// A journal could not be decoded and stays in `journal/`.
    left_journals: bool,
    retention: Retention,
    checkpoint_due: bool,
    /// `seq` of the newest checkpoint.
    last_checkpoint: Option<i64>,
    recovered: bool,
    /// Rows dropped and already told of in a `losses` row.
    told_dropped: u64,
    /// Held as long as the run lives.
    _lock: File,
}

impl Writer {
    /// Begins a run in `dir`, which is created where missing. Every table has an (empty) sealed
    /// file when this returns, so that readers find all of them.
    ///
    /// # Errors
    ///
    /// `dir` is a symbolic link, no directory, not writable or full; the message says which.
    pub fn create(dir: &Path, info: &RunInfo, options: Options) -> Result<Self> {
        let dir = LogDir::create(dir)?;
        let manifest = Manifest::new(info);
        let Some(run) = manifest.run8() else {
            return Err(LogError::directory(&dir.path, "the run has no id"));
        };
        let taken = "another run has the same id; start again";
        if dir.path.join(name::manifest(run)).exists() {
            return Err(LogError::directory(&dir.path, taken));
        }
        dir.probe(run)?;
        warn_of_low_space(&dir);
        let lock = dir.lock(run)?.ok_or_else(|| LogError::directory(&dir.path, taken))?;
        manifest.write(&dir)?;
        let retention = Retention::new(&dir, &manifest, options.max_disk_bytes);
        let start_ns = info.clock.wall_ns;
        let tables = TABLES.iter().enumerate().map(|(i, table)| TableState::new(i, table));
        let mut writer = Self {
            dir,
            run,
            manifest,
            options,
            tables: tables.collect(),
            now_ns: start_ns,
            last_sync_ns: start_ns,
            failure: None,
            leftovers: Vec::new(),
            left_journals: false,
            retention,
            checkpoint_due: false,
            last_checkpoint: None,
            recovered: false,
            told_dropped: 0,
            _lock: lock,
        };
        writer.write_empty_files()?;
        Ok(writer)
    }

    fn write_empty_files(&mut self) -> Result<()> {
        for state in &mut self.tables {
            let name = state.next_name(self.run);
            let sealer = Sealer::new(&self.dir, &self.manifest, name)?;
            let (relative, bytes) = sealer.finish(&self.dir, &name::date_dir(self.now_ns))?;
            let since_ns = self.now_ns;
            self.retention.add(Sealed { name, relative, bytes, since_ns, first_seq: None });
        }
        Ok(())
    }

    /// The first digits of the run's id, as in the names of its files.
    pub fn run8(&self) -> Run8 {
        self.run
    }

    /// The run as its manifest tells of it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Bytes free on the log's file system; `None` where it does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        self.dir.free_bytes().ok()
    }

    /// Bytes that the runs of this host take in the directory, as far as known.
    pub fn disk_bytes(&self) -> u64 {
        self.retention.bytes() + self.open_bytes()
    }

    fn open_bytes(&self) -> u64 {
        self.tables.iter().map(TableState::open_bytes).sum()
    }

    /// Why the log cannot be written at the moment, with what to do about it.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_ref().map(|failure| failure.message.as_str())
    }

    /// Rows dropped so far because the log could not be written, by table; only tables with any.
    pub fn dropped(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let lossy = self.tables.iter().filter(|state| state.dropped > 0);
        lossy.map(|state| (state.table.name, state.dropped))
    }

    /// Takes a row. Checkpoints of the live set go through [`Writer::checkpoint`] instead.
    pub fn push<R: Row>(&mut self, row: &R) {
        let (failed, batch_rows, now_ns) =
            (self.failure.is_some(), self.options.batch_rows, self.now_ns);
        let Some(state) = self.tables.get_mut(R::INDEX) else { return };
        if failed && state.rows.len() >= batch_rows {
            state.dropped += 1;
            return;
        }
        if state.rows.is_empty() {
            state.buffered_since_ns = now_ns;
        }
        state.rows.append(row);
        if !failed && state.rows.len() >= batch_rows {
            self.run_table(R::INDEX, true);
        }
    }

    /// Writes what has waited long enough, seals what is due, forces journals to disk, deletes
    /// what is over the limit, or tries again after a failure. Call it about four times a second
    /// with the wall clock's nanoseconds since the epoch; it may wait for the disk.
    pub fn tick(&mut self, now_ns: i64) -> Tick {
        self.now_ns = now_ns;
        if self.failure.is_some() {
            self.retry(false);
        }
        for index in 0..self.tables.len() {
            let flush = self.tables.get(index).is_some_and(|state| {
                due(now_ns, state.buffered_since_ns, self.options.flush_every_ns)
            });
            self.run_table(index, flush);
        }
        self.sync();
        self.reseal_leftovers(1);
        self.enforce_limit(0);
        Tick {
            checkpoint_due: std::mem::take(&mut self.checkpoint_due),
            recovered: std::mem::take(&mut self.recovered),
        }
    }

    /// Writes a checkpoint of the live set as one sealed file of its own: all allocations that
    /// live after the event numbered `seq`. A checkpoint is whole or not there at all; one that
    /// cannot be written is left out, the next one makes up for it. Where no event came since the
    /// last checkpoint, there is nothing to write.
    pub fn checkpoint(&mut self, seq: i64, rows: impl IntoIterator<Item = LiveRow>) {
        if self.failure.is_some() || self.last_checkpoint == Some(seq) {
            return;
        }
        match self.write_checkpoint(seq, rows) {
            Ok(sealed) => {
                self.last_checkpoint = Some(seq);
                self.retention.add(sealed);
            }
            Err(e) => self.fail(&e),
        }
    }

    fn write_checkpoint(
        &mut self,
        seq: i64,
        rows: impl IntoIterator<Item = LiveRow>,
    ) -> Result<Sealed> {
        let Some(state) = self.tables.get_mut(LiveRow::INDEX) else {
            return Err(LogError::directory(&self.dir.path, "the table live is missing"));
        };
        let name = state.next_name(self.run);
        let mut sealer = Sealer::new(&self.dir, &self.manifest, name)?;
        sealer.note(CHECKPOINT_SEQ, seq.to_string());
        if let Err(e) = fill(&mut sealer, rows, self.options.batch_rows) {
            sealer.abandon(&self.dir);
            return Err(e);
        }
        let (relative, bytes) = sealer.finish(&self.dir, &name::date_dir(self.now_ns))?;
        Ok(Sealed { name, relative, bytes, since_ns: self.now_ns, first_seq: Some(seq) })
    }

    /// Notes that the clocks have moved apart; the manifest gets another anchor.
    pub fn add_clock_anchor(&mut self, anchor: ClockAnchor) {
        self.manifest.clock_anchors.push(anchor);
        if self.failure.is_none()
            && let Err(e) = self.manifest.write(&self.dir)
        {
            self.fail(&e);
        }
    }

    /// Seals everything and marks the run as ended.
    ///
    /// # Errors
    ///
    /// Something could not be written. What is sealed stays; rows in a journal are still read and
    /// can be sealed later with [`super::recover`].
    pub fn finish(mut self, end_ns: i64) -> Result<()> {
        self.now_ns = end_ns;
        if self.failure.is_some() {
            self.retry(true);
        }
        // Before the last files are made: no checkpoint would stand in for what is in them.
        self.enforce_limit(self.closing_bytes());
        for index in 0..self.tables.len() {
            self.run_table(index, true);
            self.seal_table(index);
        }
        self.reseal_leftovers(usize::MAX);
        if let Some(failure) = self.failure.take() {
            return Err(LogError::directory(&self.dir.path, failure.message));
        }
        self.manifest.end_ns = Some(end_ns);
        self.manifest.sealed = self.leftovers.is_empty() && !self.left_journals;
        self.manifest.write(&self.dir)?;
        self.dir.remove(Area::Journal, &name::lock(self.run))
    }

    /// By how much the log may still grow when it is closed.
    fn closing_bytes(&self) -> u64 {
        let waiting = self.tables.iter().filter(|table| table.open_bytes() > 0).count();
        (waiting as u64 + 2) * SMALL_FILE_BYTES
    }

    /// Flushes a table where asked, and seals its file where due.
    fn run_table(&mut self, index: usize, flush: bool) {
        if self.failure.is_some() {
            return;
        }
        let context = context!(self);
        let Some(state) = self.tables.get_mut(index) else { return };
        let flushed = if flush { state.flush(&context, self.run) } else { Ok(()) };
        let wants_seal = state.wants_seal(&context);
        match flushed {
            Err(e) => self.fail(&e),
            Ok(()) if wants_seal => self.seal_table(index),
            Ok(()) => {}
        }
    }

    fn seal_table(&mut self, index: usize) {
        if self.failure.is_some() {
            return;
        }
        let context = context!(self);
        let Some(state) = self.tables.get_mut(index) else { return };
        let (closed, result) = state.seal(&context);
        match closed {
            Some(Closed::Sealed(sealed)) => {
                self.checkpoint_due |= index == EventRow::INDEX;
                self.retention.add(sealed);
            }
            Some(Closed::Left(leftover)) => self.leftovers.push(leftover),
            None => {}
        }
        if let Err(e) = result {
            self.fail(&e);
        }
    }

    fn sync(&mut self) {
        if self.failure.is_some()
            || !due(self.now_ns, self.last_sync_ns, self.options.sync_every_ns)
        {
            return;
        }
        self.last_sync_ns = self.now_ns;
        if let Err(e) = self.tables.iter_mut().try_for_each(TableState::sync) {
            self.fail(&e);
        }
    }

    /// Deletes the oldest samples over the limit, with room for `more_bytes`, and says so in the log.
    fn enforce_limit(&mut self, more_bytes: u64) {
        if self.failure.is_some() {
            return;
        }
        let open_bytes = self.open_bytes() + more_bytes;
        let enforced = self.retention.enforce(&self.dir, open_bytes);
        let deleted = enforced.deleted.map(|it| ("deleted", it.text, Some(it.bytes as i64)));
        let too_small = enforced.too_small.map(|text| ("warning", text, None));
        for (kind, text, value) in deleted.into_iter().chain(too_small) {
            let (ts_ns, kind) = (self.now_ns, kind.to_owned());
            self.push(&AnnotationRow { ts_ns, proc_id: None, kind, text, value });
        }
    }
}

fn fill(
    sealer: &mut Sealer,
    rows: impl IntoIterator<Item = LiveRow>,
    batch_rows: usize,
) -> Result<()> {
    let mut builder = BatchBuilder::new(LiveRow::TABLE);
    let table = LiveRow::TABLE.name.as_ref();
    let failed = |e| LogError::arrow("build rows for table", table, e);
    for row in rows {
        builder.append(&row);
        if builder.len() >= batch_rows {
            sealer.write(&builder.finish().map_err(failed)?)?;
        }
    }
    sealer.write(&builder.finish().map_err(failed)?)
}

fn warn_of_low_space(dir: &LogDir) {
    if let Ok(free_bytes) = dir.free_bytes()
        && free_bytes < LOW_SPACE_BYTES
    {
        let path = dir.path.display();
        tracing::warn!(%path, free_bytes, "little space is left for the log; see --max-disk");
    }
}
