//! What the file of a CPython tells: where its runtime is, and how old it is.

use std::fs::File;

use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

use crate::host::{ElfSource, Mapping, Segments};

/// `_PyRuntime` by section, where the symbol was stripped (3.10 and later).
const RUNTIME_SECTION: &str = ".PyRuntime";

/// The facts of one file; addresses are those in the file.
#[derive(Debug, Default)]
pub(crate) struct Image {
    segments: Segments,
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
        let mut image = Self { segments: Segments::of(&elf), ..Self::default() };
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
        self.segments.bias(mappings)
    }
}
