//! Finds the record of one function in `.eh_frame`, reading no more of the file than that takes.

use std::{collections::BTreeMap, ops::Range};

use gimli::{
    BaseAddresses, CieOrFde, EhFrame, EhFrameOffset, EndianSlice, FrameDescriptionEntry,
    LittleEndian, UnwindSection as _,
};
use object::{
    elf::FileHeader64,
    read::elf::{FileHeader as _, SectionHeader as _},
};

use super::Module;

/// Longest record that is read; that of Python's evaluation loop, long for its many rows, is some
/// kilobytes.
const RECORD_LIMIT: u32 = 1 << 20;
/// Longest `.eh_frame` that is searched from its beginning, for files without an index.
const SCAN_LIMIT: u64 = 16 << 20;
/// Entries of the index that are read at once: a page.
const CHUNK: u64 = 512;

/// `DW_EH_PE_*` of the only table that linkers write: relative to the section, four bytes signed.
const TABLE_ENCODING: u8 = 0x3b;
/// Values of four bytes, signed or not, of whatever base.
const FOUR_BYTES: [u8; 2] = [0x03, 0x0b];

/// Where records of functions are: first address to address of the record.
pub(super) type Index = BTreeMap<u64, u64>;

pub(super) type Section<'a> = EhFrame<EndianSlice<'a, LittleEndian>>;
type Entry<'a> = FrameDescriptionEntry<EndianSlice<'a, LittleEndian>>;

/// The unwind information of one function: its record, behind the common record that it refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Function {
    /// Addresses of its code, as the file states them (SVMA).
    pub(super) range: Range<u64>,
    /// An `.eh_frame` section of those two records.
    pub(super) section: Vec<u8>,
    /// Address of the section for which what the record says relative to itself is true.
    pub(super) section_svma: u64,
    /// Bytes of the common record; the function's own is behind it.
    common_bytes: usize,
}

impl Function {
    /// Finds the function that holds a stated address; `None` where the file tells of none.
    pub(super) fn find(module: &Module, svma: u64) -> Option<Self> {
        let found = match search_table(module, svma) {
            Table::Absent => module.index.get_or_init(|| scan(module)).range(..=svma).next_back(),
            Table::Missed => None,
            Table::Found(record) => return Self::read(module, record, svma),
        };
        Self::read(module, *found?.1, svma)
    }

    fn read(module: &Module, record: u64, svma: u64) -> Option<Self> {
        let (mut function, back) = read_record(module, record)?;
        let common = record.checked_add(4)?.checked_sub(back.into())?;
        let (mut section, second) = read_record(module, common)?;
        if back == 0 || second != 0 {
            return None;
        }
        // The reference to the common record is a distance back from where it stands.
        let distance = u32::try_from(section.len()).ok()?.checked_add(4)?;
        function.get_mut(4..8)?.copy_from_slice(&distance.to_le_bytes());
        let section_svma = record.checked_sub(section.len() as u64)?;
        let common_bytes = section.len();
        section.append(&mut function);
        let mut found = Self { range: 0..0, section, section_svma, common_bytes };
        found.range = found.stated_range()?;
        found.range.contains(&svma).then_some(found)
    }

    /// The range of addresses that the record states.
    fn stated_range(&self) -> Option<Range<u64>> {
        let section = eh_frame(&self.section);
        let entry = self.entry(&section, &self.bases())?;
        let start = entry.initial_address();
        Some(start..start.checked_add(entry.len())?)
    }

    /// What addresses in the section are relative to.
    pub(super) fn bases(&self) -> BaseAddresses {
        BaseAddresses::default().set_eh_frame(self.section_svma)
    }

    /// The function's own record, parsed.
    pub(super) fn entry<'a>(
        &self,
        section: &Section<'a>,
        bases: &BaseAddresses,
    ) -> Option<Entry<'a>> {
        let offset = EhFrameOffset(self.common_bytes);
        section.fde_from_offset(bases, offset, Section::cie_from_offset).ok()
    }
}

pub(super) fn eh_frame(section: &[u8]) -> Section<'_> {
    let mut eh_frame = EhFrame::new(section, LittleEndian);
    eh_frame.set_address_size(8);
    eh_frame
}

/// Reads the record at an address: its bytes, and the second word, which is 0 for a common record
/// and else the distance to it.
fn read_record(module: &Module, svma: u64) -> Option<(Vec<u8>, u32)> {
    let offset = module.file_offset(svma)?;
    let length = word(&module.read(offset, 4)?, 0)?;
    // 0 ends the section; the longest value announces a 64-bit length, which nobody writes.
    if !(4..=RECORD_LIMIT).contains(&length) {
        return None;
    }
    let record = module.read(offset, length as usize + 4)?;
    let second = word(&record, 4)?;
    // The file may have changed between the two reads.
    (word(&record, 0) == Some(length)).then_some((record, second))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

enum Table {
    Absent,
    Missed,
    Found(u64),
}

/// Looks an address up in the sorted table of `.eh_frame_hdr`.
fn search_table(module: &Module, svma: u64) -> Table {
    let Some((header, entries)) = table_header(module) else { return Table::Absent };
    match last_at_or_before(module, header, entries, svma) {
        Some(record) => Table::Found(record),
        None => Table::Missed,
    }
}

/// Address of `.eh_frame_hdr` and how many entries its table has.
fn table_header(module: &Module) -> Option<(u64, u64)> {
    let (svma, bytes) = module.eh_frame_hdr()?;
    let header = module.read(module.file_offset(svma)?, 12)?;
    let &[version, pointer, count, table] = header.first_chunk()?;
    let four_bytes = |encoding: u8| FOUR_BYTES.contains(&(encoding & 0x0f));
    if version != 1 || !four_bytes(pointer) || !four_bytes(count) || table != TABLE_ENCODING {
        return None;
    }
    let entries = u64::from(word(&header, 8)?).min(bytes.saturating_sub(12) / 8);
    (entries > 0).then_some((svma, entries))
}

/// Address of the record of the last function that begins at or before the address.
fn last_at_or_before(module: &Module, header: u64, entries: u64, svma: u64) -> Option<u64> {
    let table = module.file_offset(header)?.checked_add(12)?;
    // Both values of an entry are distances from the section.
    let wanted = i32::try_from(svma.wrapping_sub(header).cast_signed()).ok()?;
    let (mut low, mut high) = (0, entries);
    while high - low > CHUNK {
        let middle = low + (high - low) / 2;
        let entry = module.read(table.checked_add(middle * 8)?, 4)?;
        if word(&entry, 0)?.cast_signed() <= wanted { low = middle } else { high = middle }
    }
    let chunk = module.read(table.checked_add(low * 8)?, (high - low) as usize * 8)?;
    let (entries, _) = chunk.as_chunks::<8>();
    let after =
        entries.partition_point(|[a, b, c, d, ..]| i32::from_le_bytes([*a, *b, *c, *d]) <= wanted);
    let found = entries.get(after.checked_sub(1)?)?;
    let record = word(found, 4)?.cast_signed();
    Some(header.wrapping_add_signed(record.into()))
}

/// Lists the functions of a file without an index, in one pass over the section.
fn scan(module: &Module) -> Index {
    eh_frame_section(module).map(|(svma, section)| list(&section, svma)).unwrap_or_default()
}

/// Address and content of `.eh_frame`.
fn eh_frame_section(module: &Module) -> Option<(u64, Vec<u8>)> {
    let source = module.source()?;
    let data = source.reader();
    let header = FileHeader64::<object::LittleEndian>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, data).ok()?;
    let (_, section) = sections.section_by_name(endian, b".eh_frame")?;
    let bytes = Some(section.sh_size(endian)).filter(|bytes| *bytes <= SCAN_LIMIT)?;
    let content = module.read(section.sh_offset(endian), bytes as usize)?;
    Some((section.sh_addr(endian), content))
}

fn list(section: &[u8], svma: u64) -> Index {
    let mut index = Index::new();
    let bases = BaseAddresses::default().set_eh_frame(svma);
    let eh_frame = eh_frame(section);
    let mut entries = eh_frame.entries(&bases);
    while let Ok(Some(entry)) = entries.next() {
        if let CieOrFde::Fde(partial) = entry
            && let Ok(function) = partial.parse(Section::cie_from_offset)
        {
            let record = svma.wrapping_add(function.offset() as u64);
            index.insert(function.initial_address(), record);
        }
    }
    index
}
