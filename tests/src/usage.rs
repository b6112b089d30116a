//! What a running agent takes: descriptors, threads, memory, entries of its eBPF maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
};

use anyhow::{Context as _, Result};

const BPF_MAP_GET_NEXT_KEY: i64 = 4;
const BPF_MAP_GET_FD_BY_ID: i64 = 14;
const BPF_OBJ_GET_INFO_BY_FD: i64 = 15;
const BPF_MAP_TYPE_HASH: u32 = 1;

/// What a process takes at a moment.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Anonymous memory, KiB (`RssAnon`).
    pub memory_kib: usize,
    /// Entries of each of its hash maps. Those that throw the oldest entry out are left out: they are
    /// as full as they ever were.
    pub entries: BTreeMap<String, usize>,
}

impl Usage {
    /// Of a process now.
    pub fn of(pid: u32) -> Result<Self> {
        let status =
            fs::read_to_string(format!("/proc/{pid}/status")).context("read its status")?;
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let value = line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok());
            value.with_context(|| format!("{key} is not in its status"))
        };
        let list = fs::read_dir(format!("/proc/{pid}/fd")).context("list its descriptors")?;
        Ok(Self {
            descriptors: list.count(),
            threads: number("Threads:")?,
            memory_kib: number("RssAnon:")?,
            entries: entries(pid)?,
        })
    }
}

/// The maps that a process has descriptors of.
fn map_ids(pid: u32) -> Result<BTreeSet<u32>> {
    let list = fs::read_dir(format!("/proc/{pid}/fdinfo")).context("list its descriptors")?;
    let texts = list.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let id = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("map_id:"))?;
        line.trim().parse().ok()
    };
    Ok(texts.filter_map(id).collect())
}

fn entries(pid: u32) -> Result<BTreeMap<String, usize>> {
    let mut entries = BTreeMap::new();
    for id in map_ids(pid)? {
        // One may be gone by now.
        let Ok(map) = open_map(id) else { continue };
        let info = map_info(&map).with_context(|| format!("ask for the map {id}"))?;
        if info.kind == BPF_MAP_TYPE_HASH {
            let name = info.name.split(|byte| *byte == 0).next().unwrap_or_default();
            let name = String::from_utf8_lossy(name).into_owned();
            entries.insert(name, count(&map, info.key_size as usize));
        }
    }
    Ok(entries)
}

/// The start of `struct bpf_map_info`.
#[repr(C)]
#[derive(Default)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    name: [u8; 16],
}

/// Calls `bpf(2)` with a `bpf_attr`.
fn bpf(command: i64, attr: &mut [u64; 4]) -> io::Result<RawFd> {
    let attr = attr.as_mut_ptr();
    // SAFETY: the kernel reads 32 bytes of `attr`, which are there, and follows the pointers in it to
    // what the caller keeps alive and gave the sizes of.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr, size_of::<[u64; 4]>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

fn open_map(id: u32) -> io::Result<OwnedFd> {
    let fd = bpf(BPF_MAP_GET_FD_BY_ID, &mut [u64::from(id), 0, 0, 0])?;
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn map_info(map: &OwnedFd) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    let (fd, size) = (map.as_raw_fd() as u64, size_of::<MapInfo>() as u64);
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut [fd | size << 32, (&raw mut info) as u64, 0, 0])?;
    Ok(info)
}

/// Entries of a map. It may change meanwhile, and be begun anew where the entry that the walk stands
/// on goes: no more steps than that are taken.
fn count(map: &OwnedFd, key_size: usize) -> usize {
    let mut keys = BTreeSet::new();
    let mut key: Vec<u8> = Vec::new();
    for _ in 0..1 << 17 {
        let mut next = vec![0_u8; key_size];
        let from = if key.is_empty() { 0 } else { key.as_ptr() as u64 };
        let attr = &mut [map.as_raw_fd() as u64, from, next.as_mut_ptr() as u64, 0];
        if bpf(BPF_MAP_GET_NEXT_KEY, attr).is_err() {
            break;
        }
        keys.insert(next.clone());
        key = next;
    }
    keys.len()
}
