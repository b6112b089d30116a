//! Puts probes in, once for each file and process.
//!
//! Whether a process is probed already is asked of its memory, which has our breakpoints or has not.
//! Numbers of files do not tell: overlayfs shows one file under another number in each of its mounts,
//! and two files under one number where a container has written to the file since it was mapped.

use std::{
    collections::HashSet, fs::File, num::NonZeroU32, os::fd::AsRawFd as _, path::PathBuf, sync::Arc,
};

use tracing::{debug, warn};

use super::{
    Attached, Attacher, Notice, Phase, Place, chain,
    files::{self, Source},
    guard::{self, Probes},
    shared::{Route, Settled},
};
use crate::{
    clock,
    host::{FileId, Mapping},
    kernel::{KernelError, Links, Scope},
    probes::Library,
};

impl Attacher {
    /// Probes a library that a process maps.
    pub(super) fn attach_mapping(&mut self, tgid: u32, library: Library, mapping: &Mapping) {
        let id = mapping.file_id();
        if self.phase == Phase::Closed || self.hopeless.contains(&(tgid, id, mapping.start)) {
            return;
        }
        if self.host_wide && !self.guard.is_apart(library) {
            self.share(tgid, library, mapping);
        }
        // Or apart by now: somebody objected.
        if !self.host_wide || self.guard.is_apart(library) {
            self.attach_own(tgid, library, mapping);
        }
    }

    /// Probes the file for every process, unless it is.
    fn share(&mut self, tgid: u32, library: Library, mapping: &Mapping) {
        let id = mapping.file_id();
        if self.shared.is_user(tgid, id) || self.shared.join_unprobed(id, tgid) {
            return;
        }
        if let Some(known) = self.files.get(id)
            && self.join(tgid, id, &known)
        {
            return;
        }
        let Some(source) = self.open(tgid, library, mapping) else { return };
        if !self.join(tgid, id, &source) {
            self.attach_shared(id, &source, Some((tgid, mapping.start)));
        }
    }

    fn probes(&self, tgid: u32, id: FileId, source: &Source) -> Probes {
        guard::probes(&self.host, tgid, id, &source.file, source.sites())
    }

    /// Notes that the process has the file's probes, if it has.
    fn join(&mut self, tgid: u32, id: FileId, source: &Arc<Source>) -> bool {
        self.probes(tgid, id, source) == Probes::There && self.shared.join(id, source, tgid)
    }

    /// Attaches for every process. Calls count only once a process that maps the file was seen to
    /// have the breakpoints: links through an overlay can end in another file than the mapped one.
    pub(super) fn attach_shared(
        &mut self,
        id: FileId,
        source: &Arc<Source>,
        user: Option<(u32, u64)>,
    ) {
        let (library, shown) = (source.library, source.shown.as_path());
        let place = Place { id, library, shown, owner: None };
        let route = Route::new(id, Arc::clone(source), user.map(|(tgid, _)| tgid));
        if source.sites.is_none() {
            return self.shared.add(Links::default(), route);
        }
        if let Some((tgid, objection)) = self.objection(&place, source) {
            return self.give_in(&place, tgid, objection);
        }
        let links = match self.links(source, Scope::Host) {
            Ok(links) => links,
            Err(error) => {
                self.failed(&place, chain(&error));
                return self.shared.add(Links::default(), route);
            }
        };
        // Looked at once more: somebody may have patched it meanwhile.
        if let Some((tgid, objection)) = self.objection(&place, source) {
            drop(links);
            return self.give_in(&place, tgid, objection);
        }
        if let Some((tgid, start)) = user
            && !self.is_met(tgid, start, &place, source)
        {
            return self.throw_away(links);
        }
        if let Err(error) = self.kernel.arm(&links, Scope::Host) {
            self.failed(&place, chain(&error));
            return self.shared.add(Links::default(), route);
        }
        self.tell_attached(&place, source);
        self.shared.add(links, route);
    }

    /// Whether the process meets probes that were just put in; where it does not, and runs, they are
    /// not tried in this mapping again.
    fn is_met(&mut self, tgid: u32, start: u64, place: &Place<'_>, source: &Source) -> bool {
        let found = self.probes(tgid, place.id, source);
        if found == Probes::There {
            return true;
        }
        if self.host.has_memory(tgid) && self.hopeless.insert((tgid, place.id, start)) {
            if found == Probes::Missing {
                let place = Place { owner: Some(tgid), ..*place };
                let why = "the kernel puts no probes into this mapping: the file was written to since \
                           it was mapped, or it is mapped writable or shared; restart the process to \
                           have it recorded";
                self.failed(&place, why.to_owned());
            } else {
                debug!(tgid, file = %place.shown.display(), "no probed function is mapped");
            }
        }
        false
    }

    /// Probes the file in this process, unless it is.
    fn attach_own(&mut self, tgid: u32, library: Library, mapping: &Mapping) {
        let id = mapping.file_id();
        if self.process_links.contains_key(&(tgid, id)) {
            return;
        }
        let known = self.files.get(id);
        let Some(source) = known.or_else(|| self.open(tgid, library, mapping)) else { return };
        if self.has_own_probes(tgid, id, &source) {
            let links = Links::default();
            self.process_links.insert((tgid, id), Attached { links, source });
        } else {
            self.attach_source(tgid, id, &source);
        }
    }

    /// Whether the process has our probes in the file already, under another number: it was found
    /// below an overlay before it was mapped through that.
    fn has_own_probes(&self, tgid: u32, id: FileId, source: &Source) -> bool {
        let alike = self.process_links.iter().any(|((owner, _), attached)| {
            *owner == tgid
                && !attached.links.is_empty()
                && attached.source.library == source.library
                && attached.source.sites == source.sites
                && attached.source.is_same_below(source)
        });
        let probes = || self.probes(tgid, id, source);
        alike && probes() == Probes::There
    }

    /// Probes an opened file in one process.
    pub(super) fn attach_source(&mut self, tgid: u32, id: FileId, source: &Arc<Source>) {
        let (library, shown) = (source.library, source.shown.as_path());
        let place = Place { id, library, shown, owner: Some(tgid) };
        if self.phase == Phase::Closed || self.is_done(&place) {
            return;
        }
        if source.sites.is_none() {
            return self.keep(tgid, id, Links::default(), source);
        }
        if let Some((tgid, objection)) = self.objection(&place, source) {
            return self.give_in(&place, tgid, objection);
        }
        if !self.follow_owner(&place, source) {
            return;
        }
        let scope = NonZeroU32::new(tgid).map_or(Scope::Host, Scope::Process);
        let waits = self.must_wait(&place);
        let links = self.links(source, scope).and_then(|links| {
            let armed = if waits { Ok(()) } else { self.kernel.arm(&links, scope) };
            armed.map(|()| links)
        });
        match links {
            Ok(links) => self.attached(&place, links, source),
            Err(error) => self.give_up(tgid, &place, &error, source),
        }
    }

    fn attached(&mut self, place: &Place<'_>, links: Links, source: &Arc<Source>) {
        // Looked at once more: somebody may have patched it meanwhile.
        if let Some((tgid, objection)) = self.objection(place, source) {
            drop(links);
            return self.give_in(place, tgid, objection);
        }
        self.tell_attached(place, source);
        if let Some(tgid) = place.owner {
            self.spared.remove(&(tgid, place.id));
            self.keep(tgid, place.id, links, source);
        }
        self.look_at_children(place);
    }

    fn tell_attached(&self, place: &Place<'_>, source: &Source) {
        debug!(file = %place.shown.display(), owner = place.owner, "attached");
        let probes = source.sites().len();
        self.tell(Notice::Attached {
            tgid: place.owner,
            path: place.shown.to_owned(),
            library: place.library,
            probes,
            available: probes,
            at_ns: clock::boot_ns(),
        });
    }

    pub(super) fn give_up(
        &mut self,
        tgid: u32,
        place: &Place<'_>,
        error: &KernelError,
        source: &Arc<Source>,
    ) {
        self.keep(tgid, place.id, Links::default(), source);
        // A process that ended meanwhile is no failure.
        if self.host.mappings(tgid).is_some() {
            self.failed(place, chain(error));
        }
    }

    fn keep(&mut self, tgid: u32, id: FileId, links: Links, source: &Arc<Source>) {
        let source = Arc::clone(source);
        self.process_links.insert((tgid, id), Attached { links, source });
    }

    /// Whether nothing is to be done for a file of this number.
    pub(super) fn is_done(&self, place: &Place<'_>) -> bool {
        match place.owner {
            None => self.shared.contains(place.id) || self.guard.is_apart(place.library),
            Some(tgid) => self.process_links.contains_key(&(tgid, place.id)),
        }
    }

    /// Links that do not count yet. The kernel is given the opened file, not a path: what a path names
    /// can change, and in a container somebody else chooses it.
    pub(super) fn links(&mut self, source: &Source, scope: Scope) -> Result<Links, KernelError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", source.file.as_raw_fd()));
        let sites = self.kept(scope, source.sites());
        self.kernel.attach_unarmed(&path, &sites, scope)
    }

    /// Opens the mapped file. One that can't be opened says nothing of other processes.
    fn open(&mut self, tgid: u32, library: Library, mapping: &Mapping) -> Option<Arc<Source>> {
        let (id, shown) = (mapping.file_id(), mapping.path.as_path());
        let place = Place { id, library, shown, owner: Some(tgid) };
        let Some(file) = files::open_mapped(&self.host, tgid, mapping) else {
            // A process that ended, or maps something else by now, is no failure.
            let still = self.host.mappings(tgid).is_some_and(|now| now.contains(mapping));
            if still && self.hopeless.insert((tgid, id, mapping.start)) {
                self.failed(&place, "the mapped file could not be opened".to_owned());
            }
            return None;
        };
        let owner = place.owner.filter(|_| !self.host_wide);
        Some(self.learn(&Place { owner, ..place }, file))
    }

    /// Takes in an opened file, and says so where it is no library.
    pub(super) fn learn(&mut self, place: &Place<'_>, file: File) -> Arc<Source> {
        let (source, error) = Source::new(file, place.library, place.shown.to_owned());
        if let Some(error) = error {
            self.failed(place, error);
        }
        self.files.insert(place.id, source)
    }

    /// Looks for processes that ended without a word: those that mapped a library but made no call.
    pub(super) fn tidy(&mut self) {
        let users = self.shared.users().into_iter();
        for tgid in users.chain(self.guard.known()).collect::<HashSet<u32>>() {
            if !self.host.has_memory(tgid) {
                self.forget(tgid);
            }
        }
        self.settle();
    }

    /// Takes probes out of files that nobody wants any more.
    pub(super) fn settle(&mut self) {
        let Settled { gone, stranded } = self.shared.settle();
        for links in gone {
            self.throw_away(links);
        }
        for (at, before) in stranded {
            self.hand_over(at, before);
        }
    }

    /// Puts probes in through another mount of the file, and takes out those that hold the mount of a
    /// container that ended. For a moment both report calls, of which the kernel half makes one, and
    /// counts the other as lost: the other order would miss some.
    fn hand_over(&mut self, at: usize, before: Route) {
        let Some(probed) = self.shared.get_mut(at) else { return };
        let Some(source) = probed.routes.first().map(|route| Arc::clone(&route.source)) else {
            return;
        };
        // Written to since, the overlay leads to a file of its own.
        let same = source.is_untouched();
        let links = same.then(|| self.links(&source, Scope::Host));
        let file = source.shown.display();
        let new = match links {
            Some(Ok(links)) => links,
            failed => {
                let error = failed.and_then(Result::err).map(|error| chain(&error));
                warn!(%file, error, "probes stay on the mount of a container that ended");
                if let Some(probed) = self.shared.get_mut(at) {
                    probed.routes.insert(0, before);
                    probed.stuck = true;
                }
                return;
            }
        };
        debug!(%file, "probed through another mount");
        let Some(probed) = self.shared.get_mut(at) else { return };
        let old = std::mem::replace(&mut probed.links, new);
        let armed = self.kernel.arm(&probed.links, Scope::Host);
        if let Err(error) = armed.and_then(|()| self.kernel.disarm(&old)) {
            warn!(%file, error = chain(&error), "calls may be missed or counted twice");
        }
        self.throw_away(old);
    }
}
