//! What a process holds on a device, by owner.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::split::{Segment, Split, Tensor, holds_any, split};
use crate::account::state::{DeviceBlock, Process};

/// The library whose blocks are `PyTorch`'s cache.
pub const TORCH_CACHE: &str = "libc10_cuda";

/// Unit in which the driver takes device memory for `cuMemAlloc` and its kin: smaller blocks share
/// one, larger ones take whole ones (measured on an H200, driver 580).
const PAGE_BYTES: u64 = 2 << 20;

/// Device memory of a process on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Segments of `PyTorch`'s cache, bytes.
    pub segments_bytes: i64,
    /// Everything else by owning library; `None`: the owner is not known.
    pub libraries: BTreeMap<Option<String>, i64>,
    /// What the driver takes beyond the blocks' sizes, in whole pages of 2 MiB.
    pub rounding_bytes: i64,
    /// What of the cache is free, and why it is still there; `None`: the blocks are not told apart.
    pub split: Option<Split>,
}

impl Holding {
    /// Of `process` on a device, which may have several of its numbers in [`Process::devices`].
    /// `library_of` names a stack's owner, `tensors` are all live blocks of `PyTorch`'s cache there in
    /// order of address, if they are known.
    pub fn of<'a>(
        process: &Process,
        devices: &[usize],
        library_of: impl Fn(i64) -> Option<&'a str>,
        tensors: Option<&[Tensor]>,
    ) -> Self {
        let mut holding = Self::default();
        let (mut pages, mut segments) = (Pages::default(), Vec::new());
        let mapped = Mapped::of(process);
        for block in process.device_blocks(devices) {
            let bytes = block.live.size_bytes.unwrap_or(0);
            pages.add(&block, bytes);
            let library = library_of(block.live.stack_id);
            let segment = || segment(process, &block, bytes, &mapped);
            // Whoever asked the driver for it: what PyTorch hands out of, is its cache (a pluggable
            // allocator under a pool of PyTorch's, a segment without a stack).
            let is_segment = library == Some(TORCH_CACHE)
                || tensors.is_some_and(|tensors| holds_any(&segment(), tensors));
            if is_segment {
                holding.segments_bytes += bytes;
                segments.push(segment());
            } else {
                *holding.libraries.entry(library.map(str::to_owned)).or_default() += bytes;
            }
        }
        holding.rounding_bytes = pages.rounding_bytes();
        holding.split = tensors.map(|tensors| split(&segments, tensors));
        holding
    }

    /// All of it, without what rounding takes.
    pub fn bytes(&self) -> i64 {
        self.libraries.values().fold(self.segments_bytes, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Of what nobody is known to own, so much is `PyTorch`'s after all.
    pub(super) fn adopt(&mut self, most_bytes: i64) {
        let Some(unowned) = self.libraries.get_mut(&None) else { return };
        let adopted = most_bytes.clamp(0, *unowned);
        *unowned -= adopted;
        self.segments_bytes += adopted;
        if *unowned == 0 {
            self.libraries.remove(&None);
        }
        if adopted > 0 {
            self.split = None;
        }
    }
}

/// Ranges of addresses by allocation, for what lies behind handles.
struct Mapped(HashMap<i64, Vec<(u64, u64)>>);

impl Mapped {
    fn of(process: &Process) -> Self {
        let mut ranges: HashMap<i64, Vec<(u64, u64)>> = HashMap::new();
        for (addr, size_bytes, alloc_id) in process.maps() {
            ranges.entry(alloc_id).or_default().push((addr, size_bytes));
        }
        Self(ranges)
    }
}

fn segment(process: &Process, block: &DeviceBlock<'_>, bytes: i64, mapped: &Mapped) -> Segment {
    let ranges = match block.addr {
        Some(addr) => vec![(addr, bytes.max(0) as u64)],
        None => mapped.0.get(&block.alloc_id).cloned().unwrap_or_default(),
    };
    Segment { ranges, size_bytes: bytes, of_graph: process.is_of_graph(block.alloc_id) }
}

/// Counts the pages that blocks lie on.
#[derive(Default)]
struct Pages {
    /// Pages that blocks share, and the bytes of these blocks.
    shared: HashSet<u64>,
    shared_bytes: i64,
    /// What blocks that have pages of their own leave of them.
    whole_rest: i64,
}

impl Pages {
    /// Of what lies behind a handle (in whole pages) or is an array (padded in ways of its own)
    /// nothing is known.
    fn add(&mut self, block: &DeviceBlock<'_>, bytes: i64) {
        let (Some(addr), Ok(size_bytes)) = (block.addr, u64::try_from(bytes)) else { return };
        if addr.is_multiple_of(PAGE_BYTES) && size_bytes >= PAGE_BYTES {
            self.whole_rest += (size_bytes.next_multiple_of(PAGE_BYTES) - size_bytes) as i64;
        } else if size_bytes > 0 && size_bytes < PAGE_BYTES {
            let last = addr.saturating_add(size_bytes - 1);
            self.shared.extend(addr / PAGE_BYTES..=last / PAGE_BYTES);
            self.shared_bytes += bytes;
        }
    }

    fn rounding_bytes(&self) -> i64 {
        let shared = self.shared.len() as i64 * PAGE_BYTES as i64 - self.shared_bytes;
        shared + self.whole_rest
    }
}
