//! Names of functions of a file whose symbols are too many to copy.
//!
//! `libtorch_cpu.so` has 80 MiB of names. Here the addresses are held, sixteen bytes a function, and
//! a name is read from the file when it is asked for.

use object::{
    LittleEndian,
    elf::{self, FileHeader64, Sym64},
    read::elf::{FileHeader as _, SectionHeader as _, Sym as _},
};

use super::Module;

/// Symbols read at a time.
const CHUNK: usize = 1 << 16;
/// Functions that are held at most.
const FUNCTION_LIMIT: usize = 1 << 22;
/// Longest mangled name that is read.
const NAME_LIMIT: usize = 4096;
const SYMBOL: usize = size_of::<Sym64<LittleEndian>>();

/// A function's place and where its name is.
#[derive(Clone, Copy, Debug)]
struct Function {
    address: u64,
    size: u32,
    name: u32,
}

/// The functions of a file, by address.
#[derive(Debug)]
pub(super) struct Functions {
    functions: Vec<Function>,
    /// Where the names are in the file, and how long they are.
    names: (u64, u64),
}

impl Functions {
    /// Reads the addresses; `None` where the file has no symbols or cannot be read.
    pub(super) fn of(module: &Module) -> Option<Self> {
        let source = module.source()?;
        let data = source.reader();
        let header = FileHeader64::<LittleEndian>::parse(data).ok()?;
        let sections = header.sections(LittleEndian, data).ok()?;
        let of_kind = |kind| sections.iter().find(move |s| s.sh_type(LittleEndian) == kind);
        let table = of_kind(elf::SHT_SYMTAB).or_else(|| of_kind(elf::SHT_DYNSYM))?;
        let strings = sections.section(table.link(LittleEndian)).ok()?;
        let names = (strings.sh_offset(LittleEndian), strings.sh_size(LittleEndian));
        let count = (table.sh_size(LittleEndian) as usize / SYMBOL).min(FUNCTION_LIMIT * 2);
        let mut functions = Vec::new();
        for first in (0..count).step_by(CHUNK) {
            let offset = table.sh_offset(LittleEndian).checked_add((first * SYMBOL) as u64)?;
            let bytes = module.read(offset, CHUNK.min(count - first) * SYMBOL)?;
            functions.extend(bytes.chunks_exact(SYMBOL).filter_map(function));
            functions.truncate(FUNCTION_LIMIT);
        }
        functions.sort_unstable_by_key(|function| function.address);
        functions.shrink_to_fit();
        Some(Self { functions, names })
    }

    /// What it takes.
    pub(super) fn bytes(&self) -> u64 {
        (self.functions.len() * size_of::<Function>()) as u64
    }

    /// The demangled name of the function at an address that the file states.
    pub(super) fn name(&self, module: &Module, svma: u64) -> Option<String> {
        let after = self.functions.partition_point(|function| function.address <= svma);
        let function = self.functions.get(after.checked_sub(1)?)?;
        if svma - function.address >= u64::from(function.size) {
            return None;
        }
        let name = u64::from(function.name);
        let room = self.names.1.checked_sub(name)?.min(NAME_LIMIT as u64) as usize;
        let bytes = module.read(self.names.0.checked_add(name)?, room)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Some(demangled(&String::from_utf8_lossy(&bytes[..end])))
    }
}

fn function(bytes: &[u8]) -> Option<Function> {
    let (symbol, _) = object::pod::from_bytes::<Sym64<LittleEndian>>(bytes).ok()?;
    let is_function = matches!(symbol.st_type(), elf::STT_FUNC | elf::STT_GNU_IFUNC);
    let size = u32::try_from(symbol.st_size(LittleEndian)).unwrap_or(u32::MAX);
    (is_function && size > 0 && !symbol.is_undefined(LittleEndian)).then(|| Function {
        address: symbol.st_value(LittleEndian),
        size,
        name: symbol.st_name(LittleEndian),
    })
}

fn demangled(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    let parsed = cpp_demangle::Symbol::new(name).ok();
    parsed.and_then(|symbol| symbol.demangle().ok()).unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host::Host,
        native::{AddressSpace, Modules, Place},
    };

    #[inline(never)]
    fn looked_for() -> u32 {
        std::hint::black_box(7)
    }

    #[test]
    fn a_function_of_this_program_is_named() {
        let mut modules = Modules::default();
        let space = AddressSpace::read(&Host::live(), std::process::id(), &mut modules).unwrap();
        let at = looked_for as fn() -> u32 as usize as u64;
        let Some(Place::Module { module, svma: Some(svma), .. }) = space.lookup(at) else {
            panic!("this program")
        };
        let functions = Functions::of(module).unwrap();
        let name = functions.name(module, svma).unwrap();
        assert!(name.ends_with("::looked_for"), "{name}");
        assert_eq!(functions.name(module, svma + 1).as_deref(), Some(name.as_str()));
        assert_eq!(functions.name(module, 1), None);
    }

    #[test]
    fn names_are_demangled() {
        let name =
            "_ZN5torch8autograd9generated12MulBackward05applyEOSt6vectorIN2at6TensorESaIS4_EE";
        assert!(demangled(name).starts_with("torch::autograd::generated::MulBackward0::apply("));
        assert_eq!(demangled("cuMemAlloc_v2"), "cuMemAlloc_v2");
        assert_eq!(
            demangled("_ZN3fooE17h0123456789abcdefE"),
            demangled("_ZN3fooE17h0123456789abcdefE")
        );
    }
}
