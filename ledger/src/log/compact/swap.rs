//! Putting merged files in the place of those that they stand for, at once, and cleaning up after a
//! crash.
//!
//! In `staging/`, of the day D of table T, lie at most:
//! - `compact-T-D.new`: the directory that is laid out; once it is exchanged, the one that was
//!   there before;
//! - `compact-T-D.old`: that one, on file systems that cannot exchange two names at once;
//! - `compact-T-D.json`: what is merged into what, written before the exchange and removed when all
//!   is done. Without it, nothing was exchanged.

use std::{
    ffi::{CStr, CString},
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, AtFlags, Gid, Mode, OFlags, RenameFlags, Uid},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use super::plan::{Day, Group};
use crate::log::{
    TABLES, Table,
    dir::{Area, DIRECTORY, LogDir},
    error::{LogError, Result},
    table_index,
};

/// How often a directory is emptied into which a recorder may still move files.
const SWEEPS: usize = 5;

/// How two directories are exchanged, and what tests do in between.
#[derive(Default)]
pub(super) struct How<'a> {
    /// Rename twice, as where the file system cannot exchange names.
    pub(super) one_by_one: bool,
    /// Called after each step; an error stops as a crash does.
    pub(super) after_each: Option<&'a mut dyn FnMut() -> Result<()>>,
    /// It did: nothing is cleaned up.
    pub(super) crashed: bool,
}

impl How<'_> {
    /// A step is done.
    pub(super) fn passed(&mut self) -> Result<()> {
        let Some(after_each) = &mut self.after_each else { return Ok(()) };
        after_each().inspect_err(|_| self.crashed = true)
    }
}

/// What is merged into what.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    table: String,
    day: String,
    /// Names of the files that go.
    inputs: Vec<String>,
    /// Names of those that come; each is that of an input too.
    outputs: Vec<String>,
}

impl Record {
    /// Whether the directory has inputs that no merged file has the name of: whether it is the one
    /// that was there before.
    fn has_inputs(&self, dir: &OwnedFd) -> bool {
        let names = names(dir).unwrap_or_default();
        let mut gone = self.inputs.iter().filter(|input| !self.outputs.contains(input));
        gone.any(|input| names.iter().any(|name| name.to_bytes() == input.as_bytes()))
    }

    fn is_input(&self, name: &CStr) -> bool {
        self.inputs.iter().any(|input| input.as_bytes() == name.to_bytes())
    }
}

/// One table's directory of one day.
pub(super) struct Place<'a> {
    dir: &'a LogDir,
    pub(super) table: &'static Table,
    day: String,
}

impl<'a> Place<'a> {
    pub(super) fn new(dir: &'a LogDir, table: &'static Table, day: &str) -> Self {
        Self { dir, table, day: day.to_owned() }
    }

    pub(super) fn of(dir: &'a LogDir, day: &Day) -> Self {
        Self::new(dir, day.table(), &day.name)
    }

    /// Relative to the log.
    pub(super) fn relative(&self) -> PathBuf {
        Path::new(self.table.name).join(&self.day)
    }

    /// Of one of its files.
    pub(super) fn path(&self, file_name: &str) -> PathBuf {
        self.dir.path.join(self.relative()).join(file_name)
    }

    /// Of a file of the directory that is being laid out.
    pub(super) fn staged_path(&self, file_name: &str) -> PathBuf {
        self.dir.path_in(Area::Staging, &self.staged("new")).join(file_name)
    }

    fn staged(&self, what: &str) -> String {
        format!("compact-{}-{}.{what}", self.table.name, self.day)
    }

    fn failed(&self, doing: &'static str) -> impl FnOnce(Errno) -> LogError {
        let path = self.dir.path.join(self.relative());
        move |e| LogError::io(doing, &path, e)
    }

    fn open_table(&self) -> Result<OwnedFd> {
        fs::openat(&self.dir.root, self.table.name, DIRECTORY | OFlags::RDONLY, Mode::empty())
            .map_err(self.failed("open the table of"))
    }

    /// Opens the directory.
    pub(super) fn open(&self) -> Result<OwnedFd> {
        open_in(&self.open_table()?, &self.day).map_err(self.failed("open directory"))
    }

    /// Begins the directory that takes its place, with the same owner and mode.
    pub(super) fn stage(&self, from: &OwnedFd) -> Result<OwnedFd> {
        let failed = |e| self.failed("lay out the directory that takes the place of")(e);
        let name = self.staged("new");
        fs::mkdirat(&self.dir.staging, &name, Mode::RWXU).map_err(failed)?;
        let staged = open_in(&self.dir.staging, &name).map_err(failed)?;
        let (own, like) = (fs::fstat(&staged).map_err(failed)?, fs::fstat(from).map_err(failed)?);
        if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid) {
            let (uid, gid) = (Uid::from_raw(like.st_uid), Gid::from_raw(like.st_gid));
            fs::fchown(&staged, Some(uid), Some(gid)).map_err(failed)?;
        }
        fs::fchmod(&staged, Mode::from_raw_mode(like.st_mode & 0o7777)).map_err(failed)?;
        Ok(staged)
    }

    /// Puts the directory with the merged files in the place of the one with their inputs, which
    /// then go. Files that are not merged are in both before, so that none is missing at any
    /// moment.
    pub(super) fn exchange(
        &self,
        day: &Day,
        from: &OwnedFd,
        staged: &OwnedFd,
        how: &mut How<'_>,
    ) -> Result<()> {
        let record = self.record(day);
        self.link_others(&record, from, staged)?;
        fs::fsync(staged).map_err(self.failed("write to disk the merged files of"))?;
        how.passed()?;
        self.write_record(&record)?;
        how.passed()?;
        let old = self.swap(how)?;
        how.passed()?;
        self.sweep(&record, &old, how)?;
        self.remove_record()
    }

    fn record(&self, day: &Day) -> Record {
        let inputs = day.groups.iter().flat_map(|group| &group.inputs);
        let first = |group: &Group| Some(group.inputs.first()?.file_name());
        Record {
            table: self.table.name.to_owned(),
            day: self.day.clone(),
            inputs: inputs.map(super::plan::Input::file_name).collect(),
            outputs: day.groups.iter().filter_map(first).collect(),
        }
    }

    /// Links what is not merged into the directory that is being laid out. Directories cannot be
    /// linked; they are moved when the exchange is done.
    fn link_others(&self, record: &Record, from: &OwnedFd, staged: &OwnedFd) -> Result<()> {
        for name in names(from).map_err(self.failed("list"))? {
            if record.is_input(&name) {
                continue;
            }
            match fs::linkat(from, &name, staged, &name, AtFlags::empty()) {
                // Deleted meanwhile, or a directory.
                Ok(()) | Err(Errno::NOENT) => {}
                Err(_) if is_directory(from, &name) => {}
                Err(e) => return Err(LogError::io("link", &self.path(&name.to_string_lossy()), e)),
            }
        }
        Ok(())
    }

    /// Exchanges the directories; the name in `staging/` of the one that was there before.
    fn swap(&self, how: &mut How<'_>) -> Result<String> {
        let (table, new) = (self.open_table()?, self.staged("new"));
        let failed = |e| self.failed("exchange the files of")(e);
        let staging = &self.dir.staging;
        let exchanged = if how.one_by_one {
            Err(Errno::INVAL)
        } else {
            fs::renameat_with(staging, &new, &table, &self.day, RenameFlags::EXCHANGE)
        };
        let old = match exchanged {
            Ok(()) => new,
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                let old = self.staged("old");
                fs::renameat(&table, &self.day, staging, &old).map_err(failed)?;
                how.passed()?;
                fs::renameat(staging, &new, &table, &self.day).map_err(failed)?;
                old
            }
            Err(e) => return Err(failed(e)),
        };
        fs::fsync(&table).map_err(failed)?;
        fs::fsync(staging).map_err(failed)?;
        Ok(old)
    }

    /// Empties the directory that was there before: inputs go, what a recorder moved there
    /// meanwhile is moved to its place.
    fn sweep(&self, record: &Record, old: &str, how: &mut How<'_>) -> Result<()> {
        let staging = &self.dir.staging;
        let path = self.dir.path_in(Area::Staging, old);
        let failed = |e| LogError::io("empty", &path, e);
        let old_fd = open_in(staging, old).map_err(failed)?;
        let day = self.open()?;
        for _ in 0..SWEEPS {
            for name in names(&old_fd).map_err(failed)? {
                if record.is_input(&name) || same_file(&old_fd, &day, &name) {
                    fs::unlinkat(&old_fd, &name, AtFlags::empty()).map_err(failed)?;
                } else {
                    let keep = RenameFlags::NOREPLACE;
                    match fs::renameat_with(&old_fd, &name, &day, &name, keep) {
                        Err(Errno::INVAL) => fs::renameat(&old_fd, &name, &day, &name),
                        result => result,
                    }
                    .map_err(failed)?;
                }
                how.passed()?;
            }
            fs::fsync(&old_fd).map_err(failed)?;
            fs::fsync(&day).map_err(failed)?;
            match fs::unlinkat(staging, old, AtFlags::REMOVEDIR) {
                Ok(()) => return fs::fsync(staging).map_err(failed),
                Err(Errno::NOTEMPTY | Errno::EXIST) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Err(failed(Errno::NOTEMPTY))
    }

    fn write_record(&self, record: &Record) -> Result<()> {
        let name = self.staged("json");
        let path = self.dir.path_in(Area::Staging, &name);
        let json = serde_json::to_vec_pretty(record)
            .map_err(|source| LogError::Manifest { path: path.clone(), source })?;
        let failed = |e: Errno| LogError::io("write", &path, e);
        let half = self.staged("json.tmp");
        self.dir.remove(Area::Staging, &half)?;
        let mut file = self.dir.create_file(Area::Staging, &half)?;
        file.write_all(&json).map_err(|e| LogError::io("write", &path, e))?;
        fs::fsync(&file).map_err(failed)?;
        fs::renameat(&self.dir.staging, &half, &self.dir.staging, &name).map_err(failed)?;
        fs::fsync(&self.dir.staging).map_err(failed)
    }

    fn remove_record(&self) -> Result<()> {
        self.dir.remove(Area::Staging, &self.staged("json"))?;
        self.dir.remove(Area::Staging, &self.staged("json.tmp"))
    }

    /// Removes the directory that was being laid out: nothing in it is the only one of its kind.
    fn roll_back(&self) -> Result<()> {
        let name = self.staged("new");
        let path = self.dir.path_in(Area::Staging, &name);
        let failed = |e| LogError::io("remove", &path, e);
        let staged = match open_in(&self.dir.staging, &name) {
            Ok(staged) => staged,
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        for name in names(&staged).map_err(failed)? {
            fs::unlinkat(&staged, &name, AtFlags::empty()).map_err(failed)?;
        }
        fs::unlinkat(&self.dir.staging, &name, AtFlags::REMOVEDIR).map_err(failed)
    }

    /// Finishes what a crash interrupted, or takes it back.
    fn put_right(&self, record: &Record) -> Result<()> {
        let (new, old) = (self.staged("new"), self.staged("old"));
        let staging = &self.dir.staging;
        let failed = |e| self.failed("put right")(e);
        let has_inputs = |name: &str| Some(record.has_inputs(&open_in(staging, name).ok()?));
        let missing = matches!(open_in(&self.open_table()?, &self.day), Err(Errno::NOENT));
        if missing {
            let table = self.open_table()?;
            let put = |name| fs::renameat(staging, name, &table, &self.day);
            match (has_inputs(&new), has_inputs(&old)) {
                // The crash fell between two renames: the merged files are whole, so they go in.
                (Some(false), Some(_)) => put(&new).map_err(failed)?,
                (_, Some(_)) => put(&old).map_err(failed)?,
                // Somebody deleted the day since; so go its files.
                (_, None) => {
                    self.roll_back()?;
                    return self.remove_record();
                }
            }
        }
        let how = &mut How::default();
        match has_inputs(&new) {
            Some(true) => self.sweep(record, &new, how)?,
            // Emptied but for its last files, or not exchanged yet: see what is in its place.
            Some(false) if !record.has_inputs(&self.open()?) => self.sweep(record, &new, how)?,
            Some(false) => self.roll_back()?,
            None => {}
        }
        if has_inputs(&old).is_some() {
            self.sweep(record, &old, how)?;
        }
        self.remove_record()
    }
}

fn open_in(at: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    fs::openat(at, name, DIRECTORY | OFlags::RDONLY, Mode::empty())
}

/// Names in an open directory, text or not.
fn names(dir: &OwnedFd) -> rustix::io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in fs::Dir::read_from(dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn is_directory(at: &OwnedFd, name: &CStr) -> bool {
    let stat = fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

/// Whether a name stands for the same file in both directories.
fn same_file(a: &OwnedFd, b: &OwnedFd, name: &CStr) -> bool {
    let inode = |at| fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).ok().map(|s| s.st_ino);
    inode(a).is_some() && inode(a) == inode(b)
}

/// What compactions left in `staging/`, if they did not come to their end.
pub(in crate::log) fn leftovers(dir: &LogDir) -> Result<Vec<String>> {
    let mut names = dir.list(Area::Staging)?;
    names.retain(|name| name.starts_with("compact-"));
    names.sort_unstable();
    Ok(names)
}

/// Puts right what interrupted compactions left; the directories, relative to the log. The caller
/// holds the lock of compactions.
pub(in crate::log) fn repair(dir: &LogDir) -> Result<Vec<PathBuf>> {
    let mut repaired = Vec::new();
    for name in leftovers(dir)? {
        if let Some(stem) = name.strip_suffix(".json")
            && let Some(place) = place_of(dir, stem)
        {
            place.put_right(&read_record(dir, &name)?)?;
            repaired.push(place.relative());
        }
    }
    for name in leftovers(dir)? {
        if let Some(stem) = name.strip_suffix(".new")
            && let Some(place) = place_of(dir, stem)
        {
            place.roll_back()?;
            repaired.push(place.relative());
        } else if name.ends_with(".json.tmp") {
            dir.remove(Area::Staging, &name)?;
        }
    }
    Ok(repaired)
}

/// The table (its position in [`TABLES`]) and the day that the name of something in `staging/`
/// tells, its ending aside.
pub(in crate::log) fn day_of(stem: &str) -> Option<(usize, String)> {
    let (table, day) = stem.strip_prefix("compact-")?.split_once("-date=")?;
    let day = format!("date={day}");
    Some((table_index(table)?, day)).filter(|(_, day)| super::plan::is_day(day))
}

fn place_of<'a>(dir: &'a LogDir, stem: &str) -> Option<Place<'a>> {
    let (table, day) = day_of(stem)?;
    Some(Place::new(dir, TABLES.get(table)?, &day))
}

fn read_record(dir: &LogDir, name: &str) -> Result<Record> {
    let path = dir.path_in(Area::Staging, name);
    let mut text = Vec::new();
    let mut file: File = dir.open_file(Area::Staging, name)?;
    file.read_to_end(&mut text).map_err(|e| LogError::io("read", &path, e))?;
    serde_json::from_slice(&text).map_err(|source| LogError::Manifest { path, source })
}
