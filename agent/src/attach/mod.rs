//! Which files hold traced functions, which processes map them, and the probes in them.
//!
//! Probes belong to a file by (device, inode). `record` attaches once a file, for every process;
//! `run` and `attach` put probes into the followed processes only, as they map the file. A process
//! whose code somebody else has patched is spared ([`guard`]).

pub mod candidates;
pub mod elf;
pub mod examine;
pub mod guard;
pub mod mmaps;
mod spare;
mod tidy;
pub mod worker;

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    num::NonZeroU32,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{Arc, mpsc::Sender},
};

use agent_common::life::FOLLOW_CHILDREN;
use thiserror::Error;
use tracing::{debug, warn};

use crate::{
    clock,
    host::{FileId, Host, maps::Mapping, open_regular},
    kernel::{Kernel, KernelError, Links, Scope, Site},
    probes::Library,
};

pub use self::spare::TOO_LATE;
use self::{
    examine::ToExaminer,
    guard::{Guard, Objection, Sparing},
    tidy::{HostLinks, Known, Stamp},
};

/// What the attaching tells the rest.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A process is followed from here on.
    Following {
        /// Process.
        tgid: u32,
    },
    /// A process had mapped the driver library before the recording began.
    AlreadyMapped {
        /// Process.
        tgid: u32,
    },
    /// Probes are in place.
    Attached {
        /// Process; `None` for every process that maps the file.
        tgid: Option<u32>,
        /// Path as the process sees it.
        path: PathBuf,
        /// Which library it is.
        library: Library,
        /// Functions probed.
        probes: usize,
        /// Functions of the table that the file has.
        available: usize,
        /// When the last probe was in place, `CLOCK_BOOTTIME`.
        at_ns: u64,
    },
    /// A file could not be probed: what its processes do stays unseen.
    Failed {
        /// Process, where one is meant.
        tgid: Option<u32>,
        /// Path as the process sees it.
        path: PathBuf,
        /// Why, the whole chain.
        error: String,
    },
    /// A process is spared: its library is not probed, or not any more.
    Spared {
        /// Process.
        tgid: u32,
        /// Path as the process sees it.
        path: PathBuf,
        /// Why.
        objection: Objection,
        /// It was probed until now.
        was_probed: bool,
    },
    /// The whole host is recorded, but of this library each process gets probes of its own.
    Apart {
        /// The library.
        library: Library,
        /// The process because of which.
        tgid: u32,
        /// What it objects.
        objection: Objection,
        /// Processes whose probes were taken out and put in again: calls between are not seen.
        moved: Vec<u32>,
    },
    /// A process runs a Python whose frames cannot be walked: why.
    NoPython {
        /// Process.
        tgid: u32,
        /// For the user.
        reason: String,
    },
    /// Mapping events were dropped by the kernel, and everything was looked through again.
    MappingsLost(u64),
}

/// A library in its scope.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    id: FileId,
    library: Library,
    /// Path as the process sees it; never opened.
    shown: &'a Path,
    /// The process; `None` for every process.
    owner: Option<u32>,
}

/// Links of a file to one process. The file stays open as long: a child gets the same probes at
/// once, without a look at what it maps. (The links themselves hold the file as well.)
struct Attached {
    links: Links,
    /// `None` where the file could not be probed.
    source: Option<Arc<Source>>,
}

/// What a process maps, of that what concerns us.
struct Seen {
    mappings: Vec<Mapping>,
    ours: Vec<(Library, Mapping)>,
    /// UCX was not seen in it before.
    new_ucx: bool,
}

/// Why processes can't be followed.
#[derive(Debug, Error)]
pub enum FollowError {
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// All of them have to be spared.
    #[error("not probed: {0}")]
    Spared(Objection),
}

/// A file that was probed.
struct Source {
    file: File,
    library: Library,
    /// Path as the process saw it.
    shown: PathBuf,
}

/// How far the attaching is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The first look at what runs already.
    First,
    /// Process by process, as they come.
    Usual,
    /// No probe is put in any more.
    Closed,
}

/// What an [`Attacher`] is to probe.
#[derive(Clone, Debug)]
pub struct Breadth {
    /// Every process of the host, or the followed ones.
    pub host_wide: bool,
    /// What is probed.
    pub libraries: Vec<Library>,
    /// But not those.
    pub sparing: Sparing,
}

/// Attaches and detaches.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Attacher {
    kernel: Kernel,
    host: Host,
    /// Every process of the host, or the followed ones.
    host_wide: bool,
    /// What is probed.
    libraries: Vec<Library>,
    followed: HashSet<u32>,
    phase: Phase,
    files: HashMap<FileId, Known>,
    host_links: HashMap<FileId, HostLinks>,
    /// Our files that were mapped at the last look through all processes, while it goes on.
    mapped: HashSet<FileId>,
    process_links: HashMap<(u32, FileId), Attached>,
    guard: Guard,
    /// What is not probed, so that it is told once.
    spared: HashMap<(u32, FileId), Objection>,
    notices: Sender<Notice>,
    /// Told of the processes that use CUDA.
    examiner: Sender<ToExaminer>,
    /// Links to drop, on a thread of their own: the kernel waits for running programs at each.
    garbage: Sender<Links>,
}

impl Attacher {
    /// Takes over the loaded programs.
    pub fn new(
        kernel: Kernel,
        scope: Breadth,
        notices: Sender<Notice>,
        garbage: Sender<Links>,
        examiner: Sender<ToExaminer>,
    ) -> Self {
        Self {
            kernel,
            host: Host::live(),
            host_wide: scope.host_wide,
            libraries: scope.libraries,
            followed: HashSet::new(),
            phase: Phase::Usual,
            files: HashMap::new(),
            host_links: HashMap::new(),
            mapped: HashSet::new(),
            process_links: HashMap::new(),
            guard: Guard::new(scope.sparing),
            spared: HashMap::new(),
            notices,
            examiner,
            garbage,
        }
    }

    /// Follows a process and its future children, and probes what it maps.
    pub fn follow(&mut self, tgid: u32) -> Result<(), KernelError> {
        self.kernel.follow(tgid, FOLLOW_CHILDREN)?;
        self.followed.insert(tgid);
        self.tell(Notice::Following { tgid });
        self.look_at(tgid);
        Ok(())
    }

    /// Follows processes that run already. Fails where all of them have to be spared.
    pub fn follow_running(&mut self, tgids: &[u32]) -> Result<(), FollowError> {
        self.phase = Phase::First;
        let result = tgids.iter().try_for_each(|tgid| self.follow(*tgid));
        self.phase = Phase::Usual;
        result?;
        let spared = |tgid: &u32| self.spared.iter().find(|((owner, _), _)| owner == tgid);
        match tgids.iter().map(spared).collect::<Option<Vec<_>>>().as_deref() {
            Some([((_, _), objection), ..]) => Err(FollowError::Spared(**objection)),
            _ => Ok(()),
        }
    }

    /// Probes what is mapped on the host now, and what its processes are likely to map.
    pub fn begin_host_wide(&mut self) {
        // Before the first probe it must be known who objects.
        self.phase = Phase::First;
        for tgid in all_processes() {
            self.survey(tgid);
        }
        self.phase = Phase::Usual;
        for file in candidates::libcuda(None) {
            self.prepare(&file, None);
        }
        self.look_at_all();
    }

    /// A child of a followed process; the kernel half follows it already. It gets its parent's
    /// probes, of what that maps and of what is likely to be mapped, before its first call.
    pub fn adopt(&mut self, tgid: u32, parent: u32) {
        self.followed.insert(tgid);
        let sources = self.sources_of(parent);
        self.attach_sources(tgid, sources);
        self.look_at(tgid);
    }

    /// A followed process runs another program. Probes that wait for a file to be mapped stay,
    /// unless another thread than the main one called `execve`: they belong to the main thread's
    /// task, whose place that thread took.
    pub fn executed(&mut self, tgid: u32, by_leader: bool) {
        self.tell_examiner(ToExaminer::Executed(tgid));
        if !by_leader {
            let sources = self.sources_of(tgid);
            self.drop_links(tgid);
            self.attach_sources(tgid, sources);
        }
        self.look_at(tgid);
    }

    /// The process ended.
    pub fn forget(&mut self, tgid: u32) {
        self.followed.remove(&tgid);
        self.tell_examiner(ToExaminer::Ended(tgid));
        self.drop_links(tgid);
        self.guard.forget(tgid);
        self.spared.retain(|(owner, _), _| *owner != tgid);
    }

    fn sources_of(&self, tgid: u32) -> Vec<(FileId, Arc<Source>)> {
        let ours = self.process_links.iter().filter(|((owner, _), _)| *owner == tgid);
        ours.filter_map(|((_, id), attached)| Some((*id, Arc::clone(attached.source.as_ref()?))))
            .collect()
    }

    fn attach_sources(&mut self, tgid: u32, sources: Vec<(FileId, Arc<Source>)>) {
        for (id, source) in sources {
            let Source { file, library, shown } = &*source;
            let place = Place { id, library: *library, shown, owner: Some(tgid) };
            self.attach_file(&place, || file.try_clone().ok());
        }
    }

    fn drop_links(&mut self, tgid: u32) {
        let taken: Vec<_> = self.process_links.extract_if(|(owner, _), _| *owner == tgid).collect();
        for (_, attached) in taken {
            self.throw_away(attached.links);
        }
    }

    /// A process mapped a file executable.
    pub fn mapped(&mut self, tgid: u32, path: &Path) {
        let interesting = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| self.library(name).is_some() || guard::is_ucx(name.as_bytes()));
        if interesting && (self.host_wide || self.followed.contains(&tgid)) {
            self.look_at(tgid);
        } else {
            self.tell_examiner(ToExaminer::Mapped(tgid));
        }
    }

    /// Looks through every process that concerns us.
    pub fn look_at_all(&mut self) {
        if self.host_wide {
            let all = all_processes();
            self.forget_all_but(&all);
            self.mapped.clear();
            for tgid in all {
                self.look_at(tgid);
            }
            self.forget_files();
        } else {
            for tgid in self.followed.clone() {
                self.look_at(tgid);
            }
        }
    }

    /// Probes a library that nobody maps yet, before its first call can be missed.
    pub fn prepare(&mut self, path: &Path, tgid: Option<NonZeroU32>) {
        // As /proc/PID/maps will show it, links followed.
        let Ok(path) = path.canonicalize() else { return };
        let path = path.as_path();
        let Some(id) = candidates::file_id(path) else { return };
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(library) = self.library(name) else { return };
        let place = Place { id, library, shown: path, owner: tgid.map(NonZeroU32::get) };
        self.attach_file(&place, || open_regular(path, id));
        if tgid.is_none()
            && let Some(file) = self.host_links.get_mut(&id)
        {
            file.expected = true;
        }
    }

    fn library(&self, file_name: &str) -> Option<Library> {
        Library::of_file_name(file_name).filter(|library| self.libraries.contains(library))
    }

    fn look_at(&mut self, tgid: u32) {
        let at_ns = clock::boot_ns();
        let Some(Seen { mappings, ours, new_ucx }) = self.survey(tgid) else { return };
        if new_ucx {
            self.make_way(tgid);
        }
        if ours.is_empty() {
            return;
        }
        // First: its interpreter is found while the probes are put in.
        self.tell_examiner(ToExaminer::Uses { tgid, mappings, at_ns });
        for (library, mapping) in ours {
            self.mapped.insert((mapping.dev, mapping.inode));
            self.attach_mapping(tgid, (mapping.dev, mapping.inode), library, &mapping);
        }
    }

    /// Learns what the process maps.
    fn survey(&mut self, tgid: u32) -> Option<Seen> {
        let mappings = self.host.mappings(tgid)?;
        let mut seen = HashSet::new();
        let ours: Vec<(Library, Mapping)> = mappings
            .iter()
            .filter(|mapping| mapping.executable)
            .filter_map(|mapping| {
                let name = str::from_utf8(mapping.file_name()).unwrap_or_default();
                Some((self.library(name)?, mapping))
            })
            .filter(|(_, mapping)| seen.insert((mapping.dev, mapping.inode)))
            .map(|(library, mapping)| (library, mapping.clone()))
            .collect();
        let libraries: HashSet<Library> = ours.iter().map(|(library, _)| *library).collect();
        if self.phase == Phase::First && libraries.contains(&Library::Cuda) {
            self.tell(Notice::AlreadyMapped { tgid });
        }
        let new_ucx = self.guard.learn(&self.host, tgid, &mappings, libraries);
        Some(Seen { mappings, ours, new_ucx })
    }

    fn attach_mapping(&mut self, tgid: u32, id: FileId, library: Library, mapping: &Mapping) {
        let one_by_one = !self.host_wide || self.guard.is_apart(library);
        let owner = one_by_one.then_some(tgid);
        let place = Place { id, library, shown: &mapping.path, owner };
        let host = self.host.clone();
        self.attach_file(&place, || host.open_mapped(tgid, mapping));
        if owner.is_none() && self.guard.is_apart(library) {
            // Somebody objected meanwhile.
            self.attach_mapping(tgid, id, library, mapping);
        }
    }

    /// Attaches the library's rows, once a file and scope. The kernel is given the opened file, not
    /// a path: what a path names can change, and in a container somebody else chooses it.
    fn attach_file(&mut self, place: &Place<'_>, open: impl FnOnce() -> Option<File>) {
        let done = match place.owner {
            None => self.host_links.contains_key(&place.id) || self.guard.is_apart(place.library),
            Some(tgid) => self.process_links.contains_key(&(tgid, place.id)),
        };
        if done || self.phase == Phase::Closed {
            return;
        }
        let Some(file) = open() else {
            // A process that ended meanwhile is no failure.
            if place.owner.is_none_or(|tgid| self.host.mappings(tgid).is_some()) {
                self.failed(place, "the mapped file could not be opened".to_owned());
            }
            return self.keep(place, Links::default(), None);
        };
        let Some(sites) = self.sites(place, &file) else { return };
        if let Some((tgid, objection)) = self.objection(place, &file, &sites) {
            return self.give_in(place, tgid, objection);
        }
        if !self.follow_owner(place) {
            return;
        }
        match self.attach_sites(place, &file, &sites) {
            Ok(links) => self.attached(place, links, file, &sites),
            Err(error) => self.give_up(place, &error),
        }
    }

    fn attached(&mut self, place: &Place<'_>, links: Links, file: File, sites: &[Site]) {
        // Looked at once more: somebody may have patched it meanwhile.
        if let Some((tgid, objection)) = self.objection(place, &file, sites) {
            drop(links);
            return self.give_in(place, tgid, objection);
        }
        debug!(file = %place.shown.display(), owner = place.owner, "attached");
        if let Some(tgid) = place.owner {
            self.spared.remove(&(tgid, place.id));
        }
        self.tell(Notice::Attached {
            tgid: place.owner,
            path: place.shown.to_owned(),
            library: place.library,
            probes: sites.len(),
            available: sites.len(),
            at_ns: clock::boot_ns(),
        });
        self.keep(place, links, Some(file));
        self.look_at_children(place);
    }

    fn attach_sites(
        &mut self,
        place: &Place<'_>,
        file: &File,
        sites: &[Site],
    ) -> Result<Links, KernelError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let scope = place.owner.and_then(NonZeroU32::new).map_or(Scope::Host, Scope::Process);
        self.kernel.attach(&path, sites, scope)
    }

    fn give_up(&mut self, place: &Place<'_>, error: &KernelError) {
        // A process that ended meanwhile is no failure.
        let alive = place.owner.is_none_or(|tgid| self.host.mappings(tgid).is_some());
        self.keep(place, Links::default(), None);
        if alive {
            self.failed(place, chain(error));
        }
    }

    fn keep(&mut self, place: &Place<'_>, links: Links, file: Option<File>) {
        let Some(tgid) = place.owner else {
            self.host_links.insert(place.id, HostLinks::new(place.library, links));
            return;
        };
        let source = file.map(|file| {
            let (library, shown) = (place.library, place.shown.to_owned());
            Arc::new(Source { file, library, shown })
        });
        self.process_links.insert((tgid, place.id), Attached { links, source });
    }

    /// The probed functions of a file, looked up once.
    fn sites(&mut self, place: &Place<'_>, file: &File) -> Option<Vec<Site>> {
        if let Some(known) = self.known(place.id, file) {
            return known.sites.clone();
        }
        let found = file
            .try_clone()
            .map_err(|error| error.to_string())
            .and_then(|file| elf::sites(file, place.library).map_err(|error| chain(&error)));
        let sites = match found {
            Ok(sites) => Some(sites),
            Err(error) => {
                self.failed(place, error);
                None
            }
        };
        let known = Known { stamp: Stamp::of(file), sites: sites.clone() };
        self.files.insert(place.id, known);
        sites
    }

    fn failed(&self, place: &Place<'_>, error: String) {
        let (file, tgid) = (place.shown.display(), place.owner);
        warn!(%file, tgid, error, "not probed: its calls stay unseen");
        self.tell(Notice::Failed { tgid, path: place.shown.to_owned(), error });
    }

    fn tell_examiner(&self, told: ToExaminer) {
        // As for the notices.
        self.examiner.send(told).unwrap_or_default();
    }

    fn tell(&self, notice: Notice) {
        // The receiver is gone only when the recording ends.
        self.notices.send(notice).unwrap_or_default();
    }
}

/// An error with its causes, as `{:#}` of anyhow prints it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Process ids in `/proc`.
pub fn all_processes() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
