//! Reading logs: one or several directories, of one or several runs, running, crashed or ended.

mod decode;
mod gaps;
mod order;
mod part;
mod scan;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use arrow::{array::RecordBatch, datatypes::SchemaRef};

pub(crate) use self::scan::{checkpoints, footer, list_sealed, scan_sealed};
pub use self::{
    decode::BatchRows,
    gaps::Gap,
    order::{Events, RunEvent},
    scan::{Problem, ProblemKind},
};
use self::{
    order::rows_of,
    part::{BATCH_ROWS, Columns, PartBatches},
    scan::{Found, Part},
};
use super::{
    Manifest, Row, TABLES, Table,
    error::{LogError, Result},
    name::Run8,
    table_index,
};
use crate::rows::{EventRow, LiveRow};

/// A checkpoint of the live set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The run.
    pub run: Run8,
    /// The live set is the one after this event.
    pub seq: i64,
    /// The file that holds it.
    pub path: PathBuf,
}

/// Logs, opened for reading. What is read is what was there when they were opened; journals are
/// read as they are, so that running and crashed logs need no recovery.
#[derive(Debug)]
pub struct Log {
    /// By table, run and number.
    parts: Vec<Part>,
    manifests: Vec<Manifest>,
    problems: Vec<Problem>,
}

impl Log {
    /// Opens the logs in `dirs`.
    ///
    /// # Errors
    ///
    /// A directory cannot be listed, or none of them holds a log. Single files that cannot be
    /// read are [`Log::problems`], not errors.
    pub fn open(dirs: &[PathBuf]) -> Result<Self> {
        let mut found = Found::default();
        for dir in dirs {
            found.add(dir)?;
        }
        if found.parts.is_empty() {
            return Err(nothing(dirs, &found.problems));
        }
        let mut parts: Vec<Part> = found.parts.into_values().collect();
        parts.sort_by_key(|part| part.name);
        let mut manifests: Vec<Manifest> = found.manifests.into_iter().map(|(_, m)| m).collect();
        manifests.sort_by(|a, b| (a.start_ns, &a.run_id).cmp(&(b.start_ns, &b.run_id)));
        manifests.dedup_by(|a, b| a.run_id == b.run_id);
        Ok(Self { parts, manifests, problems: found.problems })
    }

    /// The manifests of the runs, by their start.
    pub fn manifests(&self) -> &[Manifest] {
        &self.manifests
    }

    /// Files that are left out or read in part. Reports must say so.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Rows of a table, counted without reading them.
    pub fn row_count(&self, table: &str) -> u64 {
        self.of_table(table_index(table)).map(|part| part.rows).sum()
    }

    fn of_table(&self, table: Option<usize>) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(move |part| Some(part.name.table) == table)
    }

    /// Rows of `R`'s table, file by file in the order of runs and numbers. An error is about one
    /// file, which it names; the next item comes from the file after it.
    pub fn rows<R: Row>(&self) -> impl Iterator<Item = Result<R>> + '_ {
        rows_of(self.of_table(Some(R::INDEX)), BATCH_ROWS)
    }

    /// Batches of a table as they are in the files, with the path of each one's file.
    pub fn batches(&self, table: &str) -> impl Iterator<Item = Result<(&Path, RecordBatch)>> + '_ {
        self.of_table(table_index(table)).flat_map(|part| {
            let (batches, error) = match PartBatches::open(part, Columns::All, BATCH_ROWS) {
                Ok(batches) => (Some(batches), None),
                Err(e) => (None, Some(Err(e))),
            };
            let batches = batches.into_iter().flatten();
            let batches = batches.map(|batch| batch.map(|batch| (part.path.as_path(), batch)));
            error.into_iter().chain(batches)
        })
    }

    /// The columns of each file, as it says them.
    pub(super) fn schemas(
        &self,
    ) -> impl Iterator<Item = (&Path, &'static Table, Result<SchemaRef>)> + '_ {
        self.parts.iter().filter_map(|part| {
            let table = *TABLES.get(part.name.table)?;
            Some((part.path.as_path(), table, part.schema(table)))
        })
    }

    fn by_run(&self, table: usize) -> BTreeMap<Run8, Vec<&Part>> {
        let mut runs: BTreeMap<Run8, Vec<&Part>> = BTreeMap::new();
        for part in self.of_table(Some(table)) {
            runs.entry(part.name.run).or_default().push(part);
        }
        runs
    }

    /// All events: by `seq` within a run, runs merged by time. Memory is bounded: a batch a run,
    /// and a window for rows that came late.
    pub fn events(&self) -> Events<'_> {
        Events::new(self.by_run(EventRow::INDEX).into_iter().collect())
    }

    /// Ranges of `seq` that are missing, by run. Reads footers only, where these tell.
    ///
    /// # Errors
    ///
    /// A file that had to be read could not be.
    pub fn gaps(&self) -> Result<Vec<Gap>> {
        let runs = self.by_run(EventRow::INDEX).into_iter();
        let gaps = runs.map(|(run, parts)| gaps::gaps(run, &parts)).collect::<Result<Vec<_>>>()?;
        Ok(gaps.into_iter().flatten().collect())
    }

    /// Checkpoints of the live set, by run and `seq`.
    pub fn checkpoints(&self) -> Vec<Checkpoint> {
        let mut checkpoints: Vec<Checkpoint> = self
            .of_table(Some(LiveRow::INDEX))
            .flat_map(|part| {
                let seqs = part.checkpoints.iter();
                seqs.map(|&seq| Checkpoint { run: part.name.run, seq, path: part.path.clone() })
            })
            .collect();
        checkpoints.sort_by_key(|checkpoint| (checkpoint.run, checkpoint.seq));
        checkpoints
    }

    /// The allocations of one checkpoint.
    pub fn checkpoint_rows<'a>(
        &'a self,
        checkpoint: &'a Checkpoint,
    ) -> impl Iterator<Item = Result<LiveRow>> + 'a {
        let part = self.of_table(Some(LiveRow::INDEX)).find(|part| part.path == checkpoint.path);
        let several = part.is_some_and(|part| part.checkpoints.len() > 1);
        let rows = rows_of::<LiveRow>(part, BATCH_ROWS);
        rows.filter(move |row| {
            !several || row.as_ref().map_or(true, |row| row.seq == checkpoint.seq)
        })
    }
}

fn nothing(dirs: &[PathBuf], problems: &[Problem]) -> LogError {
    let path = dirs.first().cloned().unwrap_or_default();
    let problem = match problems.first() {
        None => "no log of vramscope is there; name the directory that holds events/".to_owned(),
        Some(first) => format!(
            "nothing in it can be read; {} files have problems, the first is {}: {}",
            problems.len(),
            first.path.display(),
            first.message
        ),
    };
    LogError::Directory { path, problem }
}
