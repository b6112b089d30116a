//! The parts of NVML's figure, out of rows of the log.

use super::{
    model::{Breakdown, Part},
    stacks::Stacks,
};
use crate::{
    account::breakdown::{DEVICE_PARTS, PARTS},
    rows::BreakdownRow,
};

/// The parts in logs of the first version, which told no owners.
const FIRST_PARTS: [&str; 4] = ["live_device", "live_pool", "before_attach", "unexplained"];

impl Breakdown {
    /// The breakdown of the rows of one moment, if they have a sum.
    pub(super) fn of(rows: &[BreakdownRow], stacks: &Stacks) -> Option<Self> {
        let has = |category: &str| rows.iter().any(|row| row.category == category);
        let (sum, parts) = match () {
            () if has("device_used") => ("device_used", &DEVICE_PARTS[..]),
            () if has("rounding") || has("not_traced") => ("nvml_used", &PARTS[..]),
            () => ("nvml_used", &FIRST_PARTS[..]),
        };
        let sum = rows.iter().find(|row| row.category == sum)?;
        let rows = |category: &'static str| rows.iter().filter(move |row| row.category == category);
        Some(Self {
            ts_ns: sum.ts_ns,
            nvml_used_bytes: sum.bytes,
            parts: parts.iter().flat_map(|of| rows(of)).map(|row| part(row, stacks)).collect(),
        })
    }

    /// Bytes of a category; `None` where it is not among the parts.
    pub(super) fn bytes(&self, category: &str) -> Option<i64> {
        let parts = self.parts.iter().filter(|part| part.category == category);
        parts.map(|part| part.bytes).reduce(i64::saturating_add)
    }
}

fn part(row: &BreakdownRow, stacks: &Stacks) -> Part {
    let site = row.pinned_by_stack_id.and_then(|stack_id| stacks.site(stack_id));
    Part {
        category: row.category.clone(),
        library: row.library.clone(),
        bytes: row.bytes,
        estimated: row.estimated,
        pinned_by_blocks: row.pinned_by_blocks,
        pinned_by_site: site.map(str::to_owned),
    }
}
