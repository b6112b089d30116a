//! What is known of files and processes that are gone: a recording of the host may last for months,
//! in which containers come and go, each with files of its own.

use std::{
    collections::HashSet,
    fs::File,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

use super::Attacher;
use crate::{
    host::FileId,
    kernel::{Links, Site},
    probes::Library,
};

/// How long a file is mapped by no process before its probes go. They come back when it is mapped,
/// long before a first call: the driver's start alone takes longer.
const UNUSED: Duration = Duration::from_mins(1);

/// Links of a file to every process.
pub(super) struct HostLinks {
    pub(super) library: Library,
    pub(super) links: Links,
    /// It lies where programs look for it: its probes stay.
    pub(super) expected: bool,
    /// When it was seen to be mapped, or probed, last.
    used: Instant,
}

impl HostLinks {
    pub(super) fn new(library: Library, links: Links) -> Self {
        Self { library, links, expected: false, used: Instant::now() }
    }

    /// Takes a look in; true where its probes have nobody to serve.
    fn is_idle(&mut self, mapped: bool, now: Instant) -> bool {
        if mapped || self.expected {
            self.used = now;
        }
        now.saturating_duration_since(self.used) >= UNUSED
    }
}

/// A file's state, as far as it tells that the number of a deleted file was given to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    size: u64,
    changed: (i64, i64),
    modified: (i64, i64),
}

impl Stamp {
    pub(super) fn of(file: &File) -> Option<Self> {
        let metadata = file.metadata().ok()?;
        Some(Self {
            size: metadata.size(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

/// The probed functions of a file; `None` where it has none that can be.
pub(super) struct Known {
    pub(super) stamp: Option<Stamp>,
    pub(super) sites: Option<Vec<Site>>,
}

impl Attacher {
    /// What was found in the file before, if it is still the same one.
    pub(super) fn known(&self, id: FileId, file: &File) -> Option<&Known> {
        let known = self.files.get(&id)?;
        let is_same = known.stamp.is_some() && known.stamp == Stamp::of(file);
        is_same.then_some(known)
    }

    /// The kernel half tells the end only of those that made a traced call: a program that loads the
    /// libraries and uses no GPU has none.
    pub(super) fn forget_all_but(&mut self, running: &[u32]) {
        let running: HashSet<u32> = running.iter().copied().collect();
        for tgid in self.guard.known().filter(|tgid| !running.contains(tgid)).collect::<Vec<_>>() {
            self.forget(tgid);
        }
    }

    /// Takes the probes out of files that nobody maps any more (a link keeps a container's file
    /// system from going), after a look through all processes.
    pub(super) fn forget_files(&mut self) {
        let mapped = std::mem::take(&mut self.mapped);
        let now = Instant::now();
        let is_idle = |id: &FileId, file: &mut HostLinks| file.is_idle(mapped.contains(id), now);
        let idle: Vec<_> = self.host_links.extract_if(is_idle).collect();
        for (_, file) in idle {
            self.throw_away(file.links);
        }
        let (of_host, of_processes) = (&self.host_links, &self.process_links);
        let ours: HashSet<FileId> = of_processes.keys().map(|(_, id)| *id).collect();
        self.files
            .retain(|id, _| mapped.contains(id) || of_host.contains_key(id) || ours.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _};

    use super::*;

    #[test]
    fn probes_go_when_a_file_was_unmapped_for_a_while() {
        let mut file = HostLinks::new(Library::C10, Links::default());
        let begin = file.used;
        assert!(!file.is_idle(false, begin + UNUSED / 2));
        assert!(!file.is_idle(true, begin + UNUSED / 2));
        assert!(!file.is_idle(false, begin + UNUSED));
        assert!(file.is_idle(false, begin + UNUSED / 2 * 3));
        file.expected = true;
        assert!(!file.is_idle(false, begin + UNUSED * 9));
    }

    #[test]
    fn another_file_under_the_same_number_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        fs::write(&path, "one").unwrap();
        let before = Stamp::of(&File::open(&path).unwrap());
        assert_eq!(before, Stamp::of(&File::open(&path).unwrap()));
        File::options().append(true).open(&path).unwrap().write_all(b"more").unwrap();
        assert_ne!(before, Stamp::of(&File::open(&path).unwrap()));
    }
}
