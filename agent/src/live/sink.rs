//! The log's thread: rows in, files out.

use std::{
    path::PathBuf,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender},
    time::Duration,
};

use anyhow::Context as _;
use ledger::{
    log::{Options, RunInfo, Writer},
    rows,
};
use rustix::{
    process::{Gid, Uid},
    thread::{set_thread_res_gid, set_thread_res_uid},
};
use tracing::error;

use super::Message;
use crate::clock;

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
    loop {
        match inbox.recv_timeout(TICK) {
            Ok(ToLog::Rows(batch)) => {
                for row in batch {
                    events += u64::from(matches!(row, AnyRow::EventRow(_)));
                    push(&mut writer, row);
                }
            }
            Ok(ToLog::Checkpoint { seq, rows }) => writer.checkpoint(seq, rows),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        let tick = writer.tick(clock::epoch_ns());
        if tick.checkpoint_due {
            // A full channel means that the next rotation asks again.
            asks.try_send(Message::Checkpoint).unwrap_or_default();
        }
        if tick.recovered {
            asks.try_send(Message::LogRecovered).unwrap_or_default();
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

fn open(start: &Start) -> anyhow::Result<Writer> {
    if let Some((uid, gid)) = start.owner {
        become_owner(uid, gid).context("take on the rights of the log's owner")?;
    }
    let writer =
        Writer::create(&start.folder, &start.run, start.options).context("open the log")?;
    Ok(writer)
}

/// This thread's effective user and group only; the rest of the process stays root.
fn become_owner(uid: u32, gid: u32) -> anyhow::Result<()> {
    set_thread_res_gid(None, Gid::from_raw(gid), None)?;
    set_thread_res_uid(None, Uid::from_raw(uid), None)?;
    Ok(())
}
