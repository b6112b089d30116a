//! What a binary needs of the C library, read from its ELF file.

use anyhow::{Context as _, Result};
use object::{
    Endianness,
    elf::{DT_NEEDED, FileHeader64},
    read::elf::{Dyn as _, FileHeader as _},
};
use std::fmt;

/// A version of the GNU C library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u32, pub(super) u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Shared libraries and the newest symbol version among them.
pub(super) struct Needs {
    pub(super) libraries: Vec<String>,
    pub(super) newest: Version,
}

/// Whether every machine with glibc has the library; newer glibc has all of it in `libc.so.6`.
pub(super) fn is_part(library: &str) -> bool {
    let stem = library.split(".so").next().unwrap_or(library);
    // libgcc_s is GCC's runtime, which Rust unwinds with; zig links its own.
    ["libc", "libm", "libdl", "libpthread", "librt", "libutil", "ld-linux-x86-64", "libgcc_s"]
        .contains(&stem)
}

pub(super) fn needs(elf: &[u8]) -> Result<Needs> {
    let header = FileHeader64::<Endianness>::parse(elf)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, elf)?;
    let (entries, strings) = sections.dynamic(endian, elf)?.context("no dynamic section")?;
    let strings = sections.strings(endian, elf, strings)?;
    let mut libraries = Vec::new();
    for entry in entries.iter().filter(|entry| entry.tag32(endian) == Some(DT_NEEDED)) {
        libraries.push(text(entry.string(endian, strings)?));
    }
    let mut newest = Version::default();
    if let Some((mut files, link)) = sections.gnu_verneed(endian, elf)? {
        let strings = sections.strings(endian, elf, link)?;
        while let Some((_, mut versions)) = files.next()? {
            while let Some(needed) = versions.next()? {
                newest =
                    newest.max(parse(&text(needed.name(endian, strings)?)).unwrap_or_default());
            }
        }
    }
    Ok(Needs { libraries, newest })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `GLIBC_2.34` or `GLIBC_2.2.5`.
fn parse(name: &str) -> Option<Version> {
    let mut parts = name.strip_prefix("GLIBC_")?.split('.').map(str::parse);
    Some(Version(parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert!(parse("GLIBC_2.34") > parse("GLIBC_2.4"));
        assert_eq!(parse("GLIBC_2.2.5"), Some(Version(2, 2)));
        assert_eq!(parse("GCC_3.0"), None);
        assert_eq!(parse("GLIBC_PRIVATE"), None);
    }

    #[test]
    fn the_needs_of_this_test_are_read_from_its_own_file() {
        let elf = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = needs(&elf).unwrap();
        assert!(needs.libraries.iter().any(|library| library == "libc.so.6"));
        assert!(needs.libraries.iter().all(|library| is_part(library)), "{:?}", needs.libraries);
        assert!(needs.newest > Version(2, 2));
    }
}
