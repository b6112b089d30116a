//! Whether a function still begins in a process's memory as it does in the file.
//!
//! The kernel does not look: it puts its breakpoint over whatever is there, and runs the *file's*
//! first instruction in its place. Over the jump that another tool has written there, the process
//! then goes on in the middle of that jump (UCX's hooks: a segmentation fault).

use std::{fs::File, io, os::unix::fs::FileExt as _};

use crate::{
    host::{FileId, Host, Mapping},
    kernel::Site,
};

/// Bytes that are compared: more than the longest patch known (13, UCX's).
const ENTRY: usize = 16;
/// A breakpoint of x86: ours, another agent's, a debugger's. It replaces a byte and keeps the rest.
#[cfg(target_arch = "x86_64")]
const BREAKPOINT: &[u8] = &[0xcc];
/// `brk` of uprobes on arm64 (`BRK64_OPCODE_UPROBES`).
#[cfg(not(target_arch = "x86_64"))]
const BREAKPOINT: &[u8] = &[0xa0, 0x00, 0x20, 0xd4];

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entries {
    /// Every function that is mapped begins as in the file.
    Same,
    /// The function at this offset of the file does not.
    Differ(u64),
    /// The process could not be asked.
    Unreadable,
}

/// Compares the beginnings of the functions in each of the process's executable mappings of the
/// file.
pub(super) fn compare(
    host: &Host,
    tgid: u32,
    mappings: &[Mapping],
    id: FileId,
    file: &File,
    sites: &[Site],
) -> Entries {
    let ours = |mapping: &&Mapping| mapping.executable && (mapping.dev, mapping.inode) == id;
    let mut ours = mappings.iter().filter(ours).peekable();
    if ours.peek().is_none() {
        return Entries::Same;
    }
    let Ok(memory) = File::open(host.process_path(tgid, "mem")) else {
        return Entries::Unreadable;
    };
    for mapping in ours {
        for site in sites {
            let Some(address) = address_of(mapping, site.offset) else { continue };
            match (entry(file, site.offset), entry(&memory, address)) {
                (Ok(file), Ok(memory)) if same(&file, &memory) => {}
                // Of a program that was replaced since nothing can be read any more.
                (Ok(_), Ok(memory)) if !memory.is_empty() => return Entries::Differ(site.offset),
                _ => return Entries::Unreadable,
            }
        }
    }
    Entries::Same
}

/// Whether breakpoints are in a process, where a file's functions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::attach) enum Probes {
    /// In every function that is mapped.
    There,
    /// Not in all.
    Missing,
    /// No function is mapped, or the process could not be asked.
    Unknown,
}

/// Looks for breakpoints at the beginnings of the functions in the process's executable mappings of
/// the file.
pub(super) fn probes(
    host: &Host,
    tgid: u32,
    mappings: &[Mapping],
    id: FileId,
    file: &File,
    sites: &[Site],
) -> Probes {
    let Ok(memory) = File::open(host.process_path(tgid, "mem")) else { return Probes::Unknown };
    let mut found = Probes::Unknown;
    for mapping in mappings.iter().filter(|map| map.executable && map.file_id() == id) {
        for site in sites {
            let Some(address) = address_of(mapping, site.offset) else { continue };
            let (Ok(own), Ok(now)) = (entry(file, site.offset), entry(&memory, address)) else {
                return Probes::Unknown;
            };
            if own.starts_with(BREAKPOINT) {
                continue;
            }
            if !now.starts_with(BREAKPOINT) {
                return Probes::Missing;
            }
            found = Probes::There;
        }
    }
    found
}

/// Where the mapping has this offset of the file.
fn address_of(mapping: &Mapping, offset: u64) -> Option<u64> {
    let address = mapping.start.checked_add(offset.checked_sub(mapping.offset)?)?;
    (address < mapping.end).then_some(address)
}

/// The bytes there; fewer where the file ends.
fn entry(file: &File, at: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; ENTRY];
    let length = file.read_at(&mut bytes, at)?;
    bytes.truncate(length);
    Ok(bytes)
}

fn same(file: &[u8], memory: &[u8]) -> bool {
    let mut at = 0;
    while at < file.len().min(memory.len()) {
        if file[at] == memory[at] {
            at += 1;
        } else if memory[at..].starts_with(BREAKPOINT) {
            at += BREAKPOINT.len();
        } else {
            return false;
        }
    }
    !file.is_empty() && !memory.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breakpoints_are_no_difference_and_jumps_are() {
        let file = [0x55, 0x48, 0x89, 0xe5, 0x41, 0x54, 0x53, 0x48];
        let with = |at: usize, bytes: &[u8]| {
            let mut memory = file;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
            memory
        };
        assert!(same(&file, &file));
        assert!(same(&file, &with(0, BREAKPOINT)));
        // The next function may begin within these bytes.
        assert!(same(&file, &with(4, BREAKPOINT)));
        let jump = with(0, &[0x48, 0xb8, 0x60, 0x49]);
        assert!(!same(&file, &jump));
        // A breakpoint over a jump hides one byte of it.
        let mut hidden = jump;
        hidden[..BREAKPOINT.len()].copy_from_slice(BREAKPOINT);
        assert_eq!(same(&file, &hidden), BREAKPOINT.len() >= 4);
        assert!(!same(&file, &with(0, &[0xe9])));
        assert!(!same(&file, &[]));
    }

    #[test]
    fn the_end_of_a_file_is_compared_as_far_as_it_goes() {
        assert!(same(&[0x55, 0x48], &[0x55, 0x48, 0, 0]));
        assert!(!same(&[0x55, 0x48], &[0x55, 0x49, 0, 0]));
    }

    #[test]
    fn addresses_lie_inside_the_mapping() {
        let mapping =
            Mapping::parse(b"7f00000-7f01000 r-xp 00002000 08:01 9 /x/libcuda.so.1").unwrap();
        assert_eq!(address_of(&mapping, 0x2010), Some(0x7f0_0010));
        assert_eq!(address_of(&mapping, 0x3000), None);
        assert_eq!(address_of(&mapping, 0x1fff), None);
    }

    #[test]
    fn this_process_is_as_its_file() {
        let (host, pid) = (Host::live(), std::process::id());
        let file = File::open("/proc/self/exe").unwrap();
        let mappings = host.mappings(pid).unwrap();
        let exe = std::env::current_exe().unwrap();
        let own = mappings.iter().find(|map| map.executable && map.path == exe).unwrap();
        let id = (own.dev, own.inode);
        let site = Site { row: 0, offset: own.offset };
        assert_eq!(compare(&host, pid, &mappings, id, &file, &[site]), Entries::Same);
        let other = File::open("/bin/sh").unwrap();
        let differ = compare(&host, pid, &mappings, id, &other, &[site]);
        assert_eq!(differ, Entries::Differ(own.offset));
        let gone = Host::at("/nonexistent");
        assert_eq!(compare(&gone, pid, &mappings, id, &file, &[site]), Entries::Unreadable);
        assert_eq!(probes(&host, pid, &mappings, id, &file, &[site]), Probes::Missing);
        assert_eq!(probes(&host, pid, &mappings, id, &file, &[]), Probes::Unknown);
        assert_eq!(probes(&gone, pid, &mappings, id, &file, &[site]), Probes::Unknown);
    }
}
