//! The libraries of a process that decide what its calls mean: rows of `process_libs`.

use ledger::{call::ProcId, rows::ProcessLibRow};
use object::Object as _;

use super::{ElfSource, Host, Mapping, text};

/// What a library is to vramscope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LibKind {
    /// The driver API, the account of record.
    Cuda,
    /// The runtime API, for labels.
    Cudart,
    /// cuDNN's main library.
    Cudnn,
    /// NCCL.
    Nccl,
    /// PyTorch's core, which reports tensors.
    C10,
    /// PyTorch's operators and Python binding.
    Torch,
    /// The Python interpreter: its library, or the executable that holds it.
    Python,
}

impl LibKind {
    /// The word in the log's `kind` column.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::Cudart => "libcudart",
            Self::Cudnn => "libcudnn",
            Self::Nccl => "libnccl",
            Self::C10 => "libc10",
            Self::Torch => "libtorch",
            Self::Python => "python",
        }
    }

    /// What the file name of a mapping says. Packagers put hashes into names
    /// (`libcudart-d0da41ae.so.13`, `libcudart.5d3f3a7b.so.13`); plug-ins beside a library
    /// (`libnccl-net.so`, `libcudnn_ops.so`, `libcudadebugger.so`) are other libraries.
    pub fn of_file_name(name: &[u8]) -> Option<Self> {
        const STEMS: [(&str, LibKind); 8] = [
            ("libcuda", LibKind::Cuda),
            ("libcudart", LibKind::Cudart),
            ("libcudnn", LibKind::Cudnn),
            ("libnccl", LibKind::Nccl),
            ("libc10", LibKind::C10),
            ("libc10_cuda", LibKind::C10),
            ("libtorch", LibKind::Torch),
            ("libtorch_", LibKind::Torch),
        ];
        let name = std::str::from_utf8(name).ok()?;
        if let Some(rest) = name.strip_prefix("libpython").or_else(|| name.strip_prefix("python")) {
            let library = name.starts_with("lib");
            let version = rest.split(".so").next()?.trim_end_matches(['t', 'd', 'm', 'u']);
            let is_version = version.starts_with(|c: char| c.is_ascii_digit())
                && version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
            return (is_version && rest.contains(".so") == library).then_some(Self::Python);
        }
        let (before, after) = name.split_once(".so")?;
        if !(after.is_empty() || after.starts_with('.')) {
            return None;
        }
        let stem = without_hash(before);
        let of_torch = stem
            .strip_prefix("libtorch_")
            .is_some_and(|part| matches!(part, "cpu" | "cuda" | "python" | "cuda_linalg"));
        let stem = if of_torch { "libtorch_" } else { stem };
        STEMS.iter().find(|(known, _)| *known == stem).map(|(_, kind)| *kind)
    }
}

/// A file name's stem without the hash that a packager appended after `-` or `.`.
fn without_hash(stem: &str) -> &str {
    let hash = |tail: &str| tail.len() >= 8 && tail.bytes().all(|byte| byte.is_ascii_hexdigit());
    match stem.rsplit_once(['-', '.']) {
        Some((name, tail)) if hash(tail) => name,
        _ => stem,
    }
}

/// One library of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// What it is.
    pub kind: LibKind,
    /// One of its mappings, an executable one where there is one.
    pub mapping: Mapping,
    /// Version, from the file name where it tells one.
    pub version: Option<String>,
}

impl Library {
    /// The libraries among a process's mappings, one for each file, by kind.
    pub fn among(mappings: &[Mapping]) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for mapping in mappings {
            let Some(kind) = LibKind::of_file_name(mapping.file_name()) else { continue };
            if let Some(known) = found.iter_mut().find(|lib| lib.mapping.same_file(mapping)) {
                if mapping.executable && !known.mapping.executable {
                    known.mapping = mapping.clone();
                }
            } else {
                let version = version(kind, mapping.file_name());
                found.push(Self { kind, mapping: mapping.clone(), version });
            }
        }
        // Not mapped executable, it runs no code: a file that something reads.
        found.retain(|lib| lib.mapping.executable);
        found.sort_by_key(|lib| lib.kind);
        found
    }

    /// The row of the log; `ts_ns` and the two counts of probes are the caller's to fill in.
    pub fn row(&self, proc_id: ProcId, build_id: Option<String>) -> ProcessLibRow {
        use std::os::unix::ffi::OsStrExt as _;
        ProcessLibRow {
            proc_id: proc_id.0,
            kind: self.kind.as_str().to_owned(),
            path: text::clean(self.mapping.path.as_os_str().as_bytes(), 4096),
            version: self.version.clone(),
            build_id,
            ..ProcessLibRow::default()
        }
    }
}

/// `580.159.04` of `libcuda.so.580.159.04`, `3.11` of `libpython3.11.so.1.0` and `python3.11`.
fn version(kind: LibKind, name: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(name).ok()?;
    let version = if kind == LibKind::Python {
        name.split_once("python")?.1.split(".so").next()?
    } else {
        name.split_once(".so.")?.1
    };
    (!version.is_empty()).then(|| text::clean(version.as_bytes(), 64))
}

impl Host {
    /// The interesting libraries of a process; `None` where its maps cannot be read.
    pub fn libraries(&self, pid: u32) -> Option<Vec<Library>> {
        Some(Library::among(&self.mappings(pid)?))
    }

    /// GNU build id of a mapped file, in hex.
    pub fn build_id(&self, pid: u32, mapping: &Mapping) -> Option<String> {
        use std::fmt::Write as _;
        let source = ElfSource::new(self.open_mapped(pid, mapping)?);
        let elf = object::File::parse(source.reader()).ok()?;
        let id = elf.build_id().ok()??;
        // Twenty bytes by default; a longer one than SHA-512 is not a build id.
        let id = id.get(..64).unwrap_or(id);
        Some(id.iter().fold(String::new(), |mut hex, byte| {
            // Writing to a String cannot fail.
            let _infallible = write!(hex, "{byte:02x}");
            hex
        }))
    }

    /// Rows for the interesting libraries of a process.
    pub fn library_rows(&self, pid: u32, proc_id: ProcId) -> Option<Vec<ProcessLibRow>> {
        let libraries = self.libraries(pid)?;
        Some(
            libraries
                .iter()
                .map(|lib| lib.row(proc_id, self.build_id(pid, &lib.mapping)))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_versions_by_file_name() {
        let cases: &[(&str, Option<LibKind>, Option<&str>)] = &[
            ("libcuda.so.580.159.04", Some(LibKind::Cuda), Some("580.159.04")),
            ("libcuda.so.1", Some(LibKind::Cuda), Some("1")),
            ("libcudadebugger.so.1", None, None),
            ("libcudart.so.13.0.96", Some(LibKind::Cudart), Some("13.0.96")),
            ("libcudart-d0da41ae.so.13", Some(LibKind::Cudart), Some("13")),
            ("libcudart.5d3f3a7b.so.13", Some(LibKind::Cudart), Some("13")),
            ("libcudnn.so.9", Some(LibKind::Cudnn), Some("9")),
            ("libcudnn_ops.so.9", None, None),
            ("libnccl.so.2", Some(LibKind::Nccl), Some("2")),
            ("libnccl-net.so", None, None),
            ("libc10.so", Some(LibKind::C10), None),
            ("libc10_cuda.so", Some(LibKind::C10), None),
            ("libc10d.so", None, None),
            ("libtorch_cuda.so", Some(LibKind::Torch), None),
            ("libtorch.so", Some(LibKind::Torch), None),
            ("libtorchvision.so", None, None),
            ("libpython3.11.so.1.0", Some(LibKind::Python), Some("3.11")),
            ("libpython3.13t.so.1.0", Some(LibKind::Python), Some("3.13t")),
            ("python3.12", Some(LibKind::Python), Some("3.12")),
            ("python3", Some(LibKind::Python), Some("3")),
            ("python3.11-config", None, None),
            ("pythonista", None, None),
            ("libucm_cuda.so.0.0.0", None, None),
            ("libcuda.some", None, None),
            ("libcuda", None, None),
            ("", None, None),
        ];
        for (name, kind, expected) in cases {
            assert_eq!(LibKind::of_file_name(name.as_bytes()), *kind, "{name}");
            let found = kind.and_then(|kind| version(kind, name.as_bytes()));
            assert_eq!(found.as_deref(), *expected, "{name}");
        }
    }

    #[test]
    fn one_library_a_file_at_its_executable_mapping() {
        let maps = [
            "10-20 r--p 0 08:01 7 /l/libcuda.so.1",
            "20-30 r-xp 1000 08:01 7 /l/libcuda.so.1",
            "30-40 r--p 2000 08:01 7 /l/libcuda.so.1",
            "40-50 r-xp 0 08:01 8 /m/libcuda.so.1",
            "50-60 r--p 0 08:01 9 /n/libcudart.so.12",
        ];
        let mappings: Vec<_> =
            maps.iter().filter_map(|line| Mapping::parse(line.as_bytes())).collect();
        let found = Library::among(&mappings);
        let starts: Vec<_> = found.iter().map(|lib| lib.mapping.start).collect();
        assert_eq!(starts, [0x20, 0x40], "two copies of libcuda, no library that is only read");
    }

    #[test]
    fn the_build_id_of_this_test_is_read() {
        let (host, pid) = (Host::live(), std::process::id());
        let exe = std::env::current_exe().unwrap();
        let mappings = host.mappings(pid).unwrap();
        let libc = mappings.iter().find(|m| m.file_name().starts_with(b"libc.so")).unwrap();
        assert_eq!(host.build_id(pid, libc).map(|id| id.len()), Some(40));
        assert!(mappings.iter().any(|mapping| mapping.path == exe));
    }
}
