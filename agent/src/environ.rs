//! The environment of a process as it is now. `/proc/PID/environ` is the one that it was given: what it
//! has set since (`os.environ["CUDA_VISIBLE_DEVICES"] = "1"`) lies in its own memory only.

use object::{Object as _, ObjectSymbol as _};

use crate::{
    host::{ALLOWED_ENV, ElfSource, Env, Host, Mapping, Segments},
    python::Memory,
};

/// The C library's variable, by each of its names.
const SYMBOLS: [&str; 3] = ["environ", "__environ", "_environ"];
/// Entries that are looked at, and bytes of a value that are kept, as of `/proc/PID/environ`.
const MAX_ENTRIES: u64 = 8192;
const MAX_VALUE: usize = 4096;
/// Bytes that are read of every entry: more than the longest name that is looked for, with its `=`.
const NAME: usize = 32;

const _: () = {
    let mut at = 0;
    while at < ALLOWED_ENV.len() {
        assert!(ALLOWED_ENV[at].len() < NAME);
        at += 1;
    }
};

/// The allow-listed variables that a process has now; `None` where they can't be found. Of the others
/// only the beginning is read, and nothing kept.
pub fn now(host: &Host, tgid: u32) -> Option<Env> {
    let mappings = host.mappings(tgid)?;
    let memory = Memory::open(host, tgid);
    let variable = variable(host, tgid, &mappings)?;
    let list = memory.word(variable)?;
    let mut found = Vec::new();
    for at in 0..MAX_ENTRIES {
        match memory.word(list.checked_add(at * 8)?)? {
            0 => return Some(Env::parse(&found)),
            entry => take(&memory, entry, &mut found),
        }
    }
    None
}

/// Appends the entry, with a NUL, if its name is allow-listed.
fn take(memory: &Memory, entry: u64, found: &mut Vec<u8>) {
    let beginning = text(memory, entry, NAME);
    let Some(equals) = beginning.iter().position(|byte| *byte == b'=') else { return };
    let name = beginning.get(..equals).unwrap_or_default();
    if ALLOWED_ENV.iter().any(|allowed| allowed.as_bytes() == name) {
        found.extend(text(memory, entry, NAME + MAX_VALUE));
        found.push(0);
    }
}

/// Bytes up to a NUL, as far as they can be read.
fn text(memory: &Memory, addr: u64, limit: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < limit {
        // Never beyond an aligned piece: the next page may not be there.
        let at = addr.wrapping_add(bytes.len() as u64);
        let mut piece = [0; NAME];
        let length = NAME - (at % NAME as u64) as usize;
        let Some(piece) = piece.get_mut(..length).filter(|piece| !piece.is_empty()) else { break };
        if !memory.read(at, piece) {
            break;
        }
        let end = piece.iter().position(|byte| *byte == 0);
        bytes.extend_from_slice(piece.get(..end.unwrap_or(length)).unwrap_or_default());
        if end.is_some() {
            break;
        }
    }
    bytes.truncate(limit);
    bytes
}

/// The address of the variable: in the program where that has a copy of it (which the C library then
/// uses too, or which a statically linked one has), else in the C library.
fn variable(host: &Host, tgid: u32, mappings: &[Mapping]) -> Option<u64> {
    let program = host.main_executable(tgid, mappings);
    let is_libc = |mapping: &&Mapping| {
        let name = mapping.file_name();
        name.starts_with(b"libc.so.")
            || name.starts_with(b"libc-2.")
            || name.starts_with(b"ld-musl-")
    };
    let libc = mappings.iter().find(is_libc);
    let is_static = libc.is_none();
    let of_program = program.and_then(|file| address(host, tgid, mappings, file, is_static));
    of_program.or_else(|| address(host, tgid, mappings, libc?, false))
}

fn address(
    host: &Host,
    tgid: u32,
    mappings: &[Mapping],
    file: &Mapping,
    with_local: bool,
) -> Option<u64> {
    let source = ElfSource::new(host.open_mapped(tgid, file)?);
    let elf = object::File::parse(source.reader()).ok()?;
    let mut symbols: Vec<_> = elf.dynamic_symbols().collect();
    if with_local {
        symbols.extend(elf.symbols());
    }
    let named = symbols.iter().find(|symbol| {
        symbol.is_definition() && symbol.name().is_ok_and(|name| SYMBOLS.contains(&name))
    })?;
    let own: Vec<&Mapping> = mappings.iter().filter(|other| other.same_file(file)).collect();
    Some(Segments::of(&elf).bias(&own)?.wrapping_add(named.address()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_changes_nothing_has_what_it_was_given() {
        let given = std::fs::read("/proc/self/environ").unwrap();
        let pid = std::process::id();
        assert_eq!(now(&Host::live(), pid), Some(Env::parse(&given)));
        assert_eq!(now(&Host::live(), u32::MAX), None);
    }

    #[test]
    fn texts_end_at_their_nul_wherever_they_begin() {
        let memory = Memory::open(&Host::live(), std::process::id());
        let mut bytes = [b'x'; 200];
        bytes[150] = 0;
        for start in 0..70 {
            let addr = bytes.as_ptr() as u64 + start as u64;
            assert_eq!(text(&memory, addr, 1000), vec![b'x'; 150 - start]);
            assert_eq!(text(&memory, addr, 40), vec![b'x'; 40]);
        }
        assert!(text(&memory, 8, 40).is_empty());
    }
}
