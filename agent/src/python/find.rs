//! Finds the CPython of a process: which version it is and where its runtime lies.

use std::path::{Path, PathBuf};

use agent_common::python::PythonConfig;

use super::{
    LineFormat,
    image::Image,
    layout::Layout,
    memory::Memory,
    target::{Target, shown, version_of},
};
use crate::host::{Host, LibKind, Mapping};

/// Files of one process that are looked into: an executable, a library and a stub of it are usual.
const MAX_FILES: usize = 8;

/// Whether a process runs Python.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It has no CPython (or has not loaded it yet).
    None,
    /// It has one that can be walked.
    Interpreter(Interpreter),
    /// It has one whose frames cannot be walked; why, for the user.
    Unsupported(String),
}

/// The CPython of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// Major and minor version.
    pub version: (u8, u8),
    /// For the kernel half.
    pub config: PythonConfig,
    /// How its code objects store line numbers.
    pub lines: LineFormat,
    /// Where the instructions of a code object begin, in bytes; `None` where they are counted from
    /// 0 (before 3.11).
    pub code_start: Option<u32>,
    /// The file that holds it, in the mount namespace of the process.
    pub path: PathBuf,
    /// The layout was held against the structures of the running interpreter. `false`: it was not
    /// yet initialised, so that nothing could be checked.
    pub checked: bool,
}

impl Interpreter {
    /// One of this layout, and of no process; `None` where the layout makes no sense.
    pub(crate) fn of_layout(minor: u8, published: &[u8]) -> Option<Self> {
        let layout = Layout::of_minor(minor).or_else(|| Layout::published(minor, published))?;
        let Layout { config, lines, code_start, .. } = layout;
        let path = PathBuf::from(format!("/usr/bin/python3.{minor}"));
        Some(Self { version: (3, minor), config, lines, code_start, path, checked: true })
    }

    /// The one whose runtime lies at an address of a process, else why it cannot be walked.
    pub(crate) fn at(host: &Host, tgid: u32, runtime: u64, minor: u8) -> Result<Self, String> {
        let memory = Memory::open(host, tgid);
        let (path, code_type) = (Path::new("/usr/bin/python3"), Some(runtime));
        let version = Some((3, minor));
        Target { memory: &memory, path, runtime, version, code_type }.interpreter()
    }
}

/// Looks for a CPython in a process, given what it has mapped. Cheap where no mapped file has
/// "python" in its name: a program that embeds the interpreter statically under another name is
/// not found.
pub fn find(host: &Host, tgid: u32, mappings: &[Mapping]) -> Found {
    let files = candidates(host, tgid, mappings);
    if files.is_empty() {
        return Found::None;
    }
    let memory = Memory::open(host, tgid);
    let looks = files.into_iter().filter_map(|file| {
        let image = host.open_mapped(tgid, file).and_then(Image::read)?;
        look(&image, file, mappings, &memory)
    });
    // A static executable may load the library as well, for an extension: one of them is in use.
    let rank = |result: &Result<Interpreter, String>| match result {
        Ok(found) if found.checked => 0,
        Ok(_) => 1,
        Err(_) => 2,
    };
    match looks.min_by_key(rank) {
        None => Found::None,
        Some(Ok(found)) => Found::Interpreter(found),
        Some(Err(reason)) => Found::Unsupported(reason),
    }
}

/// One mapping of each file that may hold an interpreter: by name, and the main executable where
/// Python is about.
fn candidates<'a>(host: &Host, tgid: u32, mappings: &'a [Mapping]) -> Vec<&'a Mapping> {
    let mut files: Vec<&Mapping> = Vec::new();
    let mut seen_python = false;
    for mapping in mappings {
        let name = mapping.file_name();
        seen_python |= name.windows(6).any(|part| part == b"python");
        let is_new = || !files.iter().any(|known| known.same_file(mapping));
        let named = name.starts_with(b"python") || name.starts_with(b"libpython");
        if named && files.len() < MAX_FILES && is_new() {
            files.push(mapping);
        }
    }
    let has_library = files.iter().any(|file| file.file_name().starts_with(b"lib"));
    if seen_python && let Some(main) = host.main_executable(tgid, mappings) {
        let named = main.file_name().windows(6).any(|part| part == b"python");
        if (named || has_library) && !files.iter().any(|known| known.same_file(main)) {
            files.insert(0, main);
        }
    }
    files
}

/// Looks into one file. `None`: it holds no interpreter.
fn look(
    image: &Image,
    file: &Mapping,
    mappings: &[Mapping],
    memory: &Memory,
) -> Option<Result<Interpreter, String>> {
    let path = &file.path;
    let Some(runtime) = image.runtime.filter(|_| !image.is_old()) else {
        return why_not(image, file).map(Err);
    };
    let same: Vec<&Mapping> = mappings.iter().filter(|other| other.same_file(file)).collect();
    let Some(bias) = image.bias(&same) else {
        return Some(Err(format!("{} is mapped otherwise than its segments say", shown(path))));
    };
    let place = |addr: u64| addr.wrapping_add(bias);
    let version = match image.version {
        Some(addr) => memory.word(place(addr)).and_then(version_of),
        None => {
            image.oldest_minor.or_else(|| minor_of_name(file.file_name())).map(|minor| (3, minor))
        }
    };
    let (runtime, code_type) = (place(runtime), image.code_type.map(place));
    Some(Target { memory, path, runtime, version, code_type }.interpreter())
}

/// Why a file without a usable runtime is no interpreter; `None` where none is expected in it.
fn why_not(image: &Image, file: &Mapping) -> Option<String> {
    let (name, shown) = (file.file_name(), shown(&file.path));
    if image.is_old() {
        return Some(format!("{shown} is a CPython before 3.8, so its frames cannot be walked"));
    }
    let is_executable =
        name.starts_with(b"python") && LibKind::of_file_name(name) == Some(LibKind::Python);
    // The launcher of a shared build and the stable ABI's stub hold none.
    let is_expected = !image.imports && (image.code_type.is_some() || is_executable);
    is_expected
        .then(|| format!("{shown} exports no _PyRuntime, so its interpreter cannot be found"))
}

/// `12` of `python3.12`, `libpython3.12.so.1.0`.
fn minor_of_name(name: &[u8]) -> Option<u8> {
    let name = std::str::from_utf8(name).ok()?;
    let (_, rest) = name.split_once("python3.")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| rest.split_at(end).0);
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    #[test]
    fn names_of_versions() {
        let cases: [(&[u8], Option<u8>); 6] = [
            (b"python3.12", Some(12)),
            (b"libpython3.8.so.1.0", Some(8)),
            (b"python3.13t", Some(13)),
            (b"python3", None),
            (b"python3.999", None),
            (b"python3.\xff", None),
        ];
        for (name, minor) in cases {
            assert_eq!(minor_of_name(name), minor);
        }
    }

    #[test]
    fn files_are_looked_into_by_name() {
        let tree = Tree::new();
        tree.link("/opt/app (deleted)", "proc/1/exe");
        let mapping = |path: &str| Mapping {
            start: 0x1000,
            end: 0x2000,
            executable: true,
            offset: 0,
            dev: (8, 1),
            inode: path.bytes().map(u64::from).sum(),
            path: path.into(),
            deleted: false,
        };
        let names = |paths: &[&str]| -> Vec<String> {
            let mappings: Vec<_> = paths.iter().map(|path| mapping(path)).collect();
            let files = candidates(&tree.host(), 1, &mappings);
            files.iter().map(|file| file.path.display().to_string()).collect()
        };
        assert!(names(&["/opt/app", "/usr/lib/libc.so.6"]).is_empty());
        assert!(names(&["/opt/app", "/x/boost_python.so"]).is_empty());
        assert_eq!(names(&["/opt/app", "/x/libpython3.8.so"]), ["/opt/app", "/x/libpython3.8.so"]);
        assert_eq!(names(&["/bin/python3.8", "/bin/python3.8"]), ["/bin/python3.8"]);
        let many: Vec<String> = (0..100).map(|n| format!("/x/{n}/libpython3.{n}.so")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(names(&many).len(), MAX_FILES);
    }
}
