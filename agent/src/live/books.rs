//! The state thread: everything that was seen, put in order, accounted for, and handed to the log.

use std::{
    collections::VecDeque,
    sync::mpsc::{Receiver, Sender, SyncSender},
    time::{Duration, Instant},
};

use agent_common::{
    call::{KIND_NOTE, RawCall},
    cookie::Kind,
};
use ledger::{
    account::{Ledger, breakdown::Breakdown, order::Order, state::State},
    call::{Action, Call, Input, ProcId},
    rows::{AnnotationRow, EventRow, LossRow},
};

use super::{
    Message,
    brake::Brake,
    bystanders::Bystanders,
    devices::Devices,
    lives::Lives,
    oom::Refusals,
    polled::Polled,
    ranks::Communicator,
    readings::Readings,
    sink::{AnyRow, ToLog},
    spares::Buffers,
    stacks::Stacks,
};
use crate::{
    attach::{Notice, TOO_LATE},
    clock::Anchor,
    decode,
    host::{CommandDetail, Host},
    kernel::Counters,
    nvml::Trigger,
};

/// Calls that return out of order by less than this are put in order before they are applied; a
/// slower free is paired by its time all the same.
const WINDOW_NS: i64 = 20_000_000;
/// Inputs held back at once.
const ORDER_CAPACITY: usize = 1 << 18;
/// Pace of loss counters and `PyTorch` totals.
const POLL: Duration = Duration::from_millis(250);

/// What is told when the books close.
#[derive(Clone, Copy, Debug, Default)]
pub struct Closed {
    /// Processes that made a traced call.
    pub processes: u64,
    /// Things that were not seen.
    pub lost: u64,
}

/// What the books are opened with.
#[derive(Debug)]
pub(super) struct Opening {
    /// The host.
    pub(super) host: Host,
    /// Boot time to epoch.
    pub(super) anchor: Anchor,
    /// The GPUs that NVML lists.
    pub(super) devices: Devices,
    /// How much is recorded of tensors, as the log says it.
    pub(super) detail: &'static str,
    /// Every block of `PyTorch` is an event: the ledger has those that live.
    pub(super) every_tensor: bool,
    /// Blocks of `PyTorch` are told apart, by address and place.
    pub(super) sites: bool,
    /// How much of command lines.
    pub(super) commands: CommandDetail,
    /// When the recording began, `CLOCK_BOOTTIME`.
    pub(super) opened_ns: u64,
    /// Processes that were not followed before may be met (`record`).
    pub(super) host_wide: bool,
    /// Has NVML asked soon what processes hold.
    pub(super) hasten_nvml: Option<Trigger>,
}

/// The books.
pub(super) struct Books {
    pub(super) opening: Opening,
    pub(super) lives: Lives,
    pub(super) order: Order,
    pub(super) ledger: Ledger,
    pub(super) state: State,
    pub(super) breakdown: Breakdown,
    pub(super) readings: Readings,
    pub(super) bystanders: Bystanders,
    pub(super) refusals: Refusals,
    pub(super) polled: Polled,
    pub(super) brake: Brake,
    pub(super) stacks: Stacks,
    rows: Vec<AnyRow>,
    events: Vec<EventRow>,
    sink: SyncSender<ToLog>,
    spares: Buffers,
    /// Moment up to which everything was applied, epoch nanoseconds.
    applied_ns: i64,
    pub(super) closed: Closed,
    /// When it was last looked for processes that are gone.
    pub(super) looked_for: Instant,
}

impl Books {
    /// Empty books.
    pub(super) fn new(
        opening: Opening,
        counters: Counters,
        brake: Brake,
        sink: SyncSender<ToLog>,
        spares: Buffers,
    ) -> Self {
        Self {
            lives: Lives::new(opening.host.boot_id()),
            order: Order::new(ORDER_CAPACITY),
            ledger: Ledger::new(),
            state: State::new(),
            breakdown: Breakdown::new(),
            readings: Readings::default(),
            bystanders: Bystanders::default(),
            refusals: Refusals::default(),
            polled: Polled::new(counters),
            brake,
            stacks: Stacks::default(),
            rows: Vec::new(),
            events: Vec::new(),
            sink,
            spares,
            applied_ns: i64::MIN,
            closed: Closed::default(),
            looked_for: Instant::now(),
            opening,
        }
    }

    /// Serves messages until the stop.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut next_poll = Instant::now() + POLL;
        while let Ok(message) = messages.recv() {
            match message {
                Message::Batch(batch) => {
                    self.batch(&batch);
                    self.spares.calls.give(batch.calls);
                }
                Message::Notice(notice) => self.notice(notice),
                Message::Sample(sample) => self.sample(sample),
                Message::Rows(rows) => self.rows.extend(rows),
                Message::Checkpoint => self.checkpoint(),
                Message::LogRecovered => self.write_running(),
                Message::Stop(answer) => return self.close(&answer),
            }
            if Instant::now() >= next_poll {
                self.poll();
                next_poll = Instant::now() + POLL;
            }
            self.hand_over();
        }
    }

    /// Adds a row for the log.
    pub(super) fn add(&mut self, row: impl Into<AnyRow>) {
        self.rows.push(row.into());
    }

    fn hand_over(&mut self) {
        if !self.rows.is_empty() {
            let rows = std::mem::replace(&mut self.rows, self.spares.rows.take());
            // The log's thread outlives this one; if it died, its panic is the news.
            self.sink.send(ToLog::Rows(rows)).unwrap_or_default();
        }
    }

    fn batch(&mut self, batch: &super::reader::Batch) {
        for life in &batch.begins {
            self.begin(life);
        }
        for resolved in &batch.resolved {
            self.stacks.resolved(resolved);
            if resolved.mismatch {
                self.lost(Some(resolved.tgid), "stack_mismatch", 1, None);
            }
        }
        for call in &batch.calls {
            self.call(call);
        }
        for life in &batch.ends {
            self.end(life);
        }
        if batch.undecodable > 0 {
            self.lost(None, "undecodable", batch.undecodable as i64, None);
        }
        self.apply_until(self.opening.anchor.epoch(batch.complete_until_ns) - WINDOW_NS);
    }

    fn call(&mut self, raw: &RawCall) {
        if raw.kind == KIND_NOTE {
            return self.backward(raw);
        }
        let decoded =
            decode::probe(raw).ok().and_then(|probe| Some((probe, decode::action(raw, probe)?)));
        let Some((probe, action)) = decoded else {
            return self.lost(None, "undecodable", 1, None);
        };
        match probe.kind() {
            Kind::Call => self.brake.call(raw.tgid, raw.row),
            // Says nothing of a GPU: its process need not use one.
            Kind::Note if action == Action::Nothing => return,
            _ => {}
        }
        let life = self.life_of(raw.tgid, raw.exit_ns);
        let (proc_id, known) = (life.proc_id, life.row.is_some());
        if !known {
            self.announce(raw.tgid, proc_id);
        }
        if let Action::CommInit { rank, size, key } = action {
            // Of no concern to the account.
            if let Some(communicator) = Communicator::new(rank, size, key) {
                self.joined(proc_id, communicator);
            }
            return;
        }
        if raw.result == 0 {
            if shows_in_nvml_alone(action) {
                self.opening.hasten_nvml.iter().for_each(Trigger::pull);
            }
            match action {
                Action::Init => self.count_devices(raw.tgid, proc_id),
                _ => self.learn_device(proc_id, action),
            }
        }
        self.order.push(Input::Call(Call {
            proc_id,
            tgid: raw.tgid,
            tid: raw.tid,
            api: probe.api(),
            enter_ns: self.opening.anchor.epoch(raw.enter_ns),
            exit_ns: self.opening.anchor.epoch(raw.exit_ns),
            runtime_api: decode::runtime_api(raw),
            result: raw.result,
            stack_id: self.stacks.id_of(raw.tgid, raw.stack_key).unwrap_or(0),
            action,
        }));
    }

    /// The process asked the driver which device an ordinal is.
    fn learn_device(&mut self, proc_id: ProcId, action: Action) {
        let (ordinal, device) = match action {
            Action::DeviceUuid { ordinal, uuid } => {
                (ordinal, self.opening.devices.by_uuid(proc_id, ordinal, uuid))
            }
            Action::DeviceBusId { ordinal, bus_id } => {
                (ordinal, self.opening.devices.by_bus_id(proc_id, ordinal, bus_id))
            }
            _ => return,
        };
        self.ledger.set_device(proc_id, ordinal, device);
    }

    /// A backward pass began.
    fn backward(&mut self, raw: &RawCall) {
        let ts_ns = self.opening.anchor.epoch(raw.enter_ns);
        let proc_id = self.life_of(raw.tgid, raw.enter_ns).proc_id;
        self.stacks.backward(proc_id, ts_ns, raw.words[0] as i64);
    }

    /// Applies everything up to `until_ns`, and the readings that lie before it.
    fn apply_until(&mut self, until_ns: i64) {
        while let Some(reading) = self.readings.next_before(until_ns) {
            self.apply_inputs(reading.ts_ns);
            let before = self.live_device(&reading.gpu_uuid);
            self.apply_inputs(reading.ts_ns + reading.read_ns);
            let after = self.live_device(&reading.gpu_uuid);
            self.reading(&reading, &before, &after);
        }
        self.apply_inputs(until_ns);
    }

    fn apply_inputs(&mut self, until_ns: i64) {
        self.applied_ns = self.applied_ns.max(until_ns);
        let inputs: VecDeque<Input> = self.order.drain_until(until_ns).collect();
        for input in inputs {
            self.apply(&input);
        }
    }

    fn apply(&mut self, input: &Input) {
        let mut events = std::mem::take(&mut self.events);
        self.ledger.apply(input, &mut events);
        for mut row in events.drain(..) {
            row.backward_pass = self.stacks.pass_at(row.proc_id, row.ts_ns);
            self.state.apply(&row);
            self.breakdown.note(&row);
            self.refused_by_driver(&row);
            self.add(row);
        }
        self.events = events;
        match input {
            Input::Call(call) if call.action == Action::Init => self.write_process(call.proc_id),
            Input::Call(call) => self.refused_by_torch(call),
            Input::Exit { proc_id, tgid, ts_ns, exit_code } => {
                self.finish_process(*proc_id, *tgid, *ts_ns, *exit_code);
            }
            Input::Exec { proc_id, .. } => self.executed(*proc_id),
        }
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Following { tgid } => {
                if let Some(start_ns) = self.opening.host.start_boot_ns(tgid) {
                    self.lives.begin(tgid, start_ns);
                }
            }
            Notice::AlreadyMapped { tgid } => self.found_running(tgid),
            Notice::Attached { tgid, path, probes, available, at_ns, library } => {
                let path = path.display().to_string();
                self.readings.attached(&path, probes as i32, available as i32);
                let at_ns = self.opening.anchor.epoch(at_ns);
                let proc_id = tgid.and_then(|tgid| {
                    // The record of a fork may still be under way.
                    let start_ns = self.opening.host.start_boot_ns(tgid)?;
                    let life = self.lives.begin(tgid, start_ns);
                    life.attached_ns.get_or_insert(at_ns);
                    Some(life.proc_id.0)
                });
                let text = format!("{probes} of {available} functions of {}", library.as_str());
                self.annotate(proc_id, "attach", format!("{text} in {path}"), Some(probes as i64));
            }
            Notice::Failed { tgid, path, error } => {
                let proc_id = tgid.and_then(|tgid| Some(self.lives.current(tgid)?.proc_id.0));
                let text = format!("{} was not probed: {error}", path.display());
                self.annotate(proc_id, "warning", text, None);
                self.lost(tgid, "library_not_probed", 1, None);
            }
            Notice::Spared { tgid, path, objection, was_probed } => {
                let proc_id = self.lives.current(tgid).map(|life| life.proc_id.0);
                let path = path.display();
                let text = if was_probed {
                    format!("{path} is not probed any more in pid {tgid}: {objection}{TOO_LATE}")
                } else {
                    format!("{path} is not probed in pid {tgid}: {objection}")
                };
                self.annotate(proc_id, "warning", text, None);
                self.lost(Some(tgid), "library_not_probed", 1, None);
            }
            Notice::Apart { library, reason, moved } => {
                let text = format!("{} is probed process by process: {reason}", library.as_str());
                self.annotate(None, "warning", text, None);
                for tgid in moved {
                    self.lost(Some(tgid), "probes_moved", 1, None);
                }
            }
            Notice::Braked(braking) => self.braked(braking),
            Notice::NoPython { tgid, reason } => {
                let proc_id = self.lives.current(tgid).map(|life| life.proc_id.0);
                let text = format!("no Python frames: {reason}");
                self.annotate(proc_id, "warning", text, None);
            }
            Notice::MappingsLost(count) => {
                let text = "mapping events were lost; every process was looked through again";
                self.annotate(None, "warning", text.to_owned(), Some(count as i64));
            }
        }
    }

    /// Adds an annotation.
    pub(super) fn annotate(
        &mut self,
        proc_id: Option<i64>,
        kind: &str,
        text: String,
        value: Option<i64>,
    ) {
        let ts_ns = crate::clock::epoch_ns();
        self.add(AnnotationRow { ts_ns, proc_id, kind: kind.to_owned(), text, value });
    }

    /// Adds a loss that was noticed here.
    pub(super) fn lost(&mut self, tgid: Option<u32>, reason: &str, count: i64, bytes: Option<i64>) {
        let proc_id = tgid.and_then(|tgid| Some(self.lives.current(tgid)?.proc_id));
        self.lost_of(proc_id, tgid, reason, count, bytes);
    }

    fn lost_of(
        &mut self,
        proc_id: Option<ProcId>,
        tgid: Option<u32>,
        reason: &str,
        count: i64,
        bytes: Option<i64>,
    ) {
        let ts_ns = crate::clock::epoch_ns();
        self.closed.lost += count.unsigned_abs();
        self.add(LossRow {
            ts_ns,
            window_start_ns: ts_ns,
            proc_id: proc_id.map(|proc_id| proc_id.0),
            pid: tgid.map(|tgid| tgid as i32),
            reason: reason.to_owned(),
            count,
            bytes,
        });
    }

    fn poll(&mut self) {
        self.decide_refusals(self.applied_ns);
        self.write_losses();
        self.write_totals(None);
        self.write_sites_in_time();
        self.polled.sweep();
        self.write_containers();
        self.look_at_costs();
        self.share_ring();
        self.end_missed();
        self.lives.tidy(crate::clock::boot_ns());
    }

    /// Losses since the last time, of the kernel half and of the ledger.
    pub(super) fn write_losses(&mut self) {
        let rows = self.polled.losses(&mut self.lives, self.opening.anchor);
        self.closed.lost += rows.iter().map(|row| row.count.unsigned_abs()).sum::<u64>();
        self.rows.extend(rows.into_iter().map(AnyRow::from));
        for loss in self.ledger.take_losses() {
            // The process may have ended meanwhile: its key is in the loss itself.
            let (proc_id, tgid) = (Some(loss.proc_id), Some(loss.tgid));
            self.lost_of(proc_id, tgid, loss.reason, loss.count, loss.bytes);
        }
    }

    fn checkpoint(&mut self) {
        self.hand_over();
        let mut rows: Vec<_> = self.ledger.live(self.applied_ns).collect();
        if !self.opening.every_tensor {
            rows.extend(self.live_tensors());
        }
        let checkpoint = ToLog::Checkpoint { seq: self.ledger.seq(), rows };
        self.sink.send(checkpoint).unwrap_or_default();
    }

    fn close(mut self, answer: &Sender<Closed>) {
        let rest: Vec<Input> = self.order.drain_all().collect();
        for input in rest {
            self.apply(&input);
        }
        self.ledger.finish();
        self.decide_refusals(i64::MAX);
        self.poll();
        self.write_sites(None);
        self.write_running();
        self.checkpoint();
        self.annotate(None, "stop", "the recording ended".to_owned(), None);
        self.hand_over();
        answer.send(self.closed).unwrap_or_default();
    }
}

/// It takes or gives memory of a size that no call tells.
fn shows_in_nvml_alone(action: Action) -> bool {
    matches!(
        action,
        Action::CtxCreate { .. }
            | Action::PrimaryRetain { .. }
            | Action::CtxDestroy { .. }
            | Action::PrimaryRelease { .. }
            | Action::PrimaryReset { .. }
            | Action::CtxLimit { .. }
            | Action::Module { loads: true, .. }
    )
}
