//! `--max-disk`: which files may go, and in which order.

use std::{cmp::Reverse, collections::BTreeMap};

use super::table::Sealed;
use crate::{
    log::{Row, TABLES, dir::LogDir, manifest::Manifest, name::Run8, reader::scan_sealed},
    rows::{
        BreakdownRow, DeviceSampleRow, EventRow, HostSampleRow, LiveRow, ProcessSampleRow,
        SiteUsageRow,
    },
};

/// Tables whose oldest files may go. Who is who, what was allocated where, and what was lost are
/// small and stay; checkpoints go once newer ones do their work.
const EXPENDABLE: [usize; 7] = [
    EventRow::INDEX,
    SiteUsageRow::INDEX,
    BreakdownRow::INDEX,
    DeviceSampleRow::INDEX,
    ProcessSampleRow::INDEX,
    HostSampleRow::INDEX,
    LiveRow::INDEX,
];

/// What was deleted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Deleted {
    pub(super) bytes: u64,
    pub(super) text: String,
}

/// What keeping the limit came to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Enforced {
    pub(super) deleted: Option<Deleted>,
    /// The limit cannot be kept: what to tell.
    pub(super) too_small: Option<String>,
}

/// The sealed files of this run, and of earlier runs of this host that have ended.
#[derive(Debug)]
pub(super) struct Retention {
    limit: Option<u64>,
    files: Vec<Sealed>,
    bytes: u64,
    /// Said once that nothing is left to delete.
    said_full: bool,
}

impl Retention {
    /// Takes stock of the directory.
    pub(super) fn new(dir: &LogDir, manifest: &Manifest, limit: Option<u64>) -> Self {
        let mut retention = Self { limit, files: Vec::new(), bytes: 0, said_full: false };
        if limit.is_some() {
            for sealed in earlier_files(dir, manifest) {
                retention.add(sealed);
            }
        }
        retention
    }

    pub(super) fn add(&mut self, sealed: Sealed) {
        self.bytes += sealed.bytes;
        // Only what may be deleted needs to be remembered, and only under a limit.
        if self.limit.is_some() && EXPENDABLE.contains(&sealed.name.table) {
            self.files.push(sealed);
        }
    }

    /// Bytes of the sealed files.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Deletes the oldest files while there are more bytes than allowed.
    pub(super) fn enforce(&mut self, dir: &LogDir, open_bytes: u64) -> Enforced {
        let mut enforced = Enforced::default();
        let Some(limit) = self.limit.filter(|limit| self.bytes + open_bytes > *limit) else {
            return enforced;
        };
        // Oldest last, to be taken from the end.
        self.files.sort_by_key(|file| Reverse((file.since_ns, file.name.seq)));
        let mut gone: BTreeMap<&'static str, (u64, u64)> = BTreeMap::new();
        while self.bytes + open_bytes > limit {
            let Some(index) = self.files.iter().rposition(|file| self.may_go(file)) else {
                enforced.too_small = self.too_small(limit, open_bytes);
                break;
            };
            let sealed = self.files.remove(index);
            self.bytes = self.bytes.saturating_sub(sealed.bytes);
            let bytes = match dir.remove_sealed(&sealed.relative) {
                Ok(Some(bytes)) => bytes,
                // Somebody else deleted it, or merged it into another.
                Ok(None) => continue,
                Err(e) => {
                    tracing::warn!(error = %e, "old file not deleted");
                    continue;
                }
            };
            let table = TABLES.get(sealed.name.table).map_or("", |table| table.name);
            let (files, all_bytes) = gone.entry(table).or_default();
            *files += 1;
            *all_bytes += bytes;
        }
        enforced.deleted = (!gone.is_empty()).then(|| describe(&gone, limit));
        enforced
    }

    /// What to say, once, when the limit cannot be kept.
    fn too_small(&mut self, limit: u64, open_bytes: u64) -> Option<String> {
        if std::mem::replace(&mut self.said_full, true) {
            return None;
        }
        let bytes = self.bytes + open_bytes;
        let text = format!(
            "--max-disk {limit} is too small: the log takes {bytes} bytes, and nothing is left in it \
             that may be deleted; it goes on growing. Raise --max-disk"
        );
        tracing::warn!("{text}");
        Some(text)
    }

    fn may_go(&self, file: &Sealed) -> bool {
        if file.name.seq == 0 {
            return false;
        }
        if file.name.table != LiveRow::INDEX {
            return true;
        }
        let of_run = |table: usize| {
            self.files.iter().filter(move |f| f.name.table == table && f.name.run == file.name.run)
        };
        let newest = of_run(LiveRow::INDEX).all(|other| other.name.seq <= file.name.seq);
        // The first event still there; a checkpoint from before it has lost its continuation.
        let first_event = of_run(EventRow::INDEX).filter_map(|file| file.first_seq).min();
        let useless = match (file.first_seq, first_event) {
            (Some(seq), Some(first)) => seq < first - 1,
            _ => true,
        };
        !newest && useless
    }
}

fn describe(gone: &BTreeMap<&'static str, (u64, u64)>, limit: u64) -> Deleted {
    let bytes = gone.values().map(|(_, bytes)| bytes).sum();
    let parts: Vec<String> = gone
        .iter()
        .map(|(table, (files, bytes))| format!("{table}: {files} files, {bytes} bytes"))
        .collect();
    let text =
        format!("oldest files deleted to stay within --max-disk {limit}: {}", parts.join("; "));
    Deleted { bytes, text }
}

/// Sealed files of runs of this host whose agent is gone. Files of other hosts, and of another
/// live agent, are not ours to delete.
fn earlier_files(dir: &LogDir, manifest: &Manifest) -> Vec<Sealed> {
    let scan = scan_sealed(&dir.path);
    let mut dead: BTreeMap<Run8, bool> = BTreeMap::new();
    let mut ours = |run: Run8| {
        *dead.entry(run).or_insert_with(|| {
            let path = dir.path.join(crate::log::name::manifest(run));
            let same_host = Manifest::read(&path).is_ok_and(|other| other.host == manifest.host);
            same_host && Some(run) != manifest.run8() && dir.is_dead(run)
        })
    };
    scan.into_iter().filter(|sealed| ours(sealed.name.run)).collect()
}
