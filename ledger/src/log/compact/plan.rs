//! Which files are merged into which, and which are left alone.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::fs::{self, OFlags, Stat};

use super::{Compaction, Merged, swap::Place};
use crate::log::{
    TABLES, Table,
    check::{Difference, differences},
    dir::{Area, LogDir},
    error::{LogError, Result, chain},
    name::{self, ARROWS, FileName, PARQUET, Run8},
    reader::{checkpoints, footer, list_sealed},
    recover::why_not,
};

/// A file to merge.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub(super) name: FileName,
    /// Its state when the plan was made.
    pub(super) stat: Stat,
    pub(super) rows: u64,
    pub(super) checkpoints: Vec<i64>,
}

impl Input {
    pub(super) fn file_name(&self) -> String {
        self.name.with(PARQUET)
    }

    fn bytes(&self) -> u64 {
        self.stat.st_size.max(0) as u64
    }
}

/// Files that become one, two at least, in the order of their numbers; the merged file has the name
/// of the first.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) inputs: Vec<Input>,
}

impl Group {
    pub(super) fn rows(&self) -> u64 {
        self.inputs.iter().map(|input| input.rows).sum()
    }

    /// An error where one of the files is not the one that was merged any more.
    pub(super) fn check_unchanged(&self, place: &Place<'_>, from: &OwnedFd) -> Result<()> {
        for input in &self.inputs {
            let path = place.path(&input.file_name());
            let now = fs::statat(from, input.file_name(), fs::AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|e| LogError::io("look at", &path, e))?;
            let then = &input.stat;
            if (now.st_ino, now.st_size, now.st_mtime) != (then.st_ino, then.st_size, then.st_mtime)
            {
                return Err(LogError::content(&path, "it changed while it was being merged"));
            }
        }
        Ok(())
    }
}

/// What is merged in one table's directory of one day.
#[derive(Debug)]
pub(super) struct Day {
    table: &'static Table,
    pub(super) name: String,
    pub(super) groups: Vec<Group>,
}

impl Day {
    pub(super) fn table(&self) -> &'static Table {
        self.table
    }

    pub(super) fn merged(&self, bytes_after: Option<u64>) -> Merged {
        let inputs = || self.groups.iter().flat_map(|group| &group.inputs);
        Merged {
            files_before: inputs().count() as u64,
            files_after: self.groups.len() as u64,
            bytes_before: inputs().map(Input::bytes).sum(),
            bytes_after,
            rows: self.groups.iter().map(Group::rows).sum(),
        }
    }
}

/// The locks of the runs whose files are merged: nobody recovers them meanwhile.
#[derive(Debug, Default)]
pub(super) struct Locks {
    /// With whether the lock's file was there before.
    held: BTreeMap<Run8, (File, bool)>,
}

impl Locks {
    /// Gives the locks back, and removes their files where these are new.
    pub(super) fn release(self, dir: &LogDir) -> Result<()> {
        for (run, (_file, was_there)) in &self.held {
            if !was_there {
                dir.remove(Area::Journal, &name::lock(*run))?;
            }
        }
        Ok(())
    }
}

/// What to merge.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) days: Vec<Day>,
    pub(super) left: Vec<(PathBuf, String)>,
    pub(super) waiting: BTreeMap<Run8, String>,
    pub(super) locks: Locks,
}

/// Files that can only become one with the next where these are equal: run, place, owner and mode.
type Kind = (usize, String, Run8, (u32, u32, u32));

impl Plan {
    /// Looks through the log in `dir`; runs that are merged are locked, but for a dry run.
    pub(super) fn make(dir: &LogDir, options: Compaction) -> Result<Self> {
        let mut plan = Self::default();
        let (files, problems) = list_sealed(&dir.path);
        for problem in problems {
            plan.leave(dir, &problem.path, problem.message);
        }
        let mut free: BTreeMap<Run8, bool> = BTreeMap::new();
        let mut sorter = Sorter { target_bytes: options.target_bytes, ..Sorter::default() };
        for (name, path) in files {
            // The empty file of a run keeps its table readable when others are deleted.
            if name.seq == 0 {
                continue;
            }
            if let std::collections::btree_map::Entry::Vacant(entry) = free.entry(name.run) {
                entry.insert(plan.take(dir, name.run, options)?);
            }
            if free.get(&name.run) != Some(&true) {
                continue;
            }
            match inspect(dir, name, &path) {
                Ok((day, input)) => sorter.take(day, input),
                Err(e) => {
                    sorter.end_group();
                    plan.leave(dir, &path, chain(&e));
                }
            }
        }
        sorter.end_group();
        plan.days = sorter.days();
        Ok(plan)
    }

    fn leave(&mut self, dir: &LogDir, path: &Path, why: String) {
        let relative = path.strip_prefix(&dir.path).unwrap_or(path);
        // The path is said already.
        let why =
            why.strip_prefix(&format!("{}: ", path.display())).map(str::to_owned).unwrap_or(why);
        self.left.push((relative.to_owned(), why));
    }

    /// Whether the run's files may be merged.
    fn take(&mut self, dir: &LogDir, run: Run8, options: Compaction) -> Result<bool> {
        let names = dir.list(Area::Journal)?;
        let of_run = |name: &String| FileName::parse(name, ARROWS).is_some_and(|n| n.run == run);
        let why = match why_not(dir, run, options.other_hosts) {
            Some(why) => Some(why),
            None if names.iter().any(of_run) => {
                Some("rows of it lie in the journal; seal them first: vramscope recover")
            }
            None => None,
        };
        if let Some(why) = why {
            self.waiting.insert(run, why.to_owned());
            return Ok(false);
        }
        if options.dry_run {
            return Ok(true);
        }
        let Some(lock) = dir.lock(run)? else {
            self.waiting.insert(run, "another process works on it".to_owned());
            return Ok(false);
        };
        self.locks.held.insert(run, (lock, names.contains(&name::lock(run))));
        Ok(true)
    }
}

/// Puts files, which come in the order of their names, into groups.
#[derive(Default)]
struct Sorter {
    target_bytes: u64,
    kind: Option<Kind>,
    group: Vec<Input>,
    groups: BTreeMap<(usize, String), Vec<Group>>,
}

impl Sorter {
    fn take(&mut self, day: String, input: Input) {
        let stat = &input.stat;
        let access = (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777);
        let kind = (input.name.table, day, input.name.run, access);
        let bytes: u64 = self.group.iter().map(Input::bytes).sum();
        let is_large = input.bytes() >= self.target_bytes / 2;
        if self.kind.as_ref() != Some(&kind)
            || is_large
            || bytes + input.bytes() > self.target_bytes
        {
            self.end_group();
        }
        if !is_large {
            self.kind = Some(kind);
            self.group.push(input);
        }
    }

    fn end_group(&mut self) {
        let inputs = std::mem::take(&mut self.group);
        if let Some((table, day, ..)) = self.kind.take()
            && inputs.len() > 1
        {
            self.groups.entry((table, day)).or_default().push(Group { inputs });
        }
    }

    fn days(self) -> Vec<Day> {
        let days = self.groups.into_iter().filter_map(|((table, name), groups)| {
            Some(Day { table: TABLES.get(table)?, name, groups })
        });
        days.collect()
    }
}

/// Whether a directory's name is `date=YYYY-MM-DD`.
pub(super) fn is_day(name: &str) -> bool {
    let Some(date) = name.strip_prefix("date=") else { return false };
    let pattern = |(at, byte): (usize, u8)| match at {
        4 | 7 => byte == b'-',
        _ => byte.is_ascii_digit(),
    };
    date.len() == 10 && date.bytes().enumerate().all(pattern)
}

/// What is known of a file before it is merged: its day and itself.
fn inspect(dir: &LogDir, name: FileName, path: &Path) -> Result<(String, Input)> {
    let day = path.parent().and_then(|day| day.file_name()?.to_str());
    let in_table = path.ancestors().nth(3) == Some(dir.path.as_path());
    let Some(day) = day.filter(|day| in_table && is_day(day)) else {
        return Err(LogError::content(path, "it does not lie in a date= directory of its table"));
    };
    let Some(table) = TABLES.get(name.table) else {
        return Err(LogError::content(path, "no such table"));
    };
    let place = Place::new(dir, table, day);
    let file = open(&place, &place.open()?, &name.with(PARQUET))?;
    let stat = fs::fstat(&file).map_err(|e| LogError::io("look at", path, e))?;
    let footer = footer(&file, path)?;
    // A merged file has this version's columns: one that has others would lose them.
    let differences = differences(table, footer.schema());
    let in_the_way = |difference: &&Difference| !matches!(difference, Difference::Older(_));
    if let Some(difference) = differences.iter().find(in_the_way) {
        return Err(LogError::content(path, difference.to_string()));
    }
    let metadata = footer.metadata();
    let rows = metadata.file_metadata().num_rows().max(0) as u64;
    let input = Input { name, stat, rows, checkpoints: checkpoints(metadata) };
    Ok((day.to_owned(), input))
}

/// Opens a file of a day; never a symbolic link, and never waiting for a pipe.
pub(super) fn open(place: &Place<'_>, day: &OwnedFd, file_name: &str) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    fs::openat(day, file_name, flags, fs::Mode::empty())
        .map(File::from)
        .map_err(|e| LogError::io("open", &place.path(file_name), e))
}
