//! Numbers of attachments, by which the kernel half looks up whose calls they report.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

/// Gives numbers out. They come round in a long recording: one whose probes are still there is passed
/// over, or those would report what the new ones are to.
#[derive(Debug, Default)]
pub(super) struct Slots {
    next: u16,
    taken: HashMap<u16, Weak<u16>>,
}

impl Slots {
    /// A number that is free, taken until the last clone is dropped; `None` where none is.
    pub(super) fn take(&mut self) -> Option<Arc<u16>> {
        let free = |slot: &u16| self.taken.get(slot).is_none_or(|taken| taken.strong_count() == 0);
        let slot = (0..=u16::MAX).map(|n| self.next.wrapping_add(n)).find(free)?;
        self.next = slot.wrapping_add(1);
        let taken = Arc::new(slot);
        self.taken.insert(slot, Arc::downgrade(&taken));
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_round_but_not_to_those_that_are_in_use() {
        let mut slots = Slots::default();
        let kept = slots.take().unwrap();
        let also = slots.take().unwrap();
        drop(also);
        for _ in 2..=u16::MAX {
            slots.take().unwrap();
        }
        let again = slots.take().unwrap();
        assert_eq!((*kept, *again), (0, 1));
        let all: Vec<_> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(all.len(), usize::from(u16::MAX) - 1);
        drop(kept);
        assert_eq!(slots.take().map(|slot| *slot), Some(0));
    }
}
