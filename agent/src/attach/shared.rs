//! What is probed for every process of the host, who uses it, and when it is let go.
//!
//! A probe holds the mount that its file was found on: left in place, one in a container's library
//! would keep the container's file system from being unmounted, and its disk space from being freed,
//! as long as the agent runs.

use std::{collections::HashSet, sync::Arc};

use super::files::Source;
use crate::{host::FileId, kernel::Links, probes::Library};

/// A file under one of its numbers.
pub(super) struct Route {
    id: FileId,
    pub(super) source: Arc<Source>,
    /// Processes that map it, and were seen to be probed.
    users: HashSet<u32>,
    /// It was found where drivers lie, before anybody mapped it.
    prepared: bool,
}

impl Route {
    /// The file as a process maps it, or as it was found where drivers lie.
    pub(super) fn new(id: FileId, source: Arc<Source>, user: Option<u32>) -> Self {
        Self { id, source, users: user.into_iter().collect(), prepared: user.is_none() }
    }

    /// Whether it is held on to. Nobody maps it: then only where it is in nobody's way, so that the
    /// next process's first calls are met. One that was written to is let go before the kernel puts
    /// breakpoints to where its functions were.
    fn is_wanted(&self) -> bool {
        let waits = || self.source.is_in_nobodys_way() || (self.prepared && self.source.is_named());
        !self.users.is_empty() || (waits() && self.source.is_unwritten())
    }
}

/// A file that is probed, or could not be.
///
/// overlayfs shows one file under another number in each of its mounts, and the kernel's probes are in
/// the file below: two containers of one image share them.
pub(super) struct Probed {
    library: Library,
    pub(super) links: Links,
    /// The links were made through the first.
    pub(super) routes: Vec<Route>,
    /// They can't be made through another.
    pub(super) stuck: bool,
}

/// All of them.
#[derive(Default)]
pub(super) struct Shared(Vec<Probed>);

/// What became of files that lost users.
#[derive(Default)]
pub(super) struct Settled {
    /// Links of files that nobody wants any more.
    pub(super) gone: Vec<Links>,
    /// Files whose links were made through a route that nobody wants any more, and that route.
    pub(super) stranded: Vec<(usize, Route)>,
}

impl Shared {
    /// Whether the file has been dealt with, under this number.
    pub(super) fn contains(&self, id: FileId) -> bool {
        self.routes().any(|route| route.id == id)
    }

    /// Whether the process was seen to be probed in this file.
    pub(super) fn is_user(&self, tgid: u32, id: FileId) -> bool {
        self.routes().any(|route| route.id == id && route.users.contains(&tgid))
    }

    /// The processes that use something.
    pub(super) fn users(&self) -> HashSet<u32> {
        self.routes().flat_map(|route| route.users.iter().copied()).collect()
    }

    fn routes(&self) -> impl Iterator<Item = &Route> {
        self.0.iter().flat_map(|probed| &probed.routes)
    }

    /// Whether the library is probed in any file.
    pub(super) fn has(&self, library: Library) -> bool {
        self.0.iter().any(|probed| probed.library == library && !probed.links.is_empty())
    }

    /// Takes in a file that was dealt with.
    pub(super) fn add(&mut self, links: Links, route: Route) {
        let library = route.source.library;
        self.0.push(Probed { library, links, routes: vec![route], stuck: false });
    }

    /// One more process maps the file. False where it is not known that the file can't be probed.
    pub(super) fn join_unprobed(&mut self, id: FileId, tgid: u32) -> bool {
        let unprobed = self.0.iter_mut().filter(|probed| probed.links.is_empty());
        let Some(route) =
            unprobed.flat_map(|probed| &mut probed.routes).find(|route| route.id == id)
        else {
            return false;
        };
        route.users.insert(tgid);
        true
    }

    /// One more process maps the file, and has our breakpoints in it. False where they are none of
    /// ours.
    ///
    /// Breakpoints alone may be another tool's: the times that the file below has must be those of one
    /// that is probed.
    pub(super) fn join(&mut self, id: FileId, source: &Arc<Source>, tgid: u32) -> bool {
        let Some(at) = self.position(id, source) else { return false };
        let Some(probed) = self.0.get_mut(at) else { return false };
        match probed.routes.iter_mut().find(|route| route.id == id) {
            Some(route) => {
                route.users.insert(tgid);
            }
            None => probed.routes.push(Route::new(id, Arc::clone(source), Some(tgid))),
        }
        true
    }

    fn position(&self, id: FileId, source: &Source) -> Option<usize> {
        let alike = |probed: &Probed| {
            let first = probed.routes.first();
            probed.library == source.library
                && !probed.links.is_empty()
                && first.is_some_and(|route| route.source.sites == source.sites)
        };
        let same =
            |probed: &Probed| probed.routes.iter().any(|route| route.source.is_same_below(source));
        let known = |probed: &Probed| probed.routes.iter().any(|route| route.id == id);
        // The latest first: a file that a container wrote to has its number in two of them.
        let find = |is: &dyn Fn(&Probed) -> bool| {
            self.0.iter().rposition(|probed| alike(probed) && is(probed))
        };
        find(&|probed| known(probed) && same(probed))
            .or_else(|| find(&same))
            .or_else(|| find(&known))
    }

    /// A process does not map any files but these any more; true where it did.
    pub(super) fn leave(&mut self, tgid: u32, except: &HashSet<FileId>) -> bool {
        let mut left = false;
        for route in self.0.iter_mut().flat_map(|probed| &mut probed.routes) {
            left |= !except.contains(&route.id) && route.users.remove(&tgid);
        }
        left
    }

    /// Lets go what nobody wants any more.
    pub(super) fn settle(&mut self) -> Settled {
        let mut settled = Settled::default();
        for probed in std::mem::take(&mut self.0) {
            let Probed { library, links, routes, stuck } = probed;
            let mut routes = routes.into_iter();
            let first = routes.next();
            let mut routes: Vec<Route> = routes.filter(Route::is_wanted).collect();
            let lost = match first {
                Some(first) if first.is_wanted() || (stuck && !routes.is_empty()) => {
                    routes.insert(0, first);
                    None
                }
                first => first,
            };
            if routes.is_empty() {
                settled.gone.push(links);
                continue;
            }
            if let Some(lost) = lost.filter(|_| !links.is_empty()) {
                settled.stranded.push((self.0.len(), lost));
            }
            self.0.push(Probed { library, links, routes, stuck });
        }
        settled
    }

    /// One of them, by the number that [`Self::settle`] gave.
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Probed> {
        self.0.get_mut(at)
    }

    /// Takes out the files of a library.
    pub(super) fn take(&mut self, library: Library) -> Vec<Links> {
        let taken = self.0.extract_if(.., |probed| probed.library == library);
        taken.map(|probed| probed.links).collect()
    }

    /// Takes out all.
    pub(super) fn take_all(&mut self) -> Vec<Links> {
        self.0.drain(..).map(|probed| probed.links).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        path::Path,
    };

    use super::*;

    const FIRST: FileId = ((0, 39), 7);
    const SECOND: FileId = ((0, 41), 7);

    /// A file of a mount that is not the root's, as a library without functions.
    fn library(folder: &Path, content: &str) -> Arc<Source> {
        let path = folder.join(content);
        fs::write(&path, content).unwrap();
        let mut source = Source::new(File::open(&path).unwrap(), Library::Cuda, path).0;
        source.sites = Some(Vec::new());
        Arc::new(source)
    }

    fn elsewhere() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn a_file_under_two_numbers_goes_with_its_last_user() {
        let folder = elsewhere();
        let source = library(folder.path(), "x");
        let mut shared = Shared::default();
        shared.add(Links::of_test(), Route::new(FIRST, Arc::clone(&source), Some(1)));
        assert!(shared.join(SECOND, &source, 2) && shared.join(SECOND, &source, 3));
        assert_eq!(shared.0.len(), 1, "one file, probed once");
        assert!(shared.is_user(2, SECOND) && !shared.is_user(2, FIRST));
        assert!(shared.leave(3, &HashSet::new()) && !shared.leave(3, &HashSet::new()));
        assert!(!shared.leave(2, &HashSet::from([SECOND])), "still mapped");
        let settled = shared.settle();
        assert!(settled.gone.is_empty() && settled.stranded.is_empty());
        // The container through whose mount the links were made.
        shared.leave(1, &HashSet::new());
        let settled = shared.settle();
        assert!(settled.gone.is_empty());
        assert_eq!(settled.stranded.len(), 1);
        assert!(shared.settle().stranded.is_empty(), "once");
        shared.leave(2, &HashSet::new());
        assert_eq!(shared.settle().gone.len(), 1);
        assert!(!shared.has(Library::Cuda) && !shared.contains(SECOND));
    }

    #[test]
    fn copies_of_one_library_are_told_apart() {
        let folder = elsewhere();
        let (one, other) = (library(folder.path(), "one"), library(folder.path(), "other"));
        let mut shared = Shared::default();
        shared.add(Links::of_test(), Route::new(FIRST, Arc::clone(&one), Some(1)));
        shared.add(Links::of_test(), Route::new(SECOND, Arc::clone(&other), Some(2)));
        let third = ((0, 43), 7);
        assert!(shared.join(third, &one, 3));
        assert_eq!(shared.0[0].routes.len(), 2);
        assert_eq!(shared.0[1].routes.len(), 1);
        let copy = library(folder.path(), "copy");
        assert!(!shared.join(((0, 45), 7), &copy, 4), "another agent's breakpoints");
    }

    #[test]
    fn a_file_that_cant_be_probed_is_none_of_ours() {
        let folder = elsewhere();
        let source = library(folder.path(), "x");
        let mut shared = Shared::default();
        shared.add(Links::default(), Route::new(FIRST, Arc::clone(&source), Some(1)));
        assert!(!shared.join(SECOND, &source, 2), "somebody else's breakpoints");
        assert!(shared.join_unprobed(FIRST, 2) && !shared.join_unprobed(SECOND, 2));
        assert!(shared.is_user(2, FIRST));
    }

    #[test]
    fn drivers_of_the_host_wait_for_users_until_they_are_replaced() {
        let folder = elsewhere();
        let source = library(folder.path(), "x");
        let mut shared = Shared::default();
        shared.add(Links::of_test(), Route::new(FIRST, Arc::clone(&source), None));
        assert!(shared.settle().gone.is_empty());
        fs::write(&source.shown, "another content").unwrap();
        assert_eq!(shared.settle().gone.len(), 1, "its functions may be elsewhere now");
        let source = library(folder.path(), "y");
        shared.add(Links::of_test(), Route::new(FIRST, Arc::clone(&source), None));
        fs::remove_file(&source.shown).unwrap();
        assert_eq!(shared.settle().gone.len(), 1);
    }
}
