//! Requests that were refused for lack of memory: how they ended, and what was held at that moment.

use std::collections::HashMap;

use ledger::{
    account::breakdown::whole,
    call::{Action, Call, Level, ProcId},
    rows::{EventRow, OomRow},
};

use super::{books::Books, breakdown::TorchNow, readings::Reading};
use crate::nvml::ProcessReading;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// So long after a refusal the same thread may try again, or PyTorch give up, because of it.
const DECIDED_NS: i64 = 1_000_000_000;
/// The moment of a refusal of one size is kept in full at most so often: a loop that is refused again
/// and again would fill the log.
const FULL_NS: i64 = 1_000_000_000;
/// Sizes that are remembered for that.
const MAX_SIZES: usize = 1024;
/// Refusals of one thread that wait to be decided.
const MAX_WAITING: usize = 64;

/// Refusals whose end is not known yet, by process and thread.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    waiting: HashMap<(i64, i32), Vec<OomRow>>,
    /// When the moment of a refusal was last kept, by process, function and size.
    kept_ns: HashMap<Kind, i64>,
}

/// Refusals that are alike: process, function, size.
type Kind = (i64, String, Option<i64>);

impl Refusals {
    /// Forgets an ended process.
    fn forget(&mut self, proc_id: i64) {
        self.waiting.retain(|(of, _), _| *of != proc_id);
        self.kept_ns.retain(|(of, ..), _| *of != proc_id);
    }
}

impl Books {
    /// Takes in an event: a refusal by the driver, or a success that ends one.
    pub(super) fn refused_by_driver(&mut self, row: &EventRow) {
        if row.op == "fail" && row.result == OUT_OF_MEMORY {
            self.refuse(row);
        } else if row.op == "alloc" && !self.refusals.waiting.is_empty() {
            self.tried_again(row);
        }
    }

    fn refuse(&mut self, row: &EventRow) {
        let torch = self.polled.totals_of(row.pid as u32, row.cuda_ordinal);
        let oom = OomRow {
            ts_ns: row.ts_ns,
            tid: row.tid,
            api: row.api.clone().into_owned(),
            size_bytes: row.size_bytes,
            nvml_index: row.nvml_index,
            stack_id: row.stack_id,
            torch_allocated_bytes: torch.map(|totals| totals.allocated_bytes as i64),
            torch_reserved_bytes: torch.map(|totals| totals.reserved_bytes as i64),
            memory: Some(memory_of(&row.level).to_owned()),
            ..self.held(row.proc_id, row.pid as u32, row.gpu_uuid.clone())
        };
        self.keep_moment(&oom);
        let waiting = self.refusals.waiting.entry((row.proc_id, row.tid)).or_default();
        waiting.push(oom);
        if waiting.len() > MAX_WAITING {
            let oldest = waiting.remove(0);
            self.decided(oldest, "refused");
        }
    }

    /// The same size on the same thread went well: mostly after PyTorch gave its cache back.
    fn tried_again(&mut self, row: &EventRow) {
        let key = (row.proc_id, row.tid);
        let Some(waiting) = self.refusals.waiting.get_mut(&key) else { return };
        let same = |oom: &mut OomRow| oom.size_bytes == row.size_bytes && oom.api == row.api;
        let ended: Vec<OomRow> = waiting.extract_if(.., same).collect();
        for oom in ended {
            self.decided(oom, "retried");
        }
    }

    /// Tells of a refusal by `PyTorch`, if the call is the report of one: what the driver refused on
    /// that thread just before is the same request.
    pub(super) fn refused_by_torch(&mut self, call: &Call) {
        let Action::TorchOom { size_bytes, allocated_bytes, reserved_bytes, ordinal } = call.action
        else {
            return;
        };
        let (nvml_index, gpu_uuid) = self.gpu_of(call.proc_id, ordinal as u32);
        let key = (call.proc_id.0, call.tid as i32);
        for oom in self.refusals.waiting.remove(&key).unwrap_or_default() {
            self.decided(oom, "raised");
        }
        let oom = OomRow {
            ts_ns: call.exit_ns,
            tid: call.tid as i32,
            api: call.api.to_owned(),
            size_bytes: i64::try_from(size_bytes).ok(),
            nvml_index,
            stack_id: call.stack_id,
            torch_allocated_bytes: Some(allocated_bytes as i64),
            torch_reserved_bytes: Some(reserved_bytes as i64),
            memory: Some("device".to_owned()),
            ..self.held(call.proc_id.0, call.tgid, gpu_uuid)
        };
        self.keep_moment(&oom);
        self.decided(oom, "raised");
    }

    /// What was neither tried again nor given up by PyTorch: the program was told.
    pub(super) fn decide_refusals(&mut self, now_ns: i64) {
        let due = |oom: &mut OomRow| oom.ts_ns + DECIDED_NS < now_ns;
        let mut ended: Vec<OomRow> = Vec::new();
        self.refusals.waiting.retain(|_, waiting| {
            ended.extend(waiting.extract_if(.., due));
            !waiting.is_empty()
        });
        for oom in ended {
            self.decided(oom, "refused");
        }
    }

    /// A process ends: what it was refused is decided.
    pub(super) fn end_refusals(&mut self, proc_id: i64) {
        let its = self.refusals.waiting.extract_if(|(of, _), _| *of == proc_id);
        let ended: Vec<OomRow> = its.flat_map(|(_, waiting)| waiting).collect();
        for oom in ended {
            self.decided(oom, "refused");
        }
        self.refusals.forget(proc_id);
    }

    fn decided(&mut self, oom: OomRow, outcome: &str) {
        self.add(OomRow { outcome: Some(outcome.to_owned()), ..oom });
    }

    /// What the process held by the account, and what was used of the device.
    fn held(&self, proc_id: i64, tgid: u32, gpu_uuid: Option<String>) -> OomRow {
        let uuid = gpu_uuid.as_deref();
        let device = uuid.and_then(|uuid| self.readings.device(uuid));
        let (device_used_bytes, device_total_bytes) = device.unwrap_or_default();
        let process = self.state.process(proc_id);
        OomRow {
            proc_id,
            process_live_bytes: process.map(|process| process.live_bytes(Level::Device)),
            device_used_bytes,
            device_total_bytes,
            others_bytes: uuid.and_then(|uuid| self.others_bytes(uuid, tgid)),
            gpu_uuid,
            ..OomRow::default()
        }
    }

    /// Writes what every process on the device held at the moment of a refusal: blocks as they were,
    /// what only NVML tells as of its last reading.
    fn keep_moment(&mut self, oom: &OomRow) {
        let Some(uuid) = oom.gpu_uuid.clone() else { return };
        let kind = (oom.proc_id, oom.api.clone(), oom.size_bytes);
        let kept_ns = &mut self.refusals.kept_ns;
        if kept_ns.get(&kind).is_some_and(|last_ns| oom.ts_ns - last_ns < FULL_NS) {
            return;
        }
        if kept_ns.len() >= MAX_SIZES {
            kept_ns.clear();
        }
        kept_ns.insert(kind, oom.ts_ns);
        let listed = self.readings.listed_on(&uuid).unwrap_or_default().to_vec();
        let reading = Reading {
            ts_ns: oom.ts_ns,
            read_ns: 0,
            gpu_uuid: uuid,
            processes: None,
            device_bytes: None,
            torch: self.torch_at(oom),
        };
        for process in &listed {
            self.keep_share(&reading, process);
        }
    }

    /// `PyTorch` as it is now; of the process that was refused, as it said itself.
    fn torch_at(&mut self, oom: &OomRow) -> std::sync::Arc<TorchNow> {
        let now = self.readings.torch_now(&self.polled, &self.stacks);
        let (Some(allocated), Some(reserved), "c10") =
            (oom.torch_allocated_bytes, oom.torch_reserved_bytes, oom.api.as_str())
        else {
            return now.as_of(self.opening.anchor.boot(oom.ts_ns));
        };
        let (proc_id, uuid) = (ProcId(oom.proc_id), oom.gpu_uuid.as_deref().unwrap_or_default());
        let ordinal = self.opening.devices.ordinal_of(proc_id, uuid);
        let tgid = self.lives.by_id(proc_id).map(|life| life.tgid);
        match tgid.zip(ordinal) {
            Some((tgid, ordinal)) => now.said((tgid, ordinal as u32), allocated, reserved),
            None => now,
        }
    }

    fn keep_share(&mut self, reading: &Reading, process: &ProcessReading) {
        let boot_ns = self.opening.anchor.boot(reading.ts_ns);
        let traced = self.lives.at(process.pid, boot_ns).filter(|life| life.row.is_some());
        let rows = if let Some(proc_id) = traced.map(|life| life.proc_id) {
            let moment = self.moment(reading, process, proc_id);
            self.breakdown.snapshot(proc_id, &reading.gpu_uuid, moment)
        } else {
            let known = self.listed_process(process.pid).zip(process.used_bytes);
            let all = |(proc_id, used): (ProcId, u64)| {
                whole(proc_id, &reading.gpu_uuid, reading.ts_ns, used as i64)
            };
            known.map(all).unwrap_or_default()
        };
        for row in rows {
            self.add(row);
        }
    }
}

/// What there was not enough of, by the level of the request.
fn memory_of(level: &str) -> &'static str {
    match Level::parse(level) {
        Some(Level::Host) => "host",
        Some(Level::Virtual) => "address_space",
        _ => "device",
    }
}

#[cfg(test)]
mod tests {
    use super::memory_of;

    #[test]
    fn what_there_was_not_enough_of() {
        for (level, memory) in [
            ("device", "device"),
            ("pool", "device"),
            ("host", "host"),
            ("virtual", "address_space"),
        ] {
            assert_eq!(memory_of(level), memory);
        }
    }
}
