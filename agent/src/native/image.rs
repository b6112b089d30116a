//! A private copy of what names the functions of a file.

use std::{fs::File, io::Write as _, os::fd::AsRawFd as _, path::PathBuf};

use gimli::{DebugAbbrev, DebugInfo, EndianSlice, LittleEndian as Little, UnitOffset};
use object::{
    LittleEndian,
    elf::{self, FileHeader64, SectionHeader64},
    read::elf::{FileHeader as _, SectionHeader as _, SectionTable},
};
use rustix::fs::MemfdFlags;

use super::Module;
use crate::host::BoundedElf;

/// Longest symbol or string table; of larger ones [`super::functions`] reads what is asked for.
const TABLE_LIMIT: u64 = 16 << 20;
/// Debug information that is copied at most, in all; beyond, functions have names but no lines.
const DEBUG_LIMIT: u64 = 64 << 20;
/// Deepest nesting of debug information that is handed on: blazesym recurses into inlined calls.
/// What compilers write stays below a hundred.
const DEPTH_LIMIT: isize = 256;

const HEADER: usize = size_of::<FileHeader64<LittleEndian>>();
const SECTION: usize = size_of::<SectionHeader64<LittleEndian>>();

/// An ELF file in memory with the symbols of another and no references to anything else.
///
/// blazesym maps the files that it reads, and follows what they say of separate debug files. This
/// copy can neither shrink nor change while it is mapped, and names no other file.
#[derive(Debug)]
pub(super) struct Image {
    /// Holds the memory.
    _file: File,
    /// Where it can be opened as long as this lives.
    pub(super) path: PathBuf,
    /// Its size.
    pub(super) bytes: u64,
    /// Whether it has debug information.
    pub(super) debug: bool,
}

/// A section to write.
struct Part {
    name: Vec<u8>,
    kind: u32,
    link: u32,
    entry: u64,
    content: Vec<u8>,
}

impl Image {
    /// Copies the symbols of a file; `None` where it has none or cannot be read.
    pub(super) fn of(module: &Module) -> Option<Self> {
        let source = module.source()?;
        let data = source.reader();
        let header = FileHeader64::<LittleEndian>::parse(data).ok()?;
        let sections = header.sections(LittleEndian, data).ok()?;
        let mut parts = symbols(module, &sections)?;
        let debug = debug(module, &sections).unwrap_or_default();
        let has_debug = !debug.is_empty();
        parts.extend(debug);
        let content = write(header.e_machine(LittleEndian), parts)?;
        Self::store(&content, has_debug)
    }

    fn store(content: &[u8], debug: bool) -> Option<Self> {
        let memory = rustix::fs::memfd_create("vramscope-symbols", MemfdFlags::CLOEXEC).ok()?;
        let mut file = File::from(memory);
        file.write_all(content).ok()?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        Some(Self { _file: file, path, bytes: content.len() as u64, debug })
    }
}

type Sections<'a> = SectionTable<'a, FileHeader64<LittleEndian>, BoundedElf<'a>>;

/// The symbol table and its strings. The full one holds all that the dynamic one does.
fn symbols(module: &Module, sections: &Sections<'_>) -> Option<Vec<Part>> {
    let of_kind = |kind| sections.iter().find(move |section| section.sh_type(LittleEndian) == kind);
    let table = of_kind(elf::SHT_SYMTAB).or_else(|| of_kind(elf::SHT_DYNSYM))?;
    let strings = sections.section(table.link(LittleEndian)).ok()?;
    let symbols = Part {
        name: b".symtab".to_vec(),
        kind: elf::SHT_SYMTAB,
        link: 2,
        entry: table.sh_entsize(LittleEndian),
        content: content(module, table, TABLE_LIMIT)?,
    };
    let strings = plain(b".strtab", elf::SHT_STRTAB, content(module, strings, TABLE_LIMIT)?);
    Some(vec![symbols, strings])
}

fn plain(name: &[u8], kind: u32, content: Vec<u8>) -> Part {
    Part { name: name.to_vec(), kind, link: 0, entry: 0, content }
}

fn content(
    module: &Module,
    section: &SectionHeader64<LittleEndian>,
    limit: u64,
) -> Option<Vec<u8>> {
    let bytes = Some(section.sh_size(LittleEndian)).filter(|bytes| *bytes <= limit)?;
    module.read(section.sh_offset(LittleEndian), bytes as usize)
}

/// The debug information, where it is whole, of a bearable size and not compressed (what it
/// unpacks to is not bounded by what it takes in the file).
fn debug(module: &Module, sections: &Sections<'_>) -> Option<Vec<Part>> {
    let mut left = DEBUG_LIMIT;
    let mut parts = Vec::new();
    for section in sections.iter() {
        let name = sections.section_name(LittleEndian, section).ok()?;
        if !name.starts_with(b".debug_") || name == b".debug_sup" {
            continue;
        }
        if section.sh_flags(LittleEndian) & u64::from(elf::SHF_COMPRESSED) != 0 {
            return None;
        }
        let content = content(module, section, left)?;
        left -= content.len() as u64;
        parts.push(plain(name, elf::SHT_PROGBITS, content));
    }
    is_flat(&parts).then_some(parts)
}

/// Whether no entry is nested too deep.
fn is_flat(parts: &[Part]) -> bool {
    let section = |name: &[u8]| {
        let part = parts.iter().find(|part| part.name == name);
        part.map_or(&[][..], |part| &part.content)
    };
    let info = DebugInfo::new(section(b".debug_info"), Little);
    let abbreviations = DebugAbbrev::new(section(b".debug_abbrev"), Little);
    depth(&info, &abbreviations).is_some_and(|depth| depth <= DEPTH_LIMIT)
}

fn depth(
    info: &DebugInfo<EndianSlice<'_, Little>>,
    abbreviations: &DebugAbbrev<EndianSlice<'_, Little>>,
) -> Option<isize> {
    let mut deepest = 0;
    let mut units = info.units();
    while let Some(unit) = units.next().ok()? {
        let abbreviations = unit.abbreviations(abbreviations).ok()?;
        let start: Option<UnitOffset> = None;
        let mut entries = unit.entries_raw(&abbreviations, start).ok()?;
        while !entries.is_empty() {
            deepest = deepest.max(entries.next_depth());
            if let Some(abbreviation) = entries.read_abbreviation().ok()? {
                entries.skip_attributes(abbreviation.attributes()).ok()?;
            }
        }
    }
    Some(deepest)
}

/// Lays the sections out behind a header: an empty one, the given ones, the one with the names.
fn write(machine: u16, mut parts: Vec<Part>) -> Option<Vec<u8>> {
    let mut names = vec![0];
    let mut name_at = Vec::new();
    parts.push(plain(b".shstrtab", elf::SHT_STRTAB, Vec::new()));
    for part in &parts {
        name_at.push(u32::try_from(names.len()).ok()?);
        names.extend_from_slice(&part.name);
        names.push(0);
    }
    parts.last_mut()?.content = names;
    let count = u16::try_from(parts.len() + 1).ok()?;
    let mut headers = vec![0; SECTION];
    let mut body = vec![0; HEADER];
    for (part, name) in parts.into_iter().zip(name_at) {
        // Tables are read in place: they want alignment.
        body.resize(body.len().next_multiple_of(16), 0);
        headers.extend(section_header(name, &part, body.len() as u64));
        body.extend(part.content);
    }
    body.resize(body.len().next_multiple_of(16), 0);
    let header = file_header(machine, body.len() as u64, count);
    body.get_mut(..HEADER)?.copy_from_slice(&header);
    body.extend(headers);
    Some(body)
}

fn file_header(machine: u16, sections_at: u64, count: u16) -> Vec<u8> {
    let mut header = vec![0x7f, b'E', b'L', b'F', elf::ELFCLASS64, elf::ELFDATA2LSB, 1, 0];
    header.resize(16, 0);
    header.extend(elf::ET_DYN.to_le_bytes());
    header.extend(machine.to_le_bytes());
    header.extend(1_u32.to_le_bytes());
    // No entry point, no program headers.
    header.extend([0; 16]);
    header.extend(sections_at.to_le_bytes());
    header.extend(0_u32.to_le_bytes());
    for half in [HEADER as u16, 0, 0, SECTION as u16, count, count - 1] {
        header.extend(half.to_le_bytes());
    }
    header
}

fn section_header(name: u32, part: &Part, at: u64) -> Vec<u8> {
    let mut header = Vec::with_capacity(SECTION);
    header.extend([name, part.kind].iter().flat_map(|word| word.to_le_bytes()));
    let size = part.content.len() as u64;
    header.extend([0, 0, at, size].iter().flat_map(|word| word.to_le_bytes()));
    header.extend([part.link, 0].iter().flat_map(|word| word.to_le_bytes()));
    header.extend([8, part.entry].iter().flat_map(|word| word.to_le_bytes()));
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Debug information of one unit with entries that are nested so deep.
    fn nested(depth: usize) -> Vec<Part> {
        // Entry 1: a block with children and no attributes.
        let abbreviations = vec![1, 0x0b, 1, 0, 0, 0];
        let mut entries = vec![1; depth];
        entries.extend(vec![0; depth]);
        let mut info = Vec::new();
        info.extend((entries.len() as u32 + 7).to_le_bytes());
        info.extend([4, 0, 0, 0, 0, 0, 8]);
        info.extend(entries);
        let part = |name, content| plain(name, elf::SHT_PROGBITS, content);
        vec![part(b".debug_info", info), part(b".debug_abbrev", abbreviations)]
    }

    #[test]
    fn deep_nesting_is_not_handed_on() {
        assert!(is_flat(&nested(100)));
        assert!(!is_flat(&nested(1000)));
        assert!(!is_flat(&nested(1_000_000)));
        let mut cut = nested(100);
        cut[0].content.truncate(50);
        assert!(!is_flat(&cut), "nor what cannot be parsed");
    }
}
