//! What `--max-disk` deleted, and where the account begins because of it.

use std::collections::BTreeMap;

use crate::{
    log::Run8,
    report::{
        model::Warning,
        units::{counted, show_bytes},
    },
    rows::AnnotationRow,
};

/// Where the account of a run begins whose first events are deleted.
#[derive(Clone, Copy, Debug)]
pub(in crate::report) struct Begin {
    /// Moment of the checkpoint; that of the first event after it, where the checkpoint is empty.
    pub(in crate::report) ts_ns: Option<i64>,
    /// Allocations in the checkpoint.
    pub(in crate::report) rows: u64,
}

/// What `--max-disk` deleted.
#[derive(Clone, Debug, Default)]
pub(in crate::report) struct Deleted {
    bytes: i64,
    /// When it last did.
    last_ns: Option<i64>,
    /// By run.
    pub(in crate::report) begins: BTreeMap<Run8, Begin>,
}

impl Deleted {
    pub(super) fn see(&mut self, row: &AnnotationRow) {
        self.bytes = self.bytes.saturating_add(row.value.unwrap_or(0));
        self.last_ns = self.last_ns.max(Some(row.ts_ns));
    }

    /// In words, for the reader of a report.
    pub(in crate::report) fn warnings(&self) -> Vec<Warning> {
        let warning = |ts_ns, text| Warning { ts_ns, pid: None, text };
        let deleted = self.last_ns.map(|ts_ns| {
            let bytes = show_bytes(self.bytes);
            let text = format!(
                "--max-disk deleted {bytes} of old files until then: what they told of readings, \
                 places and calls is not in this report"
            );
            warning(ts_ns, text)
        });
        let begins = self.begins.iter().filter_map(|(run, begin)| {
            let held = counted(begin.rows, "allocation", "allocations");
            let text = format!(
                "older events of recording {run} are deleted: its account begins here, with the \
                 {held} that were alive; totals of what was allocated and freed count from here"
            );
            Some(warning(begin.ts_ns?, text))
        });
        begins.chain(deleted).collect()
    }
}
