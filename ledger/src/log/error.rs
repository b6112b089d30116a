//! What can go wrong with a log, in words that name the file and the way out.

use std::{
    io,
    path::{Path, PathBuf},
};

use arrow::error::ArrowError;
use parquet::errors::ParquetError;
use rustix::io::Errno;

/// A failure to write or read a log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The operating system refused something.
    #[error("{doing} {}{}", path.display(), remedy(source))]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or directory.
        path: PathBuf,
        /// The refusal.
        source: io::Error,
    },
    /// The path of a log is not a directory that may be used.
    #[error("log directory {}: {problem}", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
        /// What it is instead, and what to do.
        problem: String,
    },
    /// A file that was being written was removed by somebody else.
    #[error(
        "{} was removed while it was being written; leave the log alone while it is recorded, or \
         create its directory again to go on", path.display()
    )]
    Vanished {
        /// The file.
        path: PathBuf,
    },
    /// Parquet could not be written or read.
    #[error("{doing} {}", path.display())]
    Parquet {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ParquetError,
    },
    /// A batch could not be made, written or read.
    #[error("{doing} {}", path.display())]
    Arrow {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ArrowError,
    },
    /// A file's content is not what its name says.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A column does not have the type that the schema gives it.
    #[error(
        "{}: table {table}, column {column}: {problem}; was the file written by vramscope?",
        path.display()
    )]
    Column {
        /// The file.
        path: PathBuf,
        /// The table.
        table: &'static str,
        /// The column.
        column: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The manifest of a run is not readable JSON of the expected form.
    #[error("read manifest {}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
}

/// What the user can do about an error of the operating system, where that is known.
fn remedy(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC) => ": the disk is full; free space, or record with --max-disk",
        Some(Errno::DQUOT) => ": the disk quota is used up; free space, or record with --max-disk",
        Some(Errno::ROFS) => ": the file system is read-only; choose another directory",
        Some(Errno::ACCESS | Errno::PERM) => ": not permitted; choose a directory you may write",
        Some(Errno::NOENT) => ": it does not exist (any more); create the directory again",
        Some(Errno::LOOP) => ": it is a symbolic link, which is never followed; remove it",
        Some(Errno::MFILE) => ": too many open files; raise `ulimit -n`",
        _ => "",
    }
}

impl LogError {
    pub(crate) fn io(doing: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Io { doing, path: path.to_owned(), source: source.into() }
    }

    pub(crate) fn parquet(doing: &'static str, path: &Path, source: ParquetError) -> Self {
        // A full disk arrives wrapped; unwrap it, so that the remedy is said.
        match source {
            ParquetError::External(inner) => match inner.downcast::<io::Error>() {
                Ok(error) => Self::io(doing, path, *error),
                Err(inner) => Self::Parquet {
                    doing,
                    path: path.to_owned(),
                    source: ParquetError::External(inner),
                },
            },
            source => Self::Parquet { doing, path: path.to_owned(), source },
        }
    }

    pub(crate) fn arrow(doing: &'static str, path: &Path, source: ArrowError) -> Self {
        match source {
            ArrowError::IoError(_, error) => Self::io(doing, path, error),
            source => Self::Arrow { doing, path: path.to_owned(), source },
        }
    }

    pub(crate) fn content(path: &Path, problem: impl Into<String>) -> Self {
        Self::Content { path: path.to_owned(), problem: problem.into() }
    }

    pub(crate) fn directory(path: &Path, problem: impl Into<String>) -> Self {
        Self::Directory { path: path.to_owned(), problem: problem.into() }
    }

    /// Whether a file or directory was not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Whether a file's bytes are the problem, so that trying again does not help.
    pub(crate) fn is_about_content(&self) -> bool {
        matches!(self, Self::Content { .. } | Self::Column { .. } | Self::Arrow { .. })
    }
}

/// Shorthand for results of this module.
pub(crate) type Result<T, E = LogError> = std::result::Result<T, E>;

/// The message and all its causes, as one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Runs a decoder of other people's bytes. The decoders of arrow and parquet return errors for
/// nearly all damage, but some checks in them are assertions: damage to a file must not end the
/// program.
pub(crate) fn guard<T>(path: &Path, decode: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode))
        .unwrap_or_else(|_| Err(LogError::content(path, "the file is damaged: decoding it failed")))
}
