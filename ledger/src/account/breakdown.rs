//! Where a process's memory on a device went, at one moment, held against NVML's figure.

use std::collections::HashMap;

use crate::{call::ProcId, rows::BreakdownRow};

/// What is known of a process on a device at one moment. Take NVML's figure and the account's so
/// that the account's device bytes were equal before and after the NVML call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// When, nanoseconds since the epoch.
    pub ts_ns: i64,
    /// What NVML charges to the process; `None` where it says "not available".
    pub nvml_used: Option<i64>,
    /// What NVML charged when the agent attached; `None` for a process seen from its start.
    pub baseline: Option<i64>,
    /// Live bytes of level `device`.
    pub live_device: i64,
    /// Live bytes of level `pool`: the pools hold at least these.
    pub live_pool: i64,
    /// Live bytes of level `managed`, wherever they reside.
    pub live_managed: i64,
    /// Live bytes of level `host`.
    pub live_host: i64,
    /// Live bytes of level `imported`.
    pub live_imported: i64,
    /// What `PyTorch` says its tensors hold, where it was heard.
    pub torch_allocated: Option<i64>,
    /// What `PyTorch` says its allocator holds.
    pub torch_reserved: Option<i64>,
}

/// Makes breakdowns; remembers per process and device how much can still be from before attach.
#[derive(Debug, Default)]
pub struct Breakdown {
    before_attach: HashMap<(ProcId, String), i64>,
}

impl Breakdown {
    /// Nothing remembered yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The rows of one moment. `live_device`, `live_pool`, `before_attach` and `unexplained` add up
    /// to `nvml_used` exactly; the others stand beside it. Without NVML's figure there is no
    /// `nvml_used`, no `before_attach` and no `unexplained` row: they are not known.
    ///
    /// `before_attach` is what NVML showed at attach, less what later readings prove gone: an upper
    /// bound that never rises. `live_pool` is a lower bound of what the pools hold, so both are
    /// marked estimated, and `unexplained` too where it depends on one of them. It may be negative
    /// and is never cut off.
    pub fn rows(&mut self, proc_id: ProcId, gpu_uuid: &str, moment: &Moment) -> Vec<BreakdownRow> {
        let row = |category: &str, bytes: i64, estimated: bool| BreakdownRow {
            ts_ns: moment.ts_ns,
            proc_id: proc_id.0,
            gpu_uuid: gpu_uuid.to_owned(),
            category: category.to_owned(),
            library: None,
            bytes,
            estimated,
        };
        let mut rows = Vec::with_capacity(10);
        if let Some(nvml_used) = moment.nvml_used {
            let before = self.before_attach(proc_id, gpu_uuid, moment, nvml_used);
            let explained = moment.live_device + moment.live_pool + before.unwrap_or(0);
            rows.push(row("nvml_used", nvml_used, false));
            rows.extend(before.map(|bytes| row("before_attach", bytes, true)));
            let estimated = before.is_some() || moment.live_pool != 0;
            rows.push(row("unexplained", nvml_used - explained, estimated));
        }
        rows.push(row("live_device", moment.live_device, false));
        rows.push(row("live_pool", moment.live_pool, true));
        rows.extend(moment.torch_allocated.map(|bytes| row("torch_allocated", bytes, false)));
        rows.extend(moment.torch_reserved.map(|bytes| row("torch_reserved", bytes, false)));
        rows.push(row("live_managed", moment.live_managed, false));
        rows.push(row("live_host", moment.live_host, false));
        rows.push(row("live_imported", moment.live_imported, false));
        rows
    }

    /// Forgets a process that ended.
    pub fn forget(&mut self, proc_id: ProcId) {
        self.before_attach.retain(|(of, _), _| *of != proc_id);
    }

    fn before_attach(
        &mut self,
        proc_id: ProcId,
        gpu_uuid: &str,
        moment: &Moment,
        nvml_used: i64,
    ) -> Option<i64> {
        let baseline = moment.baseline?;
        let possible = baseline.min((nvml_used - moment.live_device).max(0));
        let bound = self.before_attach.entry((proc_id, gpu_uuid.to_owned())).or_insert(possible);
        *bound = possible.min(*bound);
        Some(*bound)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(rows: &[BreakdownRow], category: &str) -> Option<i64> {
        rows.iter().find(|row| row.category == category).map(|row| row.bytes)
    }

    fn rows(
        of: &mut Breakdown,
        nvml: i64,
        device: i64,
        baseline: Option<i64>,
    ) -> Vec<BreakdownRow> {
        let moment =
            Moment { nvml_used: Some(nvml), live_device: device, baseline, ..Moment::default() };
        of.rows(ProcId(1), "GPU-x", &moment)
    }

    #[test]
    fn before_attach_shrinks_as_readings_prove_it_gone_and_never_rises() {
        let mut breakdown = Breakdown::new();
        for (nvml, device, before, unexplained) in
            [(500, 0, 500, 0), (700, 200, 500, 0), (600, 300, 300, 0), (900, 300, 300, 300)]
        {
            let rows = rows(&mut breakdown, nvml, device, Some(500));
            assert_eq!(bytes(&rows, "before_attach"), Some(before));
            assert_eq!(bytes(&rows, "unexplained"), Some(unexplained));
        }
        breakdown.forget(ProcId(1));
        let rows = rows(&mut breakdown, 900, 300, Some(500));
        assert_eq!(bytes(&rows, "before_attach"), Some(500));
    }

    #[test]
    fn a_process_seen_from_its_start_has_nothing_from_before() {
        let rows = rows(&mut Breakdown::new(), 900, 300, None);
        assert_eq!(bytes(&rows, "before_attach"), None);
        assert_eq!(bytes(&rows, "unexplained"), Some(600));
    }

    #[test]
    fn without_nvml_nothing_is_made_up() {
        let moment = Moment { live_device: 7, baseline: Some(5), ..Moment::default() };
        let rows = Breakdown::new().rows(ProcId(1), "GPU-x", &moment);
        for category in ["nvml_used", "unexplained", "before_attach", "torch_reserved"] {
            assert_eq!(bytes(&rows, category), None, "{category}");
        }
        assert_eq!(bytes(&rows, "live_device"), Some(7));
    }

    #[test]
    fn more_live_than_nvml_shows_is_negative_as_it_is() {
        let rows = rows(&mut Breakdown::new(), 100, 300, None);
        assert_eq!(bytes(&rows, "unexplained"), Some(-200));
    }

    proptest! {
        #[test]
        fn the_parts_add_up(
            steps in prop::collection::vec((0..1i64 << 40, 0..1i64 << 40, 0..1i64 << 40), 1..20),
            baseline in prop::option::of(0..1i64 << 40),
        ) {
            let mut breakdown = Breakdown::new();
            for (nvml, live_device, live_pool) in steps {
                let moment = Moment {
                    nvml_used: Some(nvml), live_device, live_pool, baseline, ..Moment::default()
                };
                let rows = breakdown.rows(ProcId(1), "GPU-x", &moment);
                let parts = ["live_device", "live_pool", "before_attach", "unexplained"];
                let sum: i64 = parts.iter().filter_map(|part| bytes(&rows, part)).sum();
                prop_assert_eq!(sum, nvml);
            }
        }
    }
}
