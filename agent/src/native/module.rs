//! Files that processes execute, each opened and parsed once.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::PathBuf,
    sync::{
        Arc, OnceLock, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use object::{
    LittleEndian,
    elf::{self, FileHeader64, ProgramHeader64},
    read::elf::{FileHeader as _, ProgramHeader as _},
};

use super::cfi::Index;
use crate::host::{ElfSource, Host, Mapping, is_at_home, is_named};

/// Files that no process maps any longer and that are kept all the same: the next process of a job
/// maps the same ones.
const IDLE_LIMIT: usize = 256;
/// How long files are held for stacks that are still under way, where they are in somebody's way.
const RELEASE_NS: u64 = 5_000_000_000;
/// Mappings begin at page boundaries, segments need not; both architectures have at least this.
const PAGE: u64 = 4096;

/// A loaded part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    offset: u64,
    bytes: u64,
    svma: u64,
    executable: bool,
}

/// What the program headers tell.
#[derive(Debug, Default)]
struct Layout {
    segments: Vec<Segment>,
    /// Address and size of `.eh_frame_hdr`.
    eh_frame_hdr: Option<(u64, u64)>,
    build_id: Option<String>,
}

/// A file that is mapped executable. Its descriptor stays open for a while after the process ended and
/// after the file was deleted, since it is still read then.
#[derive(Debug)]
pub struct Module {
    /// Unlike any other module of this agent's life.
    pub(super) id: u64,
    /// Path as the process that was met first sees it: a claim, to be shown, never to be opened.
    /// `[vdso]` for the kernel's.
    pub path: PathBuf,
    /// GNU build id, in hex.
    pub build_id: Option<String>,
    /// `None` where it could not be opened, or was closed.
    file: RwLock<Option<File>>,
    /// Its length when it was opened.
    bytes: u64,
    layout: Layout,
    /// Where functions' records are, for files without `.eh_frame_hdr`.
    pub(super) index: OnceLock<Index>,
}

impl Module {
    /// A file of which nothing but the name is known.
    pub(super) fn nameless(path: impl Into<PathBuf>) -> Self {
        Self::new(path.into(), None, Layout::default())
    }

    /// Takes the opened file; one that is no 64-bit ELF file has neither segments nor a build id.
    pub(crate) fn open(path: impl Into<PathBuf>, file: File) -> Self {
        let layout = file.try_clone().ok().and_then(Layout::read).unwrap_or_default();
        Self::new(path.into(), Some(file), layout)
    }

    fn new(path: PathBuf, file: Option<File>, mut layout: Layout) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let metadata = file.as_ref().and_then(|file| file.metadata().ok());
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            path,
            build_id: layout.build_id.take(),
            file: RwLock::new(file),
            bytes: metadata.map_or(0, |metadata| metadata.len()),
            layout,
            index: OnceLock::new(),
        }
    }

    /// Whether the file is an ELF file with something to load.
    pub fn is_elf(&self) -> bool {
        !self.layout.segments.is_empty()
    }

    /// The address that the file states for a place in it (SVMA), preferring code: the pages at
    /// the border of two segments belong to both.
    pub fn svma(&self, file_offset: u64) -> Option<u64> {
        let holds = |segment: &&Segment| {
            let start = segment.offset & !(PAGE - 1);
            (start..segment.offset.saturating_add(segment.bytes)).contains(&file_offset)
        };
        let code = self.layout.segments.iter().filter(|segment| segment.executable).find(holds);
        let segment = code.or_else(|| self.layout.segments.iter().find(holds))?;
        Some(segment.svma.wrapping_add(file_offset).wrapping_sub(segment.offset))
    }

    /// Where the file holds what is loaded at a stated address.
    pub(super) fn file_offset(&self, svma: u64) -> Option<u64> {
        let holds = |segment: &&Segment| {
            svma.checked_sub(segment.svma).is_some_and(|distance| distance < segment.bytes)
        };
        let segment = self.layout.segments.iter().find(holds)?;
        (svma - segment.svma).checked_add(segment.offset)
    }

    /// Address and size of `.eh_frame_hdr`.
    pub(super) fn eh_frame_hdr(&self) -> Option<(u64, u64)> {
        self.layout.eh_frame_hdr
    }

    /// Reads a part of the file, all of it or nothing. The caller bounds the size; what the file is
    /// too short for takes no memory, whatever its headers say.
    pub(super) fn read(&self, offset: u64, bytes: usize) -> Option<Vec<u8>> {
        if offset.checked_add(bytes as u64)? > self.bytes {
            return None;
        }
        let mut content = vec![0; bytes];
        self.file()?.as_ref()?.read_exact_at(&mut content, offset).ok()?;
        Some(content)
    }

    fn file(&self) -> Option<RwLockReadGuard<'_, Option<File>>> {
        self.file.read().ok()
    }

    /// Closes the file: of functions that nobody asked for there are no names any more.
    fn close(&self) {
        // Poisoned by a panic of a reader, it stays open.
        drop(self.file.write().map(|mut file| file.take()));
    }

    /// Whether to hold the file open is in nobody's way.
    fn is_in_nobodys_way(&self) -> bool {
        let file = self.file();
        file.and_then(|file| Some(is_named(file.as_ref()?) && is_at_home(file.as_ref()?)))
            .unwrap_or(true)
    }

    /// A second descriptor, for a reader that owns its file.
    pub(super) fn source(&self) -> Option<ElfSource> {
        Some(ElfSource::new(self.file()?.as_ref()?.try_clone().ok()?))
    }
}

impl Layout {
    fn read(file: File) -> Option<Self> {
        let source = ElfSource::new(file);
        let data = source.reader();
        let header = FileHeader64::<LittleEndian>::parse(data).ok()?;
        let endian = header.endian().ok()?;
        let mut layout = Self::default();
        for program in header.program_headers(endian, data).ok()? {
            layout.add(program);
            if layout.build_id.is_none() {
                layout.build_id = build_id(program, data);
            }
        }
        Some(layout)
    }

    fn add(&mut self, program: &ProgramHeader64<LittleEndian>) {
        let endian = LittleEndian;
        let (svma, bytes) = (program.p_vaddr(endian), program.p_filesz(endian));
        match program.p_type(endian) {
            elf::PT_LOAD => self.segments.push(Segment {
                offset: program.p_offset(endian),
                bytes,
                svma,
                executable: program.p_flags(endian) & elf::PF_X != 0,
            }),
            elf::PT_GNU_EH_FRAME => self.eh_frame_hdr = Some((svma, bytes)),
            _ => {}
        }
    }
}

/// The build id in hex, where this segment holds the note.
fn build_id(
    program: &ProgramHeader64<LittleEndian>,
    data: crate::host::BoundedElf<'_>,
) -> Option<String> {
    use std::fmt::Write as _;
    let mut notes = program.notes(LittleEndian, data).ok()??;
    while let Ok(Some(note)) = notes.next() {
        if note.n_type(LittleEndian) == elf::NT_GNU_BUILD_ID && note.name() == elf::ELF_NOTE_GNU {
            // Twenty bytes by default; a longer one than SHA-512 is not a build id.
            let id = note.desc().get(..64).unwrap_or(note.desc());
            return Some(id.iter().fold(String::new(), |mut hex, byte| {
                // Writing to a String cannot fail.
                let _infallible = write!(hex, "{byte:02x}");
                hex
            }));
        }
    }
    None
}

/// Tells whether a file is still the one that was parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(module: &Module) -> Option<Self> {
        let metadata = module.file()?.as_ref()?.metadata().ok()?;
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Some(Self { bytes: metadata.len(), modified })
    }
}

#[derive(Debug)]
struct Entry {
    module: Arc<Module>,
    stamp: Option<Stamp>,
    last_use: u64,
    /// Since when it was found in no process.
    unused_ns: Option<u64>,
}

/// The modules of all processes, by device and inode.
///
/// The open descriptor keeps the inode number from being given to another file; a file that was
/// written in place is told by its size and time of change.
#[derive(Debug, Default)]
pub struct Modules {
    entries: HashMap<((u32, u32), u64), Entry>,
    uses: u64,
    vdso: OnceLock<Arc<Module>>,
}

impl Modules {
    /// The kernel's own code in every process: no file, so a name and nothing else.
    pub(super) fn vdso(&self) -> Arc<Module> {
        Arc::clone(self.vdso.get_or_init(|| Arc::new(Module::nameless("[vdso]"))))
    }

    /// The file of a mapping; opened and parsed if it is new or was changed.
    ///
    /// One that cannot be opened has a name and nothing else, and is tried again next time.
    pub fn of_mapping(&mut self, host: &Host, tgid: u32, mapping: &Mapping) -> Arc<Module> {
        self.uses += 1;
        let key = (mapping.dev, mapping.inode);
        if let Some(entry) = self.entries.get_mut(&key)
            && entry.stamp == Stamp::of(&entry.module)
        {
            entry.last_use = self.uses;
            return Arc::clone(&entry.module);
        }
        let Some(file) = host.open_mapped(tgid, mapping) else {
            return Arc::new(Module::nameless(&mapping.path));
        };
        let module = Arc::new(Module::open(&mapping.path, file));
        let stamp = Stamp::of(&module);
        let entry =
            Entry { module: Arc::clone(&module), stamp, last_use: self.uses, unused_ns: None };
        self.entries.insert(key, entry);
        self.forget_idle();
        module
    }

    /// Closes the files that no process uses any more where they are in the way of somebody: a
    /// container's file system can't go as long as a file of it is open, and a deleted file takes its
    /// space. Stacks of a process that ended are resolved within that time.
    pub fn release(&mut self, used: &HashSet<u64>, now_ns: u64) {
        self.entries.retain(|_, Entry { module, unused_ns, .. }| {
            if used.contains(&module.id) || module.is_in_nobodys_way() {
                *unused_ns = None;
                return true;
            }
            let since_ns = *unused_ns.get_or_insert(now_ns);
            let waits = now_ns.saturating_sub(since_ns) < RELEASE_NS;
            if !waits {
                module.close();
            }
            waits
        });
    }

    /// Closes the files that nobody uses, the longest unused first, down to the limit.
    fn forget_idle(&mut self) {
        let idle = |entry: &Entry| Arc::strong_count(&entry.module) == 1;
        let mut uses: Vec<u64> =
            self.entries.values().filter(|entry| idle(entry)).map(|entry| entry.last_use).collect();
        let Some(surplus) = uses.len().checked_sub(IDLE_LIMIT + 1) else { return };
        let (_, newest_to_go, _) = uses.select_nth_unstable(surplus);
        let newest_to_go = *newest_to_go;
        self.entries.retain(|_, entry| !idle(entry) || entry.last_use > newest_to_go);
    }

    /// How many files are open.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no file is open.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
