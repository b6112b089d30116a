//! The walk of a thread's Python frames, with and without the GIL: only the thread itself changes
//! its frames, and it is in a probe.

use agent_common::{
    python::{NONE, PythonConfig},
    stack::{
        CFRAMES, FLAG_PYTHON, FLAG_PYTHON_CUT, FLAG_PYTHON_FAULT, PYTHON_FRAMES, RawPythonFrame,
    },
};
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    helpers::generated::{self, bpf_get_current_task},
    macros::map,
    maps::HashMap,
};

use crate::{
    hash,
    task::Task,
    thread::{STRUCT_WORDS, Thread},
};

/// Interpreters of processes, written by the agent.
#[map]
static PYTHON: HashMap<u32, PythonConfig> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// Thread states that are looked through for a thread's own; a new thread's is the first.
const THREAD_STEPS: u32 = 512;

/// Tagged pointers of 3.14 (`_PyStackRef`); objects are aligned to 16 bytes.
const TAG: u64 = 7;

#[inline(always)]
pub(crate) fn config(tgid: u32) -> Option<&'static PythonConfig> {
    // SAFETY: the agent replaces an entry only while the process starts; without preallocation an
    // old one stays valid until the program returns.
    unsafe { PYTHON.get(tgid) }
}

/// A child has its parent's interpreter at the same place.
pub(crate) fn fork(parent: u32, child: u32) {
    if let Some(config) = config(parent) {
        PYTHON.insert(child, config, 0).unwrap_or_default();
    }
}

/// The program is gone.
pub(crate) fn forget(tgid: u32) {
    if config(tgid).is_some() {
        PYTHON.remove(tgid).unwrap_or_default();
    }
}

/// Reads a word of the process; 0 where it can't be read.
#[inline(always)]
pub(crate) fn word(address: u64) -> u64 {
    let mut word = 0_u64;
    let to = &raw mut word;
    // The result is not looked at: after a failure the helper leaves zeros, and a branch here would
    // double the paths of the loops that the verifier must follow.
    // SAFETY: the helper checks the address and fails instead of faulting.
    unsafe { generated::bpf_probe_read_user(to.cast(), 8, address as *const _) };
    word
}

/// Reads a structure of `bytes` bytes. After a failure, which is told by -1 and not by a branch, it
/// is zeros.
#[inline(always)]
pub(crate) fn read(to: &mut [u64; STRUCT_WORDS], bytes: u32, address: u64) -> i64 {
    // The mask bounds the length for the verifier; the agent keeps to it.
    let bytes = bytes & (STRUCT_WORDS as u32 * 8 - 1);
    let to: *mut [u64; STRUCT_WORDS] = to;
    // SAFETY: the buffer holds `bytes`; the helper checks the address.
    unsafe { generated::bpf_probe_read_user(to.cast(), bytes, address as *const _) >> 63 }
}

/// The pointer at `offset` of a structure.
#[inline(always)]
pub(crate) fn member(structure: &[u64; STRUCT_WORDS], offset: u32) -> u64 {
    structure[(offset >> 3) as usize & (STRUCT_WORDS - 1)]
}

/// The 32-bit member at `offset`.
#[inline(always)]
pub(crate) fn member_32(structure: &[u64; STRUCT_WORDS], offset: u32) -> u32 {
    (member(structure, offset) >> ((offset & 4) * 8)) as u32
}

#[inline(always)]
fn member_8(structure: &[u64; STRUCT_WORDS], offset: u32) -> u32 {
    (member(structure, offset) >> ((offset & 7) * 8)) as u32 & 0xff
}

/// Walks the frames into `thread` and returns their hash. Every turn goes straight on: the verifier
/// follows each path of each turn. A frame that can't be read is zeros, and ends the walk.
#[inline(never)]
pub(crate) fn walk(thread: &mut Thread, config: &PythonConfig) -> u64 {
    thread.frame_count = 0;
    thread.cframe_count = 0;
    thread.flags = 0;
    let mut frame = first_frame(thread, config);
    let mut key = hash::SEED;
    for n in 0..PYTHON_FRAMES {
        if frame == 0 {
            break;
        }
        let failed = read(&mut thread.frame, config.frame_bytes, frame);
        thread.flags |= failed as u64 & u64::from(FLAG_PYTHON_FAULT);
        let found = frame_at(thread, config, frame);
        key = hash::mix(hash::mix(key, found.definition), found.instruction);
        thread.frames[n] = found;
        thread.frame_count = n as u64 + 1;
        frame = member(&thread.frame, config.frame_previous);
    }
    if frame != 0 {
        thread.flags |= u64::from(FLAG_PYTHON_CUT);
    }
    key
}

/// The frame that `thread.frame` is a copy of.
#[inline(always)]
fn frame_at(thread: &mut Thread, config: &PythonConfig, addr: u64) -> RawPythonFrame {
    // All ones where there is an owner: `NONE` has the sign bit.
    let has_owner = !(config.frame_owner as i32 >> 31) as u32;
    let owner = member_8(&thread.frame, config.frame_owner) & has_owner;
    // The lower half only, where the instruction is an index.
    let mask = 0xffff_ffff | u64::from(config.instruction_is_index).wrapping_sub(1) << 32;
    let instruction = member(&thread.frame, config.frame_instruction) & mask;
    let code = member(&thread.frame, config.frame_code) & !TAG;
    read(&mut thread.code, config.code_bytes, code + u64::from(config.code_from));
    let first_line = member_32(&thread.code, config.code_first_line) as i32;
    // All ones unless the frame is a shim, which runs no code.
    let runs = (i64::from(owner) - i64::from(config.shim_owner)) >> 63;
    let definition = definition(thread, config, code) & runs as u64;
    RawPythonFrame { addr, code, instruction, definition, owner, first_line }
}

/// Names the code object that `thread.code` is a copy of. Its address alone does not: code objects
/// are freed, and others take their place.
#[inline(always)]
fn definition(thread: &Thread, config: &PythonConfig, code: u64) -> u64 {
    let mut key = hash::mix(thread.salt, code);
    key = hash::mix(key, u64::from(member_32(&thread.code, config.code_first_line)));
    key = hash::mix(key, member(&thread.code, config.code_name));
    key = hash::mix(key, member(&thread.code, config.code_file));
    hash::mix(key, member(&thread.code, config.code_lines)) | 1
}

/// The innermost frame of the thread; 0 where it runs no Python.
#[inline(always)]
fn first_frame(thread: &mut Thread, config: &PythonConfig) -> u64 {
    // SAFETY: a helper without arguments.
    let id = Task(unsafe { bpf_get_current_task() }).thread_pointer();
    let interpreters = word(config.runtime + u64::from(config.interpreters_head));
    if interpreters == 0 {
        return 0;
    }
    let known = thread.interpreters == interpreters
        && word(thread.python_state + u64::from(config.thread_id)) == id;
    if !known {
        find_thread(thread, config, interpreters, id);
    }
    if thread.python_state == 0 {
        return 0;
    }
    thread.flags |= u64::from(FLAG_PYTHON);
    take_cframes(thread, config);
    frame_of(thread.python_state, config)
}

#[inline(always)]
fn frame_of(python_state: u64, config: &PythonConfig) -> u64 {
    let frame = word(python_state + u64::from(config.thread_frame));
    match config.cframe_current {
        NONE => frame,
        offset => word(frame + u64::from(offset)),
    }
}

/// Looks through the thread states of all interpreters for that of the thread `id`. Several can
/// match, one an interpreter: the one that has a frame. New interpreters come first in the list, so
/// that is the innermost.
#[inline(never)]
fn find_thread(thread: &mut Thread, config: &PythonConfig, interpreters: u64, id: u64) {
    // With several interpreters the thread may change between them: it is looked for each time.
    let only = word(interpreters + u64::from(config.interpreter_next)) == 0;
    let (mut interpreter, mut state) = (interpreters, 0);
    thread.python_state = 0;
    for _ in 0..THREAD_STEPS {
        if state == 0 {
            if interpreter == 0 {
                break;
            }
            state = word(interpreter + u64::from(config.interpreter_threads));
            interpreter = word(interpreter + u64::from(config.interpreter_next));
            continue;
        }
        if word(state + u64::from(config.thread_id)) == id {
            // Kept in memory: in a register it would make each turn another state.
            thread.python_state = state;
            if frame_of(state, config) != 0 {
                break;
            }
        }
        state = word(state + u64::from(config.thread_next));
    }
    thread.interpreters = if only { interpreters } else { 0 };
}

/// The `CFrame`s of the thread: each lies on the C stack, in the frame of one evaluation loop.
#[inline(always)]
fn take_cframes(thread: &mut Thread, config: &PythonConfig) {
    if config.thread_cframe == NONE || config.cframe_previous == NONE {
        return;
    }
    let mut cframe = word(thread.python_state + u64::from(config.thread_cframe));
    for n in 0..CFRAMES {
        if cframe == 0 {
            break;
        }
        thread.cframes[n] = cframe;
        thread.cframe_count = n as u64 + 1;
        cframe = word(cframe + u64::from(config.cframe_previous));
    }
}
