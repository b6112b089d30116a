//! The stacks of a log, for comparing with what is true.

use std::collections::HashMap;

use anyhow::{Context, Result};
use ledger::rows::{EventRow, FrameRow, StackRow};

use crate::logs::Logged;

/// A stack with its frames.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Its row.
    pub row: StackRow,
    /// Its frames, innermost first.
    pub frames: Vec<FrameRow>,
}

impl Stack {
    /// Function, file and line of each Python frame, innermost first.
    pub fn python(&self) -> Vec<(String, String, Option<i32>)> {
        let python = self.frames.iter().filter(|frame| frame.kind == "python");
        python
            .map(|frame| {
                let file = frame.file.clone().unwrap_or_default();
                (frame.function.clone(), file, frame.line)
            })
            .collect()
    }

    /// The functions, innermost first.
    pub fn functions(&self) -> Vec<&str> {
        self.frames.iter().map(|frame| frame.function.as_str()).collect()
    }
}

/// The stacks of a log.
#[derive(Debug)]
pub struct Stacks {
    by_id: HashMap<i64, Stack>,
    allocations: Vec<EventRow>,
}

impl Stacks {
    /// Reads them; each must be there once, with all of its frames.
    pub fn read(log: &Logged) -> Result<Self> {
        let mut frames: HashMap<i64, FrameRow> = HashMap::new();
        for row in log.rows::<FrameRow>()? {
            let id = row.frame_id;
            anyhow::ensure!(frames.insert(id, row).is_none(), "frame {id} is there twice");
        }
        let mut by_id = HashMap::new();
        for row in log.rows::<StackRow>()? {
            let of_stack = row.frame_ids.iter().map(|id| frames.get(id).cloned());
            let of_stack = of_stack.collect::<Option<Vec<_>>>();
            let of_stack = of_stack.with_context(|| format!("{row:?} lacks a frame"))?;
            let id = row.stack_id;
            let stack = Stack { row, frames: of_stack };
            anyhow::ensure!(by_id.insert(id, stack).is_none(), "stack {id} is there twice");
        }
        let mut allocations = log.events()?;
        allocations.retain(|event| event.op == "alloc" && event.level == "device");
        Ok(Self { by_id, allocations })
    }

    /// The device allocations, in their order.
    pub fn allocations(&self) -> &[EventRow] {
        &self.allocations
    }

    /// The stack of an event; `None` where it has none.
    pub fn of(&self, event: &EventRow) -> Option<&Stack> {
        self.by_id.get(&event.stack_id)
    }

    /// The stack of the one allocation of so many bytes.
    pub fn of_size(&self, bytes: i64) -> Result<&Stack> {
        let mut found = self.allocations.iter().filter(|event| event.size_bytes == Some(bytes));
        let event = found.next().with_context(|| format!("no allocation of {bytes} bytes"))?;
        anyhow::ensure!(found.next().is_none(), "two allocations of {bytes} bytes");
        self.of(event).with_context(|| format!("no stack of {event:?}"))
    }
}
