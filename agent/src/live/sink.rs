//! The log's thread: rows in, files out.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender},
    time::Duration,
};

use anyhow::Context as _;
use ledger::{
    log::{ClockAnchor, Options, RunInfo, Writer},
    rows,
};
use rustix::{
    process::{Gid, Uid},
    thread::{CapabilitySet, set_thread_res_gid, set_thread_res_uid},
};
use tracing::error;

use super::{Message, spares::Spares};
use crate::{
    clock::{self, Anchor, Step, Watch},
    heap, privileges,
};

macro_rules! any_row {
    ($($variant:ident),*) => {
        /// A row of any table.
        #[derive(Clone, Debug)]
        #[allow(missing_docs, reason = "each variant is the row type of its name")]
        pub enum AnyRow {
            $($variant(rows::$variant),)*
        }

        $(impl From<rows::$variant> for AnyRow {
            fn from(row: rows::$variant) -> Self {
                Self::$variant(row)
            }
        })*

        fn push(writer: &mut Writer, row: AnyRow) {
            match row {
                $(AnyRow::$variant(row) => writer.push(&row),)*
            }
        }
    };
}

any_row!(
    EventRow,
    SiteUsageRow,
    BreakdownRow,
    LiveRow,
    DeviceSampleRow,
    ProcessSampleRow,
    HostSampleRow,
    ProcessRow,
    ProcessLibRow,
    DeviceRow,
    StackRow,
    FrameRow,
    OomRow,
    AnnotationRow,
    LossRow
);

/// What the log's thread is handed.
#[derive(Debug)]
pub enum ToLog {
    /// Rows, in their order.
    Rows(Vec<AnyRow>),
    /// The live set after the event `seq`.
    Checkpoint {
        /// `seq` of the last event before it.
        seq: i64,
        /// The allocations.
        rows: Vec<rows::LiveRow>,
    },
}

/// How long the thread sleeps when no rows come: the journal's pace.
const TICK: Duration = Duration::from_millis(50);

/// Time between looks for a step of the wall clock.
const WATCH_NS: i64 = 1_000_000_000;

/// Time between two trims of the heap: files are finished once a minute, each table at its time.
const TRIM_NS: i64 = 20_000_000_000;

/// What the log needs to begin.
#[derive(Clone, Debug)]
pub struct Start {
    /// Folder.
    pub folder: PathBuf,
    /// Who owns the files: they are made with this user's rights, so a folder of theirs cannot
    /// lead root anywhere.
    pub owner: Option<(u32, u32)>,
    /// The run.
    pub run: RunInfo,
    /// Sizes.
    pub options: Options,
}

/// What became of the log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// Rows of `events`.
    pub events: u64,
    /// Rows that could not be written, of all tables.
    pub dropped: u64,
    /// Bytes of the files.
    pub log_bytes: u64,
}

/// Opens the log; the answer goes to `opened`. Then takes rows until the senders are gone.
pub fn run(
    start: &Start,
    inbox: &Receiver<ToLog>,
    asks: &SyncSender<Message>,
    opened: &SyncSender<anyhow::Result<()>>,
    spares: &Spares<AnyRow>,
) -> anyhow::Result<Written> {
    let mut writer = match open(start) {
        Ok(writer) => {
            opened.send(Ok(())).unwrap_or_default();
            writer
        }
        Err(error) => {
            // Whoever asked tells the user.
            opened.send(Err(error)).unwrap_or_default();
            return Ok(Written::default());
        }
    };
    let mut events = 0;
    let mut watch = Watch::new(Anchor::of_process());
    let (mut look_ns, mut trim_ns) = (0, 0);
    loop {
        match inbox.recv_timeout(TICK) {
            Ok(ToLog::Rows(mut batch)) => {
                for row in batch.drain(..) {
                    events += u64::from(matches!(row, AnyRow::EventRow(_)));
                    push(&mut writer, row);
                }
                spares.give(batch);
            }
            Ok(ToLog::Checkpoint { seq, rows }) => writer.checkpoint(seq, rows),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        let now_ns = clock::epoch_ns();
        if now_ns >= look_ns {
            look_ns = now_ns + WATCH_NS;
            if let Some(step) = watch.look() {
                tell_step(&mut writer, now_ns, step);
            }
        }
        let tick = writer.tick(now_ns);
        if tick.checkpoint_due {
            // A full channel means that the next rotation asks again.
            asks.try_send(Message::Checkpoint).unwrap_or_default();
        }
        if tick.recovered {
            asks.try_send(Message::LogRecovered).unwrap_or_default();
        }
        if now_ns >= trim_ns {
            trim_ns = now_ns + TRIM_NS;
            heap::trim();
        }
    }
    let dropped = writer.dropped().map(|(_, count)| count).sum();
    let log_bytes = writer.disk_bytes();
    match writer.finish(clock::epoch_ns()) {
        Ok(()) => Ok(Written { events, dropped, log_bytes }),
        Err(failure) => {
            error!(error = %failure, "the end of the log is in its journal only");
            Err(failure).context("finish the log; what was sealed before is intact")
        }
    }
}

/// Tells of a step of the wall clock at `now_ns`, in the log's time.
fn tell_step(writer: &mut Writer, now_ns: i64, step: Step) {
    let boot_ns = now_ns.saturating_sub(Anchor::of_process().offset_ns());
    let wall_ns = now_ns.saturating_add(step.ahead_ns);
    writer.add_clock_anchor(ClockAnchor { boot_ns, wall_ns });
    writer.push(&rows::AnnotationRow {
        ts_ns: now_ns,
        proc_id: None,
        kind: "clock".to_owned(),
        text: step.to_string(),
        value: Some(step.by_ns),
    });
}

fn open(start: &Start) -> anyhow::Result<Writer> {
    if let Some((uid, gid)) = start.owner {
        become_owner(uid, gid).context("take on the rights of the log's owner")?;
    }
    let writer =
        Writer::create(&start.folder, &start.run, start.options).context("open the log")?;
    privileges::give_up(needed_to_write(start));
    Ok(writer)
}

/// Who writes into a folder of their own needs nothing for it. Root may write into a user's, which
/// is a power of its own.
fn needed_to_write(start: &Start) -> CapabilitySet {
    let folder = fs::metadata(&start.folder).map(|metadata| metadata.uid()).ok();
    let is_own = folder == Some(rustix::process::geteuid().as_raw());
    if start.owner.is_some() || is_own {
        CapabilitySet::empty()
    } else {
        CapabilitySet::DAC_OVERRIDE
    }
}

/// This thread's effective user and group only; the rest of the process stays root.
fn become_owner(uid: u32, gid: u32) -> anyhow::Result<()> {
    set_thread_res_gid(None, Gid::from_raw(gid), None)?;
    set_thread_res_uid(None, Uid::from_raw(uid), None)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use ledger::{log::Log, report::Model};

    use super::*;

    #[test]
    fn a_step_of_the_wall_clock_is_in_the_log_and_its_times_go_on() {
        const HOUR: i64 = 3_600_000_000_000;
        let temp = tempfile::tempdir().unwrap();
        let start_ns = clock::epoch_ns();
        let offset_ns = Anchor::of_process().offset_ns();
        let run = RunInfo {
            host: "here".to_owned(),
            boot_id: "boot".to_owned(),
            pid: 1,
            clock: ClockAnchor { boot_ns: start_ns - offset_ns, wall_ns: start_ns },
            tool_version: "0.1.0".to_owned(),
            command: Vec::new(),
        };
        let mut writer = Writer::create(temp.path(), &run, Options::default()).unwrap();
        for (by_ns, ahead_ns) in [(HOUR, HOUR), (-2 * HOUR, -HOUR)] {
            let now_ns = clock::epoch_ns();
            tell_step(&mut writer, now_ns, Step { by_ns, ahead_ns });
            writer.tick(now_ns);
        }
        writer.finish(clock::epoch_ns()).unwrap();

        let log = Log::open(&[temp.path().to_owned()]).unwrap();
        let told: Vec<rows::AnnotationRow> = log.rows().map(Result::unwrap).collect();
        assert_eq!(
            told.iter().map(|row| row.value).collect::<Vec<_>>(),
            [Some(HOUR), Some(-2 * HOUR)]
        );
        assert!(told.iter().all(|row| row.kind == "clock"));
        assert!(told[0].ts_ns <= told[1].ts_ns && told[1].ts_ns < start_ns + HOUR / 60);
        let anchors = &log.manifests()[0].clock_anchors;
        let offsets: Vec<i64> = anchors.iter().map(|a| a.offset_ns() - offset_ns).collect();
        assert_eq!(offsets, [0, HOUR, -HOUR]);
        let report = Model::read(&[temp.path().to_owned()]).unwrap().text(false);
        // Lines end where the page does.
        let report = report.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(report.contains("the wall clock was set forward by 3600.000 s"), "{report}");
        assert!(report.contains("it is 3600.000 s behind them now"), "{report}");
    }
}
