//! How the log is written.

const SECOND_NS: i64 = 1_000_000_000;

/// How the log is written. [`Options::default`] holds the values of `docs/event-log.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes that the runs of this host may take in the directory; oldest samples go first.
    pub max_disk_bytes: Option<u64>,
    /// Rows of a table held in memory at most before they go to the journal.
    pub batch_rows: usize,
    /// Time that a row waits at most before it goes to the journal.
    pub flush_every_ns: i64,
    /// Time after which journals are forced to disk.
    pub sync_every_ns: i64,
    /// Time between attempts to go on after a failure.
    pub retry_every_ns: i64,
    /// Rows at which a file is sealed.
    pub max_file_rows: u64,
    /// Bytes at which a file is sealed.
    pub max_file_bytes: u64,
    /// Age at which a file with rows is sealed.
    pub max_file_age_ns: i64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_disk_bytes: None,
            batch_rows: 4_096,
            flush_every_ns: SECOND_NS / 4,
            sync_every_ns: 5 * SECOND_NS,
            retry_every_ns: 3 * SECOND_NS,
            max_file_rows: 1_000_000,
            max_file_bytes: 64 << 20,
            max_file_age_ns: 60 * SECOND_NS,
        }
    }
}

impl Options {
    /// Bytes of a journal at which its file is sealed: a journal is not compressed, and it must
    /// leave room for sealed files under a small `max_disk_bytes`.
    pub(super) fn journal_limit(&self) -> u64 {
        let share = self.max_disk_bytes.map_or(u64::MAX, |bytes| bytes / 8);
        share.clamp(256 << 10, 512 << 20)
    }
}
