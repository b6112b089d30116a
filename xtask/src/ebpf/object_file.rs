//! The ELF object of the kernel half: DWARF removed, two builds compared.

use anyhow::{Context as _, Result};
use object::{
    Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionKind,
    build::elf::{Builder, Section, SectionData},
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
    write(builder)
}

/// LLVM keeps the names of sections and symbols in one table; the writer wants two.
fn write(mut builder: Builder<'_>) -> Result<Vec<u8>> {
    let has_names = |section: &Section<'_>| matches!(section.data, SectionData::SectionString);
    if !builder.sections.iter().any(has_names) {
        let names = builder.sections.add();
        names.name = ".shstrtab".into();
        names.sh_type = elf::SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use object::Endianness;

    /// An object as the linker writes it: a program, BTF and DWARF.
    fn object(program: &'static [u8], btf: &'static [u8]) -> Vec<u8> {
        let mut builder = Builder::new(Endianness::Little, true);
        builder.header.e_type = elf::ET_REL;
        builder.header.e_machine = elf::EM_BPF;
        let alloc = u64::from(elf::SHF_ALLOC | elf::SHF_EXECINSTR);
        let contents = [("uprobe", alloc, program), (".BTF", 0, btf), (".debug_info", 0, b"dwarf")];
        for (name, flags, data) in contents {
            let section = builder.sections.add();
            section.name = name.into();
            section.sh_type = elf::SHT_PROGBITS;
            section.sh_flags = flags;
            section.sh_addralign = 1;
            section.data = SectionData::Data(data.into());
        }
        builder.set_section_sizes();
        write(builder).unwrap()
    }

    fn names(object: &[u8]) -> Vec<String> {
        let file = object::File::parse(object).unwrap();
        file.sections().map(|section| section.name().unwrap().to_owned()).collect()
    }

    #[test]
    fn dwarf_goes_and_btf_stays() {
        let stripped = without_dwarf(&object(b"\x95\0\0\0\0\0\0\0", b"btf")).unwrap();
        let names = names(&stripped);
        assert!(!names.iter().any(|name| name.starts_with(".debug_")), "{names:?}");
        assert!([".BTF", "uprobe"].iter().all(|name| names.iter().any(|n| n == name)), "{names:?}");
    }

    #[test]
    fn a_changed_program_is_a_difference_and_changed_btf_is_none() {
        let one = object(b"\x95\0\0\0\0\0\0\0", b"btf");
        assert!(differences(&one, &object(b"\x95\0\0\0\0\0\0\0", b"other")).unwrap().is_empty());
        let other = object(b"\xb7\0\0\0\0\0\0\0", b"btf");
        assert_eq!(differences(&one, &other).unwrap(), ["uprobe"]);
    }

    #[test]
    fn a_file_that_is_no_object_is_an_error() {
        assert!(without_dwarf(b"not ELF").is_err());
        assert!(differences(b"not ELF", b"not ELF").is_err());
    }
}
