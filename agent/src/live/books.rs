//! The state thread: everything that was seen, put in order, accounted for, and handed to the log.

use std::{
    collections::VecDeque,
    sync::mpsc::{Receiver, Sender, SyncSender},
    time::{Duration, Instant},
};

use agent_common::{
    call::{KIND_NOTE, RawCall},
    life::{KIND_EXIT, RawLife},
};
use ledger::{
    account::{Ledger, breakdown::Breakdown, order::Order, state::State},
    call::{Action, Call, Input, ProcId},
    rows::{AnnotationRow, EventRow, LossRow, OomRow, ProcessRow},
};
use tracing::debug;

use super::{
    Message,
    devices::Devices,
    lives::{Life, Lives},
    polled::Polled,
    readings::Readings,
    sink::{AnyRow, ToLog},
    stacks::Stacks,
};
use crate::{
    attach::Notice,
    clock::Anchor,
    decode,
    host::{CommandDetail, Env, Host, Identity},
    kernel::Counters,
};

/// Calls that return out of order by less than this are put in order before they are applied; a
/// slower free is paired by its time all the same.
const WINDOW_NS: i64 = 20_000_000;
/// Inputs held back at once.
const ORDER_CAPACITY: usize = 1 << 18;
/// Pace of loss counters and `PyTorch` totals.
const POLL: Duration = Duration::from_millis(250);
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

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
    /// How much of command lines.
    pub(super) commands: CommandDetail,
    /// Processes that were not followed before may be met (`record`).
    pub(super) host_wide: bool,
}

/// The books.
pub(super) struct Books {
    pub(super) opening: Opening,
    pub(super) lives: Lives,
    order: Order,
    pub(super) ledger: Ledger,
    pub(super) state: State,
    pub(super) breakdown: Breakdown,
    pub(super) readings: Readings,
    pub(super) polled: Polled,
    pub(super) stacks: Stacks,
    rows: Vec<AnyRow>,
    events: Vec<EventRow>,
    sink: SyncSender<ToLog>,
    /// Moment up to which everything was applied, epoch nanoseconds.
    applied_ns: i64,
    closed: Closed,
}

impl Books {
    /// Empty books.
    pub(super) fn new(opening: Opening, counters: Counters, sink: SyncSender<ToLog>) -> Self {
        Self {
            lives: Lives::new(opening.host.boot_id()),
            order: Order::new(ORDER_CAPACITY),
            ledger: Ledger::new(),
            state: State::new(),
            breakdown: Breakdown::new(),
            readings: Readings::default(),
            polled: Polled::new(counters),
            stacks: Stacks::default(),
            rows: Vec::new(),
            events: Vec::new(),
            sink,
            applied_ns: i64::MIN,
            closed: Closed::default(),
            opening,
        }
    }

    /// Serves messages until the stop.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut next_poll = Instant::now() + POLL;
        while let Ok(message) = messages.recv() {
            match message {
                Message::Batch(batch) => self.batch(&batch),
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
            // The log's thread outlives this one; if it died, its panic is the news.
            self.sink.send(ToLog::Rows(std::mem::take(&mut self.rows))).unwrap_or_default();
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

    fn begin(&mut self, life: &RawLife) {
        self.lives.begin(life.tgid, life.start_ns).told.learn(life);
    }

    /// The life that a record belongs to. A process whose beginning was lost is looked up.
    fn life_of(&mut self, tgid: u32, ts_ns: u64) -> &mut Life {
        if self.lives.at(tgid, ts_ns).is_none() {
            let start_ns = self.opening.host.start_boot_ns(tgid).unwrap_or(ts_ns);
            self.lives.begin(tgid, start_ns.min(ts_ns));
        }
        self.lives.at_or_begin(tgid, ts_ns)
    }

    fn call(&mut self, raw: &RawCall) {
        if raw.kind == KIND_NOTE {
            return self.backward(raw);
        }
        let decoded = decode::probe(raw)
            .ok()
            .and_then(|probe| Some((probe, decode::action(raw, probe.meaning)?)));
        let Some((probe, action)) = decoded else {
            return self.lost(None, "undecodable", 1, None);
        };
        let life = self.life_of(raw.tgid, raw.exit_ns);
        let (proc_id, known) = (life.proc_id, life.row.is_some());
        if !known {
            self.announce(raw.tgid, proc_id);
        }
        if let Action::DeviceUuid { ordinal, uuid } = action
            && raw.result == 0
        {
            let device = self.opening.devices.by_uuid(proc_id, ordinal, uuid);
            self.ledger.set_device(proc_id, ordinal, device);
        }
        self.order.push(Input::Call(Call {
            proc_id,
            tgid: raw.tgid,
            tid: raw.tid,
            api: probe.api(),
            enter_ns: self.opening.anchor.epoch(raw.enter_ns),
            exit_ns: self.opening.anchor.epoch(raw.exit_ns),
            result: raw.result,
            stack_id: self.stacks.id_of(raw.tgid, raw.stack_key).unwrap_or(0),
            action,
        }));
    }

    /// A backward pass began.
    fn backward(&mut self, raw: &RawCall) {
        let ts_ns = self.opening.anchor.epoch(raw.enter_ns);
        let proc_id = self.life_of(raw.tgid, raw.enter_ns).proc_id;
        self.stacks.backward(proc_id, ts_ns, raw.words[0] as i64);
    }

    /// First traced call of a process: who it is.
    pub(super) fn announce(&mut self, tgid: u32, proc_id: ProcId) {
        self.closed.processes += 1;
        let early = self.lives.by_id(proc_id).and_then(|life| life.early.take());
        // What was read when the program began is whole; a process that is ending by now has lost
        // its environment already.
        let row = match early.or_else(|| self.identity(tgid, proc_id)) {
            Some(identity) => {
                self.set_devices(tgid, proc_id, &identity.env);
                identity.row
            }
            None => self.told(tgid, proc_id),
        };
        debug!(tgid, command = row.command, "first traced call");
        let Some(life) = self.lives.by_id(proc_id) else { return };
        life.row = Some(row);
        let late = life.late;
        if late {
            self.ledger.set_attached_late(proc_id);
        }
        self.write_process(proc_id);
        self.write_libraries(tgid, proc_id);
    }

    /// What `/proc` says of a process, while it is there.
    fn identity(&self, tgid: u32, proc_id: ProcId) -> Option<Identity> {
        let identity = self.opening.host.identity(tgid, self.opening.commands);
        identity.filter(|identity| identity.row.proc_id == proc_id.0)
    }

    /// The row of a process of which `/proc` says nothing any more.
    fn told(&mut self, tgid: u32, proc_id: ProcId) -> ProcessRow {
        let row = ProcessRow {
            proc_id: proc_id.0,
            pid: tgid as i32,
            host: self.opening.host.name().to_owned(),
            ..ProcessRow::default()
        };
        let Some(life) = self.lives.by_id(proc_id) else { return row };
        ProcessRow {
            comm: life.told.comm.clone(),
            uid: life.told.uid.map(|uid| uid as i32),
            ppid: life.told.ppid.map(|ppid| ppid as i32),
            start_ns: Some(self.opening.anchor.epoch(life.start_ns)),
            ..row
        }
    }

    fn set_devices(&mut self, tgid: u32, proc_id: ProcId, env: &Env) {
        let Opening { devices, host, .. } = &mut self.opening;
        for (ordinal, device) in devices.by_environment(host, tgid, proc_id, env) {
            self.ledger.set_device(proc_id, ordinal, device);
        }
    }

    fn write_libraries(&mut self, tgid: u32, proc_id: ProcId) {
        let now_ns = crate::clock::epoch_ns();
        for mut row in self.opening.host.library_rows(tgid, proc_id).unwrap_or_default() {
            row.ts_ns = now_ns;
            if let Some((probes, available)) = self.readings.probes_of(&row.path) {
                row.probes = probes;
                row.probes_available = available;
            }
            self.add(row);
        }
    }

    /// Writes what is known of a process now; readers take the latest row.
    fn write_process(&mut self, proc_id: ProcId) {
        let from_start = self.ledger.from_start(proc_id);
        let Some(life) = self.lives.by_id(proc_id) else { return };
        let Some(known) = life.row.as_mut() else { return };
        // The ledger forgets a process that ended.
        known.from_start |= from_start;
        let mut row = known.clone();
        row.attached_ns = life.attached_ns;
        row.ts_ns = crate::clock::epoch_ns();
        self.opening.detail.clone_into(&mut row.detail);
        self.add(row);
    }

    fn end(&mut self, raw: &RawLife) {
        let ts_ns = self.opening.anchor.epoch(raw.ts_ns);
        let life = self.lives.begin(raw.tgid, raw.start_ns);
        let proc_id = life.proc_id;
        if raw.kind == KIND_EXIT {
            life.ended_ns = Some(raw.ts_ns);
            let exit_code = raw.exit_code;
            self.order.push(Input::Exit { proc_id, tgid: raw.tgid, ts_ns, exit_code });
        } else {
            life.told.learn(raw);
            self.order.push(Input::Exec { proc_id, tgid: raw.tgid, ts_ns });
            self.meet_again(raw.tgid, proc_id);
        }
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
            if row.op == "fail" && row.result == OUT_OF_MEMORY {
                let oom = self.oom(&row);
                self.add(oom);
            }
            self.add(row);
        }
        self.events = events;
        match input {
            Input::Call(call) if call.action == Action::Init => self.write_process(call.proc_id),
            Input::Exit { proc_id, tgid, ts_ns, exit_code } => {
                self.finish_process(*proc_id, *tgid, *ts_ns, *exit_code);
            }
            Input::Exec { proc_id, .. } => self.executed(*proc_id),
            Input::Call(_) => {}
        }
    }

    /// Another program: its name and environment are new. They are read when the record of the exec
    /// comes, not when it is applied: a short program is gone by then.
    fn meet_again(&mut self, tgid: u32, proc_id: ProcId) {
        let identity = self.identity(tgid, proc_id);
        let Some(life) = self.lives.by_id(proc_id) else { return };
        let Some(row) = life.row.as_mut() else {
            life.early = identity;
            return;
        };
        row.from_start = false;
        if let Some(identity) = identity {
            *row = identity.row;
            let Opening { devices, host, .. } = &mut self.opening;
            devices.by_environment(host, tgid, proc_id, &identity.env);
        } else {
            self.opening.devices.forget(proc_id);
        }
    }

    /// The account of the new program begins, without any devices.
    fn executed(&mut self, proc_id: ProcId) {
        for (ordinal, device) in self.opening.devices.all(proc_id) {
            self.ledger.set_device(proc_id, ordinal, device);
        }
        self.write_process(proc_id);
    }

    fn finish_process(&mut self, proc_id: ProcId, tgid: u32, ts_ns: i64, exit_code: i32) {
        self.write_totals(Some(tgid));
        self.write_sites(Some(tgid));
        if let Some(life) = self.lives.by_id(proc_id)
            && let Some(row) = life.row.as_mut()
        {
            row.end_ns = Some(ts_ns);
            row.exit_code = Some(shell_code(exit_code));
            self.write_process(proc_id);
        }
        self.write_losses();
        self.polled.forget(tgid, self.opening.anchor.boot(ts_ns));
        self.stacks.forget(tgid, proc_id);
        self.state.forget(proc_id.0);
        self.breakdown.forget(proc_id);
        self.opening.devices.forget(proc_id);
        self.readings.forget(proc_id);
    }

    fn oom(&self, row: &EventRow) -> OomRow {
        let (used, total) =
            row.gpu_uuid.as_deref().and_then(|uuid| self.readings.device(uuid)).unwrap_or_default();
        let ordinal = row.cuda_ordinal;
        let torch = self.polled.totals_of(row.pid as u32, ordinal);
        OomRow {
            ts_ns: row.ts_ns,
            proc_id: row.proc_id,
            tid: row.tid,
            api: row.api.clone().into_owned(),
            size_bytes: row.size_bytes,
            nvml_index: row.nvml_index,
            gpu_uuid: row.gpu_uuid.clone(),
            stack_id: row.stack_id,
            process_live_bytes: self
                .state
                .process(row.proc_id)
                .map(|process| process.live_bytes(ledger::call::Level::Device)),
            device_used_bytes: used,
            device_total_bytes: total,
            torch_allocated_bytes: torch.map(|totals| totals.allocated_bytes as i64),
            torch_reserved_bytes: torch.map(|totals| totals.reserved_bytes as i64),
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

    /// A process that had the library before the recording began: what it holds is "before attach".
    fn found_running(&mut self, tgid: u32) {
        let Some(start_ns) = self.opening.host.start_boot_ns(tgid) else { return };
        let life = self.lives.begin(tgid, start_ns);
        life.late = true;
        let proc_id = life.proc_id;
        if !self.opening.host_wide {
            self.announce(tgid, proc_id);
        }
        let text = "was running with the CUDA driver library loaded: what it held is one sum";
        self.annotate(Some(proc_id.0), "late_attach", text.to_owned(), None);
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
        self.write_losses();
        self.write_totals(None);
        self.write_sites_in_time();
        self.polled.sweep();
        self.write_containers();
        self.lives.tidy(crate::clock::boot_ns());
    }

    /// Losses since the last time, of the kernel half and of the ledger.
    fn write_losses(&mut self) {
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

    fn write_running(&mut self) {
        let running: Vec<ProcId> = self.lives.running().map(|life| life.proc_id).collect();
        for proc_id in running {
            self.write_process(proc_id);
        }
    }

    fn close(mut self, answer: &Sender<Closed>) {
        let rest: Vec<Input> = self.order.drain_all().collect();
        for input in rest {
            self.apply(&input);
        }
        self.ledger.finish();
        self.poll();
        self.write_sites(None);
        self.write_running();
        self.checkpoint();
        self.annotate(None, "stop", "the recording ended".to_owned(), None);
        self.hand_over();
        answer.send(self.closed).unwrap_or_default();
    }
}

/// `wait` status as shells show it.
fn shell_code(status: i32) -> i32 {
    match status & 0x7f {
        0 => status >> 8 & 0xff,
        signal => 128 + signal,
    }
}

#[cfg(test)]
mod tests {
    use super::shell_code;

    #[test]
    fn exit_codes_are_the_shells() {
        assert_eq!(shell_code(0), 0);
        assert_eq!(shell_code(3 << 8), 3);
        assert_eq!(shell_code(9), 137);
        assert_eq!(shell_code(0xb | 0x80), 139);
    }
}
