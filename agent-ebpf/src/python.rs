//! The walk of a thread's Python frames, with and without the GIL: only the thread itself changes
//! its frames, and it is in a probe.

use agent_common::{
    python::{FRAME_GRANULE, NONE, PythonConfig},
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
    opaque::{opaque, sign},
    task::Task,
    thread::{KNOWN_CODES, STRUCT_WORDS, TEXT_WORDS, Thread},
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

/// Reads a structure of `bytes` bytes. After a failure it is zeros.
#[inline(always)]
pub(crate) fn read(to: &mut [u64; STRUCT_WORDS], bytes: u32, address: u64) {
    // The mask bounds the length for the verifier; the agent keeps to it.
    let bytes = bytes & (STRUCT_WORDS as u32 * 8 - 1);
    let to: *mut [u64; STRUCT_WORDS] = to;
    // SAFETY: the buffer holds `bytes`; the helper checks the address.
    unsafe { generated::bpf_probe_read_user(to.cast(), bytes, address as *const _) };
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

/// Walks the frames of a thread into `thread` and returns their hash; 0 where there are none. Every
/// turn goes straight on, and what its branches do is in memory: the verifier follows each path of
/// each turn. A frame that can't be read is zeros, and ends the walk.
#[inline(never)]
pub(crate) fn walk(thread: &mut Thread, config: &PythonConfig) -> u64 {
    let mut frame = first_frame(thread, config);
    let mut key = hash::SEED;
    thread.window_from = NOWHERE;
    for n in 0..PYTHON_FRAMES {
        if frame == 0 {
            break;
        }
        let at = place_in_window(frame, config);
        // As one number: conditions of their own would narrow `at`, each turn in another way.
        let outside = (frame - at) ^ thread.window_from | sign(thread.window_at.wrapping_sub(at));
        if outside != 0 {
            load(thread, config, frame);
        }
        let found = frame_at(thread, config, frame);
        key = hash::mix(hash::mix(key, found.definition), found.instruction);
        thread.frames[n] = found;
        thread.frame_count = n as u64 + 1;
        frame = in_window(thread, at, config.frame_previous);
    }
    if frame != 0 {
        thread.flags |= u64::from(FLAG_PYTHON_CUT);
    }
    key
}

/// `Thread::window_from` where nothing was read: no frame lies there.
const NOWHERE: u64 = 1;

/// How far a frame lies behind the beginning of the window that holds it.
#[inline(always)]
fn place_in_window(frame: u64, config: &PythonConfig) -> u64 {
    frame & u64::from(config.frame_granule_mask) & (FRAME_GRANULE - 1)
}

/// Reads a frame and what lies before it, where the outer frames are: a call's frame follows its
/// caller's.
#[inline(never)]
fn load(thread: &mut Thread, config: &PythonConfig, frame: u64) {
    let at = place_in_window(frame, config);
    let bytes = at as u32 + (config.frame_bytes & (STRUCT_WORDS as u32 * 8 - 1));
    (thread.window_from, thread.window_at) = (frame - at, at);
    let to = (&raw mut thread.words).cast();
    // SAFETY: the buffer has a structure more than a granule; the helper checks the address.
    let read = unsafe { generated::bpf_probe_read_user(to, bytes, (frame - at) as *const _) };
    thread.flags |= sign(read as u64) & u64::from(FLAG_PYTHON_FAULT);
}

/// The word at `offset` of the frame that lies `at` bytes behind the window's beginning.
#[inline(always)]
fn in_window(thread: &Thread, at: u64, offset: u32) -> u64 {
    let offset = (at + u64::from(offset & (STRUCT_WORDS as u32 * 8 - 1))) >> 3;
    let words: *const u64 = (&raw const thread.words).cast();
    // SAFETY: below the buffer's length, since `at` is below a granule.
    let word = unsafe { words.add(offset as usize) };
    // SAFETY: as above.
    unsafe { *word }
}

/// The frame at `addr`, which is in the window.
#[inline(always)]
fn frame_at(thread: &mut Thread, config: &PythonConfig, addr: u64) -> RawPythonFrame {
    let at = place_in_window(addr, config);
    // All ones where there is an owner: `NONE` has the sign bit.
    let has_owner = !sign(u64::from(config.frame_owner) << 32);
    let owner = in_window(thread, at, config.frame_owner) >> ((config.frame_owner & 7) * 8);
    let owner = owner & 0xff & has_owner;
    // The lower half only, where the instruction is an index.
    let mask = 0xffff_ffff | u64::from(config.instruction_is_index).wrapping_sub(1) << 32;
    let instruction = in_window(thread, at, config.frame_instruction) & mask;
    // All ones unless the frame is a shim, which runs no code.
    let runs = sign(owner.wrapping_sub(u64::from(config.shim_owner)));
    let code = in_window(thread, at, config.frame_code) & !TAG & runs;
    let known = &thread.known[slot_of(thread, code)];
    let unknown = known.code ^ code | sign(known.until_ns.wrapping_sub(thread.now_ns));
    if unknown & runs != 0 {
        look_at_code(thread, config, code);
    }
    let definition = thread.known[slot_of(thread, code)].definition & runs;
    RawPythonFrame { addr, code, instruction, definition, owner }
}

/// Where a code object is in `Thread::known`, if it is: at one of two neighbours.
#[inline(always)]
fn slot_of(thread: &Thread, code: u64) -> usize {
    let slot = (code.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as usize & (KNOWN_CODES - 2);
    let other = thread.known[slot].code ^ code;
    // 1 where another is at the first one.
    place(slot | (sign(other | other.wrapping_neg()) & 1) as usize)
}

/// The same place in `Thread::known`. Older verifiers (6.1 is one) know nothing of what an `or` or
/// `xor` of two numbers gives; a mask tells them, where the compiler does not see it to be needless.
#[inline(always)]
fn place(slot: usize) -> usize {
    opaque(slot as u64) as usize & (KNOWN_CODES - 1)
}

/// How long a code object must have been at its address, and for how long it is then taken for
/// granted that it still is: to look at each of them at each call would double the cost of a walk.
/// Functions that live shorter are told apart at each call. One that lived longer, was freed, and
/// whose address was given within so few milliseconds to another, is found out with the next look.
const SETTLED_NS: u64 = 1 << 30;
const HOLDS_FOR_NS: u64 = 1 << 23;

/// Names a code object. Its address alone does not: code objects are freed, and others take their
/// place. Nor do the addresses of its parts, where programs make functions at run time; so the
/// beginnings of what they hold are in the name.
///
/// A global function, as `stack::key_of_stack`.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn look_at_code(
    thread: *mut Thread,
    config: *const PythonConfig,
    code: u64,
) -> u32 {
    // SAFETY: null or valid: callers pass references. The verifier wants the look.
    let Some(thread) = (unsafe { thread.as_mut() }) else { return 0 };
    // SAFETY: as above.
    let Some(config) = (unsafe { config.as_ref() }) else { return 0 };
    let definition = define(thread, config, code);
    let now_ns = thread.now_ns;
    let slot = slot_of(thread, code);
    // Where it is at neither place, either makes room, by chance.
    let is_new = thread.known[slot].code != code;
    let slot = if is_new { slot ^ (now_ns >> 6) as usize & 1 } else { slot };
    let known = &mut thread.known[place(slot)];
    if known.code != code || known.definition != definition {
        (known.code, known.definition, known.since_ns) = (code, definition, now_ns);
    }
    let is_settled = now_ns.wrapping_sub(known.since_ns) >= SETTLED_NS;
    known.until_ns = if is_settled { now_ns + HOLDS_FOR_NS } else { 0 };
    0
}

#[inline(always)]
fn define(thread: &mut Thread, config: &PythonConfig, code: u64) -> u64 {
    read(&mut thread.code, config.code_bytes, code + u64::from(config.code_from));
    let first_line = member_32(&thread.code, config.code_first_line);
    let mut key = hash::mix(hash::mix(thread.salt, code), u64::from(first_line));
    let name = member(&thread.code, config.code_name);
    text(thread, name);
    key = hash::mix(hash::mix(key, name), text_word(thread, config.text_hash));
    key = hash::mix(hash::mix(key, text_word(thread, config.text_length)), begin(thread, config));
    let file = member(&thread.code, config.code_file);
    text(thread, file);
    key = hash::mix(hash::mix(key, file), text_word(thread, config.text_length));
    key = hash::mix(key, begin(thread, config));
    let lines = member(&thread.code, config.code_lines);
    text(thread, lines);
    key = hash::mix(hash::mix(key, lines), text_word(thread, config.bytes_size));
    for n in 0..4 {
        key = hash::mix(key, text_word(thread, config.bytes_data + n * 8));
    }
    key | 1
}

/// Reads the beginning of a `str` or `bytes` object.
#[inline(always)]
fn text(thread: &mut Thread, object: u64) {
    let to: *mut [u64; TEXT_WORDS] = &raw mut thread.text;
    // After a failure it is zeros.
    // SAFETY: the buffer is as long; the helper checks the address.
    unsafe { generated::bpf_probe_read_user(to.cast(), TEXT_WORDS as u32 * 8, object as *const _) };
}

#[inline(always)]
fn text_word(thread: &Thread, offset: u32) -> u64 {
    thread.text[(offset >> 3) as usize & (TEXT_WORDS - 1)]
}

/// The first characters of a string of ASCII.
#[inline(always)]
fn begin(thread: &Thread, config: &PythonConfig) -> u64 {
    hash::mix(text_word(thread, config.text_ascii), text_word(thread, config.text_ascii + 8))
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

/// The `CFrame`s of the thread: each lies on the C stack, in the frame of one evaluation loop. The
/// key does without them.
#[inline(always)]
pub(crate) fn take_cframes(thread: &mut Thread, config: &PythonConfig) {
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
