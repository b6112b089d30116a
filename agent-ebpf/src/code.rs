//! Python code objects, sent once each: names and lines must outlive the object.

use agent_common::{
    loss::Loss,
    python::PythonConfig,
    stack::{FILE_BYTES, FLAG_VERIFY, KIND_CODE, PYTHON_FRAMES, RawCode, RawPythonFrame, RawText},
};
use aya_ebpf::{helpers::generated, macros::map, maps::LruHashMap};

use crate::{
    emit,
    lose::lose,
    python::{self, member, member_32, read, word},
    thread::Thread,
};

/// Definitions that were sent. One that falls out is sent again.
#[map]
static DEFINED: LruHashMap<u64, u8> = LruHashMap::with_max_entries(32768, 0);

/// Sends the code objects of the walked frames that were not sent before; all of them where the
/// stack is sent to verify its key, since an address may have got another object.
///
/// A global function, as `stack::key_of_stack`.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn define_codes(thread: *mut Thread) -> u32 {
    // SAFETY: null or valid: callers pass references. The verifier wants the look.
    let Some(thread) = (unsafe { thread.as_mut() }) else { return 0 };
    let tgid = (thread.ids >> 32) as u32;
    let Some(config) = python::config(tgid) else { return 0 };
    python::take_cframes(thread, config);
    for n in 0..PYTHON_FRAMES {
        if n as u64 >= thread.frame_count {
            break;
        }
        let frame = thread.frames[n];
        // SAFETY: the value is not used.
        let known = unsafe { DEFINED.get(frame.definition) }.is_some();
        if frame.definition != 0 && (!known || thread.sending & u64::from(FLAG_VERIFY) != 0) {
            send(thread, config, &frame, tgid);
        }
    }
    0
}

/// Straight on, with hardly a branch: the verifier follows every path of every turn of the loop. So
/// reads take in what lies after a string, as far as there is anything. Where a string could not be
/// copied the agent reads it itself, while the object is still there.
#[inline(never)]
fn send(thread: &mut Thread, config: &PythonConfig, frame: &RawPythonFrame, tgid: u32) {
    read(&mut thread.code, config.code_bytes, frame.code + u64::from(config.code_from));
    let Some(mut entry) = emit::STACKS.reserve::<RawCode>(0) else {
        lose(tgid, Loss::StackRingFull);
        return;
    };
    // SAFETY: the record is ours until it is submitted, and every field that is read is set.
    let record = unsafe { &mut *entry.as_mut_ptr() };
    record.kind = KIND_CODE;
    record.tgid = tgid;
    record.definition = frame.definition;
    record.code = frame.code;
    record.first_line = member_32(&thread.code, config.code_first_line) as i32;
    let name = Text::at(member(&thread.code, config.code_name), config);
    record.name_text = name.raw(copy(&mut record.name, name.data));
    let file = Text::at(member(&thread.code, config.code_file), config);
    record.file_text = file.raw(copy(&mut record.file, file.end(FILE_BYTES)));
    let lines = member(&thread.code, config.code_lines);
    record.lines_addr = lines + u64::from(config.bytes_data);
    record.lines_bytes = word(lines + u64::from(config.bytes_size)) as u32;
    record.lines_copied = copy(&mut record.lines, record.lines_addr);
    emit::submit(entry);
    DEFINED.insert(frame.definition, 1, 0).unwrap_or_default();
}

/// A `str` object.
struct Text {
    state: u32,
    length: u32,
    /// Address of its first character.
    data: u64,
}

impl Text {
    #[inline(always)]
    fn at(object: u64, config: &PythonConfig) -> Self {
        let state = word(object + u64::from(config.text_state)) as u32;
        let length = word(object + u64::from(config.text_length)) as u32;
        let (ascii, compact) = (u64::from(config.text_ascii), u64::from(config.text_compact));
        // One of the two, without a branch.
        let begins = compact - (compact - ascii) * u64::from(state >> 6 & 1);
        Self { state, length, data: object + begins }
    }

    /// Include/cpython/unicodeobject.h: interned:2, kind:3, compact:1, ascii:1. A string that is not
    /// compact has its characters elsewhere: kind 0 says that there are none here.
    #[inline(always)]
    fn kind(&self) -> u32 {
        (self.state >> 2 & 7) * (self.state >> 5 & 1)
    }

    /// Where its last `bytes` bytes begin, or all of it.
    #[inline(always)]
    fn end(&self, bytes: usize) -> u64 {
        let before = i64::from(self.length) * i64::from(self.kind()) - bytes as i64;
        self.data + (before & !(before >> 63)) as u64
    }

    #[inline(always)]
    fn raw(&self, copied: u32) -> RawText {
        RawText {
            length: self.length,
            kind: self.kind() as u8,
            ascii: (self.state >> 6 & 1) as u8,
            copied: copied as u16,
        }
    }
}

/// Size of the pages of which a whole one is there or not.
const PAGE_BYTES: u32 = 4096;

/// Fills the buffer, or, where that goes over the end of what is there (also of memory that was never
/// written to), its beginning up to the page's end; gives the bytes that were copied.
#[inline(always)]
fn copy<const N: usize>(to: &mut [u8; N], address: u64) -> u32 {
    const { assert!(N.is_power_of_two() && N < PAGE_BYTES as usize) };
    let to: *mut [u8; N] = to;
    // SAFETY: the buffer is as long; the helper checks the address and fails instead of faulting.
    let whole = unsafe { generated::bpf_probe_read_user(to.cast(), N as u32, address as *const _) };
    // Where the whole is not to be had and this page is there, less than `N` of it is left. The mask
    // bounds it for the verifier.
    let rest = (PAGE_BYTES - (address as u32 & (PAGE_BYTES - 1))) & (N as u32 - 1);
    // SAFETY: as above, and the buffer is longer.
    let part = unsafe { generated::bpf_probe_read_user(to.cast(), rest, address as *const _) };
    // 0 where a read succeeded, else -1 and less: all ones where it failed.
    let (whole, part) = ((whole >> 63) as u32, (part >> 63) as u32);
    N as u32 & !whole | rest & whole & !part
}
