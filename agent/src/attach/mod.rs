//! Which files hold traced functions, which processes map them, and the probes in them.
//!
//! Probes belong to a file. `record` attaches once a file, for every process (`shared`); `run` and
//! `attach` put probes into the followed processes only, as they map the file. A process whose code
//! somebody else has patched is spared ([`guard`]).
//!
//! A file is known by (device, inode), and stays open as long as it is known (`files`). overlayfs
//! shows one file under other numbers in each of its mounts, so that whether a process is probed
//! already is not asked of the numbers but of the process's memory (`put`).

pub mod brake;
pub mod candidates;
pub mod elf;
pub mod examine;
mod files;
pub mod guard;
pub mod mmaps;
mod notice;
mod put;
mod shared;
mod spare;
pub mod worker;

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
    path::Path,
    sync::{Arc, mpsc::Sender},
};

use agent_common::{life::FOLLOW_CHILDREN, quota::Quota};
use thiserror::Error;
use tracing::warn;

use crate::{
    clock,
    host::{FileId, Host, maps::Mapping, open_regular},
    kernel::{Kernel, KernelError, Links},
    probes::Library,
};

use self::{
    examine::ToExaminer,
    files::{Files, Source},
    guard::{Guard, Objection, Sparing},
    shared::Shared,
};
pub use self::{notice::Notice, spare::TOO_LATE};

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

/// A file in one process.
struct Attached {
    /// None where the file can't be probed, or is probed through another.
    links: Links,
    /// A child gets the same probes at once, without a look at what it maps.
    source: Arc<Source>,
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
    /// Rows of the probe table that are left out, because somebody asked for that.
    pub left_out: Vec<u8>,
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
    left_out: Vec<u8>,
    followed: HashSet<u32>,
    phase: Phase,
    files: Files,
    /// What is probed for every process.
    shared: Shared,
    /// What is probed for one process.
    process_links: HashMap<(u32, FileId), Attached>,
    /// Mappings that were tried in vain, by where they begin, so that it is told once.
    hopeless: HashSet<(u32, FileId, u64)>,
    guard: Guard,
    /// What is not probed, so that it is told once.
    spared: HashMap<(u32, FileId), Objection>,
    brakes: brake::Brakes,
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
            left_out: scope.left_out,
            followed: HashSet::new(),
            phase: Phase::Usual,
            files: Files::default(),
            shared: Shared::default(),
            process_links: HashMap::new(),
            hopeless: HashSet::new(),
            guard: Guard::new(scope.sparing),
            spared: HashMap::new(),
            brakes: brake::Brakes::default(),
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
        self.shared.leave(tgid, &HashSet::new());
        self.hopeless.retain(|(owner, _, _)| *owner != tgid);
        if !by_leader {
            let sources = self.sources_of(tgid);
            self.drop_links(tgid);
            self.attach_sources(tgid, sources);
        }
        self.look_at(tgid);
        self.settle();
    }

    /// The process ended.
    pub fn forget(&mut self, tgid: u32) {
        self.followed.remove(&tgid);
        self.tell_examiner(ToExaminer::Ended(tgid));
        self.drop_links(tgid);
        self.guard.forget(tgid);
        self.brakes.forget(tgid);
        self.spared.retain(|(owner, _), _| *owner != tgid);
        self.hopeless.retain(|(owner, _, _)| *owner != tgid);
        self.shared.leave(tgid, &HashSet::new());
        self.settle();
    }

    /// Limits what one user may add to the ring of calls, or lifts the limits.
    fn set_quota(&mut self, quota: Quota) {
        if let Err(error) = self.kernel.set_quota(quota) {
            warn!(error = chain(&error), "one user may fill the ring of calls");
        }
    }

    /// What a process has probes of its own in.
    fn sources_of(&self, tgid: u32) -> Vec<(FileId, Arc<Source>)> {
        let ours = self.process_links.iter().filter(|((owner, _), _)| *owner == tgid);
        let probed = ours.filter(|(_, attached)| !attached.links.is_empty());
        probed.map(|((_, id), attached)| (*id, Arc::clone(&attached.source))).collect()
    }

    fn attach_sources(&mut self, tgid: u32, sources: Vec<(FileId, Arc<Source>)>) {
        for (id, source) in sources {
            self.attach_source(tgid, id, &source);
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
            for tgid in all_processes() {
                self.look_at(tgid);
            }
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
        let tgid = tgid.map(NonZeroU32::get);
        let place = Place { id, library, shown: path, owner: tgid };
        if self.phase == Phase::Closed || self.is_done(&place) {
            return;
        }
        let source = self.files.get(id).or_else(|| {
            let Some(file) = open_regular(path, id) else {
                self.failed(&place, "the file could not be opened".to_owned());
                return None;
            };
            Some(self.learn(&place, file))
        });
        match (tgid, source) {
            (Some(tgid), Some(source)) => self.attach_source(tgid, id, &source),
            (None, Some(source)) => self.attach_shared(id, &source, None),
            (_, None) => {}
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
        let mapped = ours.iter().map(|(_, mapping)| mapping.file_id()).collect();
        if self.shared.leave(tgid, &mapped) {
            self.settle();
        }
        if ours.is_empty() {
            return;
        }
        // First: its interpreter is found while the probes are put in.
        self.tell_examiner(ToExaminer::Uses { tgid, mappings, at_ns });
        for (library, mapping) in ours {
            self.attach_mapping(tgid, library, &mapping);
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
            .filter(|(_, mapping)| seen.insert(mapping.file_id()))
            .map(|(library, mapping)| (library, mapping.clone()))
            .collect();
        let libraries: HashSet<Library> = ours.iter().map(|(library, _)| *library).collect();
        if self.phase == Phase::First && libraries.contains(&Library::Cuda) {
            self.tell(Notice::AlreadyMapped { tgid });
        }
        let new_ucx = self.guard.learn(&self.host, tgid, &mappings, libraries);
        Some(Seen { mappings, ours, new_ucx })
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
