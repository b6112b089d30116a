//! Sealing what a dead agent left in its journal.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{
    compact::swap::{leftovers, repair},
    dir::{Area, LogDir},
    error::{LogError, Result, chain},
    manifest::Manifest,
    name::{self, ARROWS, FileName, Run8, TMP},
    reader::scan_sealed,
    writer::table::reseal,
};

/// What [`recover`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Files that were sealed, relative to the log.
    pub sealed: Vec<PathBuf>,
    /// Directories in which an interrupted compaction was finished or taken back.
    pub repaired: Vec<PathBuf>,
    /// Files that were left as they are, and why.
    pub skipped: Vec<(PathBuf, String)>,
}

/// Seals the journals of runs that have ended and removes their unfinished files. Reading a log
/// does not need this; other readers see what was in the journals only after it.
///
/// Runs of other hosts are touched only with `other_hosts`: whether an agent on another host is
/// still alive cannot always be seen over a network file system.
///
/// # Errors
///
/// The directory cannot be written.
pub fn recover(path: &Path, other_hosts: bool) -> Result<Recovered> {
    let dir = LogDir::open_for_owner(path)?;
    let mut recovered = Recovered::default();
    // A compaction that is going on has the lock, and puts itself right.
    if !leftovers(&dir)?.is_empty()
        && let Some(_lock) = dir.lock_compaction()?
    {
        recovered.repaired = repair(&dir)?;
        dir.remove(Area::Staging, name::COMPACTION_LOCK)?;
    }
    for (run, journals) in journals(&dir, &mut recovered)? {
        match why_not(&dir, run, other_hosts) {
            Some(reason) => {
                let skipped = journals.into_iter().map(|(_, path)| (path, reason.to_owned()));
                recovered.skipped.extend(skipped);
            }
            None => recover_run(&dir, run, journals, &mut recovered)?,
        }
    }
    Ok(recovered)
}

type Journals = BTreeMap<Run8, Vec<(FileName, PathBuf)>>;

fn journals(dir: &LogDir, recovered: &mut Recovered) -> Result<Journals> {
    let mut runs = Journals::new();
    for file_name in dir.list(Area::Journal)? {
        let path = Path::new(Area::Journal.as_str()).join(&file_name);
        if let Some(name) = FileName::parse(&file_name, ARROWS) {
            runs.entry(name.run).or_default().push((name, path));
        } else if let Some(run) = lock_of(&file_name) {
            runs.entry(run).or_default();
        } else if file_name != "." && file_name != ".." {
            recovered.skipped.push((path, "not a journal of vramscope".to_owned()));
        }
    }
    Ok(runs)
}

fn lock_of(file_name: &str) -> Option<Run8> {
    Run8::of(file_name.strip_prefix("run-")?.strip_suffix(".lock")?)
}

fn read_manifest(dir: &LogDir, run: Run8) -> Option<Manifest> {
    Manifest::read(&dir.path.join(name::manifest(run))).ok()
}

/// Why a run is not to be touched, if it is not.
pub(super) fn why_not(dir: &LogDir, run: Run8, other_hosts: bool) -> Option<&'static str> {
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let host = read_manifest(dir, run).map(|manifest| manifest.host);
    if host.is_some_and(|host| host != here) && !other_hosts {
        return Some("its run is of another host; give --other-hosts if that host's agent is gone");
    }
    (!dir.is_dead(run)).then_some("its run is still going on")
}

fn recover_run(
    dir: &LogDir,
    run: Run8,
    journals: Vec<(FileName, PathBuf)>,
    recovered: &mut Recovered,
) -> Result<()> {
    let lock = dir.lock(run)?;
    let mut manifest = read_manifest(dir, run).unwrap_or_else(|| Manifest::unknown(run));
    let sealed: Vec<FileName> = scan_sealed(&dir.path).into_iter().map(|file| file.name).collect();
    let skipped_before = recovered.skipped.len();
    for (name, path) in journals {
        // The agent died between moving the sealed file to its place and removing the journal.
        if sealed.contains(&name) {
            dir.remove(Area::Journal, &name.with(ARROWS))?;
            continue;
        }
        let result = modified_ns(dir, name).and_then(|ns| reseal(dir, &manifest, name, ns));
        match result {
            Ok(sealed) => recovered.sealed.push(sealed.relative),
            Err(e) => recovered.skipped.push((path, chain(&e))),
        }
    }
    remove_unfinished(dir, run)?;
    if recovered.skipped.len() == skipped_before {
        manifest.sealed = true;
        manifest.write(dir)?;
        dir.remove(Area::Journal, &name::lock(run))?;
    }
    drop(lock);
    Ok(())
}

/// When a journal was written last: the best guess at the day its rows belong to.
fn modified_ns(dir: &LogDir, name: FileName) -> Result<i64> {
    let file_name = name.with(ARROWS);
    let meta = dir.open_file(Area::Journal, &file_name)?.metadata();
    let path = dir.path_in(Area::Journal, &file_name);
    let meta = meta.map_err(|e| LogError::io("look at", &path, e))?;
    Ok(meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec()))
}

fn remove_unfinished(dir: &LogDir, run: Run8) -> Result<()> {
    for file_name in dir.list(Area::Staging)? {
        if FileName::parse(&file_name, TMP).is_some_and(|name| name.run == run) {
            dir.remove(Area::Staging, &file_name)?;
        }
    }
    Ok(())
}
