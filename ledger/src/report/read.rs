//! Driving the pass over a log.

use std::path::PathBuf;

use super::{
    collect::{Begin, Collector, LossFacts},
    model::Model,
};
use crate::{
    log::{Checkpoint, Gap, Log, LogError, Row, Run8},
    rows::{
        AnnotationRow, BreakdownRow, DeviceRow, DeviceSampleRow, EventRow, FrameRow, HostSampleRow,
        LiveRow, LossRow, OomRow, ProcessLibRow, ProcessRow, ProcessSampleRow, SiteUsageRow,
        StackRow,
    },
};

/// Events that are not in the log, and without which the account is not whole.
const ROWS_MISSING: &str = "rows_missing";
/// Files that could not be read, without which the account is not whole.
const FILES_NOT_READ: &str = "files_not_read";
/// Files that could not be read, of readings beside the account.
const SAMPLES_NOT_READ: &str = "samples_not_read";
/// Tables of readings beside the account.
const SAMPLES: [&str; 6] = [
    BreakdownRow::TABLE.name,
    DeviceSampleRow::TABLE.name,
    ProcessSampleRow::TABLE.name,
    HostSampleRow::TABLE.name,
    ProcessLibRow::TABLE.name,
    DeviceRow::TABLE.name,
];
/// Events that are not in the log, but whose effect a checkpoint tells.
const ROWS_BEFORE_CHECKPOINT: &str = "rows_before_checkpoint";

impl Model {
    /// Reads the logs in `dirs`.
    ///
    /// # Errors
    ///
    /// A directory cannot be listed, or none of them holds a log. What is wrong with single files
    /// is in [`Model::problems`].
    pub fn read(dirs: &[PathBuf]) -> Result<Self, LogError> {
        let pass = read(dirs)?;
        Ok(pass.finish(dirs.iter().map(|dir| dir.display().to_string()).collect()))
    }
}

/// The pass over the logs in `dirs`.
pub(super) fn read(dirs: &[PathBuf]) -> Result<Collector, LogError> {
    let log = Log::open(dirs)?;
    let mut pass = Collector::default();
    for problem in log.problems() {
        let text = format!("{}: {}", problem.path.display(), problem.message);
        pass.problem(text, problem.misses);
    }
    for manifest in log.manifests() {
        pass.manifest(manifest);
    }
    // What stacks mean is known before rows that name them.
    each(&log, &mut pass, |pass, row: FrameRow| pass.stacks.frame(row));
    each(&log, &mut pass, |pass, row: StackRow| pass.stacks.stack(row));
    // Ends of processes are known before what is judged by them.
    each(&log, &mut pass, |pass, row: ProcessRow| pass.process(row));
    each(&log, &mut pass, |pass, row: DeviceRow| pass.device(row));
    each(&log, &mut pass, |pass, row: AnnotationRow| pass.annotation(row));
    each(&log, &mut pass, |pass, row: LossRow| pass.loss(&row));
    each(&log, &mut pass, |pass, row: DeviceSampleRow| pass.device_sample(&row));
    each(&log, &mut pass, |pass, row: ProcessSampleRow| pass.process_sample(&row));
    each(&log, &mut pass, |pass, row: SiteUsageRow| pass.site_usage(&row));
    // Refusals are known before what was held at their moments.
    each(&log, &mut pass, |pass, row: OomRow| pass.oom(row));
    each(&log, &mut pass, |pass, row: BreakdownRow| pass.breakdown(row));
    events(&log, &mut pass);
    Ok(pass)
}

/// Hands every row of a table to `take`; what cannot be read becomes a problem.
fn each<R: Row>(log: &Log, pass: &mut Collector, mut take: impl FnMut(&mut Collector, R)) {
    for row in log.rows::<R>() {
        match row {
            Ok(row) => take(pass, row),
            Err(error) => pass.problem(chain(&error), Some(R::TABLE.name)),
        }
    }
}

/// Applies the events. Where the first ones of a run are gone, a checkpoint stands in for them.
fn events(log: &Log, pass: &mut Collector) {
    let gaps = log.gaps().unwrap_or_else(|error| {
        pass.problem(chain(&error), Some(EventRow::TABLE.name));
        Vec::new()
    });
    let checkpoints = log.checkpoints();
    let mut starts: Vec<(Run8, i64)> = Vec::new();
    for gap in gaps {
        let checkpoint = checkpoint_for(&gap, &checkpoints);
        if let Some(checkpoint) = checkpoint {
            starts.push((gap.run, checkpoint.seq));
            let mut begin = Begin { ts_ns: None, rows: 0 };
            for row in log.checkpoint_rows(checkpoint) {
                match row {
                    Ok(row) => {
                        begin = Begin { ts_ns: Some(row.ts_ns), rows: begin.rows + 1 };
                        pass.start_from(gap.run, &row);
                    }
                    Err(error) => pass.problem(chain(&error), Some(LiveRow::TABLE.name)),
                }
            }
            pass.deleted.begins.insert(gap.run, begin);
        }
        let reason = if checkpoint.is_some() { ROWS_BEFORE_CHECKPOINT } else { ROWS_MISSING };
        let missing = gap.last.saturating_sub(gap.first).saturating_add(1);
        pass.missing(reason, missing);
    }
    for item in log.events() {
        match item {
            Ok(item) => {
                let start = starts.iter().find(|(run, _)| *run == item.run);
                if start.is_none_or(|(_, seq)| item.event.seq > *seq) {
                    if let Some(begin) = pass.deleted.begins.get_mut(&item.run) {
                        begin.ts_ns.get_or_insert(item.event.ts_ns);
                    }
                    pass.event(item.run, &item.event);
                }
            }
            Err(error) => pass.problem(chain(&error), Some(EventRow::TABLE.name)),
        }
    }
}

/// The checkpoint that stands in for a gap at the start of its run: the first after it.
fn checkpoint_for<'a>(gap: &Gap, checkpoints: &'a [Checkpoint]) -> Option<&'a Checkpoint> {
    let mut later = checkpoints.iter().filter(|c| c.run == gap.run && c.seq >= gap.last);
    if gap.first <= 1 { later.next() } else { None }
}

impl Collector {
    /// Notes that a file was left out or read in part, and of which table rows are missing by it.
    pub(super) fn problem(&mut self, text: String, misses: Option<&str>) {
        if self.problems.contains(&text) {
            return;
        }
        self.problems.push(text);
        match misses {
            Some(table) if SAMPLES.contains(&table) => self.missing(SAMPLES_NOT_READ, 1),
            Some(_) => self.missing(FILES_NOT_READ, 1),
            None => {}
        }
    }

    /// Counts events or files that are not in the log; when they were is not known.
    fn missing(&mut self, reason: &str, count: i64) {
        let window = self.span;
        let facts = self.losses.entry((reason.to_owned(), None)).or_default();
        *facts = LossFacts { count: facts.count.saturating_add(count), window, ..*facts };
    }
}

/// An error with its causes, as one line.
fn chain(error: &LogError) -> String {
    let first: &dyn std::error::Error = error;
    let causes = std::iter::successors(first.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
