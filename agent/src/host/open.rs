//! Opens what a process has mapped, without ever following a path that it chose.

use std::{
    cell::Cell,
    fs::File,
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    sync::LazyLock,
};

use object::read::{ReadCache, ReadRef};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, statx};

use super::{Host, Mapping};

/// A file, as the kernel tells files apart: device (major and minor number) and inode.
pub type FileId = ((u32, u32), u64);

/// Longest single piece of an ELF file that is read into memory; the string tables of PyTorch's
/// libraries, the largest in use, take a third of it.
const PIECE_LIMIT: u64 = 64 << 20;
/// Most that is read of one file in all.
const BUDGET: u64 = 512 << 20;

impl Host {
    /// Opens the file of a mapping for reading.
    ///
    /// First through `/proc/PID/map_files`, which leads to the mapped file whatever happened to
    /// its path; where that is refused, by path inside the root of the process (`openat2` with
    /// `RESOLVE_IN_ROOT`), and then only if device and inode are those of the mapping. Anything
    /// but a regular file is refused *before* it is opened: opening a device can have effects,
    /// opening a pipe can block.
    pub fn open_mapped(&self, pid: u32, mapping: &Mapping) -> Option<File> {
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::open(self.map_file(pid, mapping), path_only, Mode::empty())
            .ok()
            .and_then(|found| reopen_regular(&found, None))
            .or_else(|| {
                let expected = (mapping.dev, mapping.inode);
                reopen_regular(&self.find_in_root(pid, &mapping.path)?, Some(expected))
            })
    }

    /// Whether there is something at a path, as the process itself would see it.
    pub fn exists_in_root(&self, pid: u32, path: &Path) -> bool {
        self.find_in_root(pid, path).is_some()
    }

    /// Finds a path as the process itself would see it, without leaving its root. The result can
    /// be asked for its state, not read.
    pub(super) fn find_in_root(&self, pid: u32, path: &Path) -> Option<OwnedFd> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            rustix::fs::openat(CWD, self.process_path(pid, "root"), directory, Mode::empty())
                .ok()?;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat2(root, path.as_os_str().as_bytes(), path_only, Mode::empty(), resolve)
            .ok()
    }
}

/// Opens the regular file that `stat` had found at a path of this host; `None` where something else
/// is there by now.
pub fn open_regular(path: &Path, expected: FileId) -> Option<File> {
    let path_only = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, path_only, Mode::empty()).ok()?;
    reopen_regular(&found, Some(expected))
}

/// Device and inode that an opened file tells.
pub fn stat_id(file: impl AsFd) -> Option<FileId> {
    let stat = rustix::fs::fstat(file).ok()?;
    Some(((rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)), stat.st_ino))
}

/// Whether the file still has a name. One that was deleted takes its space as long as it is open.
pub fn is_named(file: impl AsFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink > 0)
}

/// Whether the file lies on the mount of the root folder that the agent sees. Any other may be a
/// container's, or is to be unmounted some time, which an open file on it would prevent.
pub fn is_at_home(file: impl AsFd) -> bool {
    static HOME: LazyLock<Option<u64>> = LazyLock::new(|| mount_of(File::open("/").ok()?));
    HOME.is_some() && mount_of(file) == *HOME
}

/// The number of the mount that a file was opened on.
fn mount_of(file: impl AsFd) -> Option<u64> {
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    let told = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID);
    told.then_some(found.stx_mnt_id)
}

/// Opens for reading what a path-only descriptor stands for: a regular file, and the one that is
/// expected.
fn reopen_regular(found: &impl AsFd, expected: Option<FileId>) -> Option<File> {
    let stat = rustix::fs::fstat(found).ok()?;
    let dev = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let is_expected = expected.is_none_or(|expected| expected == (dev, stat.st_ino));
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !is_expected {
        return None;
    }
    File::open(format!("/proc/self/fd/{}", found.as_fd().as_raw_fd())).ok()
}

/// An ELF file that is read piece by piece as asked, with limits.
///
/// The file may be hostile: a note or table that claims terabytes (in a sparse file, truthfully),
/// or the same megabytes over and over, is an error here, not an allocation.
#[derive(Debug)]
pub struct ElfSource {
    cache: ReadCache<File>,
    budget: Cell<u64>,
}

impl ElfSource {
    /// Takes the opened file.
    pub fn new(file: File) -> Self {
        Self { cache: ReadCache::new(file), budget: Cell::new(BUDGET) }
    }

    /// What `object::File::parse` takes.
    pub fn reader(&self) -> BoundedElf<'_> {
        BoundedElf(self)
    }

    /// Counts bytes against what may be read in all.
    fn spend(&self, bytes: u64) -> Result<(), ()> {
        let left = self.budget.get().checked_sub(bytes).ok_or(())?;
        self.budget.set(left);
        Ok(())
    }
}

/// The view of an [`ElfSource`] that a parser holds.
#[derive(Clone, Copy, Debug)]
pub struct BoundedElf<'a>(&'a ElfSource);

impl<'a> ReadRef<'a> for BoundedElf<'a> {
    fn len(self) -> Result<u64, ()> {
        (&self.0.cache).len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        if size > PIECE_LIMIT {
            return Err(());
        }
        self.0.spend(size)?;
        (&self.0.cache).read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        let found = (&self.0.cache).read_bytes_at_until(range, delimiter)?;
        self.0.spend(found.len() as u64)?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::host::testing::Tree;

    fn mapping_of(path: &Path, claimed: &str) -> Mapping {
        let stat = rustix::fs::stat(path).unwrap();
        Mapping {
            start: 0x1000,
            end: 0x2000,
            executable: true,
            offset: 0,
            dev: (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)),
            inode: stat.st_ino,
            path: claimed.into(),
            deleted: false,
        }
    }

    fn content(file: Option<File>) -> Option<String> {
        let mut text = String::new();
        file?.read_to_string(&mut text).unwrap();
        Some(text)
    }

    #[test]
    fn map_files_come_first() {
        let tree = Tree::new();
        tree.write("real", "mapped");
        tree.write("proc/1/root/lib/x.so", "replaced");
        tree.link(tree.root().join("real"), "proc/1/map_files/1000-2000");
        let mapping = mapping_of(&tree.root().join("real"), "/lib/x.so");
        assert_eq!(content(tree.host().open_mapped(1, &mapping)).as_deref(), Some("mapped"));
    }

    #[test]
    fn the_path_serves_only_for_the_same_inode() {
        let tree = Tree::new();
        tree.write("proc/1/root/lib/x.so", "same");
        tree.write("proc/1/root/lib/y.so", "other");
        let mapping = mapping_of(&tree.root().join("proc/1/root/lib/x.so"), "/lib/x.so");
        assert_eq!(content(tree.host().open_mapped(1, &mapping)).as_deref(), Some("same"));
        let replaced = Mapping { path: "/lib/y.so".into(), ..mapping };
        assert!(tree.host().open_mapped(1, &replaced).is_none());
    }

    #[test]
    fn links_of_the_container_stay_inside_its_root() {
        let tree = Tree::new();
        tree.write("secret", "host file");
        tree.write("proc/1/root/keep", "");
        tree.link(tree.root().join("secret"), "proc/1/root/absolute");
        tree.link("../../../secret", "proc/1/root/relative");
        for path in ["/absolute", "/relative", "/../../../secret"] {
            let mapping = mapping_of(&tree.root().join("secret"), path);
            assert!(tree.host().open_mapped(1, &mapping).is_none(), "{path}");
        }
    }

    #[test]
    fn home_is_the_mount_of_the_root_folder() {
        assert!(is_at_home(File::open("/").unwrap()));
        assert!(!is_at_home(File::open("/proc/self/status").unwrap()));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let file = File::create(&path).unwrap();
        assert!(is_named(&file));
        std::fs::remove_file(&path).unwrap();
        assert!(!is_named(&file));
    }

    #[test]
    fn what_took_a_files_place_is_not_opened() {
        let tree = Tree::new();
        let path = tree.root().join("libcuda.so.1");
        tree.write("libcuda.so.1", "x");
        let stat = rustix::fs::stat(&path).unwrap();
        let id = ((rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)), stat.st_ino);
        assert_eq!(content(open_regular(&path, id)).as_deref(), Some("x"));
        std::fs::rename(&path, tree.root().join("kept")).unwrap();
        tree.write("libcuda.so.1", "another");
        assert!(open_regular(&path, id).is_none());
        std::fs::remove_file(&path).unwrap();
        // Opened for reading, a pipe without a writer would block for ever.
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let stat = rustix::fs::stat(&path).unwrap();
        assert!(open_regular(&path, (id.0, stat.st_ino)).is_none());
    }

    #[test]
    fn only_regular_files_are_opened() {
        let tree = Tree::new();
        tree.link("/dev/null", "proc/1/map_files/1000-2000");
        let mapping = mapping_of(Path::new("/dev/null"), "/dev/null");
        assert!(tree.host().open_mapped(1, &mapping).is_none());
    }

    #[test]
    fn huge_and_repeated_pieces_are_errors() {
        let tree = Tree::new();
        tree.write("sparse", "");
        let file = File::options().write(true).open(tree.root().join("sparse")).unwrap();
        file.set_len(1 << 40).unwrap();
        let source = ElfSource::new(File::open(tree.root().join("sparse")).unwrap());
        let elf = source.reader();
        assert_eq!(elf.len(), Ok(1 << 40));
        assert_eq!(elf.read_bytes_at(0, PIECE_LIMIT + 1), Err(()));
        assert_eq!(elf.read_bytes_at(0, 16), Ok(&[0; 16][..]));
        source.budget.set(1000);
        assert!(elf.read_bytes_at(5, 900).is_ok());
        assert_eq!(elf.read_bytes_at(6, 900), Err(()));
    }
}
