//! Heavy records: stacks and code objects as the kernel half copies them, of a process that lays
//! out its stack, its Python frames and its code objects as it likes.

use std::{fs, ops::Range, os::unix::fs::symlink, path::Path, sync::OnceLock};

use agent::{
    fuzzing::{FRAME_LIMIT, interpreter, resolve},
    host::Host,
    python::Interpreter,
};
use agent_common::stack::{
    CFRAMES, COPY_BYTES, KIND_CODE, KIND_STACK, PENDING_RETURNS, PYTHON_FRAMES, RawCode,
    RawPythonFrame, RawReturn, RawStack,
};
use zerocopy::{FromZeros as _, IntoBytes as _};

use super::Target;
use crate::{input::Input, limits::Cost, scratch};

pub(super) const TARGET: Target = Target {
    name: "stacks",
    run,
    seeds,
    longest: 1 << 14,
    // What is known of the made-up process's libraries is most of it.
    memory: Cost { base: 12 << 20, per_byte: 400 },
    time_ns: Cost { base: 2_000_000_000, per_byte: 100_000 },
};

/// Above what the kernel gives to a process: no real one's memory is read.
const TGID: u32 = (1 << 22) + 2;
/// Where the libraries of the made-up process begin, and how far apart they are.
const LIBRARIES: u64 = 0x7000_0000_0000;
const APART: u64 = 1 << 32;
/// The libraries of this process that the made-up one has too.
const TAKEN: [&str; 3] = ["libc.so", "libgcc_s.so", "ld-linux"];
/// Records of an input at most.
const RECORDS: usize = 8;

struct Scene {
    host: Host,
    /// Executable memory.
    codes: Vec<Range<u64>>,
}

fn scene() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| make_scene().expect("a folder for a made-up process"))
}

/// A process with some of this one's libraries at addresses that never change, one of them by an
/// interpreter's name, and code without a file.
fn make_scene() -> std::io::Result<Scene> {
    let root = scratch::folder().join("stacks");
    let links = root.join(format!("proc/{TGID}/map_files"));
    fs::create_dir_all(&links)?;
    let own = fs::read_to_string("/proc/self/maps")?;
    let (mut maps, mut codes) = (Vec::new(), Vec::new());
    for line in own.lines() {
        let (Some(at), Some(fields)) = (line.find('/'), line.get(..line.len().min(60))) else {
            continue;
        };
        let (Some(path), Some(library)) = (line.get(at..), taken(line)) else { continue };
        let Some((old, offset)) = range_and_offset(fields) else { continue };
        for (number, name) in [(library, path), (TAKEN.len(), "/usr/bin/python3.12")] {
            // The interpreter is a second copy of the last one.
            if number == TAKEN.len() && library + 1 != TAKEN.len() {
                continue;
            }
            let start = LIBRARIES + number as u64 * APART + offset;
            let new = start..start + (old.end - old.start);
            let (range, inode) = (format!("{:x}-{:x}", new.start, new.end), number + 7);
            maps.push(format!("{range} r-xp {offset:08x} 08:01 {inode} {name}"));
            let link = links.join(range);
            if !link.exists() {
                symlink(Path::new(path), link)?;
            }
            codes.push(new);
        }
    }
    let jit = LIBRARIES - APART..LIBRARIES - APART + 0x1000;
    maps.push(format!("{:x}-{:x} rwxp 00000000 00:00 0", jit.start, jit.end));
    maps.push("7ffff000-80000000 --xp 00000000 00:00 0   [uprobes]\n".to_owned());
    codes.extend([jit, 0x7fff_f000..0x8000_0000]);
    fs::write(root.join(format!("proc/{TGID}/maps")), maps.join("\n"))?;
    Ok(Scene { host: Host::at(root), codes })
}

/// Which of the libraries an executable mapping is of.
fn taken(line: &str) -> Option<usize> {
    let name = line.rsplit('/').next()?;
    let is_code = line.split(' ').nth(1) == Some("r-xp");
    TAKEN.iter().position(|start| is_code && name.starts_with(start))
}

fn range_and_offset(fields: &str) -> Option<(Range<u64>, u64)> {
    let mut words = fields.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    Some((hex(start)?..hex(end)?, hex(words.nth(1)?)?))
}

fn run(data: &[u8]) {
    let mut input = Input(data);
    let (interpreter, named) = (of_version(input.byte()), input.byte() < 4);
    let mut records = Vec::new();
    let mut stacks = 0;
    while records.len() < RECORDS && !input.is_empty() {
        let (record, is_stack) = record(&mut input);
        stacks += usize::from(is_stack);
        records.push(vec![record]);
    }
    let count = records.len();
    let made = resolve(&scene().host, TGID, interpreter, records, named);
    assert!(made.resolved + made.undecodable as usize <= count, "{made:?}");
    assert!(made.stacks.len() <= made.resolved && made.wanted <= stacks, "{made:?}");
    // Each may continue with the stack that called a backward pass, which may do so itself.
    let (native, python) = (FRAME_LIMIT * RECORDS, PYTHON_FRAMES * RECORDS);
    for stack in &made.stacks {
        assert!(stack.0 <= native && stack.1 <= python, "{made:?}");
    }
}

fn of_version(byte: u8) -> Option<Interpreter> {
    // What 3.13 publishes is another target's affair; its frames are as those of 3.12.
    let mut found = interpreter(8 + byte % 5, &[])?;
    found.path = "/usr/bin/python3.12".into();
    (byte & 128 == 0).then_some(found)
}

/// A record, and whether it is a stack that the resolver cannot but see.
fn record(input: &mut Input<'_>) -> (Vec<u8>, bool) {
    match input.byte() {
        0..150 => (stack(input), true),
        150..240 => (code(input), false),
        // Of any length and kind.
        _ => {
            let bytes = usize::from(input.half());
            (input.take(bytes).to_vec(), true)
        }
    }
}

/// A word as stacks hold them.
fn word(input: &mut Input<'_>, sp: u64) -> u64 {
    match input.byte() {
        0..110 => {
            let codes = &scene().codes;
            let (which, at) = (usize::from(input.byte()), u64::from(input.number()));
            let code = codes.get(which % codes.len()).cloned().unwrap_or_default();
            code.start + at.checked_rem(code.end - code.start).unwrap_or(0)
        }
        110..200 => sp.wrapping_add(8 * u64::from(input.half())),
        200..230 => input.byte().into(),
        230..245 => input.word(),
        245..250 => u64::MAX - u64::from(input.byte()),
        _ => 0,
    }
}

fn stack(input: &mut Input<'_>) -> Vec<u8> {
    let mut raw = RawStack::new_zeroed();
    (raw.kind, raw.tgid, raw.tid) = (KIND_STACK, TGID, TGID);
    raw.flags = input.byte();
    raw.sp = if input.byte() < 240 { 0x7ffd_0000_0000 } else { input.word() };
    let sp = raw.sp;
    (raw.key, raw.caller_key) = (input.byte().into(), input.byte().into());
    (raw.ip, raw.fp, raw.lr) = (word(input, sp), word(input, sp), word(input, sp));
    let [frames, cframes, returns, words] = input.array::<4>();
    (raw.frame_count, raw.cframe_count) = (frames.into(), cframes.into());
    raw.return_count = returns.into();
    for pending in raw.returns.iter_mut().take(usize::from(returns).min(PENDING_RETURNS)) {
        *pending = RawReturn { slot: word(input, sp), address: word(input, sp) };
    }
    for cframe in raw.cframes.iter_mut().take(usize::from(cframes).min(CFRAMES)) {
        *cframe = word(input, sp);
    }
    for frame in raw.frames.iter_mut().take(usize::from(frames).min(PYTHON_FRAMES)) {
        *frame = python_frame(input, sp);
    }
    let words = 8 * usize::from(words);
    let copy: Vec<u8> = (0..words).flat_map(|_| word(input, sp).to_le_bytes()).collect();
    raw.copied = if input.byte() < 250 { copy.len() as u32 } else { input.number() };
    let mut record = raw.as_bytes().to_vec();
    record.extend(copy);
    record.resize(size_of::<RawStack>() + COPY_BYTES, 0);
    record
}

fn python_frame(input: &mut Input<'_>, sp: u64) -> RawPythonFrame {
    let [code, definition, owner] = input.array::<3>();
    RawPythonFrame {
        addr: word(input, sp),
        code: u64::from(code % 4) * 0x1000,
        instruction: input.half().into(),
        definition: (definition % 5).into(),
        owner: (owner % 6).into(),
    }
}

/// A code object with little of everything.
fn code(input: &mut Input<'_>) -> Vec<u8> {
    let mut raw = RawCode::new_zeroed();
    let texts: [u8; 16] = input.array();
    raw.name_text.as_mut_bytes().copy_from_slice(&texts[..8]);
    raw.file_text.as_mut_bytes().copy_from_slice(&texts[8..]);
    let [code, definition, first_line, bytes] = input.array::<4>();
    (raw.code, raw.definition) = (u64::from(code % 4) * 0x1000, (definition % 5).into());
    raw.first_line = (first_line % 4).into();
    raw.lines_bytes = bytes.into();
    raw.lines_copied = input.byte().into();
    let rest: [u8; 48] = input.array();
    raw.name[..16].copy_from_slice(&rest[..16]);
    raw.file[..16].copy_from_slice(&rest[16..32]);
    raw.lines[..16].copy_from_slice(&rest[32..]);
    (raw.kind, raw.tgid) = (KIND_CODE, TGID);
    raw.as_bytes().to_vec()
}

fn seeds() -> Vec<Vec<u8>> {
    // A name and a file of one byte a character, whole; a line table.
    let text = [4, 0, 0, 0, 1, 1, 16, 0];
    let mut code = vec![200];
    code.extend([text, text].as_flattened());
    code.extend([1, 1, 1, 12, 12]);
    code.extend(b"main\0\0\0\0\0\0\0\0\0\0\0\0x.py\0\0\0\0\0\0\0\0\0\0\0\0");
    code.extend([2, 1, 4, 1, 6, 2, 0xd8, 4, 5, 0xf2, 1, 2, 0, 0, 0, 0]);
    let place = |library: u8, at: u32| [&[0, library][..], &at.to_le_bytes()].concat();
    let mut stack = vec![0, 2, 0, 1, 0];
    stack.extend(place(0, 0x4_0000));
    stack.extend([110, 8, 0, 255, 2, 1, 1, 60]);
    stack.extend([110, 4, 0]);
    stack.extend(place(0, 0x5_0000));
    stack.extend([110, 9, 0]);
    for owner in [0, 3] {
        stack.extend([1, 1, owner, 110, 6, 0, 4, 0]);
    }
    for at in 0..60_u32 {
        stack.extend(place((at % 4) as u8, at * 0x1234));
        stack.extend([110, (at + 3) as u8, 0]);
    }
    (0..6)
        .map(|version| [&[version, version][..], &code, &stack, &stack].concat())
        .chain([vec![4, 1, 250, 200, 0, KIND_STACK, 0, 0], vec![128, 0, 0]])
        .collect()
}
