//! What a process has mapped executable, and where an address lies in it.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::ffi::OsStrExt as _,
    sync::Arc,
};

use agent_common::stack::{ExecutablePages, WINDOW_BITS, WINDOW_WORDS, WINDOWS, Window};

use super::{Module, Modules};
use crate::host::{Host, Mapping};

/// Longest `maps` that is read.
const MAPS_LIMIT: u64 = 64 << 20;
/// Granules of an executable window are at least a page.
const MIN_SHIFT: u64 = 12;

/// What executable memory holds.
#[derive(Clone, Debug)]
enum Content {
    /// A file, or the vDSO.
    Module(Arc<Module>),
    /// The kernel's landing place of return probes.
    Uprobes,
    /// Memory without a file: written at run time.
    Jit,
}

/// A range of executable memory.
#[derive(Clone, Debug)]
struct Code {
    start: u64,
    end: u64,
    /// Offset of `start` in the file.
    offset: u64,
    content: Content,
}

/// Where an address lies.
#[derive(Clone, Debug)]
pub enum Place<'a> {
    /// In a file (or the vDSO, which is none).
    Module {
        /// The file.
        module: &'a Arc<Module>,
        /// Offset in the file.
        file_offset: u64,
        /// Address as the file states it; `None` where the file is no ELF file.
        svma: Option<u64>,
    },
    /// In code that was written at run time.
    Jit,
    /// In the kernel's landing place of return probes.
    Uprobes,
}

/// The executable memory of one process.
///
/// A file can be mapped executable more than once (libffi maps its trampolines so), at any
/// distance: each range stands for itself.
#[derive(Clone, Debug)]
pub struct AddressSpace {
    /// By address, disjoint.
    codes: Vec<Code>,
}

impl AddressSpace {
    /// Reads what a process has mapped; `None` where that cannot be read, as when it ended.
    pub fn read(host: &Host, tgid: u32, modules: &mut Modules) -> Option<Self> {
        let lines = executable_lines(host, tgid)?;
        // A process that has ended and was not waited for has an empty list.
        if lines.is_empty() {
            return None;
        }
        let mut codes: Vec<Code> =
            lines.iter().filter_map(|line| Code::of_line(line, host, tgid, modules)).collect();
        codes.sort_by_key(|code| code.start);
        Some(Self { codes })
    }

    /// That of a process which maps one file executable, from its beginning.
    pub(crate) fn of_module(start: u64, bytes: u64, module: Arc<Module>) -> Self {
        let end = start.saturating_add(bytes);
        Self { codes: vec![Code { start, end, offset: 0, content: Content::Module(module) }] }
    }

    /// Reads again; whether anything has changed. What is known stays where the process has ended.
    pub fn refresh(&mut self, host: &Host, tgid: u32, modules: &mut Modules) -> bool {
        let Some(now) = Self::read(host, tgid, modules) else { return false };
        let changed = now.codes.len() != self.codes.len()
            || now.codes.iter().zip(&self.codes).any(|(new, old)| !new.is_same(old));
        *self = now;
        changed
    }

    /// Where an address lies; `None` where nothing is mapped executable.
    pub fn lookup(&self, pc: u64) -> Option<Place<'_>> {
        let after = self.codes.partition_point(|code| code.start <= pc);
        let code = self.codes.get(after.checked_sub(1)?).filter(|code| pc < code.end)?;
        Some(match &code.content {
            Content::Module(module) => {
                let file_offset = (pc - code.start).wrapping_add(code.offset);
                Place::Module { module, file_offset, svma: module.svma(file_offset) }
            }
            Content::Jit => Place::Jit,
            Content::Uprobes => Place::Uprobes,
        })
    }

    /// What tells its modules from all others.
    pub(crate) fn module_ids(&self) -> impl Iterator<Item = u64> {
        self.modules().map(|module| module.id)
    }

    /// The modules, by address; one that is mapped twice comes twice.
    pub fn modules(&self) -> impl Iterator<Item = &Arc<Module>> {
        self.codes.iter().filter_map(|code| match &code.content {
            Content::Module(module) => Some(module),
            Content::Jit | Content::Uprobes => None,
        })
    }

    /// The bits by which the kernel half tells return addresses from other words of a stack.
    ///
    /// The widest gaps between files' code split the address space: the executable lies terabytes
    /// below the libraries. A window over such a gap would be so coarse that it takes data for
    /// code. Where all lies together, windows are empty.
    pub fn executable_pages(&self) -> Box<ExecutablePages> {
        let ranges: Vec<(u64, u64)> = self
            .codes
            .iter()
            .filter(|code| matches!(&code.content, Content::Module(module) if module.is_elf()))
            .map(|code| (code.start, code.end))
            .collect();
        let mut gaps: Vec<(u64, usize)> = ranges
            .windows(2)
            .enumerate()
            .map(|(at, pair)| match pair {
                [before, after] => (after.0.saturating_sub(before.1), at + 1),
                _ => (0, at + 1),
            })
            .collect();
        gaps.sort_unstable_by(|one, other| other.cmp(one));
        let mut splits: Vec<usize> = gaps.into_iter().map(|(_, at)| at).take(WINDOWS - 1).collect();
        splits.sort_unstable();
        splits.resize(WINDOWS - 1, ranges.len());
        let mut rest = ranges.as_slice();
        let mut done = 0;
        let windows = std::array::from_fn(|at| {
            let end = splits.get(at).copied().unwrap_or(ranges.len());
            let (own, after) = rest.split_at((end - done).min(rest.len()));
            (rest, done) = (after, end);
            window(own)
        });
        Box::new(ExecutablePages { windows })
    }
}

/// The finest window that holds all ranges, which are sorted.
fn window(ranges: &[(u64, u64)]) -> Window {
    let start = ranges.first().map_or(0, |range| range.0);
    let span = ranges.last().map_or(0, |range| range.1.saturating_sub(1).saturating_sub(start));
    let mut window = Window { start, shift: MIN_SHIFT, bits: [0; WINDOW_WORDS] };
    while span >> window.shift >= WINDOW_BITS {
        window.shift += 1;
    }
    for (from, to) in ranges {
        let (first, last) = ((from - start) >> window.shift, (to - 1 - start) >> window.shift);
        for bit in first..=last {
            if let Some(word) = window.bits.get_mut((bit / 64) as usize) {
                *word |= 1 << (bit % 64);
            }
        }
    }
    window
}

impl Code {
    fn of_line(line: &[u8], host: &Host, tgid: u32, modules: &mut Modules) -> Option<Self> {
        if let Some(mapping) = Mapping::parse(line) {
            let module = modules.of_mapping(host, tgid, &mapping);
            let content = if is_written_at_run_time(&mapping, &module) {
                Content::Jit
            } else {
                Content::Module(module)
            };
            let Mapping { start, end, offset, .. } = mapping;
            return Some(Self { start, end, offset, content });
        }
        let line = line.trim_ascii_end();
        let (start, end) = range_of(line)?;
        let content = match line.rsplit(|byte| *byte == b' ').next()? {
            b"[vdso]" => Content::Module(modules.vdso()),
            b"[uprobes]" => Content::Uprobes,
            _ => Content::Jit,
        };
        Some(Self { start, end, offset: 0, content })
    }

    fn is_same(&self, other: &Self) -> bool {
        let same_content = match (&self.content, &other.content) {
            (Content::Module(one), Content::Module(two)) => one.id == two.id,
            (Content::Jit, Content::Jit) | (Content::Uprobes, Content::Uprobes) => true,
            _ => false,
        };
        (self.start, self.end, self.offset) == (other.start, other.end, other.offset)
            && same_content
    }
}

/// Code that was written into a file without a name, as just-in-time compilers and libffi do.
fn is_written_at_run_time(mapping: &Mapping, module: &Module) -> bool {
    let path = mapping.path.as_os_str().as_bytes();
    !module.is_elf() && (path.starts_with(b"/memfd:") || path == b"/dev/zero")
}

/// The addresses at the beginning of a line of `maps`.
fn range_of(line: &[u8]) -> Option<(u64, u64)> {
    let word = std::str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?;
    let (start, end) = word.split_once('-')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    (start < end).then_some((start, end))
}

/// The lines of `maps` that tell of executable memory.
fn executable_lines(host: &Host, tgid: u32) -> Option<Vec<Vec<u8>>> {
    let file = File::open(host.process_path(tgid, "maps")).ok()?;
    let mut reader = BufReader::with_capacity(64 << 10, file.take(MAPS_LIMIT));
    let (mut found, mut line) = (Vec::new(), Vec::new());
    while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        let permissions = line.split(|byte| *byte == b' ').nth(1);
        if permissions.and_then(|word| word.get(2)) == Some(&b'x') {
            found.push(std::mem::take(&mut line));
        }
        line.clear();
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    /// A space of made-up maps: files that cannot be opened are modules by name.
    fn space(maps: &str) -> AddressSpace {
        let tree = Tree::new();
        tree.write("proc/7/maps", maps);
        AddressSpace::read(&tree.host(), 7, &mut Modules::default()).unwrap()
    }

    #[test]
    fn addresses_lie_in_files_jit_and_kernel_pages() {
        let space = space(
            "400000-401000 r--p 00000000 08:01 5 /bin/x\n\
             401000-403000 r-xp 00001000 08:01 5 /bin/x\n\
             500000-501000 rwxp 00000000 00:00 0\n\
             600000-601000 r-xp 00000000 00:01 9 /memfd:jit (deleted)\n\
             7fff0000-7fff1000 r-xp 00000000 00:00 0   [vdso]\n\
             7ffff000-80000000 --xp 00000000 00:00 0   [uprobes]\n",
        );
        let path = |pc| match space.lookup(pc) {
            Some(Place::Module { module, file_offset, svma: None }) => {
                Some((module.path.to_str().unwrap().to_owned(), file_offset))
            }
            _ => None,
        };
        assert_eq!(path(0x40_1010), Some(("/bin/x".to_owned(), 0x1010)));
        assert_eq!(path(0x7fff_0010), Some(("[vdso]".to_owned(), 0x10)));
        assert!(matches!(space.lookup(0x50_0000), Some(Place::Jit)));
        assert!(matches!(space.lookup(0x60_0fff), Some(Place::Jit)));
        assert!(matches!(space.lookup(0x7fff_f000), Some(Place::Uprobes)));
        for outside in [0, 0x40_0010, 0x40_3000, 0x60_1000, u64::MAX] {
            assert!(space.lookup(outside).is_none(), "{outside:#x}");
        }
    }

    #[test]
    fn a_process_without_maps_has_no_space() {
        let tree = Tree::new();
        tree.write("proc/7/maps", "");
        let (host, mut modules) = (tree.host(), Modules::default());
        assert!(AddressSpace::read(&host, 7, &mut modules).is_none());
        assert!(AddressSpace::read(&host, 8, &mut modules).is_none());
    }

    #[test]
    fn what_is_known_outlives_the_process() {
        let tree = Tree::new();
        tree.write("proc/7/maps", "500000-501000 rwxp 00000000 00:00 0\n");
        let (host, mut modules) = (tree.host(), Modules::default());
        let mut space = AddressSpace::read(&host, 7, &mut modules).unwrap();
        assert!(!space.refresh(&host, 7, &mut modules), "nothing changed");
        tree.write("proc/7/maps", "");
        assert!(!space.refresh(&host, 7, &mut modules));
        assert!(space.lookup(0x50_0000).is_some());
        tree.write("proc/7/maps", "600000-601000 rwxp 00000000 00:00 0\n");
        assert!(space.refresh(&host, 7, &mut modules));
        assert!(space.lookup(0x50_0000).is_none());
    }

    fn marked(window: &Window, addr: u64) -> bool {
        let Some(distance) = addr.checked_sub(window.start) else { return false };
        let bit = distance >> window.shift;
        bit < WINDOW_BITS && window.bits[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    #[test]
    fn windows_are_as_fine_as_the_span_allows() {
        let fine = window(&[(0x1000, 0x3000), (0x5000, 0x6000)]);
        assert_eq!((fine.start, fine.shift), (0x1000, 12));
        for (addr, expected) in
            [(0xfff, false), (0x1000, true), (0x2fff, true), (0x3000, false), (0x5000, true)]
        {
            assert_eq!(marked(&fine, addr), expected, "{addr:#x}");
        }
        // 2^17 pages just fit; one more does not.
        let (start, pages) = (0x7000_0000_0000, 1 << 17);
        let last = |pages: u64| (start + (pages - 1) * 4096, start + pages * 4096);
        assert_eq!(window(&[(start, start + 4096), last(pages)]).shift, 12);
        let coarse = window(&[(start, start + 4096), last(pages + 1)]);
        assert_eq!(coarse.shift, 13);
        assert!(marked(&coarse, start + pages * 4096));
        assert!(!marked(&coarse, start + 16384));
        assert_eq!(window(&[]).bits, [0; WINDOW_WORDS]);
        let widest = window(&[(0, 4096), (u64::MAX - 4095, u64::MAX)]);
        assert!(marked(&widest, u64::MAX - 4000));
    }

    #[test]
    fn executable_and_libraries_have_a_window_each() {
        let (host, pid) = (Host::live(), std::process::id());
        let space = AddressSpace::read(&host, pid, &mut Modules::default()).unwrap();
        let pages = space.executable_pages();
        let own = executable_and_libraries_have_a_window_each as *const () as u64;
        let libc = libc::getpid as *const () as u64;
        assert!(marked(&pages.windows[0], own), "{own:#x}");
        assert!(pages.windows[1..].iter().any(|window| marked(window, libc)), "{libc:#x}");
        assert!(pages.windows.iter().all(|window| window.shift <= 14));
        let stack = 0_u64;
        assert!(!pages.windows.iter().any(|window| marked(window, (&raw const stack) as u64)));
    }

    #[test]
    fn code_that_lies_far_apart_makes_no_window_coarse() {
        let (host, mut modules) = (Host::live(), Modules::default());
        let own = AddressSpace::read(&host, std::process::id(), &mut modules).unwrap();
        let module = own.modules().find(|module| module.is_elf()).unwrap();
        let code = |start: u64| Code {
            start,
            end: start + 4096,
            offset: 0,
            content: Content::Module(Arc::clone(module)),
        };
        let spread = |starts: &[u64]| {
            let codes = starts.iter().map(|start| code(*start)).collect();
            AddressSpace { codes }.executable_pages()
        };
        let (low, exe, lib) = (0x20_0000, 0x5555_0000_0000, 0x7f00_0000_0000);
        let pages = spread(&[low, exe, exe + 0x5000, lib, lib + 0x100_0000]);
        for (window, starts) in
            pages.windows.iter().zip([&[low][..], &[exe, exe + 0x5000], &[lib, lib + 0x100_0000]])
        {
            assert_eq!(window.shift, MIN_SHIFT);
            assert!(starts.iter().all(|start| marked(window, *start)));
            assert!(!marked(window, starts[0] + 0x1000));
        }
        let pages = spread(&[exe, lib]);
        assert!(marked(&pages.windows[0], exe) && marked(&pages.windows[1], lib));
        assert_eq!(pages.windows[2].bits, [0; WINDOW_WORDS]);
        assert_eq!(spread(&[]).windows[0].bits, [0; WINDOW_WORDS]);
    }
}
