//! When the log cannot be written: hold what fits, count the rest, try again, tell of the gap.

use super::{
    Writer,
    table::{Leftover, due, reseal},
};
use crate::{
    log::{
        dir::LogDir,
        error::{LogError, Result, chain},
    },
    rows::{AnnotationRow, LossRow},
};

/// Reason in the `losses` row that tells of rows dropped while the log could not be written.
pub const LOG_WRITE_FAILED: &str = "log_write_failed";

/// The log cannot be written.
#[derive(Debug)]
pub(super) struct Failure {
    /// Why, and what to do.
    pub(super) message: String,
    since_ns: i64,
    tried_ns: i64,
}

impl Writer {
    /// Notes a failure: lets go of all unfinished files, which may free the space that is
    /// missing. Sealed files and journals stay as they are.
    pub(super) fn fail(&mut self, error: &LogError) {
        let message = chain(error);
        tracing::warn!(error = %message, "log not written for now");
        for state in &mut self.tables {
            self.leftovers.extend(state.abandon(&self.dir));
        }
        let since_ns = self.failure.take().map_or(self.now_ns, |failure| failure.since_ns);
        self.failure = Some(Failure { message, since_ns, tried_ns: self.now_ns });
    }

    /// Tries to go on, at once or when it is time.
    pub(super) fn retry(&mut self, at_once: bool) {
        let Some(failure) = self.failure.as_ref() else { return };
        if !at_once && !due(self.now_ns, failure.tried_ns, self.options.retry_every_ns) {
            return;
        }
        let (since_ns, tried_ns) = (failure.since_ns, self.now_ns);
        match self.reopen() {
            Ok(dir) => self.go_on(dir),
            Err(e) => self.failure = Some(Failure { message: chain(&e), since_ns, tried_ns }),
        }
    }

    /// The directory may have been removed and made again since: open it anew.
    fn reopen(&self) -> Result<LogDir> {
        let dir = LogDir::open(&self.dir.path, None)?;
        dir.probe(self.run)?;
        self.manifest.write(&dir)?;
        Ok(dir)
    }

    fn go_on(&mut self, dir: LogDir) {
        let Some(failure) = self.failure.take() else { return };
        self.dir = dir;
        self.recovered = true;
        let dropped: u64 = self.tables.iter().map(|state| state.dropped).sum();
        let rows = dropped.saturating_sub(self.told_dropped);
        tracing::warn!(rows_dropped = rows, "the log is written again");
        self.tell_of_gap(failure.since_ns, &failure.message);
    }

    fn tell_of_gap(&mut self, since_ns: i64, reason: &str) {
        let dropped: u64 = self.tables.iter().map(|state| state.dropped).sum();
        let count = dropped.saturating_sub(self.told_dropped);
        self.told_dropped = dropped;
        let tables: Vec<String> =
            self.dropped().map(|(table, rows)| format!("{table} {rows}")).collect();
        let text = format!(
            "the log could not be written ({reason}); rows dropped since the start: {}",
            if tables.is_empty() { "none".to_owned() } else { tables.join(", ") }
        );
        let ts_ns = self.now_ns;
        self.push(&AnnotationRow { ts_ns, kind: "warning".into(), text, ..Default::default() });
        if count > 0 {
            self.push(&LossRow {
                ts_ns,
                window_start_ns: since_ns,
                reason: LOG_WRITE_FAILED.into(),
                count: count as i64,
                ..Default::default()
            });
        }
    }

    /// Seals up to `limit` of the journals that were left by failures.
    pub(super) fn reseal_leftovers(&mut self, limit: usize) {
        for _ in 0..limit.min(self.leftovers.len()) {
            if self.failure.is_some() {
                return;
            }
            let leftover = self.leftovers.remove(0);
            match reseal(&self.dir, &self.manifest, leftover.name, leftover.since_ns) {
                Ok(sealed) => self.retention.add(sealed),
                Err(e) if e.is_not_found() => self.lost(&leftover),
                Err(e) if e.is_about_content() => self.leave(&e),
                Err(e) => {
                    self.leftovers.push(leftover);
                    self.fail(&e);
                }
            }
        }
    }

    /// A journal cannot be decoded: trying again will not help. It stays where it is, and the run
    /// is not marked as sealed.
    fn leave(&mut self, error: &LogError) {
        tracing::warn!(error = %chain(error), "journal not sealed, left as it is");
        self.left_journals = true;
    }

    /// A journal was removed by somebody: its rows are gone.
    fn lost(&mut self, leftover: &Leftover) {
        if let Some(state) = self.tables.get_mut(leftover.name.table) {
            state.dropped += leftover.rows;
        }
        self.tell_of_gap(leftover.since_ns, "a journal was removed");
    }
}
