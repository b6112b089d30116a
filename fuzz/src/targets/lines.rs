//! Line tables of CPython 3.8 to 3.14.

use agent::{
    fuzzing::line_in_part,
    python::{LineFormat, line_at},
};

use super::Target;
use crate::{input::Input, limits::Cost};

pub(super) const TARGET: Target = Target {
    name: "lines",
    run,
    seeds,
    longest: 1 << 16,
    memory: Cost { base: 4096, per_byte: 0 },
    time_ns: Cost { base: 50_000_000, per_byte: 4000 },
};

/// Offsets that are looked up in one table.
const OFFSETS: usize = 8;

const FORMATS: [LineFormat; 3] =
    [LineFormat::Lnotab, LineFormat::Linetable310, LineFormat::Locations];

/// What the beginning of a table tells is what all of it tells, or nothing.
fn run(data: &[u8]) {
    let mut input = Input(data);
    let first_line = input.number() as i32;
    let offsets: [u32; OFFSETS] = std::array::from_fn(|_| input.number());
    let cut = usize::from(input.half());
    let table = input.0;
    let part = table.get(..cut).unwrap_or(table);
    for format in FORMATS {
        for offset in offsets {
            let whole = line_at(format, table, first_line, offset);
            let by_part = line_in_part(format, part, first_line, offset);
            assert!(by_part.is_none() || by_part == whole, "{format:?}: {by_part:?}, {whole:?}");
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let tables: [&[u8]; 4] = [
        // Pairs of steps; a range without a line; entries of every code.
        &[4, 1, 6, 2, 255, 0, 2, 127, 0, 200, 8, 1],
        &[4, 2, 4, 0x80, 4, 1, 254, 0, 2, 130],
        &[0x80 | 12 << 3 | 1, 0, 0, 0x80 | 15 << 3, 0x80 | 13 << 3, 1 | 64, 1, 0xf0, 2, 1, 0, 3],
        &[0xf2, 65, 1, 64, 2, 0, 0x80, 0x11, 0xd8, 4, 5, 0xe7, 0x81, 0],
    ];
    let seed = |table: &&[u8]| {
        let mut data = 10_i32.to_le_bytes().to_vec();
        data.extend((0..OFFSETS as u32).flat_map(|at| (at * 2).to_le_bytes()));
        data.extend(7_u16.to_le_bytes());
        data.extend_from_slice(table);
        data
    };
    tables.iter().map(seed).collect()
}
