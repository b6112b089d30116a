//! From symbol names to file offsets, once per file.

use std::{collections::HashMap, fs::File};

use object::{Object as _, ObjectSegment as _, ObjectSymbol as _};
use thiserror::Error;

use crate::{
    host::ElfSource,
    kernel::Site,
    probes::{Library, rows_of},
};

/// The file is not an ELF library that can be parsed.
#[derive(Debug, Error)]
#[error("parse it as an ELF library")]
pub struct ElfError(#[from] object::Error);

/// Finds the library's probed functions among the file's exported symbols. Functions that this
/// version does not have are left out.
pub fn sites(file: File, library: Library) -> Result<Vec<Site>, ElfError> {
    let mut found = matches(file, library)?;
    found.dedup_by_key(|site| site.row);
    Ok(found)
}

/// All exported symbols that are a probed function, in order. The beginning of a name may be that of
/// several.
fn matches(file: File, library: Library) -> Result<Vec<Site>, ElfError> {
    let source = ElfSource::new(file);
    let elf = object::File::parse(source.reader())?;
    let segments: Vec<_> = elf
        .segments()
        .map(|segment| (segment.address(), segment.size(), segment.file_range().0))
        .collect();
    let (beginnings, exact): (Vec<_>, Vec<_>) =
        rows_of(library).partition(|(_, probe)| probe.symbol.ends_with('*'));
    let exact: HashMap<&str, u8> =
        exact.into_iter().map(|(row, probe)| (probe.symbol, row)).collect();
    let row_of = |name: &str| {
        exact
            .get(name)
            .copied()
            .or_else(|| beginnings.iter().find(|(_, probe)| probe.is(name)).map(|(row, _)| *row))
    };
    let mut found: Vec<Site> = elf
        .dynamic_symbols()
        .filter(object::ObjectSymbol::is_definition)
        .filter_map(|symbol| {
            let row = row_of(symbol.name().ok()?)?;
            let offset = file_offset(&segments, symbol.address())?;
            Some(Site { row, offset })
        })
        .collect();
    found.sort_unstable_by_key(|site| (site.row, site.offset));
    Ok(found)
}

/// A symbol's address is not its place in the file: patched libraries differ.
fn file_offset(segments: &[(u64, u64, u64)], address: u64) -> Option<u64> {
    segments.iter().find_map(|(start, size, offset)| {
        let distance = address.checked_sub(*start).filter(|distance| distance < size)?;
        distance.checked_add(*offset)
    })
}

#[cfg(test)]
mod tests {
    use std::{env, path::Path};

    use super::*;

    /// Libraries of `PyTorch`: lines of version, machine and path.
    const WHEELS_ENV: &str = "VRAMSCOPE_TEST_WHEELS";

    /// What keeps the agent from finding each of a library's functions in this file exactly once.
    fn complaint(version: &str, path: &Path) -> Option<String> {
        let library = Library::of_file_name(path.file_name()?.to_str()?)?;
        let rows: Vec<_> = rows_of(library).collect();
        let all = matches(File::open(path).unwrap(), library).unwrap();
        let times = |row| all.iter().filter(|site| site.row == row).count();
        let wrong = rows.iter().filter(|(row, _)| times(*row) != 1);
        let wrong: Vec<_> =
            wrong.map(|(row, probe)| format!("{} x {}", times(*row), probe.symbol)).collect();
        let probed = sites(File::open(path).unwrap(), library).unwrap();
        let (name, found) = (library.as_str(), probed.len());
        println!("torch {version}, {name}: {found} of {} found", rows.len());
        (!wrong.is_empty()).then(|| format!("{version}, {name}: {}", wrong.join(", ")))
    }

    #[test]
    #[ignore = "wants real libraries of PyTorch: cargo xtask test --wheels"]
    fn every_function_of_pytorch_is_in_each_of_its_versions_once() {
        let listed = env::var(WHEELS_ENV).unwrap();
        let mut complaints = Vec::new();
        for line in listed.lines() {
            let (version, path) = line.rsplit_once(' ').unwrap();
            complaints.extend(complaint(version, Path::new(path)));
        }
        assert!(complaints.is_empty(), "{complaints:#?}");
        assert!(!listed.is_empty());
    }

    #[test]
    fn offsets_follow_the_segment_not_the_address() {
        let segments = [(0, 0x1000, 0), (0x3000, 0x1000, 0x2000)];
        assert_eq!(file_offset(&segments, 0x10), Some(0x10));
        assert_eq!(file_offset(&segments, 0x3010), Some(0x2010));
        assert_eq!(file_offset(&segments, 0x5000), None);
        assert_eq!(file_offset(&[(u64::MAX, 2, 0)], 5), None);
        assert_eq!(file_offset(&[(0, 0x1000, u64::MAX)], 5), None);
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let file = File::open("/proc/self/cmdline").unwrap();
        assert!(sites(file, Library::Cuda).is_err());
    }
}
