//! Keeps probes out of processes that object to them, and takes them out where an objection comes
//! late.

use std::{fs::File, path::Path};

use agent_common::life::FOLLOW_CHILDREN;
use tracing::{debug, warn};

use super::{Attached, Attacher, Notice, Phase, Place, elf, guard::Objection};
use crate::{
    host::{FileId, Mapping},
    kernel::{Links, Site},
    probes::Library,
};

/// What may have happened where UCX came to a process that was probed.
pub const TOO_LATE: &str =
    ". If UCX was sooner than the removal of the probes, it runs without these hooks";
/// Threads that take probes out when all go.
const DETACHERS: usize = 16;

impl Attacher {
    /// Who objects to probes in the file in this scope, and why.
    pub(super) fn objection(
        &self,
        place: &Place<'_>,
        file: &File,
        sites: &[Site],
    ) -> Option<(u32, Objection)> {
        let Some(tgid) = place.owner else { return self.who_objects(place.library) };
        let known = self.guard.objects(&self.host, tgid, place.library);
        let objection =
            known.or_else(|| self.guard.compare(&self.host, tgid, place.id, file, sites));
        Some((tgid, objection?))
    }

    /// Does without probes that somebody objects to.
    pub(super) fn give_in(&mut self, place: &Place<'_>, tgid: u32, objection: Objection) {
        match place.owner {
            None => self.set_apart(place.library, tgid, objection),
            Some(tgid) => self.spare(tgid, place.id, place.shown, objection, false),
        }
    }

    /// A process on this host because of which the library must not be probed in all. Each process
    /// is compared with the file that it maps itself: one file can have several ids (overlayfs).
    fn who_objects(&self, library: Library) -> Option<(u32, Objection)> {
        if let Some(tgid) = self.guard.any_ucx(library) {
            return Some((tgid, Objection::Ucx));
        }
        self.guard.users(library).into_iter().find_map(|tgid| {
            let mappings = self.host.mappings(tgid)?;
            let ours = mappings.iter().filter(|mapping| {
                let name = str::from_utf8(mapping.file_name()).unwrap_or_default();
                mapping.executable && self.library(name) == Some(library)
            });
            let objection = ours.clone().find_map(|mapping| self.compare(tgid, library, mapping));
            Some((tgid, objection?))
        })
    }

    fn compare(&self, tgid: u32, library: Library, mapping: &Mapping) -> Option<Objection> {
        let id = (mapping.dev, mapping.inode);
        let file = self.host.open_mapped(tgid, mapping)?;
        let known = self.known(id, &file).and_then(|known| known.sites.clone());
        // A file that is no library can't be probed either.
        let sites = known.or_else(|| elf::sites(file.try_clone().ok()?, library).ok())?;
        self.guard.compare(&self.host, tgid, id, &file, &sites)
    }

    /// UCX was found in a process: whatever probes would meet it are taken out at once.
    pub(super) fn make_way(&mut self, tgid: u32) {
        let Some(objection) = self.guard.objects(&self.host, tgid, Library::Cuda) else { return };
        let probed_in_all = self.host_links.values().any(|file| file.library == Library::Cuda);
        if self.host_wide && probed_in_all {
            self.set_apart(Library::Cuda, tgid, objection);
        }
        self.withdraw(tgid, objection);
    }

    /// Takes the driver's probes out of a process.
    fn withdraw(&mut self, tgid: u32, objection: Objection) {
        let of_driver = |attached: &Attached| {
            attached.source.as_ref().is_some_and(|source| source.library == Library::Cuda)
        };
        let taken: Vec<_> = self
            .process_links
            .extract_if(|(owner, _), attached| *owner == tgid && of_driver(attached))
            .collect();
        for ((_, id), Attached { links, source }) in taken {
            self.throw_away(links);
            let Some(source) = source else { continue };
            self.spare(tgid, id, &source.shown, objection, true);
        }
    }

    /// Takes a library's probes out of the whole host, and puts them into each process that does not
    /// object.
    fn set_apart(&mut self, library: Library, tgid: u32, objection: Objection) {
        if !self.guard.set_apart(library) {
            return;
        }
        let taken: Vec<_> = self.host_links.extract_if(|_, file| file.library == library).collect();
        let probed = !taken.is_empty();
        for (_, file) in taken {
            self.throw_away(file.links);
        }
        let library_name = library.as_str();
        warn!(library_name, tgid, "not probed for the whole host at once: {objection}");
        let users = self.guard.users(library);
        let moved = if probed { users.clone() } else { Vec::new() };
        self.tell(Notice::Apart { library, tgid, objection, moved });
        for tgid in users {
            self.look_at(tgid);
        }
    }

    fn spare(
        &mut self,
        tgid: u32,
        id: FileId,
        path: &Path,
        objection: Objection,
        was_probed: bool,
    ) {
        if self.spared.insert((tgid, id), objection) == Some(objection) {
            return;
        }
        let file = path.display();
        if was_probed {
            warn!(%file, tgid, "not probed any more, its calls stay unseen: {objection}{}", TOO_LATE);
        } else {
            warn!(%file, tgid, "not probed, its calls stay unseen: {objection}");
        }
        let path = path.to_owned();
        self.tell(Notice::Spared { tgid, path, objection, was_probed });
    }

    /// Where the whole host is recorded, a process with probes of its own is followed: its children
    /// need some too. False where that fails, which is told.
    pub(super) fn follow_owner(&mut self, place: &Place<'_>) -> bool {
        let Some(tgid) = place.owner else { return true };
        if !self.host_wide || self.followed.contains(&tgid) {
            return true;
        }
        if let Err(error) = self.kernel.follow(tgid, FOLLOW_CHILDREN) {
            self.give_up(place, &error);
            return false;
        }
        debug!(tgid, "followed for its children");
        self.followed.insert(tgid);
        self.tell(Notice::Following { tgid });
        true
    }

    /// Where the whole host is recorded, a process may have made children before it was followed.
    pub(super) fn look_at_children(&mut self, place: &Place<'_>) {
        let Some(tgid) = place.owner.filter(|_| self.host_wide) else { return };
        for child in self.host.children(tgid) {
            if !self.followed.contains(&child) {
                self.look_at(child);
            }
        }
    }

    /// Takes every probe out, for good; they are gone when this returns.
    pub(super) fn detach(&mut self) {
        self.phase = Phase::Closed;
        let of_host = self.host_links.drain().map(|(_, file)| file.links);
        let of_processes = self.process_links.drain().map(|(_, attached)| attached.links);
        let mut all: Vec<Links> = of_host.chain(of_processes).flat_map(Links::split).collect();
        // The kernel waits at each, and for all at once no longer than for one.
        let share = all.len().div_ceil(DETACHERS).max(1);
        std::thread::scope(|scope| {
            while !all.is_empty() {
                let some = all.split_off(all.len().saturating_sub(share));
                scope.spawn(move || drop(some));
            }
        });
    }

    pub(super) fn throw_away(&self, links: Links) {
        for links in links.split() {
            // The receiver lives as long as the recording; after it, dropping here is as good.
            self.garbage.send(links).unwrap_or_default();
        }
    }
}
