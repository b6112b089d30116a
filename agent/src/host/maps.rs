//! `/proc/PID/maps`: which files a process has mapped, and where.

use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::PathBuf,
};

use super::{FileId, Host};

/// Longest `maps` that is read: the kernel's limit of 65,530 mappings with long paths stays below.
const MAPS_LIMIT: u64 = 64 << 20;

/// What the kernel appends to the path of a deleted file.
const DELETED: &[u8] = b" (deleted)";

/// One line of `maps` that maps a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// May be executed.
    pub executable: bool,
    /// Offset of `start` in the file.
    pub offset: u64,
    /// Device of the file system, major and minor, as the kernel's inode has it. (On btrfs and
    /// overlayfs `stat` tells another.)
    pub dev: (u32, u32),
    /// Inode number.
    pub inode: u64,
    /// Path in the mount namespace of the process: a claim, which is never opened as it is.
    /// A newline in it stands as `\012`.
    pub path: PathBuf,
    /// The file was deleted (or replaced, as by a package upgrade) since it was mapped.
    pub deleted: bool,
}

impl Mapping {
    /// Parses a line of `maps`; `None` for memory without a file, and for lines that are none.
    ///
    /// The path is the *rest of the line*: names may hold blanks, and one that ends in
    /// ` (deleted)` cannot be told from a deleted file.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let mut field = || std::str::from_utf8(fields.next()?).ok();
        let (start, end) = field()?.split_once('-')?;
        let (start, end) = (hex(start)?, hex(end)?);
        let executable = field()?.as_bytes().get(2) == Some(&b'x');
        let offset = hex(field()?)?;
        let (major, minor) = field()?.split_once(':')?;
        let dev = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode: u64 = field()?.parse().ok()?;
        let path = fields.next()?.trim_ascii_start();
        if inode == 0 || !path.starts_with(b"/") || start >= end {
            return None;
        }
        let (path, deleted) =
            path.strip_suffix(DELETED).map_or((path, false), |whole| (whole, true));
        let path = OsString::from_vec(path.to_vec()).into();
        Some(Self { start, end, executable, offset, dev, inode, path, deleted })
    }

    /// Last component of the path, as bytes.
    pub fn file_name(&self) -> &[u8] {
        self.path.file_name().map(std::ffi::OsStr::as_bytes).unwrap_or_default()
    }

    /// Device and inode: no other file has them as long as this is mapped.
    pub const fn file_id(&self) -> FileId {
        (self.dev, self.inode)
    }

    /// Whether it maps the same file as another, by device and inode.
    pub fn same_file(&self, other: &Self) -> bool {
        self.file_id() == other.file_id()
    }
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word, 16).ok()
}

impl Host {
    /// The mapping of what a process executes.
    pub fn main_executable<'a>(&self, pid: u32, mappings: &'a [Mapping]) -> Option<&'a Mapping> {
        let target = self.process_path(pid, "exe").read_link().ok()?;
        let named = target.as_os_str().as_encoded_bytes();
        let named = named.strip_suffix(b" (deleted)").unwrap_or(named);
        mappings.iter().find(|mapping| mapping.path.as_os_str().as_encoded_bytes() == named)
    }

    /// The file mappings of a process, by address; `None` where its maps cannot be read.
    pub fn mappings(&self, pid: u32) -> Option<Vec<Mapping>> {
        let file = File::open(self.process_path(pid, "maps")).ok()?;
        let mut reader = BufReader::with_capacity(64 << 10, file.take(MAPS_LIMIT));
        let (mut found, mut line) = (Vec::new(), Vec::new());
        // A process that ends meanwhile gives what came before.
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            found.extend(Mapping::parse(&line));
            line.clear();
        }
        Some(found)
    }

    /// Whether the process still has memory; one that has ended has none, waited for or not.
    pub fn has_memory(&self, pid: u32) -> bool {
        let pages = super::text::read_bounded(&self.process_path(pid, "statm"), 256);
        pages.is_some_and(|pages| !pages.is_empty() && !pages.starts_with(b"0 "))
    }

    /// The link in `/proc/PID/map_files` that leads to the mapped file itself, whatever its path
    /// now names. Following it takes `CAP_SYS_ADMIN` or `CAP_CHECKPOINT_RESTORE`.
    pub fn map_file(&self, pid: u32, mapping: &Mapping) -> PathBuf {
        self.process_path(pid, format!("map_files/{:x}-{:x}", mapping.start, mapping.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_files() {
        let cases: &[(&[u8], &str, bool, bool)] = &[
            (
                b"7f00-7f80 r-xp 00000000 08:01 99   /usr/lib/libcuda.so.1",
                "/usr/lib/libcuda.so.1",
                true,
                false,
            ),
            (b"7f00-7f80 r--p 00000000 08:01 99 /a b/lib c.so\n", "/a b/lib c.so", false, false),
            (b"7f00-7f80 r-xs 00000000 08:01 99   /x/lib.so (deleted)", "/x/lib.so", true, true),
            (b"7f00-7f80 r-xp 00000000 08:01 99   /x/a\\012b", "/x/a\\012b", true, false),
            (b"7f00-7f80 rw-s 00000000 00:01 99   /memfd:x (deleted)", "/memfd:x", false, true),
            (
                b"7f00-7f80 r-xp 00000000 08:01 99   /x/7f00-7f80 r-xp 0 08:02 7 /y",
                "/x/7f00-7f80 r-xp 0 08:02 7 /y",
                true,
                false,
            ),
        ];
        for (line, path, executable, deleted) in cases {
            let mapping = Mapping::parse(line).unwrap();
            assert_eq!(mapping.path, PathBuf::from(path));
            assert_eq!((mapping.executable, mapping.deleted), (*executable, *deleted));
            assert_eq!((mapping.start, mapping.end, mapping.inode), (0x7f00, 0x7f80, 99));
        }
        let mapping = Mapping::parse(b"10-20 r-xp 0001f000 103:0a 7 /x").unwrap();
        assert_eq!((mapping.dev, mapping.offset), ((0x103, 0xa), 0x1f000));
    }

    #[test]
    fn names_that_are_not_utf8_survive() {
        let mapping = Mapping::parse(b"10-20 r-xp 0 08:01 7 /x/\xff\xfe.so").unwrap();
        assert_eq!(mapping.file_name(), b"\xff\xfe.so");
    }

    #[test]
    fn lines_without_a_file_are_none() {
        let lines: &[&[u8]] = &[
            b"",
            b"7f00-7f80 rw-p 00000000 00:00 0",
            b"7f00-7f80 rw-p 00000000 00:00 0                          [heap]",
            b"7f00-7f80 rw-p 00000000 00:00 0                          /fake",
            b"7f80-7f00 r-xp 00000000 08:01 99 /x",
            b"7f00 r-xp 00000000 08:01 99 /x",
            b"zz-7f80 r-xp 00000000 08:01 99 /x",
            b"7f00-7f80 r-xp 00000000 0801 99 /x",
            b"7f00-7f80 r-xp 00000000 08:01 -9 /x",
            b"ffffffffffffffffff-7f80 r-xp 00000000 08:01 99 /x",
            b"\xff\xff r-xp",
        ];
        for line in lines {
            assert_eq!(Mapping::parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn this_process_maps_its_executable() {
        let (host, pid) = (Host::live(), std::process::id());
        let exe = std::env::current_exe().unwrap();
        let mappings = host.mappings(pid).unwrap();
        let own =
            mappings.iter().find(|mapping| mapping.executable && mapping.path == exe).unwrap();
        assert!(host.map_file(pid, own).symlink_metadata().is_ok());
        assert!(host.has_memory(pid) && !Host::at("/nonexistent").has_memory(pid));
    }
}
