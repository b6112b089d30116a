//! What is kept of each thread: scratch memory for its stack, and where its Python state was.
//!
//! Scratch must be the thread's own. A program in a probe can be preempted, so a per-CPU buffer
//! would be overwritten by the next thread on that CPU; discarded ring records would fill the ring.

use agent_common::{
    loss::Loss,
    python::FRAME_GRANULE,
    stack::{CFRAMES, PYTHON_FRAMES, RawPythonFrame},
};
use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    helpers::{bpf_get_current_comm, generated::bpf_get_current_task},
    macros::map,
    maps::{Array, HashMap},
};

use crate::{hash, lose::lose, regs::Registers, task::Task};

/// Words of the stack that tell call paths apart, where no Python frames do as well.
pub(crate) const SCANNED_WORDS: usize = 256;
/// Words of a buffer for one Python structure.
pub(crate) const STRUCT_WORDS: usize = 16;
/// Words of a buffer for the beginning of a Python string.
pub(crate) const TEXT_WORDS: usize = 8;
/// Words of the buffer that holds several Python frames, and of that for the stack's beginning.
const WINDOW_WORDS: usize = FRAME_GRANULE as usize / 8 + STRUCT_WORDS;
/// Code objects that are remembered: more than a training step runs. A power of two.
pub(crate) const KNOWN_CODES: usize = 256;

/// A code object as it was when it was last looked at.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct KnownCode {
    /// Address of the code object.
    pub(crate) code: u64,
    /// Its name, as in `RawPythonFrame`.
    pub(crate) definition: u64,
    /// Since when it was the same at each look, nanoseconds of `CLOCK_BOOTTIME`.
    pub(crate) since_ns: u64,
    /// Until when it is not looked at, likewise.
    pub(crate) until_ns: u64,
}

/// A thread.
#[repr(C)]
pub(crate) struct Thread {
    /// Process and thread.
    pub(crate) ids: u64,
    /// Tells this program of this process from any other that had its id: an address means
    /// something else in each.
    pub(crate) salt: u64,
    /// 1: one of autograd's own threads.
    pub(crate) autograd: u64,
    /// Head of the interpreter list when `python_state` was found; 0 = must be looked for.
    pub(crate) interpreters: u64,
    /// Its `PyThreadState`.
    pub(crate) python_state: u64,
    /// `FLAG_PYTHON*` of the last walk.
    pub(crate) flags: u64,
    /// Hash of its Python frames.
    pub(crate) chain: u64,
    /// Key of the stack that called its backward pass.
    pub(crate) caller: u64,
    /// Words of the stack that its key is made of.
    pub(crate) scanned: u64,
    /// Whether and how the stack is sent.
    pub(crate) sending: u64,
    pub(crate) frame_count: u64,
    pub(crate) cframe_count: u64,
    /// The registers at its probe.
    pub(crate) regs: Registers,
    /// When it met its probe, nanoseconds of `CLOCK_BOOTTIME`.
    pub(crate) now_ns: u64,
    /// 1: new stacks are few at this probe.
    pub(crate) rare: u64,
    /// Where the frames in `words` come from.
    pub(crate) window_from: u64,
    /// How far behind `window_from` the last of them begins.
    pub(crate) window_at: u64,
    /// A copy of a part of one code object.
    pub(crate) code: [u64; STRUCT_WORDS],
    /// A copy of the beginning of a string.
    pub(crate) text: [u64; TEXT_WORDS],
    /// Python frames and what lies between them; after their walk the beginning of the stack.
    pub(crate) words: [u64; WINDOW_WORDS],
    /// By a hash of the address, in one of two places.
    pub(crate) known: [KnownCode; KNOWN_CODES],
    /// As in `RawStack`, in the same order.
    pub(crate) cframes: [u64; CFRAMES],
    pub(crate) frames: [RawPythonFrame; PYTHON_FRAMES],
}

#[map]
static THREADS: HashMap<u64, Thread> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);
/// A thread of which nothing is known yet: too large for a program's stack.
#[map]
static BLANK: Array<Thread> = Array::with_max_entries(1, 0);

/// The entry of the calling thread; `None` (and a loss) where there is no room.
#[inline(always)]
pub(crate) fn current(ids: u64) -> Option<&'static mut Thread> {
    if let Some(thread) = known(ids) {
        return Some(thread);
    }
    enter(ids);
    known(ids)
}

/// The entry of a thread that has one.
#[inline(always)]
fn known(ids: u64) -> Option<&'static mut Thread> {
    let thread = THREADS.get_ptr_mut(ids)?;
    // SAFETY: a map value, valid until the program returns; only this thread touches it.
    Some(unsafe { &mut *thread })
}

#[inline(never)]
fn enter(ids: u64) {
    let Some(blank) = BLANK.get(0) else { return };
    if THREADS.insert(ids, blank, u64::from(BPF_NOEXIST)).is_err() {
        lose((ids >> 32) as u32, Loss::ThreadTableFull);
        return;
    }
    let Some(thread) = THREADS.get_ptr_mut(ids) else { return };
    // SAFETY: a helper without arguments.
    let task = Task(unsafe { bpf_get_current_task() });
    let (salt, autograd) = (hash::mix(task.process_start_ns(), task.mm()), is_autograd());
    // SAFETY: as above.
    let entry = unsafe { &mut *thread };
    (entry.ids, entry.salt) = (ids, salt);
    entry.autograd = autograd.into();
}

/// torch/csrc/autograd/engine.cpp names its threads `pt_autograd_N`.
fn is_autograd() -> bool {
    bpf_get_current_comm().is_ok_and(|name| name.starts_with(b"pt_autograd"))
}

/// The thread ended, or its program did.
pub(crate) fn forget(ids: u64) {
    THREADS.remove(ids).unwrap_or_default();
}
