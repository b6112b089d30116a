//! The directory of a log, held open: every file is reached from there without following a
//! symbolic link. The agent runs as root and may write into a directory that a user owns.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, Uid},
    io::Errno,
};

use super::{
    error::{LogError, Result},
    name::{self, FileName, Run8},
    schema::TABLES,
};

pub(super) const DIRECTORY: OFlags =
    OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Written and removed again to learn whether the log can be written; less is not worth starting.
const PROBE_BYTES: usize = 256 << 10;

/// Who shall own what is written: user and group id.
pub(crate) type Owner = (u32, u32);

/// A log's directory with `journal/` and `staging/`, open.
#[derive(Debug)]
pub(crate) struct LogDir {
    pub(crate) path: PathBuf,
    pub(super) root: OwnedFd,
    journal: OwnedFd,
    pub(super) staging: OwnedFd,
    owner: Option<Owner>,
}

/// The two directories that lie outside every table.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Area {
    Journal,
    Staging,
}

impl Area {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::Staging => "staging",
        }
    }
}

impl LogDir {
    /// Opens the directory of a log, creating it (and its parents) with mode 0700 where missing.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent)
                .map_err(|e| LogError::io("create directory", parent, e))?;
        }
        match fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Self::open(path, None),
            Err(e) => Err(LogError::io("create directory", path, e)),
        }
    }

    /// Opens an existing directory; creates only `journal/` and `staging/` in it.
    pub(crate) fn open(path: &Path, owner: Option<Owner>) -> Result<Self> {
        let root = open_root(path)?;
        let journal = subdir(&root, path, Area::Journal.as_str(), owner)?;
        let staging = subdir(&root, path, Area::Staging.as_str(), owner)?;
        Ok(Self { path: path.to_owned(), root, journal, staging, owner })
    }

    /// Opens an existing directory to change what is in it: root works for the user who owns it.
    pub(crate) fn open_for_owner(path: &Path) -> Result<Self> {
        let dir = Self::open(path, None)?;
        if !rustix::process::geteuid().is_root() {
            return Ok(dir);
        }
        let owner = dir.owner_of()?;
        Self::open(path, Some(owner))
    }

    fn area(&self, area: Area) -> &OwnedFd {
        match area {
            Area::Journal => &self.journal,
            Area::Staging => &self.staging,
        }
    }

    /// Path of a file in one of the areas, for messages and readers.
    pub(crate) fn path_in(&self, area: Area, name: &str) -> PathBuf {
        self.path.join(area.as_str()).join(name)
    }

    /// Creates a file that must not exist yet, mode 0600.
    pub(crate) fn create_file(&self, area: Area, name: &str) -> Result<File> {
        let path = self.path_in(area, name);
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = fs::openat(self.area(area), name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| LogError::io("create", &path, e))?;
        give(&fd, self.owner, &path)?;
        Ok(File::from(fd))
    }

    /// Opens a file of one of the areas for reading.
    pub(crate) fn open_file(&self, area: Area, name: &str) -> Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        fs::openat(self.area(area), name, flags, Mode::empty())
            .map(File::from)
            .map_err(|e| LogError::io("open", &self.path_in(area, name), e))
    }

    /// Removes a file of one of the areas; one that is gone already is fine.
    pub(crate) fn remove(&self, area: Area, name: &str) -> Result<()> {
        match fs::unlinkat(self.area(area), name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(LogError::io("remove", &self.path_in(area, name), e)),
        }
    }

    /// Names in one of the areas.
    pub(crate) fn list(&self, area: Area) -> Result<Vec<String>> {
        let path = self.path.join(area.as_str());
        let entries =
            fs::Dir::read_from(self.area(area)).map_err(|e| LogError::io("list", &path, e))?;
        let names = entries.filter_map(std::result::Result::ok);
        Ok(names.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).collect())
    }

    /// Moves a finished file of `staging/` to its place in its table, so that it is there after a
    /// power cut too. Returns its path relative to the log.
    pub(crate) fn seal(&self, file: &File, name: FileName, date: &str) -> Result<PathBuf> {
        let (from, to) = (name.with(name::TMP), name.with(name::PARQUET));
        let staged = self.path_in(Area::Staging, &from);
        fs::fsync(file).map_err(|e| LogError::io("write to disk", &staged, e))?;
        let table = TABLES.get(name.table).map_or("", |table| table.name);
        let table_fd = subdir(&self.root, &self.path, table, self.owner)?;
        let table_path = self.path.join(table);
        let date_fd = subdir(&table_fd, &table_path, date, self.owner)?;
        let target = table_path.join(date).join(&to);
        fs::renameat(&self.staging, &from, &date_fd, &to)
            .map_err(|e| LogError::io("move a finished file to", &target, e))?;
        fs::fsync(&date_fd).map_err(|e| LogError::io("write to disk", &target, e))?;
        Ok(Path::new(table).join(date).join(to))
    }

    /// Removes a sealed file, given by its path relative to the log, and its directory when that
    /// was the last file of its day. Returns its bytes; `None` where it was gone.
    pub(crate) fn remove_sealed(&self, relative: &Path) -> Result<Option<u64>> {
        let path = self.path.join(relative);
        let failed = |e: Errno| LogError::io("remove", &path, e);
        let (Some(day), Some(name)) = (relative.parent(), relative.file_name()) else {
            return Err(failed(Errno::INVAL));
        };
        let (Some(table), Some(date)) = (day.parent(), day.file_name()) else {
            return Err(failed(Errno::INVAL));
        };
        let open = |at: &OwnedFd, name: &std::ffi::OsStr| {
            fs::openat(at, name, DIRECTORY | OFlags::RDONLY, Mode::empty())
        };
        let table = open(&self.root, table.as_os_str()).map_err(failed)?;
        let day = match open(&table, date) {
            Ok(day) => day,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let removed = match fs::statat(&day, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                fs::unlinkat(&day, name, AtFlags::empty()).map_err(failed)?;
                Some(stat.st_size.max(0) as u64)
            }
            Err(Errno::NOENT) => None,
            Err(e) => return Err(failed(e)),
        };
        match fs::unlinkat(&table, date, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT) => Ok(removed),
            Err(e) => Err(failed(e)),
        }
    }

    /// Replaces a file of the log's root at once: readers see the old content or the new.
    pub(crate) fn replace(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        let failed = |e: Errno| LogError::io("write", &path, e);
        let staged = format!("{name}.{}", name::TMP);
        self.remove(Area::Staging, &staged)?;
        let mut file = self.create_file(Area::Staging, &staged)?;
        file.write_all(content).map_err(|e| LogError::io("write", &path, e))?;
        fs::fsync(&file).map_err(failed)?;
        fs::renameat(&self.staging, &staged, &self.root, name).map_err(failed)?;
        fs::fsync(&self.root).map_err(failed)
    }

    /// Takes the lock that says "this run is alive", as long as the file is held.
    /// `None`: another process holds it.
    pub(crate) fn lock(&self, run: Run8) -> Result<Option<File>> {
        self.lock_file(Area::Journal, &name::lock(run))
    }

    /// Takes the lock that says "a compaction is going on", as long as the file is held.
    /// `None`: another process holds it.
    pub(crate) fn lock_compaction(&self) -> Result<Option<File>> {
        self.lock_file(Area::Staging, name::COMPACTION_LOCK)
    }

    fn lock_file(&self, area: Area, name: &str) -> Result<Option<File>> {
        let path = self.path_in(area, name);
        let failed = |e: Errno| LogError::io("lock", &path, e);
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd =
            fs::openat(self.area(area), name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        match fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            // Its holder ended, and removed it, in between.
            Ok(()) if fs::fstat(&fd).map_err(failed)?.st_nlink == 0 => Ok(None),
            Ok(()) => {
                give(&fd, self.owner, &path)?;
                Ok(Some(File::from(fd)))
            }
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Whether nobody holds the lock of a run any more.
    pub(crate) fn is_dead(&self, run: Run8) -> bool {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match fs::openat(&self.journal, name::lock(run), flags, Mode::empty()) {
            Ok(fd) => fs::flock(&fd, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(e) => e == Errno::NOENT,
        }
    }

    /// Finds out whether the log can be written, by writing: quotas, read-only mounts and full
    /// disks show in no other way.
    pub(crate) fn probe(&self, run: Run8) -> Result<()> {
        let name = format!("probe-{run}.{}", name::TMP);
        self.remove(Area::Staging, &name)?;
        let mut file = self.create_file(Area::Staging, &name)?;
        let written = file.write_all(&vec![0; PROBE_BYTES]).and_then(|()| file.sync_data());
        self.remove(Area::Staging, &name)?;
        written.map_err(|e| LogError::io("write", &self.path_in(Area::Staging, &name), e))
    }

    /// Bytes that an unprivileged user could still write to the log's file system.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        let stat = fs::fstatvfs(&self.root)
            .map_err(|e| LogError::io("read free space of", &self.path, e))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// User and group that own the directory.
    pub(crate) fn owner_of(&self) -> Result<Owner> {
        let stat = fs::fstat(&self.root).map_err(|e| LogError::io("look at", &self.path, e))?;
        Ok((stat.st_uid, stat.st_gid))
    }
}

/// Opens the root of a log, and says in words what it is where it is no directory.
fn open_root(path: &Path) -> Result<OwnedFd> {
    match fs::open(path, DIRECTORY | OFlags::RDONLY, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(Errno::NOTDIR | Errno::LOOP) => Err(LogError::directory(path, what_instead(path))),
        Err(e) => Err(LogError::io("open directory", path, e)),
    }
}

fn what_instead(path: &Path) -> &'static str {
    let kind = fs::lstat(path).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if kind == Ok(FileType::Symlink) {
        "it is a symbolic link, which is never followed; name the directory itself"
    } else {
        "it is not a directory; name a directory, or a path that does not exist yet"
    }
}

/// Opens a directory inside one that is open, creating it where missing.
fn subdir(at: &OwnedFd, parent: &Path, name: &str, owner: Option<Owner>) -> Result<OwnedFd> {
    let path = parent.join(name);
    let made = match fs::mkdirat(at, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(e) => return Err(LogError::io("create directory", &path, e)),
    };
    let fd = match fs::openat(at, name, DIRECTORY | OFlags::RDONLY, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return Err(LogError::directory(&path, what_instead(&path)));
        }
        Err(e) => return Err(LogError::io("open directory", &path, e)),
    };
    if made {
        give(&fd, owner, &path)?;
        fs::fsync(at).map_err(|e| LogError::io("write to disk", &path, e))?;
    }
    Ok(fd)
}

fn give(fd: impl AsFd, owner: Option<Owner>, path: &Path) -> Result<()> {
    let Some((uid, gid)) = owner else { return Ok(()) };
    fs::fchown(fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .map_err(|e| LogError::io("change the owner of", path, io::Error::from(e)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn run() -> Run8 {
        Run8::of("0123abcd").unwrap()
    }

    #[test]
    fn directory_and_files_are_for_the_owner_only() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a/log");
        let dir = LogDir::create(&path).unwrap();
        dir.create_file(Area::Journal, "x").unwrap();
        let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(path.clone()), 0o700);
        assert_eq!(mode(path.join("journal")), 0o700);
        assert_eq!(mode(path.join("journal/x")), 0o600);
    }

    #[test]
    fn symbolic_links_are_refused_wherever_they_lie() {
        let temp = tempfile::tempdir().unwrap();
        let (real, link) = (temp.path().join("real"), temp.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        let message = LogDir::create(&link).unwrap_err().to_string();
        assert!(message.contains("symbolic link"), "{message}");

        symlink("/tmp", real.join("staging")).unwrap();
        let message = LogDir::create(&real).unwrap_err().to_string();
        assert!(message.contains("staging: it is a symbolic link"), "{message}");

        std::fs::remove_file(real.join("staging")).unwrap();
        let dir = LogDir::create(&real).unwrap();
        symlink("/etc/passwd", real.join("journal/x")).unwrap();
        assert!(dir.create_file(Area::Journal, "x").is_err());
        assert!(dir.open_file(Area::Journal, "x").is_err());
    }

    #[test]
    fn a_file_is_no_directory() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let message = LogDir::create(temp.path()).unwrap_err().to_string();
        assert!(message.contains("it is not a directory"), "{message}");
    }

    #[test]
    fn the_lock_of_a_run_is_held_by_one() {
        let temp = tempfile::tempdir().unwrap();
        let dir = LogDir::create(temp.path()).unwrap();
        let held = dir.lock(run()).unwrap();
        assert!(held.is_some());
        assert!(dir.lock(run()).unwrap().is_none());
        drop(held);
        assert!(dir.lock(run()).unwrap().is_some());
    }

    #[test]
    fn probing_leaves_nothing_behind() {
        let temp = tempfile::tempdir().unwrap();
        let dir = LogDir::create(temp.path()).unwrap();
        dir.probe(run()).unwrap();
        assert!(dir.free_bytes().unwrap() > 0);
        assert_eq!(std::fs::read_dir(temp.path().join("staging")).unwrap().count(), 0);
    }
}
