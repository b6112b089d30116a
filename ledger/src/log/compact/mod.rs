//! Merging the many small files of runs that have ended into few large ones.
//!
//! Readers know no list of files: they read what lies in a table's directory. So the merged files
//! of a day are laid out in `staging/` beside links to the day's other files, and then the two
//! directories are exchanged at once. Readers that list the table see the old files or the new
//! ones, never both and never neither; a crash at any moment leaves one of the two, and what it
//! leaves in `staging/` is put right by the next compaction or recovery.

mod merge;
mod plan;
pub(super) mod swap;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use self::{
    plan::{Day, Plan},
    swap::{How, Place},
};
use super::{
    dir::{Area, LogDir},
    error::{LogError, Result, chain},
    name::{self, Run8},
};

/// Size of merged files where nothing else is asked for.
pub const TARGET_BYTES: u64 = 128 << 20;

/// What to merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compaction {
    /// Files are merged up to about this size; those of half of it and more are left alone.
    pub target_bytes: u64,
    /// Change nothing, tell what would be merged.
    pub dry_run: bool,
    /// Runs of other hosts too.
    pub other_hosts: bool,
}

impl Default for Compaction {
    fn default() -> Self {
        Self { target_bytes: TARGET_BYTES, dry_run: false, other_hosts: false }
    }
}

/// Files of one table that were merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Files before.
    pub files_before: u64,
    /// Files that stand in for them.
    pub files_after: u64,
    /// Bytes of the files before.
    pub bytes_before: u64,
    /// Bytes of those that stand in for them; `None` in a dry run.
    pub bytes_after: Option<u64>,
    /// Rows, the same before and after.
    pub rows: u64,
}

impl Merged {
    /// Adds the figures of another.
    pub fn add(&mut self, other: Self) {
        self.files_before += other.files_before;
        self.files_after += other.files_after;
        self.bytes_before += other.bytes_before;
        self.bytes_after = self.bytes_after.zip(other.bytes_after).map(|(a, b)| a + b);
        self.rows += other.rows;
    }
}

/// What [`compact`] did, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// By table, only those with something to merge.
    pub tables: BTreeMap<&'static str, Merged>,
    /// Files and directories that were left as they are, relative to the log, and why.
    pub left: Vec<(PathBuf, String)>,
    /// Runs that were left as they are, and why.
    pub waiting: BTreeMap<Run8, String>,
    /// Directories in which an interrupted compaction was put right first.
    pub repaired: Vec<PathBuf>,
}

impl Compacted {
    fn add(&mut self, table: &'static str, merged: Merged) {
        let start = Merged { bytes_after: Some(0), ..Merged::default() };
        self.tables.entry(table).or_insert(start).add(merged);
    }
}

/// Merges the sealed files of runs that have ended: by table, day and run, rows in the order in
/// which they were written, events in that of `seq`. Files keep owner and mode. Memory is bounded
/// by a row group and the window in which events are put in order.
///
/// # Errors
///
/// The directory cannot be read or written, or another compaction is going on. What keeps single
/// days from being merged is in [`Compacted::left`].
pub fn compact(path: &Path, options: Compaction) -> Result<Compacted> {
    compact_as(path, options, &mut How::default())
}

fn compact_as(path: &Path, options: Compaction, how: &mut How<'_>) -> Result<Compacted> {
    let dir = LogDir::open_for_owner(path)?;
    let mut compacted = Compacted::default();
    let lock = if options.dry_run {
        None
    } else {
        let Some(lock) = dir.lock_compaction()? else {
            let problem = "it is being compacted by another process; try again when that is done";
            return Err(LogError::directory(path, problem));
        };
        compacted.repaired = swap::repair(&dir)?;
        Some(lock)
    };
    let plan = Plan::make(&dir, options)?;
    compacted.left = plan.left;
    compacted.waiting = plan.waiting;
    for day in &plan.days {
        if options.dry_run {
            compacted.add(day.table().name, day.merged(None));
            continue;
        }
        match compact_day(&dir, day, how) {
            Ok(bytes) => compacted.add(day.table().name, day.merged(Some(bytes))),
            Err(e) if how.crashed => return Err(e),
            Err(e) => {
                compacted.left.push((Place::of(&dir, day).relative(), chain(&e)));
                swap::repair(&dir)?;
            }
        }
    }
    plan.locks.release(&dir)?;
    if lock.is_some() {
        dir.remove(Area::Staging, name::COMPACTION_LOCK)?;
    }
    Ok(compacted)
}

/// Merges one table's files of one day; the bytes of the merged files.
fn compact_day(dir: &LogDir, day: &Day, how: &mut How<'_>) -> Result<u64> {
    let place = Place::of(dir, day);
    let from = place.open()?;
    let staged = place.stage(&from)?;
    let mut bytes = 0;
    for group in &day.groups {
        bytes += merge::merge(&place, group, &from, &staged)?;
        how.passed()?;
    }
    for group in &day.groups {
        group.check_unchanged(&place, &from)?;
    }
    place.exchange(day, &from, &staged, how)?;
    Ok(bytes)
}
