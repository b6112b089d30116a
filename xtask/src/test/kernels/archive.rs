//! An initial file system: a `cpio` archive of programs with the libraries that they need.
//!
//! The kernel unpacks it into memory and starts `/init`.
//! Format: <https://docs.kernel.org/driver-api/early-userspace/buffer-format.html>.

use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufWriter, Write},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

const FOLDER: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const END: &str = "TRAILER!!!";

/// An archive that is being written.
pub(super) struct Archive<W: Write> {
    to: W,
    /// What is in it, so that nothing is in it twice.
    names: BTreeSet<PathBuf>,
    inode: u32,
    written: usize,
}

impl Archive<BufWriter<File>> {
    /// A new one, in the place of an older one.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("make {}", path.display()))?;
        Ok(Self::new(BufWriter::new(file)))
    }
}

impl<W: Write> Archive<W> {
    fn new(to: W) -> Self {
        Self { to, names: BTreeSet::new(), inode: 0, written: 0 }
    }

    /// Adds a folder, and those that it is in.
    pub(super) fn folder(&mut self, name: &Path) -> Result<()> {
        if let Some(parent) = name.parent().filter(|parent| parent.parent().is_some()) {
            self.folder(parent)?;
        }
        self.entry(name, FOLDER, &[])
    }

    /// Adds a file.
    pub(super) fn bytes(&mut self, name: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
        if let Some(parent) = name.parent().filter(|parent| parent.parent().is_some()) {
            self.folder(parent)?;
        }
        self.entry(name, REGULAR | mode, bytes)
    }

    /// Adds a file of this machine.
    pub(super) fn file(&mut self, name: &Path, from: &Path) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        let mode = fs::metadata(from).map_or(0o644, |meta| meta.permissions().mode() & 0o777);
        self.bytes(name, mode, &bytes)
    }

    /// Adds the files of a folder, and of those in it.
    pub(super) fn files(&mut self, name: &Path, from: &Path) -> Result<()> {
        self.folder(name)?;
        for entry in fs::read_dir(from).with_context(|| format!("list {}", from.display()))? {
            let entry = entry?;
            let name = name.join(entry.file_name());
            if entry.path().is_dir() {
                self.files(&name, &entry.path())?;
            } else {
                self.file(&name, &entry.path())?;
            }
        }
        Ok(())
    }

    /// Adds a program, without what only debuggers read, and the libraries that it is linked with,
    /// which lie where they lie on this machine.
    pub(super) fn program(&mut self, name: &Path, from: &Path, scratch: &Path) -> Result<()> {
        let slim = scratch.join("slim");
        sh::output(sh::command("objcopy")?.arg("--strip-debug").arg(from).arg(&slim))?;
        self.file(name, &slim)?;
        self.libraries(from)
    }

    /// Adds the libraries that a program is linked with.
    pub(super) fn libraries(&mut self, of: &Path) -> Result<()> {
        for library in linked(&sh::output(sh::command("ldd")?.arg(of))?) {
            self.file(&library, &library)?;
        }
        Ok(())
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Result<()> {
        self.entry(Path::new(END), 0, &[])?;
        self.to.flush().context("write the initial file system")
    }

    fn entry(&mut self, name: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
        if !self.names.insert(name.to_owned()) {
            return Ok(());
        }
        self.inode += 1;
        let name = name.to_string_lossy();
        let name = name.trim_start_matches('/');
        let Ok(size) = u32::try_from(bytes.len()) else { bail!("{name} is too large: 4 GiB") };
        // Magic number, inode, mode, owner, group, links, time, size, four device numbers, length
        // of the name with its null, no checksum.
        let numbers = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        let mut head = String::from("070701");
        head.extend(numbers.map(|number| format!("{number:08x}")));
        self.write(head.as_bytes())?;
        self.write(name.as_bytes())?;
        self.write(&[0])?;
        self.pad()?;
        self.write(bytes)?;
        self.pad()
    }

    /// Names and contents end at multiples of four bytes.
    fn pad(&mut self) -> Result<()> {
        self.write(&[0; 3][..self.written.next_multiple_of(4) - self.written])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len();
        self.to.write_all(bytes).context("write the initial file system")
    }
}

/// Paths in what `ldd` prints: of libraries, and of the loader, which has no arrow.
fn linked(ldd: &str) -> Vec<PathBuf> {
    let path_of = |line: &str| {
        let path = line.split_once("=> ").map_or(line, |(_, path)| path).trim_start();
        let path = path.split_once(" (").map_or(path, |(path, _)| path);
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    ldd.lines().filter_map(path_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_come_once_with_their_folders() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        for _ in 0..2 {
            archive.bytes(Path::new("/a/bc"), 0o755, b"12345").unwrap();
        }
        archive.finish().unwrap();
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(text.matches("070701").count(), 3, "{text:?}");
        let at = |what: &str| text.find(what).unwrap();
        // 110 bytes of head, the name and a null, up to a multiple of four.
        assert_eq!(at("a\0"), 110);
        let file = at("a/bc\0") - 110;
        assert_eq!(file, 112);
        assert!(text[file..].starts_with("07070100000002000081ed0000000000000000"), "{text:?}");
        assert_eq!(&text[file + 54..file + 62], "00000005");
        assert_eq!(at("12345"), file + 116);
        assert_eq!(at(END), file + 116 + 8 + 110);
    }

    #[test]
    fn libraries_in_the_words_of_ldd() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f5b)\n\tlibz.so => not found\n";
        let paths = ["/lib/x/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(linked(ldd), paths);
    }
}
