//! Events in order: by `seq` within a run, by time across runs, with bounded memory.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{
    part::{BATCH_ROWS, PartRows},
    scan::Part,
};
use crate::{log::error::Result, log::name::Run8, rows::EventRow};

/// Rows held back at most, waiting for one with a lower `seq`. The ledger orders within a window
/// much smaller than this before it numbers events, so a longer wait means that rows are missing.
const WINDOW_ROWS: usize = 65_536;

/// Something with a number.
pub(super) trait Numbered {
    fn seq(&self) -> i64;
}

impl Numbered for EventRow {
    fn seq(&self) -> i64 {
        self.seq
    }
}

impl Numbered for i64 {
    fn seq(&self) -> i64 {
        *self
    }
}

/// Orders the heap by `seq`.
struct BySeq<T>(T);

impl<T: Numbered> PartialEq for BySeq<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0.seq() == other.0.seq()
    }
}
impl<T: Numbered> Eq for BySeq<T> {}
impl<T: Numbered> PartialOrd for BySeq<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T: Numbered> Ord for BySeq<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.seq().cmp(&other.0.seq())
    }
}

/// Sorts what is nearly sorted by `seq`. Numbers have no gaps, so the next one is known; only
/// where it does not come within the window is it taken for missing.
pub(super) struct InOrder<T, I> {
    source: I,
    heap: BinaryHeap<Reverse<BySeq<T>>>,
    expected: Option<i64>,
    window: usize,
    ended: bool,
}

impl<T: Numbered, I: Iterator<Item = Result<T>>> InOrder<T, I> {
    pub(super) fn new(source: I, first: Option<i64>) -> Self {
        Self { source, heap: BinaryHeap::new(), expected: first, window: WINDOW_ROWS, ended: false }
    }

    fn is_next(&self, seq: i64) -> bool {
        // At or below: a row that came too late for the window, which must not be lost.
        self.expected.is_some_and(|expected| seq <= expected)
    }

    fn emit(&mut self, item: T) -> T {
        let after = item.seq().saturating_add(1);
        self.expected = Some(self.expected.map_or(after, |expected| expected.max(after)));
        item
    }
}

impl<T: Numbered, I: Iterator<Item = Result<T>>> Iterator for InOrder<T, I> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let head = self.heap.peek().map(|Reverse(head)| head.0.seq());
            let ready = head.is_some_and(|seq| self.is_next(seq));
            if ready || self.ended || self.heap.len() >= self.window {
                let Reverse(BySeq(item)) = self.heap.pop()?;
                return Some(Ok(self.emit(item)));
            }
            match self.source.next() {
                None => self.ended = true,
                Some(Err(e)) => return Some(Err(e)),
                Some(Ok(item)) if self.is_next(item.seq()) => return Some(Ok(self.emit(item))),
                Some(Ok(item)) => self.heap.push(Reverse(BySeq(item))),
            }
        }
    }
}

/// Rows of several files, one after another; a file that cannot be opened is an error item.
pub(super) fn rows_of<'a, R: crate::log::Row + 'a>(
    parts: impl IntoIterator<Item = &'a Part> + 'a,
    batch_rows: usize,
) -> impl Iterator<Item = Result<R>> + 'a {
    parts.into_iter().flat_map(move |part| {
        let (rows, error) = match PartRows::open(part, batch_rows) {
            Ok(rows) => (Some(rows), None),
            Err(e) => (None, Some(Err(e))),
        };
        error.into_iter().chain(rows.into_iter().flatten())
    })
}

/// One run's events and the one that comes next.
struct Stream<'a> {
    run: Run8,
    events: Box<dyn Iterator<Item = Result<EventRow>> + 'a>,
    head: Option<EventRow>,
}

/// An event and the run that recorded it: `seq` and `alloc_id` count within a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunEvent {
    /// The run.
    pub run: Run8,
    /// The event.
    pub event: EventRow,
}

/// Events of all runs by time; see [`super::Log::events`].
pub struct Events<'a> {
    streams: Vec<Stream<'a>>,
    /// Streams whose next event is not known yet.
    unread: Vec<usize>,
    /// (time, stream) of each known next event.
    heads: BinaryHeap<Reverse<(i64, usize)>>,
}

impl std::fmt::Debug for Events<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("runs", &self.streams.len()).finish_non_exhaustive()
    }
}

impl<'a> Events<'a> {
    /// `runs`: each run with its parts in the order of their numbers.
    pub(super) fn new(runs: Vec<(Run8, Vec<&'a Part>)>) -> Self {
        // All runs are open at once; smaller batches keep many of them within the same memory.
        let batch_rows = (BATCH_ROWS * 8 / runs.len().max(1)).clamp(512, BATCH_ROWS);
        let streams = runs.into_iter().map(|(run, parts)| {
            let first = parts.iter().filter_map(|part| part.seqs).map(|(first, _)| first).min();
            let events = Box::new(InOrder::new(rows_of(parts, batch_rows), first));
            Stream { run, events, head: None }
        });
        let streams: Vec<_> = streams.collect();
        let unread = (0..streams.len()).collect();
        Self { streams, unread, heads: BinaryHeap::new() }
    }
}

impl Iterator for Events<'_> {
    type Item = Result<RunEvent>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(index) = self.unread.pop() {
            let Some(stream) = self.streams.get_mut(index) else { continue };
            match stream.events.next() {
                Some(Ok(event)) => {
                    self.heads.push(Reverse((event.ts_ns, index)));
                    stream.head = Some(event);
                }
                Some(Err(e)) => {
                    self.unread.push(index);
                    return Some(Err(e));
                }
                None => {}
            }
        }
        let Reverse((_, index)) = self.heads.pop()?;
        self.unread.push(index);
        let stream = self.streams.get_mut(index)?;
        let (run, event) = (stream.run, stream.head.take()?);
        Some(Ok(RunEvent { run, event }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(seqs: &[i64], window: usize) -> Vec<i64> {
        let mut order = InOrder::new(seqs.iter().copied().map(Ok), seqs.iter().copied().min());
        order.window = window;
        order.map(Result::unwrap).collect()
    }

    #[test]
    fn late_rows_come_in_their_place_and_gaps_do_not_stop_the_rest() {
        assert_eq!(order(&[1, 3, 4, 2, 5], 3), [1, 2, 3, 4, 5]);
        assert_eq!(order(&[1, 2, 7, 9, 8], 2), [1, 2, 7, 8, 9]);
        assert_eq!(order(&[5, 6, 7], 1), [5, 6, 7]);
        assert_eq!(order(&[], 1), [0; 0]);
    }

    #[test]
    fn a_row_too_late_for_the_window_is_still_there() {
        assert_eq!(order(&[1, 10, 11, 12, 2], 2), [1, 10, 11, 12, 2]);
    }

    #[test]
    fn errors_pass_and_the_rest_follows() {
        let error = crate::log::LogError::content("x".as_ref(), "broken");
        let source = [Ok(1), Err(error), Ok(2)];
        let items: Vec<_> = InOrder::<i64, _>::new(source.into_iter(), Some(1)).collect();
        assert!(matches!(items[..], [Ok(1), Err(_), Ok(2)]));
    }

    proptest! {
        #[test]
        fn every_row_comes_out_once_and_in_order_within_the_window(
            mut seqs in proptest::collection::vec(0i64..1_000, 0..200),
            swaps in proptest::collection::vec((0usize..200, 0usize..4), 0..50),
        ) {
            seqs.sort_unstable();
            seqs.dedup();
            let sorted = seqs.clone();
            for (at, by) in swaps {
                if at + by < seqs.len() {
                    seqs.swap(at, at + by);
                }
            }
            prop_assert_eq!(order(&seqs, 200), sorted.clone());
            let mut small = order(&seqs, 2);
            small.sort_unstable();
            prop_assert_eq!(small, sorted);
        }
    }
}
