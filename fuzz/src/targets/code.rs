//! Code objects of Python: the record of the kernel half, and the memory of the process behind it.

use agent::{
    fuzzing::interpreter,
    python::{Interpreter, decode},
};
use agent_common::stack::{FILE_BYTES, NAME_BYTES, RawCode, RawPythonFrame};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::Target;
use crate::{input::Input, limits::Cost};

pub(super) const TARGET: Target = Target {
    name: "code",
    run,
    seeds,
    longest: 1 << 14,
    // A line table is read up to its own limit, whatever its length is said to be.
    memory: Cost { base: 1 << 20, per_byte: 16 },
    time_ns: Cost { base: 200_000_000, per_byte: 20_000 },
};

/// Bytes of `_Py_DebugOffsets` that are read.
const PUBLISHED_BYTES: usize = 648;
/// Longest piece of memory that one read asks for.
const LONGEST_READ: usize = 256 << 10;
/// Characters that escaping may make of one.
const ESCAPED: usize = 8;

fn run(data: &[u8]) {
    let mut input = Input(data);
    let (minor, readable) = (input.byte(), input.byte());
    let Some(interpreter) = of_version(minor, &mut input) else { return };
    let raw: RawCode = read(&mut input);
    let instruction = input.word();
    let memory = input.0;
    let mut reads = 0_u32;
    let code = decode(&raw, &interpreter, |addr, into| {
        assert!(into.len() <= LONGEST_READ);
        reads += 1;
        fill(memory, addr, into);
        u32::from(readable) >> (reads & 7) & 1 == 1
    });
    assert!(reads < 20);
    assert!(code.function.chars().count() <= NAME_BYTES * ESCAPED + 1);
    assert!(code.file.chars().count() <= FILE_BYTES * ESCAPED + 1);
    let frame = RawPythonFrame {
        code: raw.code,
        instruction: raw.code.wrapping_add(instruction),
        ..RawPythonFrame::default()
    };
    for frame in [frame, RawPythonFrame { instruction, ..frame }] {
        assert!(code.line_of(&frame).is_none_or(|line| line > 0));
    }
}

/// An interpreter of a table's layout, or of one that the input publishes.
fn of_version(minor: u8, input: &mut Input<'_>) -> Option<Interpreter> {
    let minor = 8 + minor % 7;
    let published: &[u8] = if minor > 12 { &input.array::<PUBLISHED_BYTES>() } else { &[] };
    interpreter(minor, published)
}

/// A record, as far as the input goes.
fn read(input: &mut Input<'_>) -> RawCode {
    let bytes: [u8; size_of::<RawCode>()] = input.array();
    RawCode::read_from_bytes(&bytes).expect("as many bytes as a record has")
}

/// Memory that repeats itself.
fn fill(memory: &[u8], addr: u64, into: &mut [u8]) {
    let mut from = addr.checked_rem(memory.len() as u64).unwrap_or(0) as usize;
    let mut rest = into;
    while let Some(piece) = memory.get(from..).filter(|piece| !piece.is_empty()) {
        let (now, later) = rest.split_at_mut(piece.len().min(rest.len()));
        now.copy_from_slice(&piece[..now.len()]);
        (rest, from) = (later, 0);
        if rest.is_empty() {
            break;
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let table = [0x80 | 11 << 3, 0, 0, 0xf2, 65, 1, 64, 2, 0, 0xe7, 4, 2, 6, 1];
    let mut raw: RawCode = read(&mut Input(&[]));
    (raw.code, raw.first_line, raw.lines_addr) = (0x1000, 10, 0x2000);
    (raw.lines_bytes, raw.lines_copied) = (table.len() as u32, table.len() as u32);
    (raw.name_text.length, raw.name_text.kind, raw.name_text.copied) = (5, 1, 5);
    (raw.file_text.length, raw.file_text.kind, raw.file_text.copied) = (4, 2, 8);
    raw.name[..5].copy_from_slice(b"train");
    raw.file[..8].copy_from_slice(b"x\0.\0p\0y\0");
    raw.lines[..table.len()].copy_from_slice(&table);
    let mut cut = raw;
    (cut.lines_bytes, cut.lines_copied, cut.name_text.copied) = (4000, 512, 0);
    let seed = |minor: u8, raw: &RawCode| {
        let published = if minor > 4 { PUBLISHED_BYTES } else { 0 };
        let mut data = vec![minor, 0xff];
        data.resize(2 + published, 16);
        data.extend_from_slice(raw.as_bytes());
        data.extend(208_u64.to_le_bytes());
        data.extend([0x20, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0]);
        data
    };
    (0..7).flat_map(|minor| [seed(minor, &raw), seed(minor, &cut)]).collect()
}
