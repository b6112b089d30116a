//! Puts Python frames into the native stack, where their evaluation loops stand.
//!
//! An evaluation loop (`_PyEval_EvalFrameDefault`) runs a Python function and all that it calls
//! without going through C. It keeps a structure on its own C frame: a shim frame (3.12 and later)
//! or a `CFrame` (3.10 to 3.12), so the native frame that holds the structure's address is the
//! loop's, whatever its symbol. CPython 3.8 and 3.9 have neither: there the loops are known by
//! their code.

use std::ops::Range;

use agent_common::stack::RawPythonFrame;

use crate::native::NativeFrame;

/// How evaluation loops are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// 3.8, 3.9: each frame is a loop of its own; no address.
    Code,
    /// 3.10: each frame is a loop of its own, the k-th has the k-th `CFrame`.
    EachFrame,
    /// 3.11: a loop ends with an entry frame, the k-th has the k-th `CFrame`.
    Entries,
    /// 3.12 and later: a loop ends with a shim, a frame of this owner or a higher one.
    Shims(u32),
}

impl Style {
    /// That of a CPython 3 minor version.
    pub const fn of_minor(minor: u8, shim_owner: u32) -> Self {
        match minor {
            ..=9 => Self::Code,
            10 => Self::EachFrame,
            11 => Self::Entries,
            _ => Self::Shims(shim_owner),
        }
    }
}

/// What one evaluation loop runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activation {
    /// An address in the loop's C frame; `None` where there is none.
    pub addr: Option<u64>,
    /// Its Python frames, innermost first; shims are not among them.
    pub frames: Range<usize>,
}

/// Splits a thread's Python frames into what each loop runs, innermost first.
pub fn activations(frames: &[RawPythonFrame], cframes: &[u64], style: Style) -> Vec<Activation> {
    let (mut found, mut start) = (Vec::new(), 0);
    for (at, frame) in frames.iter().enumerate() {
        let (ends, past) = match style {
            Style::Code | Style::EachFrame => (true, at + 1),
            Style::Entries => (frame.owner != 0, at + 1),
            Style::Shims(owner) => (frame.owner >= u64::from(owner), at),
        };
        if !ends {
            continue;
        }
        let addr = match style {
            Style::Code => None,
            Style::EachFrame | Style::Entries => cframes.get(found.len()).copied(),
            Style::Shims(_) => Some(frame.addr),
        };
        found.push(Activation { addr, frames: start..past });
        start = at + 1;
    }
    if start < frames.len() {
        found.push(Activation { addr: None, frames: start..frames.len() });
    }
    // 3.15 ends with a frame of its own that is no loop.
    found.retain(|activation| activation.addr.is_some() || !activation.frames.is_empty());
    found
}

/// A frame of the merged stack, by where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merged {
    /// The native frame of this number.
    Native(usize),
    /// The Python frame of this number.
    Python(usize),
}

/// What is known of the native frames.
pub trait Natives {
    /// The frame runs the evaluation loop, as far as its code tells.
    fn is_loop(&self, frame: usize) -> bool;
    /// The frame is the interpreter's own.
    fn is_interpreter(&self, frame: usize) -> bool;
}

/// Merges; innermost first. The interpreter's own native frames are left out: the Python frames
/// stand for them. Python frames whose loop the native stack does not reach come last.
pub fn merge(
    native: &[NativeFrame],
    activations: &[Activation],
    natives: &impl Natives,
) -> Vec<Merged> {
    let mut merged = Vec::with_capacity(native.len());
    let mut next = 0;
    let emit = |merged: &mut Vec<Merged>, upto: usize, next: &mut usize| {
        for activation in activations.get(*next..upto).unwrap_or_default() {
            merged.extend(activation.frames.clone().map(Merged::Python));
        }
        *next = upto.max(*next);
    };
    for (at, frame) in native.iter().enumerate() {
        let placed = activations.iter().enumerate().skip(next).find(|(_, activation)| {
            match activation.addr {
                Some(addr) => frame.sp <= addr && addr < frame.cfa,
                None => natives.is_loop(at),
            }
        });
        if let Some((index, _)) = placed {
            emit(&mut merged, index + 1, &mut next);
        } else if activations.is_empty() || !natives.is_interpreter(at) {
            merged.push(Merged::Native(at));
        }
    }
    emit(&mut merged, activations.len(), &mut next);
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Table {
        loops: Vec<usize>,
        interpreter: Vec<usize>,
    }

    impl Natives for Table {
        fn is_loop(&self, frame: usize) -> bool {
            self.loops.contains(&frame)
        }

        fn is_interpreter(&self, frame: usize) -> bool {
            self.interpreter.contains(&frame)
        }
    }

    fn native(count: u64) -> Vec<NativeFrame> {
        let frame = |n| NativeFrame { pc: n, sp: n * 16, cfa: n * 16 + 16, ..Default::default() };
        (0..count).map(frame).collect()
    }

    fn python(addr: u64, owner: u64) -> RawPythonFrame {
        RawPythonFrame { addr, owner, ..Default::default() }
    }

    use Merged::{Native as N, Python as P};

    #[test]
    fn shims_place_their_loops() {
        // Native: 0 cuMemAlloc, 1 ctypes, 2 loop, 3 interpreter, 4 C callback, 5 loop, 6 main.
        let frames = [
            python(0x9000, 0),
            python(0x9100, 0),
            python(2 * 16 + 8, 3),
            python(0x9200, 0),
            python(5 * 16, 3),
        ];
        let found = activations(&frames, &[], Style::Shims(3));
        assert_eq!(found.len(), 2);
        let table = Table { loops: vec![], interpreter: vec![2, 3, 5, 6] };
        let merged = merge(&native(7), &found, &table);
        assert_eq!(merged, [N(0), N(1), P(0), P(1), N(4), P(3)]);
    }

    #[test]
    fn cframes_place_entries_and_single_frames() {
        let table = Table { loops: vec![], interpreter: vec![1, 2, 3] };
        let frames = [python(1, 0), python(2, 1), python(3, 1)];
        let found = activations(&frames, &[16 + 4, 32 + 4, 0x8000], Style::Entries);
        assert_eq!(merge(&native(4), &found, &table), [N(0), P(0), P(1), P(2)]);
        let found = activations(&frames[..2], &[16, 48, 0x8000], Style::EachFrame);
        assert_eq!(merge(&native(4), &found, &table), [N(0), P(0), P(1)]);
    }

    #[test]
    fn loops_are_known_by_their_code_where_there_is_no_address() {
        let frames = [python(1, 0), python(2, 0)];
        let found = activations(&frames, &[], Style::of_minor(8, 255));
        let table = Table { loops: vec![1, 3], interpreter: vec![1, 2, 3] };
        assert_eq!(merge(&native(5), &found, &table), [N(0), P(0), P(1), N(4)]);
    }

    #[test]
    fn python_frames_outlast_a_native_stack_that_was_cut() {
        let frames = [python(0x9000, 0), python(16, 3), python(0x9100, 0), python(0xffff, 3)];
        let found = activations(&frames, &[], Style::Shims(3));
        let table = Table { loops: vec![], interpreter: vec![1] };
        assert_eq!(merge(&native(2), &found, &table), [N(0), P(0), P(2)]);
    }

    #[test]
    fn without_python_everything_native_stays() {
        let table = Table { loops: vec![1], interpreter: vec![1, 2] };
        assert_eq!(merge(&native(3), &[], &table), [N(0), N(1), N(2)]);
    }

    #[test]
    fn a_last_frame_that_is_no_loop_is_left_out() {
        let frames = [python(0x9000, 0), python(16, 3), python(0x7000, 3)];
        let found = activations(&frames, &[], Style::Shims(3));
        let table = Table { loops: vec![], interpreter: vec![1, 2] };
        assert_eq!(merge(&native(3), &found, &table), [N(0), P(0)]);
    }
}
