//! What of `PyTorch`'s cache is free, and what keeps it.

use std::collections::HashMap;

/// A live block of `PyTorch`'s cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its first address.
    pub addr: u64,
    /// Bytes, as `PyTorch` rounds them.
    pub size_bytes: u64,
    /// The stack that allocated it; 0 = not known.
    pub stack_id: i64,
}

impl Tensor {
    fn end(&self) -> u64 {
        self.addr.saturating_add(self.size_bytes)
    }
}

/// What the cache can give back at once: a segment, or a handle of an expandable one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Its addresses: first and bytes.
    pub(super) ranges: Vec<(u64, u64)>,
    pub(super) size_bytes: i64,
    /// Made while a CUDA graph was recorded: it is kept for that graph's replays.
    pub(super) of_graph: bool,
}

/// Free bytes of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Segments without a live block: `torch.cuda.empty_cache()` gives back at most these. (A block
    /// that another stream still uses, by `record_stream`, keeps its segment a little longer.)
    pub returnable_bytes: i64,
    /// Free bytes of the private pools of CUDA graphs: of use to nobody else while the graphs live.
    pub graph_pools_bytes: i64,
    /// Live blocks in segments that have free bytes too.
    pub pinned_by_blocks: i64,
    /// The stack whose blocks keep the most free bytes.
    pub pinned_by_stack_id: Option<i64>,
}

/// The tensors that lie, wholly or in part, in a range. `tensors` are in order of address.
fn within(tensors: &[Tensor], (addr, bytes): (u64, u64)) -> (usize, &[Tensor]) {
    let first = tensors.partition_point(|tensor| tensor.end() <= addr);
    let end = tensors.partition_point(|tensor| tensor.addr < addr.saturating_add(bytes));
    (first, tensors.get(first..end).unwrap_or_default())
}

/// A live block lies in the segment.
pub(super) fn holds_any(segment: &Segment, tensors: &[Tensor]) -> bool {
    segment.ranges.iter().any(|range| !within(tensors, *range).1.is_empty())
}

/// What is free in `segments`, in which all of `tensors` lie.
pub(super) fn split(segments: &[Segment], tensors: &[Tensor]) -> Split {
    let mut split = Split::default();
    let mut pinned: HashMap<i64, i64> = HashMap::new();
    let mut pins = vec![false; tensors.len()];
    for segment in segments {
        let free_bytes = segment.size_bytes - used_bytes(segment, tensors);
        if segment.of_graph {
            split.graph_pools_bytes += free_bytes.max(0);
        } else if !holds_any(segment, tensors) {
            split.returnable_bytes += segment.size_bytes;
        } else if free_bytes > 0 {
            pin(segment, tensors, free_bytes, &mut pins, &mut pinned);
        }
    }
    split.pinned_by_blocks = pins.iter().filter(|pins| **pins).count() as i64;
    let most = pinned.into_iter().max_by_key(|(stack_id, bytes)| (*bytes, *stack_id));
    split.pinned_by_stack_id = most.map(|(stack_id, _)| stack_id).filter(|id| *id != 0);
    split
}

fn used_bytes(segment: &Segment, tensors: &[Tensor]) -> i64 {
    let mut used = 0;
    for &(addr, bytes) in &segment.ranges {
        let end = addr.saturating_add(bytes);
        let inside = within(tensors, (addr, bytes)).1.iter();
        used += inside
            .map(|tensor| tensor.end().min(end).saturating_sub(tensor.addr.max(addr)))
            .fold(0, u64::saturating_add);
    }
    i64::try_from(used).unwrap_or(i64::MAX)
}

/// Every block in the segment keeps what is free in it; each stack is charged once with that.
fn pin(
    segment: &Segment,
    tensors: &[Tensor],
    free_bytes: i64,
    pins: &mut [bool],
    pinned: &mut HashMap<i64, i64>,
) {
    let mut stacks: Vec<i64> = Vec::new();
    for range in &segment.ranges {
        let (first, inside) = within(tensors, *range);
        for (at, tensor) in inside.iter().enumerate() {
            if let Some(pins) = pins.get_mut(first + at) {
                *pins = true;
            }
            if !stacks.contains(&tensor.stack_id) {
                stacks.push(tensor.stack_id);
            }
        }
    }
    for stack_id in stacks {
        *pinned.entry(stack_id).or_default() += free_bytes;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn segment(addr: u64, mib: u64) -> Segment {
        let ranges = vec![(addr * MIB, mib * MIB)];
        Segment { ranges, size_bytes: (mib * MIB) as i64, of_graph: false }
    }

    fn tensor(addr: u64, mib: u64, stack_id: i64) -> Tensor {
        Tensor { addr: addr * MIB, size_bytes: mib * MIB, stack_id }
    }

    #[test]
    fn empty_segments_can_go_and_others_are_pinned() {
        let segments = [segment(100, 20), segment(200, 20), segment(300, 2)];
        let tensors = [tensor(100, 1, 7), tensor(110, 2, 8), tensor(300, 2, 9)];
        let split = split(&segments, &tensors);
        assert_eq!(split.returnable_bytes, 20 << 20);
        assert_eq!(split.pinned_by_blocks, 2, "a full segment pins nothing");
        assert_eq!(split.pinned_by_stack_id, Some(8));
        assert_eq!(split.graph_pools_bytes, 0);
    }

    #[test]
    fn the_stack_that_keeps_the_most_is_named() {
        let segments = [segment(100, 20), segment(200, 20), segment(300, 20)];
        let tensors = [tensor(100, 1, 7), tensor(101, 1, 7), tensor(200, 1, 8), tensor(300, 1, 8)];
        let split = split(&segments, &tensors);
        assert_eq!((split.pinned_by_blocks, split.pinned_by_stack_id), (4, Some(8)));
    }

    #[test]
    fn a_graphs_segments_are_kept_for_it() {
        let graph = Segment { of_graph: true, ..segment(100, 20) };
        let idle = Segment { of_graph: true, ..segment(200, 2) };
        let split = split(&[graph, idle], &[tensor(101, 3, 7)]);
        assert_eq!((split.graph_pools_bytes, split.returnable_bytes), (19 << 20, 0));
        assert_eq!(split.pinned_by_blocks, 0);
    }

    #[test]
    fn handles_of_an_expandable_segment_go_one_by_one() {
        let handles: Vec<Segment> = (0..4).map(|at| segment(100 + 20 * at, 20)).collect();
        // Over the first two handles, and in a corner of the last.
        let split = split(&handles, &[tensor(105, 30, 7), tensor(179, 1, 8)]);
        assert_eq!(split.returnable_bytes, 20 << 20);
        assert_eq!((split.pinned_by_blocks, split.pinned_by_stack_id), (2, Some(8)));
    }

    #[test]
    fn a_handle_that_is_not_mapped_holds_nothing() {
        let handle = Segment { ranges: vec![], ..segment(0, 2) };
        assert_eq!(split(&[handle], &[tensor(0, 1, 7)]).returnable_bytes, 2 << 20);
    }

    proptest! {
        #[test]
        fn no_more_is_free_than_there_is(
            sizes in prop::collection::vec((1..30u64, 0..30u64, any::<bool>()), 0..12),
        ) {
            let (mut segments, mut tensors) = (Vec::new(), Vec::new());
            for (at, (mib, used, of_graph)) in sizes.into_iter().enumerate() {
                let addr = 100 * at as u64;
                segments.push(Segment { of_graph, ..segment(addr, mib) });
                if used > 0 {
                    tensors.push(tensor(addr, used.min(mib), at as i64));
                }
            }
            let all: i64 = segments.iter().map(|segment| segment.size_bytes).sum();
            let used: i64 = tensors.iter().map(|tensor| tensor.size_bytes as i64).sum();
            let split = split(&segments, &tensors);
            prop_assert!(split.returnable_bytes + split.graph_pools_bytes <= all - used);
            prop_assert!(split.returnable_bytes >= 0 && split.graph_pools_bytes >= 0);
        }
    }
}
