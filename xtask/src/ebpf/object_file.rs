//! The ELF object of the kernel half: DWARF removed, two builds compared.

use anyhow::{Context as _, Result};
use object::{
    Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionKind,
    build::elf::{Builder, SectionData},
    elf,
};
use std::collections::BTreeMap;

/// The object without DWARF, as `llvm-strip -g` makes it. BTF stays: maps and line numbers in the
/// verifier's log come from it.
pub(super) fn without_dwarf(object: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(object)?;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        section.delete = name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
    }
    builder.delete_orphans();
    // LLVM keeps the names of sections and symbols in one table; the writer wants two.
    let names = builder.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut bytes = Vec::new();
    builder.write(&mut bytes)?;
    Ok(bytes)
}

/// The names of sections that the kernel would see differently. Line numbers and types (BTF)
/// may differ: distributions patch comments into the standard library's sources.
pub(super) fn differences(left: &[u8], right: &[u8]) -> Result<Vec<String>> {
    let (left, right) = (loaded(left)?, loaded(right)?);
    let names: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    let differ = names.into_iter().filter(|name| left.get(*name) != right.get(*name));
    Ok(differ.cloned().collect())
}

/// What the loader uses of a section: its bytes and, for each relocation, where and to what.
type Loaded = (Vec<u8>, Vec<(u64, String)>);

fn loaded(object: &[u8]) -> Result<BTreeMap<String, Loaded>> {
    let file = object::File::parse(object)?;
    let mut sections = BTreeMap::new();
    for section in file.sections() {
        let name = section.name()?.to_owned();
        let skipped = matches!(section.kind(), SectionKind::Metadata | SectionKind::Other);
        if skipped || name.starts_with(".BTF") || name.starts_with(".debug_") {
            continue;
        }
        let mut relocations = Vec::new();
        for (offset, relocation) in section.relocations() {
            relocations.push((offset, target(&file, relocation.target())?));
        }
        sections.insert(name, (section.data()?.to_vec(), relocations));
    }
    Ok(sections)
}

fn target(file: &object::File<'_>, target: RelocationTarget) -> Result<String> {
    let RelocationTarget::Symbol(index) = target else { return Ok(format!("{target:?}")) };
    let symbol = file.symbol_by_index(index).context("relocation to a symbol that is not there")?;
    Ok(symbol.name()?.to_owned())
}
