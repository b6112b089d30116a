//! Which event numbers a log does not have.

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::Int64Type;

use super::{
    order::InOrder,
    part::{BATCH_ROWS, Columns, PartBatches},
    scan::Part,
};
use crate::log::{
    error::{LogError, Result},
    name::Run8,
};

/// Events that are missing in a run: deleted by `--max-disk`, dropped while the log could not be
/// written, or removed by somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The run.
    pub run: Run8,
    /// First missing `seq`.
    pub first: i64,
    /// Last missing `seq`.
    pub last: i64,
}

/// The gaps of one run, whose events are numbered from 0 or 1.
pub(super) fn gaps(run: Run8, parts: &[&Part]) -> Result<Vec<Gap>> {
    match ranges(parts) {
        Some(ranges) if is_gapless_inside(&ranges) => Ok(between(run, &ranges)),
        _ => by_reading(run, parts),
    }
}

/// (first, last, rows) of every file with rows, by first; `None` where a file does not tell.
fn ranges(parts: &[&Part]) -> Option<Vec<(i64, i64, u64)>> {
    let with_rows = parts.iter().filter(|part| part.rows > 0);
    let mut ranges = with_rows
        .map(|part| part.seqs.map(|(first, last)| (first, last, part.rows)))
        .collect::<Option<Vec<_>>>()?;
    ranges.sort_unstable();
    Some(ranges)
}

/// Whether no file misses a number or shares one with another.
fn is_gapless_inside(ranges: &[(i64, i64, u64)]) -> bool {
    let full =
        ranges.iter().all(|&(first, last, rows)| last.abs_diff(first).saturating_add(1) == rows);
    let apart = ranges.windows(2).all(|pair| matches!(pair, [a, b] if a.1 < b.0));
    full && apart
}

fn between(run: Run8, ranges: &[(i64, i64, u64)]) -> Vec<Gap> {
    let mut collector = Collector::new(run);
    for &(first, last, _) in ranges {
        collector.see(first);
        collector.expected = collector.expected.max(last.saturating_add(1));
    }
    collector.gaps
}

/// Reads the `seq` column of every file.
fn by_reading(run: Run8, parts: &[&Part]) -> Result<Vec<Gap>> {
    let seqs = parts.iter().flat_map(|part| {
        let (batches, error) = match PartBatches::open(part, Columns::One("seq"), BATCH_ROWS) {
            Ok(batches) => (Some(batches), None),
            Err(e) => (None, Some(Err(e))),
        };
        let seqs = batches.into_iter().flatten().flat_map(|batch| batch_seqs(part, batch));
        error.into_iter().chain(seqs)
    });
    let mut collector = Collector::new(run);
    for seq in InOrder::new(seqs, None) {
        collector.see(seq?);
    }
    Ok(collector.gaps)
}

/// The numbers of one batch: a merged file is too large to hold those of all.
fn batch_seqs(part: &Part, batch: Result<RecordBatch>) -> Vec<Result<i64>> {
    let batch = match batch {
        Ok(batch) => batch,
        Err(e) => return vec![Err(e)],
    };
    let column = batch.column_by_name("seq");
    let column = column.and_then(|column| column.as_primitive_opt::<Int64Type>());
    match column.filter(|column| column.null_count() == 0) {
        Some(column) => column.values().iter().copied().map(Ok).collect(),
        None => vec![Err(LogError::content(&part.path, "it has no column seq of type i64"))],
    }
}

struct Collector {
    run: Run8,
    gaps: Vec<Gap>,
    /// The number after the highest seen; a run may begin with 0 or 1.
    expected: i64,
}

impl Collector {
    fn new(run: Run8) -> Self {
        Self { run, gaps: Vec::new(), expected: 1 }
    }

    fn see(&mut self, seq: i64) {
        if seq > self.expected {
            self.gaps.push(Gap { run: self.run, first: self.expected, last: seq - 1 });
        }
        self.expected = self.expected.max(seq.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_tell_gaps_at_the_start_and_between_files() {
        let run = Run8::of("00000000").unwrap();
        let gap = |first, last| Gap { run, first, last };
        assert_eq!(between(run, &[(0, 4, 5), (5, 9, 5)]), []);
        assert_eq!(between(run, &[(1, 4, 4), (7, 9, 3)]), [gap(5, 6)]);
        assert_eq!(between(run, &[(10, 19, 10)]), [gap(1, 9)]);
        assert!(is_gapless_inside(&[(0, 4, 5), (7, 9, 3)]));
        assert!(!is_gapless_inside(&[(0, 4, 4)]));
        assert!(!is_gapless_inside(&[(0, 5, 6), (4, 9, 6)]));
    }
}
