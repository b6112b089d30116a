//! Which functions a library exports.

use std::{collections::HashSet, fs::File};

use object::{Object as _, ObjectSymbol as _};

use crate::host::ElfSource;

/// How many of `symbols` a 64-bit ELF file defines in its dynamic symbol table, and those that it
/// does not; `None` where it is no such file.
pub fn exported<'a>(file: File, symbols: &[&'a str]) -> Option<(usize, Vec<&'a str>)> {
    let source = ElfSource::new(file);
    let elf = object::File::parse(source.reader()).ok()?;
    if !elf.is_64() {
        return None;
    }
    let wanted: HashSet<&str> = symbols.iter().copied().collect();
    let found: HashSet<&str> = elf
        .dynamic_symbols()
        .filter(object::ObjectSymbol::is_definition)
        .filter_map(|symbol| wanted.get(symbol.name().ok()?).copied())
        .collect();
    let missing = symbols.iter().copied().filter(|symbol| !found.contains(symbol)).collect();
    Some((found.len(), missing))
}
