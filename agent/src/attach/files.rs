//! The files that probes are put into.
//!
//! A file system gives the inode number of a deleted file to the next one that is made. What is known
//! of a file, above all where its functions are, would then be taken for true of another: a breakpoint
//! in the middle of an instruction. So a file stays open as long as anything is known of it.

use std::{
    collections::HashMap,
    fs::File,
    path::PathBuf,
    sync::{Arc, Weak},
};

use super::elf;
use crate::{
    host::{FileId, Host, Mapping, is_at_home, is_named, stat_id},
    kernel::Site,
    probes::Library,
};

/// An opened library.
pub(super) struct Source {
    pub(super) file: File,
    pub(super) library: Library,
    /// Path as the process that was met first sees it; never opened.
    pub(super) shown: PathBuf,
    /// Its probed functions; `None` where it is no library that can be parsed.
    pub(super) sites: Option<Vec<Site>>,
    content: Option<Content>,
}

/// What changes when a file's content does, and tells two copies of one library apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    bytes: i64,
    modified: (i64, u64),
    /// Also set when a file is made, and by every change of its attributes: unlike the time of
    /// modification no program can choose it.
    changed: (i64, u64),
}

impl Content {
    fn of(file: &File) -> Option<Self> {
        let stat = rustix::fs::fstat(file).ok()?;
        Some(Self {
            bytes: stat.st_size,
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
        })
    }
}

impl Source {
    /// Takes the opened file; the second value says why it can't be parsed.
    pub(super) fn new(file: File, library: Library, shown: PathBuf) -> (Self, Option<String>) {
        let content = Content::of(&file);
        let found = file
            .try_clone()
            .map_err(|error| error.to_string())
            .and_then(|file| elf::sites(file, library).map_err(|error| super::chain(&error)));
        let (sites, error) = match found {
            Ok(sites) => (Some(sites), None),
            Err(error) => (None, Some(error)),
        };
        (Self { file, library, shown, sites, content }, error)
    }

    /// The functions; none where it is no library.
    pub(super) fn sites(&self) -> &[Site] {
        self.sites.as_deref().unwrap_or_default()
    }

    /// What the file is like now. Asked of an overlay's file, the file below answers.
    fn content(&self) -> Option<Content> {
        Content::of(&self.file)
    }

    /// Whether two overlays show one file: its times and size are those of the file below. They are
    /// compared as they were and as they are, since a container may have written to one meanwhile.
    pub(super) fn is_same_below(&self, other: &Self) -> bool {
        let same = |one: Option<Content>, two| one.is_some() && one == two;
        same(self.content, other.content) || same(self.content(), other.content())
    }

    /// Whether the file is still the one that was parsed, attributes and all.
    pub(super) fn is_untouched(&self) -> bool {
        self.content.is_some() && self.content() == self.content
    }

    /// Whether the functions still are where they were found.
    pub(super) fn is_unwritten(&self) -> bool {
        let (then, now) = (self.content, self.content());
        then.zip(now)
            .is_some_and(|(then, now)| (then.bytes, then.modified) == (now.bytes, now.modified))
    }

    /// Whether it is in nobody's way to hold the file open although no process maps it.
    pub(super) fn is_in_nobodys_way(&self) -> bool {
        is_named(&self.file) && is_at_home(&self.file)
    }

    /// Whether the file still has a name.
    pub(super) fn is_named(&self) -> bool {
        is_named(&self.file)
    }
}

/// The files that somebody holds.
#[derive(Default)]
pub(super) struct Files(HashMap<FileId, Weak<Source>>);

impl Files {
    /// What is known of a file, unless it was written to since.
    pub(super) fn get(&self, id: FileId) -> Option<Arc<Source>> {
        self.0.get(&id)?.upgrade().filter(|source| source.is_unwritten())
    }

    /// Takes in a file that was opened.
    pub(super) fn insert(&mut self, id: FileId, source: Source) -> Arc<Source> {
        self.0.retain(|_, known| known.strong_count() > 0);
        let source = Arc::new(source);
        self.0.insert(id, Arc::downgrade(&source));
        source
    }
}

/// Opens the file of a mapping, and makes sure that it is that file: the process may have mapped
/// another one in its place since its maps were read.
pub(super) fn open_mapped(host: &Host, tgid: u32, mapping: &Mapping) -> Option<File> {
    let file = host.open_mapped(tgid, mapping)?;
    // On btrfs and some overlays a file's own number is another than that of its mapping.
    let is_it = stat_id(&file) == Some(mapping.file_id())
        || host.mappings(tgid).is_some_and(|now| now.contains(mapping));
    is_it.then_some(file)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn source(path: &std::path::Path) -> Source {
        Source::new(File::open(path).unwrap(), Library::Cuda, path.to_owned()).0
    }

    #[test]
    fn a_file_is_known_as_long_as_it_is_held() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        fs::write(&path, "no library").unwrap();
        let (mut files, id) = (Files::default(), ((0, 1), 2));
        let held = files.insert(id, source(&path));
        assert!(held.sites.is_none() && held.is_named() && held.is_untouched());
        assert!(files.get(id).is_some_and(|known| Arc::ptr_eq(&known, &held)));
        fs::remove_file(&path).unwrap();
        assert!(!held.is_named() && held.is_unwritten());
        assert!(files.get(id).is_some(), "its number means no other file");
        drop(held);
        assert!(files.get(id).is_none());
    }

    #[test]
    fn a_file_that_was_written_to_is_not_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        fs::write(&path, "one").unwrap();
        let (mut files, id) = (Files::default(), ((0, 1), 2));
        let held = files.insert(id, source(&path));
        fs::write(&path, "another").unwrap();
        assert!(!held.is_unwritten() && files.get(id).is_none());
    }
}
