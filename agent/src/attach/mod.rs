//! Which files hold traced functions, which processes map them, and the probes in them.
//!
//! Probes belong to a file by (device, inode). `record` attaches once a file, for every process;
//! `run` and `attach` put probes into the followed processes only, as they map the file.

pub mod candidates;
pub mod elf;
pub mod mmaps;
pub mod worker;

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::mpsc::Sender,
};

use tracing::{debug, warn};

use crate::{
    clock,
    host::{Host, maps::Mapping},
    kernel::{FOLLOW_CHILDREN, Kernel, KernelError, Links, Scope},
    probes::Library,
};

/// A file, as the kernel tells files apart.
pub type FileId = ((u32, u32), u64);

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
    /// Mapping events were dropped by the kernel, and everything was looked through again.
    MappingsLost(u64),
}

/// What a file has that we probe.
#[derive(Clone, Debug)]
struct Probed {
    library: Library,
    sites: Vec<elf::Site>,
}

/// Attaches and detaches.
#[derive(Debug)]
pub struct Attacher {
    kernel: Kernel,
    host: Host,
    /// Every process of the host, or the followed ones.
    host_wide: bool,
    /// `libc10` is probed too.
    tensors: bool,
    followed: HashSet<u32>,
    /// The first look at what runs already.
    first_look: bool,
    files: HashMap<FileId, Option<Probed>>,
    host_links: HashMap<FileId, Links>,
    process_links: HashMap<(u32, FileId), Links>,
    notices: Sender<Notice>,
    /// Links to drop, on a thread of their own: the kernel waits for running programs at each.
    garbage: Sender<Links>,
}

impl Attacher {
    /// Takes over the loaded programs.
    pub fn new(
        kernel: Kernel,
        host_wide: bool,
        tensors: bool,
        notices: Sender<Notice>,
        garbage: Sender<Links>,
    ) -> Self {
        Self {
            kernel,
            host: Host::live(),
            host_wide,
            tensors,
            followed: HashSet::new(),
            first_look: false,
            files: HashMap::new(),
            host_links: HashMap::new(),
            process_links: HashMap::new(),
            notices,
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

    /// Follows processes that run already.
    pub fn follow_running(&mut self, tgids: &[u32]) -> Result<(), KernelError> {
        self.first_look = true;
        let result = tgids.iter().try_for_each(|tgid| self.follow(*tgid));
        self.first_look = false;
        result
    }

    /// Probes what is mapped on the host now, and what its processes are likely to map.
    pub fn begin_host_wide(&mut self) {
        for file in candidates::libcuda(None) {
            self.prepare(&file, None);
        }
        self.first_look = true;
        self.look_at_all();
        self.first_look = false;
    }

    /// A child of a followed process; the kernel half follows it already.
    pub fn adopt(&mut self, tgid: u32) {
        self.followed.insert(tgid);
        self.look_at(tgid);
    }

    /// The process ended.
    pub fn forget(&mut self, tgid: u32) {
        self.followed.remove(&tgid);
        let ended: Vec<_> =
            self.process_links.keys().filter(|(owner, _)| *owner == tgid).copied().collect();
        for key in ended {
            if let Some(links) = self.process_links.remove(&key) {
                // The receiver lives as long as the recording; after it, dropping here is as good.
                self.garbage.send(links).unwrap_or_default();
            }
        }
    }

    /// A process mapped a file executable.
    pub fn mapped(&mut self, tgid: u32, path: &Path) {
        let interesting = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| self.library(name).is_some());
        if interesting && (self.host_wide || self.followed.contains(&tgid)) {
            self.look_at(tgid);
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
        let Some(id) = candidates::file_id(path) else { return };
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(library) = self.library(name) else { return };
        self.attach_file(id, library, path, path, tgid.map(NonZeroU32::get));
    }

    fn library(&self, file_name: &str) -> Option<Library> {
        Library::of_file_name(file_name)
            .filter(|library| self.tensors || *library != Library::C10)
    }

    fn look_at(&mut self, tgid: u32) {
        let Some(mappings) = self.host.mappings(tgid) else { return };
        let mut seen = HashSet::new();
        for mapping in mappings.iter().filter(|mapping| mapping.executable) {
            let id = (mapping.dev, mapping.inode);
            let name = str::from_utf8(mapping.file_name()).unwrap_or_default();
            if let Some(library) = self.library(name)
                && seen.insert(id)
            {
                if self.first_look && library == Library::Cuda {
                    self.tell(Notice::AlreadyMapped { tgid });
                }
                self.attach_mapping(tgid, id, library, mapping);
            }
        }
    }

    fn attach_mapping(&mut self, tgid: u32, id: FileId, library: Library, mapping: &Mapping) {
        let owner = (!self.host_wide).then_some(tgid);
        let file = self.host.map_file(tgid, mapping);
        self.attach_file(id, library, &file, &mapping.path, owner);
    }

    /// Attaches the library's rows, once a file and scope.
    fn attach_file(
        &mut self,
        id: FileId,
        library: Library,
        file: &Path,
        shown: &Path,
        owner: Option<u32>,
    ) {
        let done = match owner {
            None => self.host_links.contains_key(&id),
            Some(tgid) => self.process_links.contains_key(&(tgid, id)),
        };
        if done {
            return;
        }
        let Some(probed) = self.probed(id, library, file, shown, owner) else { return };
        let scope = match owner.and_then(NonZeroU32::new) {
            None => Scope::Host,
            Some(pid) => Scope::Process(pid),
        };
        let mut links = Links::default();
        let mut probes = 0;
        for site in &probed.sites {
            match self.kernel.attach(file, site.row, site.offset, scope, &mut links) {
                Ok(()) => probes += 1,
                Err(error) => return self.give_up(id, shown, owner, links, &error),
            }
        }
        debug!(file = %shown.display(), ?owner, probes, "attached");
        let notice = Notice::Attached {
            tgid: owner,
            path: shown.to_owned(),
            library: probed.library,
            probes,
            available: probed.sites.len(),
            at_ns: clock::boot_ns(),
        };
        self.keep(id, owner, links);
        self.tell(notice);
    }

    /// All of a file's rows or none: half a table would make an account that cannot add up.
    fn give_up(
        &mut self,
        id: FileId,
        shown: &Path,
        owner: Option<u32>,
        links: Links,
        error: &KernelError,
    ) {
        // A process that ended meanwhile is no failure.
        let alive = owner.is_none_or(|tgid| self.host.mappings(tgid).is_some());
        self.garbage.send(links).unwrap_or_default();
        self.keep(id, owner, Links::default());
        if alive {
            self.failed(shown, owner, error);
        }
    }

    fn keep(&mut self, id: FileId, owner: Option<u32>, links: Links) {
        match owner {
            None => self.host_links.insert(id, links),
            Some(tgid) => self.process_links.insert((tgid, id), links),
        };
    }

    fn probed(
        &mut self,
        id: FileId,
        library: Library,
        file: &Path,
        shown: &Path,
        owner: Option<u32>,
    ) -> Option<Probed> {
        if let Some(known) = self.files.get(&id) {
            return known.clone();
        }
        let probed = match elf::sites(file, library) {
            Ok(sites) => Some(Probed { library, sites }),
            Err(error) => {
                self.failed(shown, owner, &error);
                None
            }
        };
        self.files.insert(id, probed.clone());
        probed
    }

    fn failed(&self, path: &Path, tgid: Option<u32>, error: &dyn std::error::Error) {
        let error = chain(error);
        warn!(file = %path.display(), ?tgid, %error, "not probed: its calls stay unseen");
        self.tell(Notice::Failed { tgid, path: path.to_owned(), error });
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
