//! Requests that were refused for lack of memory, with what was held at the time.

use ledger::{
    call::{Action, Call, Level},
    rows::{EventRow, OomRow},
};

use super::books::Books;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

impl Books {
    /// Tells of a refusal by the driver, if the event is one.
    pub(super) fn refused_by_driver(&mut self, row: &EventRow) {
        if row.op != "fail" || row.result != OUT_OF_MEMORY {
            return;
        }
        let torch = self.polled.totals_of(row.pid as u32, row.cuda_ordinal);
        self.add(OomRow {
            ts_ns: row.ts_ns,
            tid: row.tid,
            api: row.api.clone().into_owned(),
            size_bytes: row.size_bytes,
            nvml_index: row.nvml_index,
            stack_id: row.stack_id,
            torch_allocated_bytes: torch.map(|totals| totals.allocated_bytes as i64),
            torch_reserved_bytes: torch.map(|totals| totals.reserved_bytes as i64),
            ..self.held(row.proc_id, row.gpu_uuid.clone())
        });
    }

    /// Tells of a refusal by `PyTorch`, if the call is the report of one. The driver has refused
    /// before that, most likely twice.
    pub(super) fn refused_by_torch(&mut self, call: &Call) {
        let Action::TorchOom { size_bytes, allocated_bytes, reserved_bytes, ordinal } = call.action
        else {
            return;
        };
        let (nvml_index, gpu_uuid) = self.gpu_of(call.proc_id, ordinal as u32);
        self.add(OomRow {
            ts_ns: call.exit_ns,
            tid: call.tid as i32,
            api: call.api.to_owned(),
            size_bytes: i64::try_from(size_bytes).ok(),
            nvml_index,
            stack_id: call.stack_id,
            torch_allocated_bytes: Some(allocated_bytes as i64),
            torch_reserved_bytes: Some(reserved_bytes as i64),
            ..self.held(call.proc_id.0, gpu_uuid)
        });
    }

    /// What the process held by the account, and what was used of the device.
    fn held(&self, proc_id: i64, gpu_uuid: Option<String>) -> OomRow {
        let device = gpu_uuid.as_deref().and_then(|uuid| self.readings.device(uuid));
        let (device_used_bytes, device_total_bytes) = device.unwrap_or_default();
        let process = self.state.process(proc_id);
        OomRow {
            proc_id,
            gpu_uuid,
            process_live_bytes: process.map(|process| process.live_bytes(Level::Device)),
            device_used_bytes,
            device_total_bytes,
            ..OomRow::default()
        }
    }
}
