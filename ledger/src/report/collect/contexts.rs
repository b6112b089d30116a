//! Which contexts each process holds, from the rows about them.

use std::collections::BTreeMap;

use super::facts::Place;
use crate::rows::EventRow;

/// One context of a process.
#[derive(Clone, Debug)]
pub(in crate::report) struct ContextFacts {
    pub(in crate::report) place: Place,
    /// Stack of the call that made it first; 0 = none taken.
    pub(in crate::report) stack_id: i64,
    pub(in crate::report) created_ns: i64,
    /// When it was destroyed, where it was.
    pub(in crate::report) gone_ns: Option<i64>,
    /// Retains of a primary context.
    retains: i64,
}

/// Contexts by process and handle.
pub(in crate::report) type Contexts = BTreeMap<(i64, i64), ContextFacts>;

/// Takes in a row whose `op` is `ctx`. Handles that are not known are left out.
pub(super) fn see(contexts: &mut Contexts, row: &EventRow) {
    let api = row.api.as_ref();
    if row.addr == 0 || row.result != 0 {
        return;
    }
    if api.starts_with("cuCtxCreate") || api.starts_with("cuDevicePrimaryCtxRetain") {
        let uuid = row.gpu_uuid.as_deref();
        let made = || ContextFacts {
            place: Place::of(uuid.filter(|_| row.cuda_ordinal.is_none()), row.cuda_ordinal),
            stack_id: row.stack_id,
            created_ns: row.ts_ns,
            gone_ns: Some(row.ts_ns),
            retains: 0,
        };
        let context = contexts.entry((row.proc_id, row.addr)).or_insert_with(made);
        if context.gone_ns.take().is_some() {
            (context.stack_id, context.created_ns) = (row.stack_id, row.ts_ns);
        }
        context.retains += 1;
        return;
    }
    let Some(context) = contexts.get_mut(&(row.proc_id, row.addr)) else { return };
    // The newer reset keeps the retains, but what the context held is gone.
    let keeps_retains = api.starts_with("cuDevicePrimaryCtxReset_v2");
    context.retains -= i64::from(!keeps_retains);
    if api.starts_with("cuDevicePrimaryCtxRelease") && context.retains > 0 {
        return;
    }
    context.gone_ns.get_or_insert(row.ts_ns);
}
