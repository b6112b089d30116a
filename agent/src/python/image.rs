//! What the file of a CPython tells: where its runtime is, and how old it is.

use std::fs::File;

use object::{
    Object as _, ObjectSection as _, ObjectSegment as _, ObjectSymbol as _, SegmentFlags,
};

use crate::host::{ElfSource, Mapping};

/// `_PyRuntime` by section, where the symbol was stripped (3.10 and later).
const RUNTIME_SECTION: &str = ".PyRuntime";

/// A part of the file that is loaded.
#[derive(Clone, Copy, Debug)]
struct Segment {
    addr: u64,
    offset: u64,
    executable: bool,
}

/// The facts of one file; addresses are those in the file.
#[derive(Debug, Default)]
pub(crate) struct Image {
    segments: Vec<Segment>,
    /// `_PyRuntime`.
    pub(super) runtime: Option<u64>,
    /// `Py_Version`, a constant (3.11 and later).
    pub(super) version: Option<u64>,
    /// `PyCode_Type`: the file is an interpreter.
    pub(super) code_type: Option<u64>,
    /// Lowest minor version of CPython 3 that has the functions of this file.
    pub(super) oldest_minor: Option<u8>,
    /// It takes the interpreter from a library.
    pub(super) imports: bool,
}

impl Image {
    /// Reads the exported symbols of a file; `None` where it is no ELF file that can be parsed.
    pub(crate) fn read(file: File) -> Option<Self> {
        let source = ElfSource::new(file);
        let elf = object::File::parse(source.reader()).ok()?;
        let mut image = Self { segments: segments(&elf), ..Self::default() };
        for symbol in elf.dynamic_symbols() {
            let Ok(name) = symbol.name() else { continue };
            if symbol.is_definition() {
                image.note(name, symbol.address());
            } else {
                image.imports |= name.trim_start_matches('_').starts_with("Py");
            }
        }
        if image.runtime.is_none() {
            image.runtime = elf.section_by_name(RUNTIME_SECTION).map(|section| section.address());
        }
        Some(image)
    }

    /// Notes a symbol. Versions before 3.11 have no `Py_Version`; each has functions that the
    /// version before it had not (`versionadded` in the documentation of the C API).
    fn note(&mut self, name: &str, addr: u64) {
        let minor = match name {
            "_PyRuntime" => return self.runtime = Some(addr),
            "Py_Version" => return self.version = Some(addr),
            "PyCode_Type" => return self.code_type = Some(addr),
            "PyConfig_InitPythonConfig" => 8,
            "PyInterpreterState_Get" => 9,
            "PyModule_AddObjectRef" => 10,
            _ => return,
        };
        self.oldest_minor = self.oldest_minor.max(Some(minor));
    }

    /// A CPython without the functions of 3.8.
    pub(super) fn is_old(&self) -> bool {
        self.code_type.is_some() && self.oldest_minor.is_none() && !self.imports
    }

    /// How much higher the process has the file than the file says, of all its mappings.
    pub(super) fn bias(&self, mappings: &[&Mapping]) -> Option<u64> {
        let page = !(rustix::param::page_size() as u64 - 1);
        let pairs =
            mappings.iter().flat_map(|map| self.segments.iter().map(move |part| (map, part)));
        let mut fitting = pairs.filter(|(map, part)| {
            map.offset == part.offset & page && map.executable == part.executable
        });
        // Two segments may share a page of the file, but only one is executable.
        let best = fitting.clone().find(|(map, _)| map.executable).or_else(|| fitting.next());
        best.map(|(map, part)| map.start.wrapping_sub(part.addr & page))
    }
}

fn segments<'a>(elf: &impl object::Object<'a>) -> Vec<Segment> {
    elf.segments()
        .map(|segment| Segment {
            addr: segment.address(),
            offset: segment.file_range().0,
            executable: matches!(segment.flags(), SegmentFlags::Elf { p_flags }
                if p_flags & object::elf::PF_X != 0),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, offset: u64, executable: bool) -> Mapping {
        let path = "/usr/bin/python3".into();
        let end = start + 0x1000;
        Mapping { start, end, executable, offset, dev: (8, 1), inode: 7, path, deleted: false }
    }

    #[test]
    fn the_bias_comes_from_the_executable_segment() {
        let segment = |addr, offset, executable| Segment { addr, offset, executable };
        let image = Image {
            segments: vec![
                segment(0x40_0000, 0, false),
                segment(0x40_2345, 0x1345, true),
                segment(0x40_4345, 0x1999, false),
            ],
            ..Image::default()
        };
        let (low, code, data) = (
            mapping(0x7000, 0, false),
            mapping(0x9000, 0x1000, true),
            mapping(0xb000, 0x1000, false),
        );
        let bias = 0x9000_u64.wrapping_sub(0x40_2000);
        assert_eq!(image.bias(&[&low, &data, &code]), Some(bias));
        assert_eq!(image.bias(&[&low]), Some(0x7000_u64.wrapping_sub(0x40_0000)));
        assert_eq!(image.bias(&[&mapping(0x7000, 0x8000, true)]), None);
        assert_eq!(Image::default().bias(&[&low]), None);
    }
}
