//! Which stack a key stands for, and which backward pass a moment belongs to.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use ledger::call::ProcId;

use super::reader::Resolved;

/// Backward passes of a process that are remembered: events are applied within a second.
const PASSES: usize = 256;

/// What is known of the running processes' stacks.
#[derive(Debug, Default)]
pub(super) struct Stacks {
    /// By process and key.
    ids: HashMap<(u32, u64), i64>,
    /// Owners of what stacks allocate, by stack: as many as there are lines that allocate.
    libraries: HashMap<i64, Arc<str>>,
    /// Beginnings of backward passes, by process.
    passes: HashMap<i64, VecDeque<(i64, i64)>>,
}

impl Stacks {
    /// A stack was resolved.
    pub(super) fn resolved(&mut self, resolved: &Resolved) {
        self.ids.insert((resolved.tgid, resolved.key), resolved.stack_id);
        if let Some(library) = &resolved.library {
            self.libraries.insert(resolved.stack_id, Arc::clone(library));
        }
    }

    /// The library that owns what a stack allocates, where that is known.
    pub(super) fn library_of(&self, stack_id: i64) -> Option<&str> {
        self.libraries.get(&stack_id).map(AsRef::as_ref)
    }

    /// The stack that a key stands for; `None` where it was lost, or none was taken.
    pub(super) fn id_of(&self, tgid: u32, key: u64) -> Option<i64> {
        self.ids.get(&(tgid, key)).copied()
    }

    /// A backward pass began.
    pub(super) fn backward(&mut self, proc_id: ProcId, ts_ns: i64, number: i64) {
        let passes = self.passes.entry(proc_id.0).or_default();
        if passes.len() == PASSES {
            passes.pop_front();
        }
        passes.push_back((ts_ns, number));
    }

    /// Number of the backward pass that began last before a moment; `None` before the first.
    pub(super) fn pass_at(&self, proc_id: i64, ts_ns: i64) -> Option<i64> {
        let passes = self.passes.get(&proc_id)?;
        let begun = passes.iter().rev().find(|(begin_ns, _)| *begin_ns <= ts_ns);
        begun.map(|(_, number)| *number)
    }

    /// A process ended.
    pub(super) fn forget(&mut self, tgid: u32, proc_id: ProcId) {
        self.ids.retain(|(of, _), _| *of != tgid);
        self.passes.remove(&proc_id.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_belongs_to_the_pass_before_it() {
        let mut stacks = Stacks::default();
        let proc_id = ProcId(7);
        assert_eq!(stacks.pass_at(7, 100), None);
        for number in 1..=300 {
            stacks.backward(proc_id, number * 10, number);
        }
        assert_eq!(stacks.pass_at(7, 3000), Some(300));
        assert_eq!(stacks.pass_at(7, 2999), Some(299));
        assert_eq!(stacks.pass_at(7, 1), None, "forgotten");
        stacks.forget(1, proc_id);
        assert_eq!(stacks.pass_at(7, 3000), None);
    }
}
