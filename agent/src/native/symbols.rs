//! Names of functions, and lines where the file tells.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use blazesym::symbolize::{
    Input, Sym, Symbolized,
    source::{Elf, Source},
};

use super::{Module, functions::Functions, image::Image};
use crate::host::text;

/// What the copies of symbols may take in all; the one in use is kept whatever its size.
const IMAGE_BUDGET: u64 = 32 << 20;
/// Files whose symbols are kept.
const IMAGE_LIMIT: usize = 64;
/// Places whose symbols are kept; a job has some thousands.
const PLACE_LIMIT: usize = 65_536;
/// Longest name of a function; those of C++ templates go on for pages.
const NAME_LIMIT: usize = 1024;
/// Longest path.
const PATH_LIMIT: usize = 4096;

/// A function at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Name, demangled.
    pub function: String,
    /// Source file, as the compiler was told.
    pub file: Option<String>,
    /// Line in it.
    pub line: Option<u32>,
    /// It was inlined into the next one.
    pub inlined: bool,
}

/// Names places in files; for one thread.
pub struct Symbolizer {
    blazesym: blazesym::symbolize::Symbolizer,
    /// By the module's id, the one that was used last at the end.
    images: Vec<(u64, Names)>,
    /// By the module's id and the address that the file states.
    places: HashMap<(u64, u64), Vec<Symbol>>,
}

/// Where the names of a file's functions are.
#[derive(Debug)]
enum Names {
    /// It has none.
    None,
    /// In a copy.
    Copy(Image),
    /// In the file, since they are many.
    File(Functions),
}

impl Names {
    fn of(module: &Module) -> Self {
        match Image::of(module) {
            Some(image) => Self::Copy(image),
            None => Functions::of(module).map_or(Self::None, Self::File),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Copy(image) => image.bytes,
            Self::File(functions) => functions.bytes(),
        }
    }
}

impl std::fmt::Debug for Symbolizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Symbolizer").field("images", &self.images).finish_non_exhaustive()
    }
}

impl Default for Symbolizer {
    fn default() -> Self {
        Self { blazesym: new_blazesym(), images: Vec::new(), places: HashMap::new() }
    }
}

fn new_blazesym() -> blazesym::symbolize::Symbolizer {
    blazesym::symbolize::Symbolizer::builder()
        .enable_code_info(true)
        .enable_inlined_fns(true)
        .set_debug_dirs(Some(std::iter::empty::<&str>()))
        .build()
}

impl Symbolizer {
    /// The functions at a place in a file, the innermost inlined one first; empty where the file
    /// does not tell.
    pub fn symbolize(&mut self, module: &Module, file_offset: u64) -> Vec<Symbol> {
        let Some(svma) = module.svma(file_offset) else { return Vec::new() };
        let place = (module.id, svma);
        if let Some(known) = self.places.get(&place) {
            return known.clone();
        }
        // Symbol tables and debug information are whatever somebody wrote, and blazesym has
        // assertions about its own handling of them: a panic costs this name, not the agent.
        let look_up = || self.look_up(module, svma);
        let found = catch_unwind(AssertUnwindSafe(look_up)).unwrap_or_else(|_| {
            self.blazesym = new_blazesym();
            Vec::new()
        });
        if self.places.len() >= PLACE_LIMIT {
            self.places.clear();
        }
        self.places.insert(place, found.clone());
        found
    }

    fn look_up(&mut self, module: &Module, svma: u64) -> Vec<Symbol> {
        self.load(module);
        let image = match self.images.last() {
            Some((_, Names::Copy(image))) => image,
            Some((_, Names::File(functions))) => {
                let name = functions.name(module, svma);
                return name.map(|name| named(&name)).into_iter().collect();
            }
            _ => return Vec::new(),
        };
        let mut source = Elf::new(&image.path);
        source.debug_syms = image.debug;
        let found = self.blazesym.symbolize_single(&Source::Elf(source), Input::VirtOffset(svma));
        match found {
            Ok(Symbolized::Sym(sym)) => symbols_of(&sym),
            _ => Vec::new(),
        }
    }

    /// Brings the symbols of a file to the end of the list, and forgets others for it.
    fn load(&mut self, module: &Module) {
        let known = self.images.iter().position(|(id, _)| *id == module.id);
        let image = match known {
            Some(at) => self.images.remove(at),
            None => (module.id, Names::of(module)),
        };
        self.images.push(image);
        while self.images.len() > 1 && !self.fits() {
            let (_, oldest) = self.images.remove(0);
            self.forget(oldest);
        }
    }

    fn fits(&self) -> bool {
        let bytes: u64 = self.images.iter().map(|(_, names)| names.bytes()).sum();
        bytes <= IMAGE_BUDGET && self.images.len() <= IMAGE_LIMIT
    }

    /// Drops what blazesym keeps of a file, and then the file.
    fn forget(&mut self, names: Names) {
        use blazesym::symbolize::evict::{Elf, Evict};
        let Names::Copy(image) = names else { return };
        if let Err(error) = self.blazesym.evict(&Evict::Elf(Elf::new(&image.path))) {
            tracing::debug!(%error, "evict symbols");
        }
    }
}

/// A function of which no more is known than its name.
fn named(name: &str) -> Symbol {
    let function = text::clean(name.as_bytes(), NAME_LIMIT);
    Symbol { function, file: None, line: None, inlined: false }
}

/// blazesym lists inlined functions from the outermost in.
fn symbols_of(sym: &Sym<'_>) -> Vec<Symbol> {
    let symbol = |name: &str, code: Option<&blazesym::symbolize::CodeInfo<'_>>, inlined| Symbol {
        function: text::clean(name.as_bytes(), NAME_LIMIT),
        file: code
            .map(|code| text::clean(code.to_path().as_os_str().as_encoded_bytes(), PATH_LIMIT)),
        line: code.and_then(|code| code.line),
        inlined,
    };
    let inlined = sym.inlined.iter().rev();
    let mut symbols: Vec<Symbol> =
        inlined.map(|inlined| symbol(&inlined.name, inlined.code_info.as_ref(), true)).collect();
    symbols.push(symbol(&sym.name, sym.code_info.as_deref(), false));
    symbols
}
