//! Where probes are: the beginnings of the driver's functions, in the file and in a process.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
};

use agent::{attach::elf, kernel::Site, probes::Library};
use anyhow::{Context, Result};

use agent_tests::sim::SimDevice;

type Entry = [u8; 16];

/// Bytes of each probed function: in the file and in the process.
fn entries(device: &SimDevice, pid: u32) -> Result<Vec<(Entry, Entry)>> {
    let library = device.lib_dir().join("libcuda.so.1");
    let file = File::open(&library).context("open the driver library")?;
    let memory = File::open(format!("/proc/{pid}/mem")).context("open the process's memory")?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).context("read its maps")?;
    // start-end perms offset dev inode path
    let line = maps.lines().find(|line| line.contains("r-xp") && line.contains("libcuda.so.1"));
    let words: Vec<&str> =
        line.context("it does not map the library")?.split_whitespace().collect();
    let start = words[0].split('-').next().unwrap_or_default();
    let start = u64::from_str_radix(start, 16).context("a mapping's start")?;
    let offset = u64::from_str_radix(words[2], 16).context("a mapping's offset")?;
    let sites = elf::sites(file.try_clone().context("copy a descriptor")?, Library::Cuda)?;
    let read = |file: &File, at: u64| -> Result<Entry> {
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, at).context("read a function's beginning")?;
        Ok(bytes)
    };
    let entry =
        |site: &Site| Ok((read(&file, site.offset)?, read(&memory, start + site.offset - offset)?));
    sites.iter().map(entry).collect()
}

/// How many functions do not begin in the process as they do in the file.
pub(crate) fn patched(device: &SimDevice, pid: u32) -> Result<usize> {
    Ok(entries(device, pid)?.iter().filter(|(file, memory)| file != memory).count())
}
