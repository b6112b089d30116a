//! Finding the files of a log, and telling what is not one.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::File,
    io::Read,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use parquet::{
    arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
    file::{metadata::ParquetMetaData, statistics::Statistics},
};

use crate::{
    log::{
        Row, TABLES,
        compact::swap::day_of,
        dir::Area,
        error::{LogError, Result, chain, guard},
        journal::JournalFile,
        manifest::{Manifest, SCHEMA_VERSION},
        name::{ARROWS, FileName, PARQUET},
        seal::CHECKPOINT_SEQ,
        writer::table::Sealed,
    },
    rows::EventRow,
};

/// Why a file was left out, or read only in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProblemKind {
    /// Not a file that vramscope wrote, or not in its place.
    Foreign,
    /// Cut off: its end is missing.
    Truncated,
    /// Written by a newer vramscope, with a schema that this one does not know.
    Newer,
    /// Not readable: permissions, damage.
    Unreadable,
    /// The same file of the same run was found before.
    Duplicate,
    /// The last batch of a journal is cut; the batches before it are read.
    TornJournal,
}

/// A file that the reader leaves out, or reads only in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub path: PathBuf,
    /// What kind of problem.
    pub kind: ProblemKind,
    /// In words.
    pub message: String,
    /// The table of which rows are missing, or may be.
    pub misses: Option<&'static str>,
}

impl Problem {
    pub(super) fn new(path: &Path, kind: ProblemKind, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), kind, message: message.into(), misses: None }
    }

    fn unreadable(path: &Path, error: &LogError) -> Self {
        Self::new(path, ProblemKind::Unreadable, chain(error))
    }

    /// The same, said of a file or directory of a table (by its position in [`TABLES`]).
    fn of_table(mut self, table: usize) -> Self {
        self.misses = TABLES.get(table).map(|table| table.name);
        self
    }
}

/// Where rows lie.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Sealed,
    Journal(JournalFile),
}

/// One file of one table of one run.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: FileName,
    pub(super) path: PathBuf,
    pub(super) source: Source,
    pub(super) rows: u64,
    /// First and last `seq`, where the table has one and the file says it.
    pub(super) seqs: Option<(i64, i64)>,
    /// `seq` of each checkpoint that the file holds, rising.
    pub(super) checkpoints: Vec<i64>,
}

/// What a directory holds.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) parts: HashMap<FileName, Part>,
    pub(super) manifests: Vec<(PathBuf, Manifest)>,
    pub(super) problems: Vec<Problem>,
}

impl Found {
    /// Adds the files of the log in `dir`.
    ///
    /// Journals are opened first: one that is sealed meanwhile is then found as a Parquet file
    /// too, which wins.
    pub(super) fn add(&mut self, dir: &Path) -> Result<()> {
        let names = list(dir)?;
        let journals = self.journals(dir);
        for name in &names {
            if name.starts_with("manifest-") && has_extension(name, "json") {
                self.add_manifest(&dir.join(name));
            }
        }
        for (index, table) in TABLES.iter().enumerate() {
            self.add_table(index, &dir.join(table.name));
        }
        for part in journals {
            self.add_journal(part);
        }
        self.look_for_taken_days(dir);
        Ok(())
    }

    /// A compaction that was interrupted between two renames leaves a table without a day; on file
    /// systems that exchange two names at once that cannot be.
    fn look_for_taken_days(&mut self, dir: &Path) {
        let names = list(&dir.join(Area::Staging.as_str())).unwrap_or_default();
        for name in names {
            let day = name.strip_suffix(".json").and_then(day_of);
            let Some((index, day)) = day else { continue };
            let Some(table) = TABLES.get(index) else { continue };
            let path = dir.join(table.name).join(day);
            if !path.exists() {
                let message = "a compaction was interrupted while it exchanged these files: \
                               `vramscope recover` on the log puts them back";
                let problem = Problem::new(&path, ProblemKind::Unreadable, message);
                self.problems.push(problem.of_table(index));
            }
        }
    }

    fn add_manifest(&mut self, path: &Path) {
        match Manifest::read(path) {
            Ok(manifest) => self.manifests.push((path.to_owned(), manifest)),
            Err(e) => self.problems.push(Problem::unreadable(path, &e)),
        }
    }

    fn journals(&mut self, dir: &Path) -> Vec<Part> {
        let dir = dir.join(Area::Journal.as_str());
        let names = self.list(EventRow::INDEX, &dir);
        names.iter().filter_map(|name| self.journal(&dir, name)).collect()
    }

    fn journal(&mut self, dir: &Path, file_name: &str) -> Option<Part> {
        let path = dir.join(file_name);
        let Some(name) = FileName::parse(file_name, ARROWS) else {
            if !has_extension(file_name, "lock") {
                self.foreign(&path);
            }
            return None;
        };
        match open(&path).and_then(|file| JournalFile::scan(file, &path)) {
            Ok(journal) => {
                let rows = journal.rows;
                let source = Source::Journal(journal);
                Some(Part { name, path, source, rows, seqs: None, checkpoints: Vec::new() })
            }
            // Sealed between listing and opening.
            Err(e) if e.is_not_found() => None,
            Err(e) => {
                self.problems.push(Problem::unreadable(&path, &e).of_table(name.table));
                None
            }
        }
    }

    fn add_journal(&mut self, part: Part) {
        if self.parts.contains_key(&part.name) {
            return;
        }
        if let Source::Journal(journal) = &part.source
            && journal.torn > 0
        {
            let message = format!("its last {} bytes are not a whole batch", journal.torn);
            let problem = Problem::new(&part.path, ProblemKind::TornJournal, message);
            self.problems.push(problem.of_table(part.name.table));
        }
        self.parts.insert(part.name, part);
    }

    /// Adds the files of a table. Where some vanish between listing and opening, they were deleted,
    /// or merged into others: then the table is listed again.
    fn add_table(&mut self, table: usize, dir: &Path) {
        for last in [false, false, true] {
            let mut found = Self::default();
            let gone = found.look_through(table, dir);
            if last || gone == 0 {
                return self.absorb(found);
            }
        }
    }

    /// Adds the files of a table; how many were gone before they could be opened.
    fn look_through(&mut self, table: usize, dir: &Path) -> usize {
        let mut gone = 0;
        for path in self.files_below(table, dir) {
            let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match FileName::parse(file_name, PARQUET).filter(|name| name.table == table) {
                Some(name) => match sealed_part(name, &path) {
                    Ok(part) => self.add_part(part),
                    Err(Some(problem)) => self.problems.push(problem.of_table(table)),
                    Err(None) => gone += 1,
                },
                None => self.foreign(&path),
            }
        }
        gone
    }

    fn absorb(&mut self, found: Self) {
        found.parts.into_values().for_each(|part| self.add_part(part));
        self.problems.extend(found.problems);
    }

    fn add_part(&mut self, part: Part) {
        match self.parts.entry(part.name) {
            Entry::Vacant(entry) => {
                entry.insert(part);
            }
            Entry::Occupied(_) => {
                let message = "the same file of the same run was read from another place";
                self.problems.push(Problem::new(&part.path, ProblemKind::Duplicate, message));
            }
        }
    }

    /// Names in a directory, sorted; none where there is no such directory. One that cannot be
    /// listed is a problem: what lies in it is not known.
    fn list(&mut self, table: usize, dir: &Path) -> Vec<String> {
        list(dir).unwrap_or_else(|e| {
            if !e.is_not_found() {
                self.problems.push(Problem::unreadable(dir, &e).of_table(table));
            }
            Vec::new()
        })
    }

    /// Whatever lies in a table's directory and in its `date=` directories, but no directories.
    fn files_below(&mut self, table: usize, dir: &Path) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for name in self.list(table, dir) {
            let path = dir.join(&name);
            let is_dir = std::fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir());
            if is_dir {
                files.extend(self.list(table, &path).into_iter().map(|name| path.join(name)));
            } else {
                files.push(path);
            }
        }
        files
    }

    fn foreign(&mut self, path: &Path) {
        let message = "its name is not <table>-<run>-<number> of the table it lies in";
        self.problems.push(Problem::new(path, ProblemKind::Foreign, message));
    }
}

fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found == extension)
}

/// Names in a directory, sorted.
fn list(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| LogError::io("list directory", dir, e);
    let entries = std::fs::read_dir(dir).map_err(failed)?;
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    Ok(names)
}

/// Opens a file for reading; never a symbolic link, and never waiting for a pipe.
pub(super) fn open(path: &Path) -> Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .map_err(|e| LogError::io("open", path, e))?;
    if file.metadata().is_ok_and(|meta| meta.is_file()) {
        Ok(file)
    } else {
        Err(LogError::content(path, "not a regular file"))
    }
}

/// Reads the footer of a sealed file. `Err(None)`: the file is gone.
fn sealed_part(name: FileName, path: &Path) -> Result<Part, Option<Problem>> {
    let file = match open(path) {
        Ok(file) => file,
        Err(e) if e.is_not_found() => return Err(None),
        Err(e) => return Err(Some(Problem::unreadable(path, &e))),
    };
    if !ends_as_parquet(&file) {
        let message = "it does not end as a Parquet file does: cut off, or still being copied";
        return Err(Some(Problem::new(path, ProblemKind::Truncated, message)));
    }
    let footer = footer(&file, path).map_err(|e| Some(Problem::unreadable(path, &e)))?;
    check_metadata(name, path, footer.metadata()).map_err(Some)?;
    let metadata = footer.metadata();
    let rows = metadata.file_metadata().num_rows().max(0) as u64;
    let (path, seqs) = (path.to_owned(), seqs(metadata));
    let checkpoints = checkpoints(metadata);
    Ok(Part { name, path, source: Source::Sealed, rows, seqs, checkpoints })
}

/// The `seq` of each checkpoint that a file says it holds.
pub(crate) fn checkpoints(metadata: &ParquetMetaData) -> Vec<i64> {
    let seqs = value(metadata, CHECKPOINT_SEQ).unwrap_or_default().split(',');
    let mut seqs: Vec<i64> = seqs.filter_map(|seq| seq.parse().ok()).collect();
    seqs.sort_unstable();
    seqs
}

fn ends_as_parquet(file: &File) -> bool {
    let len = file.metadata().map_or(0, |meta| meta.len());
    let (mut head, mut tail) = ([0; 4], [0; 4]);
    let mut file = file;
    len >= 12
        && file.read_exact(&mut head).is_ok()
        && file.read_exact_at(&mut tail, len - 4).is_ok()
        && (head, tail) == (*b"PAR1", *b"PAR1")
}

pub(crate) fn footer(file: &File, path: &Path) -> Result<ArrowReaderMetadata> {
    guard(path, || {
        ArrowReaderMetadata::load(file, ArrowReaderOptions::new())
            .map_err(|e| LogError::parquet("read footer of", path, e))
    })
}

fn value<'a>(metadata: &'a ParquetMetaData, key: &str) -> Option<&'a str> {
    let pairs = metadata.file_metadata().key_value_metadata()?;
    pairs.iter().find(|pair| pair.key == key)?.value.as_deref()
}

fn check_metadata(name: FileName, path: &Path, metadata: &ParquetMetaData) -> Result<(), Problem> {
    let table = TABLES.get(name.table).map_or("", |table| table.name);
    let Some(named) = value(metadata, "vramscope.table") else {
        let message = "it is a Parquet file, but not one that vramscope wrote";
        return Err(Problem::new(path, ProblemKind::Foreign, message));
    };
    if named != table {
        let message = format!("it says that it belongs to table {named}, not {table}");
        return Err(Problem::new(path, ProblemKind::Foreign, message));
    }
    let version = value(metadata, "vramscope.schema_version").and_then(|text| text.parse().ok());
    if version.is_none_or(|version: u32| version > SCHEMA_VERSION) {
        let message = format!(
            "its schema version is {}, this vramscope knows {SCHEMA_VERSION}: use a newer one",
            value(metadata, "vramscope.schema_version").unwrap_or("not given")
        );
        return Err(Problem::new(path, ProblemKind::Newer, message));
    }
    Ok(())
}

/// First and last `seq` from the statistics of every row group.
fn seqs(metadata: &ParquetMetaData) -> Option<(i64, i64)> {
    let schema = metadata.file_metadata().schema_descr();
    let column = schema.columns().iter().position(|column| column.path().string() == "seq")?;
    let ranges = metadata.row_groups().iter().map(|group| {
        match group.columns().get(column)?.statistics()? {
            Statistics::Int64(stats) => Some((*stats.min_opt()?, *stats.max_opt()?)),
            _ => None,
        }
    });
    ranges.reduce(|a, b| {
        let ((a, b), (c, d)) = (a?, b?);
        Some((a.min(c), b.max(d)))
    })?
}

/// The sealed files of a directory, and what lies among them that is none.
fn sealed_files(dir: &Path) -> Found {
    let mut found = Found::default();
    for (index, table) in TABLES.iter().enumerate() {
        found.add_table(index, &dir.join(table.name));
    }
    found
}

/// The sealed files of a directory with their sizes and ages, unreadable ones left out.
pub(crate) fn scan_sealed(dir: &Path) -> Vec<Sealed> {
    sealed_files(dir).parts.values().filter_map(|part| with_size(dir, part)).collect()
}

/// Names and paths of the sealed files of a directory, in the order of [`FileName`], and what lies
/// among them that cannot be read or is none.
pub(crate) fn list_sealed(dir: &Path) -> (Vec<(FileName, PathBuf)>, Vec<Problem>) {
    let found = sealed_files(dir);
    let mut files: Vec<_> = found.parts.into_values().map(|part| (part.name, part.path)).collect();
    files.sort_unstable();
    (files, found.problems)
}

fn with_size(dir: &Path, part: &Part) -> Option<Sealed> {
    let meta = std::fs::metadata(&part.path).ok()?;
    Some(Sealed {
        name: part.name,
        relative: part.path.strip_prefix(dir).ok()?.to_owned(),
        bytes: meta.len(),
        since_ns: meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec()),
        first_seq: part.checkpoints.last().copied().or(part.seqs.map(|(first, _)| first)),
    })
}
