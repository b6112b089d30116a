//! Every libcuda installed on this host, used or not.

use std::{
    collections::HashSet,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::host::{Host, text};

/// Where distributions, WSL and container runtimes put it, beside what the linker's cache knows.
const DIRECTORIES: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
    "usr/lib/nvidia",
];

/// Longest linker cache that is read.
const CACHE_LIMIT: u64 = 64 << 20;

/// Files of libcuda below a host's root, each once, however many names it has; stubs of the
/// toolkit, which no program runs, left out.
pub fn find(host: &Host) -> Vec<PathBuf> {
    let root = host.path("");
    let mut directories: Vec<PathBuf> = DIRECTORIES.iter().map(|at| root.join(at)).collect();
    directories.extend(compat_directories(&root.join("usr/local")));
    let mut candidates: Vec<PathBuf> = directories.iter().flat_map(|at| libcuda_in(at)).collect();
    let cache = text::read_bounded(&root.join("etc/ld.so.cache"), CACHE_LIMIT).unwrap_or_default();
    candidates.extend(cached(&cache).map(|path| root.join(path.trim_start_matches('/'))));
    let mut seen = HashSet::new();
    candidates.retain(|path| {
        let is_stub = path.components().any(|part| part.as_os_str() == "stubs");
        let file = fs::metadata(path).ok().filter(fs::Metadata::is_file);
        !is_stub && file.is_some_and(|file| seen.insert((file.dev(), file.ino())))
    });
    candidates
}

/// `compat` of every toolkit below a directory.
fn compat_directories(local: &Path) -> Vec<PathBuf> {
    entries(local)
        .filter(|(name, _)| name.starts_with("cuda"))
        .map(|(_, path)| path.join("compat"))
        .collect()
}

/// The names of libcuda in a directory, longest first: the one with the version.
fn libcuda_in(directory: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = entries(directory)
        .filter(|(name, _)| name == "libcuda.so" || name.starts_with("libcuda.so."))
        .map(|(_, path)| path)
        .collect();
    found.sort_by_key(|path| std::cmp::Reverse(path.as_os_str().len()));
    found
}

fn entries(directory: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    fs::read_dir(directory).into_iter().flatten().filter_map(|entry| {
        let entry = entry.ok()?;
        Some((entry.file_name().into_string().ok()?, entry.path()))
    })
}

/// Paths of libcuda in a linker cache of glibc 2.2 or later: a header of 48 bytes, then entries of
/// 24 bytes (flags, then the places of name and path), then text. Places count from the header,
/// before which an older cache may stand. Layout: `struct cache_file_new`,
/// <https://sourceware.org/git/?p=glibc.git;a=blob;f=sysdeps/generic/dl-cache.h>.
fn cached(cache: &[u8]) -> impl Iterator<Item = &str> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    let start = cache.windows(MAGIC.len()).position(|window| window == MAGIC);
    let cache = start.and_then(|at| cache.get(at..)).unwrap_or_default();
    let count = number(cache, MAGIC.len()).unwrap_or(0);
    // A count that lies ends where the file does.
    (0..count).map_while(move |index| cache.get(48 + 24 * index..)?.get(..24)).filter_map(
        move |entry| {
            let text = |place: usize| {
                let rest = cache.get(number(entry, place)?..)?;
                std::str::from_utf8(rest.split(|byte| *byte == 0).next()?).ok()
            };
            text(4)?.starts_with("libcuda.so").then(|| text(8))?
        },
    )
}

fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let four: [u8; 4] = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    usize::try_from(u32::from_ne_bytes(four)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    /// A linker cache that holds these names and paths.
    fn cache(libraries: &[(&str, &str)]) -> Vec<u8> {
        let mut bytes = b"glibc-ld.so.cache1.1".to_vec();
        bytes.extend((libraries.len() as u32).to_ne_bytes());
        bytes.resize(48, 0);
        let mut text = Vec::new();
        let start = 48 + 24 * libraries.len();
        for (name, path) in libraries {
            bytes.extend(1_u32.to_ne_bytes());
            for word in [name, path] {
                bytes.extend(((start + text.len()) as u32).to_ne_bytes());
                text.extend(word.as_bytes());
                text.push(0);
            }
            bytes.extend([0; 12]);
        }
        bytes.extend(text);
        bytes
    }

    #[test]
    fn each_file_is_found_once_under_its_longest_name() {
        let tree = Tree::new();
        tree.write("usr/lib/x86_64-linux-gnu/libcuda.so.580.1", "a");
        tree.link("libcuda.so.580.1", "usr/lib/x86_64-linux-gnu/libcuda.so.1");
        tree.link("libcuda.so.1", "usr/lib/x86_64-linux-gnu/libcuda.so");
        tree.link("missing", "usr/lib64/libcuda.so.1");
        tree.write("usr/local/cuda-13.0/compat/libcuda.so.580.2", "b");
        tree.write("usr/lib/x86_64-linux-gnu/libcudart.so.13", "c");
        tree.write("opt/odd/libcuda.so.1", "d");
        tree.write("usr/local/cuda/lib64/stubs/libcuda.so", "e");
        let old_cache = b"ld.so-1.7.0\0\0\0\0\0".to_vec();
        let new_cache = cache(&[
            ("libc.so.6", "/lib/libc.so.6"),
            ("libcuda.so.1", "/opt/odd/libcuda.so.1"),
            ("libcuda.so", "/usr/local/cuda/lib64/stubs/libcuda.so"),
        ]);
        tree.write("etc/ld.so.cache", [old_cache, new_cache].concat());
        let found = find(&tree.host());
        let expected = [
            "usr/lib/x86_64-linux-gnu/libcuda.so.580.1",
            "usr/local/cuda-13.0/compat/libcuda.so.580.2",
            "opt/odd/libcuda.so.1",
        ];
        assert_eq!(found, expected.map(|path| tree.root().join(path)));
    }

    #[test]
    fn a_broken_cache_gives_nothing() {
        let whole = cache(&[("libcuda.so.1", "/x/libcuda.so.1")]);
        assert_eq!(cached(&whole).collect::<Vec<_>>(), ["/x/libcuda.so.1"]);
        for length in 0..whole.len() - 17 {
            assert_eq!(cached(&whole[..length]).count(), 0, "{length}");
        }
        let mut lies = whole.clone();
        lies[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(cached(&lies).count() <= 2);
        lies[52..56].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(cached(&lies).count(), 0);
    }
}
