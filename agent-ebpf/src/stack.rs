//! Stacks: a key at each call, the whole stack the first time the key is met.

use core::ffi::c_void;

use agent_common::{
    loss::Loss,
    stack::{
        CFRAMES, COPY_BYTES, ExecutablePages, FLAG_BACKWARD, FLAG_VERIFY, KIND_STACK,
        LARGE_COPY_BYTES, PENDING_RETURNS, PYTHON_FRAMES, RawPythonFrame, RawReturn, RawStack,
        WANTED, WINDOW_BITS, WINDOW_WORDS, Window,
    },
};
use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    helpers::generated::{self, bpf_get_current_task, bpf_probe_read_kernel},
    macros::map,
    maps::{HashMap, LruHashMap},
};

use crate::{
    backward, code, emit, hash,
    lose::lose,
    python, regs,
    task::Task,
    thread::{self, SCANNED_WORDS, Thread},
};

/// Keys that were sent whole, with how often they were met since. One that falls out is sent again.
#[map]
static SEEN: LruHashMap<u64, u32> = LruHashMap::with_max_entries(65536, 0);
/// Where processes have executable code, written by the agent.
#[map]
static PAGES: HashMap<u32, ExecutablePages> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// One in so many meetings of a key sends the stack again, to verify the key. A power of two.
const VERIFY_EVERY: u32 = 4096;

/// 1: stacks are taken. The agent writes it before the programs are loaded.
#[unsafe(no_mangle)]
static TAKE_STACKS: u32 = 1;

fn enabled() -> bool {
    // SAFETY: a valid static that nobody writes while the program is loaded. Volatile, or the
    // compiler would fold the value above into the program.
    unsafe { core::ptr::read_volatile(&raw const TAKE_STACKS) == 1 }
}

/// Words of the stack that are looked at below Python frames.
const FEW_WORDS: usize = 32;
/// Bytes of a read where the whole copy would go over the end of the stack. What the last one may
/// leave out lies above every frame: a thread's control block, or the environment.
const CHUNK: usize = 512;

/// A child has its parent's libraries at the same places.
pub(crate) fn fork(parent: u32, child: u32) {
    // SAFETY: without preallocation an old value stays valid until the program returns.
    if let Some(pages) = unsafe { PAGES.get(parent) } {
        PAGES.insert(child, pages, 0).unwrap_or_default();
    }
    python::fork(parent, child);
}

/// The program is gone.
pub(crate) fn forget(tgid: u32) {
    if PAGES.get_ptr(tgid).is_some() {
        PAGES.remove(tgid).unwrap_or_default();
    }
    python::forget(tgid);
}

/// The key of the calling thread's stack; 0 where none is taken. `is_rare`: new stacks are few here,
/// and are sent with the large copy at once.
#[inline(always)]
pub(crate) fn key(ctx: *mut c_void, ids: u64, now_ns: u64, is_rare: bool) -> u64 {
    if !enabled() {
        return 0;
    }
    let Some(thread) = thread::current(ids) else { return 0 };
    thread.regs = regs::read(ctx);
    thread.now_ns = now_ns;
    thread.rare = u64::from(is_rare);
    key_of_stack(thread)
}

/// The key of the stack of a thread whose registers are known.
///
/// A global function: the verifier goes through it once, and not for each path that leads here
/// (kernels since 5.13, told by the object's BTF; to it the argument may be null). What differs
/// between the paths in it is kept in the thread's memory, which the verifier does not follow: in
/// registers, each path would have it go through all loops that come after.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn key_of_stack(thread: *mut Thread) -> u64 {
    // SAFETY: null or valid: callers pass references. The verifier wants the look.
    let Some(thread) = (unsafe { thread.as_mut() }) else { return 0 };
    let tgid = (thread.ids >> 32) as u32;
    (thread.frame_count, thread.cframe_count, thread.flags) = (0, 0, 0);
    (thread.chain, thread.caller) = (0, 0);
    if let Some(config) = python::config(tgid) {
        thread.chain = python::walk(thread, config);
    }
    if thread.autograd == 1 {
        thread.caller = backward::caller(tgid);
    }
    let mut key = hash::mix(hash::mix(thread.salt, thread.chain), thread.caller);
    key = hash::mix(hash::mix(key, thread.regs.sp), thread.regs.lr);
    key = hash::mix(key, native(thread, tgid, thread.regs.sp)) | 1;
    send_unless_seen(thread, key);
    key
}

/// `Thread::sending`: not at all, or with which copy. `FLAG_VERIFY` is added to it.
const SEND_NOT: u64 = 0;
const SEND: u64 = 1 << 8;
const SEND_LARGE: u64 = 1 << 9;

#[inline(always)]
fn send_unless_seen(thread: &mut Thread, key: u64) {
    thread.sending = SEND + thread.rare * (SEND_LARGE - SEND);
    if let Some(count) = SEEN.get_ptr_mut(key) {
        // SAFETY: a map value, valid until the program returns. Two threads that count at once may
        // count one: nothing depends on it.
        let count = unsafe { &mut *count };
        thread.sending = if *count == WANTED { SEND_LARGE } else { SEND_NOT };
        *count = count.wrapping_add(1);
        if *count & (VERIFY_EVERY - 1) == 0 && thread.sending == SEND_NOT {
            // The large copy, as the stack may be known by it.
            thread.sending = SEND_LARGE | u64::from(FLAG_VERIFY);
        }
    }
    if thread.sending == SEND_NOT {
        return;
    }
    code::define_codes(thread);
    let is_large = thread.sending & SEND_LARGE != 0;
    // Where the ring has no room for the large one it may have some for the other.
    let sent =
        (is_large && send::<LARGE_COPY_BYTES>(thread, key)) || send::<COPY_BYTES>(thread, key);
    if !sent {
        lose((thread.ids >> 32) as u32, Loss::StackRingFull);
    } else if thread.sending & u64::from(FLAG_VERIFY) == 0 {
        SEEN.insert(key, 0, 0).unwrap_or_default();
    }
}

/// Hash of the words at the stack's beginning that point to code: the return addresses there, and
/// some that are left from earlier calls. Python frames tell most call paths apart: with them a few
/// words do, for what they call into.
#[inline(never)]
fn native(thread: &mut Thread, tgid: u32, sp: u64) -> u64 {
    thread.scanned = SCANNED_WORDS as u64;
    if thread.frame_count > 0 || !scan::<SCANNED_WORDS>(thread, sp) {
        thread.scanned = FEW_WORDS as u64;
        // Where that fails too, they are zeros.
        scan::<FEW_WORDS>(thread, sp);
    }
    // The return address, wherever it points. Mixed in and not the beginning: the same word mixed
    // into itself below would be nothing.
    let mut key = hash::mix(hash::SEED, thread.words[0]);
    // SAFETY: without preallocation an old value stays valid until the program returns.
    let Some(pages) = (unsafe { PAGES.get(tgid) }) else { return key };
    let count = thread.scanned;
    for (n, word) in thread.words.iter().take(SCANNED_WORDS).enumerate() {
        if n as u64 >= count {
            break;
        }
        if executable(&pages.windows[0], *word)
            || executable(&pages.windows[1], *word)
            || executable(&pages.windows[2], *word)
        {
            key = hash::mix(key, *word);
        }
    }
    key
}

/// Copies the first words of the stack; false where it is shorter.
#[inline(always)]
fn scan<const WORDS: usize>(thread: &mut Thread, sp: u64) -> bool {
    let words = &raw mut thread.words;
    // SAFETY: the buffer is at least as long; the helper checks the address and fails instead of
    // faulting.
    unsafe { generated::bpf_probe_read_user(words.cast(), (WORDS * 8) as u32, sp as *const _) == 0 }
}

#[inline(always)]
fn executable(window: &Window, word: u64) -> bool {
    let granule = word.wrapping_sub(window.start) >> (window.shift & 63);
    if granule >= WINDOW_BITS {
        return false;
    }
    window.bits[(granule >> 6) as usize & (WINDOW_WORDS - 1)] >> (granule & 63) & 1 == 1
}

/// A record with its copy.
#[repr(C)]
struct Record<const BYTES: usize> {
    head: RawStack,
    copy: [u8; BYTES],
}

#[inline(always)]
fn send<const BYTES: usize>(thread: &Thread, key: u64) -> bool {
    let Some(mut entry) = emit::STACKS.reserve::<Record<BYTES>>(0) else { return false };
    // SAFETY: the record is ours until it is submitted, and every field that is read is set.
    let record = unsafe { &mut *entry.as_mut_ptr() };
    let (head, regs) = (&mut record.head, &thread.regs);
    head.kind = KIND_STACK;
    let backward = if thread.caller == 0 { 0 } else { FLAG_BACKWARD };
    head.flags = thread.sending as u8 | thread.flags as u8 | backward;
    head.frame_count = thread.frame_count as u16;
    head.cframe_count = thread.cframe_count as u16;
    head.tgid = (thread.ids >> 32) as u32;
    head.tid = thread.ids as u32;
    head.ts_ns = thread.now_ns;
    head.key = key;
    head.caller_key = thread.caller;
    (head.ip, head.sp, head.fp, head.lr) = (regs.ip, regs.sp, regs.fp, regs.lr);
    head.pad = 0;
    copy_frames(thread, head);
    head.return_count = pending_returns(&mut head.returns);
    head.copied = copy_stack(&mut record.copy, regs.sp);
    emit::submit(entry);
    true
}

/// `cframes` and `frames` lie one after the other in both.
#[inline(always)]
fn copy_frames(thread: &Thread, head: &mut RawStack) {
    const BYTES: usize = CFRAMES * 8 + PYTHON_FRAMES * size_of::<RawPythonFrame>();
    let (to, from) = (&raw mut head.cframes, &raw const thread.cframes);
    // SAFETY: both are so long from there on; it cannot fail on a map's memory.
    unsafe { bpf_probe_read_kernel(to.cast(), BYTES as u32, from.cast()) };
}

/// The thread's pending return probes, whose trampoline stands on the stack instead of the return
/// addresses.
#[inline(always)]
fn pending_returns(to: &mut [RawReturn; PENDING_RETURNS]) -> u16 {
    // SAFETY: a helper without arguments.
    let mut pending = Task(unsafe { bpf_get_current_task() }).return_instances();
    let mut count = 0;
    for slot in to.iter_mut() {
        if pending.is_none() {
            break;
        }
        *slot = RawReturn { slot: pending.slot(), address: pending.address() };
        count += 1;
        pending = pending.next();
    }
    count
}

/// Copies the stack up to the end of the buffer or of the mapping: a read that meets an unmapped
/// page fails whole.
#[inline(always)]
fn copy_stack<const BYTES: usize>(to: &mut [u8; BYTES], sp: u64) -> u32 {
    let to = to.as_mut_ptr();
    // SAFETY: the buffer is as long.
    if unsafe { generated::bpf_probe_read_user(to.cast(), BYTES as u32, sp as *const _) } == 0 {
        return BYTES as u32;
    }
    let mut copied = 0;
    for n in 0..BYTES / CHUNK {
        let from = (sp + (n * CHUNK) as u64) as *const c_void;
        // SAFETY: within the buffer.
        let chunk = unsafe { to.add(n * CHUNK) };
        // SAFETY: a chunk's room; the helper checks the address and fails instead of faulting.
        if unsafe { generated::bpf_probe_read_user(chunk.cast(), CHUNK as u32, from) } != 0 {
            break;
        }
        copied = (n + 1) * CHUNK;
    }
    copied as u32
}
