//! What is kept of each thread: scratch memory for its stack, and where its Python state was.
//!
//! Scratch must be the thread's own. A program in a probe can be preempted, so a per-CPU buffer
//! would be overwritten by the next thread on that CPU; discarded ring records would fill the ring.

use agent_common::{
    loss::Loss,
    stack::{CFRAMES, PYTHON_FRAMES, RawPythonFrame},
};
use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    helpers::{bpf_get_current_comm, generated::bpf_get_current_task},
    macros::map,
    maps::{Array, HashMap},
};

use crate::{hash, lose::lose, task::Task};

/// Words of the stack that tell call paths apart, where no Python frames do as well.
pub(crate) const SCANNED_WORDS: usize = 256;
/// Words of a buffer for one Python structure.
pub(crate) const STRUCT_WORDS: usize = 16;

/// A thread.
#[repr(C)]
pub(crate) struct Thread {
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
    /// A copy of one Python frame.
    pub(crate) frame: [u64; STRUCT_WORDS],
    /// A copy of a part of one code object.
    pub(crate) code: [u64; STRUCT_WORDS],
    /// The beginning of its stack.
    pub(crate) words: [u64; SCANNED_WORDS],
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
    if THREADS.get_ptr(ids).is_none() {
        enter(ids);
    }
    // Looked up again in either case, so that what follows is one path for the verifier.
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
    entry.salt = salt;
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
