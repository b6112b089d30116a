//! What keeps probes out of a process: code that somebody else has patched, or is about to.
//!
//! Probes belong to a file, and those of a whole host go into every process that maps it. So where
//! one process objects, the library is probed process by process in all the others.

mod entry;
mod ucx;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    fs::File,
};

use self::entry::Entries;
pub(super) use self::entry::Probes;
pub(crate) use self::ucx::{is_ucx, patches as has_ucx};
use crate::{
    host::{FileId, Host, Mapping},
    kernel::Site,
    probes::Library,
};

/// Why a library is not probed in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objection {
    /// A function's first bytes in memory are not those of the file.
    Patched {
        /// Offset of the function in the file.
        offset: u64,
        /// UCX is mapped: most likely it was UCX.
        by_ucx: bool,
    },
    /// The process's memory could not be compared with the file.
    Unreadable,
    /// UCX's hooks are loaded, or installed beside a loaded UCX.
    Ucx,
    /// It is under a seccomp filter, and this kernel kills for a return probe.
    Filtered,
}

/// What a user of UCX can do.
const REMEDY: &str = "start the job with UCX_MEM_CUDA_HOOK_MODE=reloc to have it recorded";

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Patched { offset, by_ucx: true } => write!(
                f,
                "UCX has patched it in memory (at offset {offset:#x}): a probe there would crash the \
                 process; {REMEDY}"
            ),
            Self::Patched { offset, by_ucx: false } => write!(
                f,
                "another tool has patched it in memory (at offset {offset:#x}): a probe there would \
                 crash the process; run the job without that tool to have it recorded"
            ),
            Self::Unreadable => f.write_str(
                "the process's memory can't be compared with the file: whether it was patched there \
                 is not known",
            ),
            Self::Ucx => write!(
                f,
                "the process uses UCX, whose CUDA hooks give up where they meet a probe; {REMEDY}, \
                 or give --force and have it run without these hooks"
            ),
            Self::Filtered => f.write_str(
                "the process is under a seccomp filter, and this kernel would kill it when a probed \
                 function returns; use kernel 6.14 or later, or give --allow-return-probes if its \
                 filter lets system call 335 pass",
            ),
        }
    }
}

/// Which processes are spared although nobody has patched anything in them yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sparing {
    /// Those with UCX's hooks.
    pub ucx: bool,
    /// Those under a seccomp filter: on this kernel return probes would kill them.
    pub filtered: bool,
}

/// What is known of who maps what, and what follows from it.
#[derive(Debug, Default)]
pub(super) struct Guard {
    sparing: Sparing,
    /// Libraries that are probed process by process, although the whole host is recorded.
    apart: HashSet<Library>,
    /// Which processes map which of our libraries.
    users: HashMap<u32, HashSet<Library>>,
    /// Processes with UCX's hooks.
    ucx: HashSet<u32>,
}

impl Guard {
    pub(super) fn new(sparing: Sparing) -> Self {
        Self { sparing, ..Self::default() }
    }

    /// Takes in what a process maps; true where UCX was not seen in it before.
    pub(super) fn learn(
        &mut self,
        host: &Host,
        tgid: u32,
        mappings: &[Mapping],
        libraries: HashSet<Library>,
    ) -> bool {
        if libraries.is_empty() {
            self.users.remove(&tgid);
        } else {
            self.users.insert(tgid, libraries);
        }
        if !ucx::patches(host, tgid, mappings) {
            // Another program may run in it by now.
            self.ucx.remove(&tgid);
            return false;
        }
        self.ucx.insert(tgid)
    }

    pub(super) fn forget(&mut self, tgid: u32) {
        self.users.remove(&tgid);
        self.ucx.remove(&tgid);
    }

    /// Processes of which something is known.
    pub(super) fn known(&self) -> impl Iterator<Item = u32> {
        self.users.keys().chain(&self.ucx).copied()
    }

    /// Processes that map the library.
    pub(super) fn users(&self, library: Library) -> Vec<u32> {
        let users = self.users.iter().filter(|(_, libraries)| libraries.contains(&library));
        users.map(|(tgid, _)| *tgid).collect()
    }

    /// Whether the library is probed process by process.
    pub(super) fn is_apart(&self, library: Library) -> bool {
        self.apart.contains(&library)
    }

    /// From here on it is; true if it was not before.
    pub(super) fn set_apart(&mut self, library: Library) -> bool {
        self.apart.insert(library)
    }

    /// A process whose UCX objects to probes in the library, whether it maps that already or not.
    pub(super) fn any_ucx(&self, library: Library) -> Option<u32> {
        let objects = library == Library::Cuda && self.sparing.ucx;
        self.ucx.iter().copied().find(|_| objects)
    }

    /// Why the library must not be probed in the process, going by what is known of it.
    pub(super) fn objects(&self, host: &Host, tgid: u32, library: Library) -> Option<Objection> {
        if self.sparing.filtered && host.is_filtered(tgid) != Some(false) {
            // A process that ended has nothing to be spared, and meets no probe.
            return Some(Objection::Filtered);
        }
        let objects = library == Library::Cuda && self.sparing.ucx && self.ucx.contains(&tgid);
        objects.then_some(Objection::Ucx)
    }

    /// Why the file must not be probed in the process, going by its memory.
    pub(super) fn compare(
        &self,
        host: &Host,
        tgid: u32,
        id: FileId,
        file: &File,
        sites: &[Site],
    ) -> Option<Objection> {
        let found = steadily(host, tgid, id, |mappings| {
            match entry::compare(host, tgid, mappings, id, file, sites) {
                Entries::Unreadable => None,
                found => Some(found),
            }
        });
        match found {
            Steady::Found(Entries::Differ(offset)) => {
                Some(Objection::Patched { offset, by_ucx: self.ucx.contains(&tgid) })
            }
            // A process that ended has nothing to be spared.
            Steady::Found(_) | Steady::Ended => None,
            Steady::Never => Some(Objection::Unreadable),
        }
    }
}

/// Whether the process has breakpoints in the file's functions.
pub(super) fn probes(host: &Host, tgid: u32, id: FileId, file: &File, sites: &[Site]) -> Probes {
    let found = steadily(host, tgid, id, |mappings| {
        Some(entry::probes(host, tgid, mappings, id, file, sites))
    });
    match found {
        Steady::Found(found) => found,
        Steady::Ended | Steady::Never => Probes::Unknown,
    }
}

/// Times that a process's memory is looked into while what it maps changes.
const LOOKS: usize = 4;

/// What a look into a process's memory came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Steady<T> {
    /// The same program was there before and after.
    Found(T),
    /// The process has ended.
    Ended,
    /// It could not be looked into.
    Never,
}

/// Looks into a process's memory by what it maps. It may execute another program meanwhile: then the
/// memory is that of another program than the mappings, and it is looked once more.
fn steadily<T>(
    host: &Host,
    tgid: u32,
    id: FileId,
    mut look: impl FnMut(&[Mapping]) -> Option<T>,
) -> Steady<T> {
    let Some(mut before) = host.mappings(tgid) else { return Steady::Ended };
    for _ in 0..LOOKS {
        let found = look(&before);
        let Some(after) = host.mappings(tgid).filter(|after| !after.is_empty()) else {
            return Steady::Ended;
        };
        if let Some(found) = found
            && places(&before, id).eq(places(&after, id))
        {
            return Steady::Found(found);
        }
        before = after;
    }
    Steady::Never
}

/// Where the file is mapped.
fn places(mappings: &[Mapping], id: FileId) -> impl Iterator<Item = (u64, u64, u64)> {
    let ours = mappings.iter().filter(move |mapping| mapping.file_id() == id);
    ours.map(|mapping| (mapping.start, mapping.end, mapping.offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    const LINE: &str = "r-xp 00000000 08:01 99 /opt/libcuda.so.1";
    const ID: FileId = ((8, 1), 99);

    #[test]
    fn what_was_read_while_another_program_was_executed_counts_for_nothing() {
        let tree = Tree::new();
        tree.write("proc/1/maps", format!("7f00-7f80 {LINE}\n"));
        let mut looks = 0;
        let found = steadily(&tree.host(), 1, ID, |mappings| {
            looks += 1;
            if looks == 1 {
                tree.write("proc/1/maps", format!("8f00-8f80 {LINE}\n"));
            }
            Some(mappings[0].start)
        });
        assert_eq!((found, looks), (Steady::Found(0x8f00), 2));
        // It has another file now.
        tree.write("proc/2/maps", format!("7f00-7f80 {LINE}\n"));
        let found = steadily(&tree.host(), 2, ID, |mappings| {
            let count = mappings.iter().filter(|mapping| mapping.file_id() == ID).count();
            tree.write("proc/2/maps", "7f00-7f80 r-xp 00000000 08:01 7 /bin/true\n");
            Some(count)
        });
        assert_eq!(found, Steady::Found(0));
    }

    #[test]
    fn a_process_that_ended_or_stays_closed_is_told_apart() {
        let tree = Tree::new();
        tree.write("proc/1/maps", format!("7f00-7f80 {LINE}\n"));
        assert_eq!(steadily(&tree.host(), 1, ID, |_| None::<()>), Steady::Never);
        tree.write("proc/2/maps", "");
        assert_eq!(steadily(&tree.host(), 2, ID, |_| Some(())), Steady::Ended);
        assert_eq!(steadily(&tree.host(), 3, ID, |_| Some(())), Steady::Ended);
    }

    #[test]
    fn where_the_kernel_kills_for_it_filtered_processes_are_spared() {
        let tree = Tree::new();
        tree.write("proc/1/status", "Seccomp:\t2\n");
        tree.write("proc/2/status", "Seccomp:\t0\n");
        let objections = |filtered: bool| {
            let guard = Guard::new(Sparing { ucx: true, filtered });
            [1, 2].map(|tgid| guard.objects(&tree.host(), tgid, Library::Cuda))
        };
        assert_eq!(objections(true), [Some(Objection::Filtered), None]);
        assert_eq!(objections(false), [None, None]);
    }

    #[test]
    fn ucx_objects_to_probes_in_the_driver_only_and_not_where_it_is_overruled() {
        let tree = Tree::new();
        let line = b"7f00-7f80 r-xp 00000000 08:01 99 /opt/ucx/lib/ucx/libucm_cuda.so.0";
        let maps = [Mapping::parse(line).unwrap()];
        for ucx in [false, true] {
            let mut guard = Guard::new(Sparing { ucx, filtered: false });
            assert!(guard.learn(&tree.host(), 1, &maps, HashSet::from([Library::Cuda])));
            assert!(!guard.learn(&tree.host(), 1, &maps, HashSet::from([Library::Cuda])), "known");
            let objects = |library| guard.objects(&tree.host(), 1, library);
            assert_eq!(objects(Library::Cuda), ucx.then_some(Objection::Ucx));
            assert_eq!(objects(Library::C10), None);
            assert_eq!(guard.any_ucx(Library::Cuda), ucx.then_some(1));
            assert_eq!(guard.users(Library::Cuda), [1]);
            // Another program runs in it.
            assert!(!guard.learn(&tree.host(), 1, &[], HashSet::new()));
            assert_eq!(guard.objects(&tree.host(), 1, Library::Cuda), None);
            assert!(guard.users(Library::Cuda).is_empty());
        }
    }
}
