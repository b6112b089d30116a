//! Facts that the kernel tells through `/proc` and `/sys`: who a process is, what it has mapped,
//! what it and its container use.
//!
//! Takes a root directory (`/`, or a made-up tree in tests), gives rows of the log. Whatever cannot
//! be read, has vanished or makes no sense is `None`: a process may end between any two reads, and
//! every name, argument and variable here is chosen by somebody else. Text is bounded, converted
//! lossily and has its control characters escaped (see [`text`]).

mod cgroup;
mod command;
mod container;
mod env;
mod identity;
mod libs;
pub mod maps;
mod open;
mod ordinals;
mod segments;
mod stat;
mod system;
pub mod text;

use std::path::{Path, PathBuf};

pub(crate) use self::system::Space;
pub use self::{
    cgroup::{Cgroup, parse as parse_cgroup},
    env::{ALLOWED as ALLOWED_ENV, Env},
    identity::{CommandDetail, Identity},
    libs::{LibKind, Library},
    maps::Mapping,
    open::{BoundedElf, ElfSource, FileId, is_at_home, is_named, open_regular, stat_id},
    ordinals::ordinal_map,
    segments::Segments,
    stat::{ProcessUsage, Stat},
};

use crate::clock::Anchor;

/// Longest text file of `/proc` or `/sys` that is read whole; `/proc/stat` of a host with
/// thousands of interrupt lines is the longest ordinary one.
const TEXT_LIMIT: u64 = 1 << 20;

/// Clock ticks a second in `/proc`: `USER_HZ`, 100 on every architecture that Linux runs CUDA on.
const TICK_NS: u64 = 10_000_000;

/// Reads the facts of one host from below a root directory.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
    boot_id: String,
    name: String,
    /// When the host booted, nanoseconds since the epoch.
    boot_ns: Option<i64>,
}

impl Host {
    /// This host.
    pub fn live() -> Self {
        let mut host = Self::at("/");
        // `btime` is cut to whole seconds, which would show processes as started before the command
        // that started them.
        host.boot_ns = Some(Anchor::of_process().offset_ns());
        host
    }

    /// A host whose `/proc`, `/sys`, `/dev` and `/etc` lie below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        let mut host =
            Self { root: root.into(), boot_id: String::new(), name: String::new(), boot_ns: None };
        let kernel = |name: &str| {
            host.read(Path::new("proc/sys/kernel").join(name))
                .map(|bytes| text::clean(bytes.trim_ascii(), 256))
                .unwrap_or_default()
        };
        let (boot_id, name) = (kernel("random/boot_id"), kernel("hostname"));
        host.boot_id = boot_id;
        host.name = name;
        host.boot_ns = host.boot_ns_by_stat();
        host
    }

    /// The kernel's random id of this boot.
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Name of the host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path below the root, `proc/version` for example.
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join(relative)
    }

    /// A path below the root's `proc/PID`.
    pub fn process_path(&self, pid: u32, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join("proc").join(pid.to_string()).join(relative)
    }

    /// The process ids in `/proc`, in the kernel's order.
    pub fn pids(&self) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(self.path("proc")) else { return Vec::new() };
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
    }

    /// The children of a process, whichever of its threads made them; none where the kernel does not
    /// list them (`CONFIG_PROC_CHILDREN`).
    pub fn children(&self, pid: u32) -> Vec<u32> {
        let Ok(threads) = std::fs::read_dir(self.process_path(pid, "task")) else {
            return Vec::new();
        };
        let lists = threads
            .flatten()
            .filter_map(|thread| text::read_bounded(&thread.path().join("children"), TEXT_LIMIT));
        let ids = |list: Vec<u8>| -> Vec<u32> {
            let list = String::from_utf8_lossy(&list);
            list.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect()
        };
        lists.flat_map(ids).collect()
    }

    /// Reads a text file below the root, at most [`TEXT_LIMIT`] bytes of it.
    fn read(&self, relative: impl AsRef<Path>) -> Option<Vec<u8>> {
        text::read_bounded(&self.path(relative), TEXT_LIMIT)
    }

    /// Reads a file below `/proc/PID`, at most `limit` bytes of it.
    fn read_process(&self, pid: u32, relative: &str, limit: u64) -> Option<Vec<u8>> {
        text::read_bounded(&self.process_path(pid, relative), limit)
    }

    /// Boot time in whole seconds, as `/proc/stat` gives it.
    fn boot_ns_by_stat(&self) -> Option<i64> {
        let stat = self.read("proc/stat")?;
        let seconds: i64 = text::field(&stat, "btime")?.parse().ok()?;
        seconds.checked_mul(1_000_000_000)
    }
}

/// Parses bytes as each text of `/proc/PID`, for the fuzz targets; how much came of it.
pub(crate) fn parse_as_every_text(content: &[u8]) -> usize {
    let lines = || content.split(|byte| *byte == b'\n');
    let mappings = lines().filter_map(Mapping::parse).collect::<Vec<_>>();
    let libraries = Library::among(&mappings).len();
    let mounts = lines().filter(|line| container::is_shm(line)).count();
    let cgroup = parse_cgroup(content);
    let environment = Env::parse(content);
    let ordinals = ordinal_map(&environment, &[]).len();
    let texts = [
        stat::parse(content).map(|stat| stat.comm),
        command::whole(content),
        command::redacted(content, None),
        cgroup.container_id,
        cgroup.v2_path,
    ];
    let characters: usize = texts.iter().flatten().map(String::len).sum();
    libraries + mounts + ordinals + cgroup.v1_paths.len() + characters
}

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests {
    use super::testing::Tree;

    #[test]
    fn children_of_all_threads() {
        let tree = Tree::new();
        tree.write("proc/7/task/7/children", "8 9 ");
        tree.write("proc/7/task/12/children", "13\n");
        tree.write("proc/7/task/14/children", "");
        let mut children = tree.host().children(7);
        children.sort_unstable();
        assert_eq!(children, [8, 9, 13]);
        assert!(tree.host().children(8).is_empty());
    }
}
