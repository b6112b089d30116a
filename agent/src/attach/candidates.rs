//! Copies of the traced libraries that a program is likely to load, before it does.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::{host::FileId, probes::Library};

/// Where drivers and containers put libcuda, beside what the loader's cache lists.
const FOLDERS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/run/opengl-driver/lib",
];

/// Device and inode of a file, in the notation of `/proc/PID/maps`.
pub fn file_id(path: &Path) -> Option<FileId> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let dev = metadata.dev();
    Some(((rustix::fs::major(dev), rustix::fs::minor(dev)), metadata.ino()))
}

/// Copies of libcuda in the folders of `library_path` (colon-separated, as `LD_LIBRARY_PATH`) and
/// in the usual ones; each file once.
pub fn libcuda(library_path: Option<&OsStr>) -> Vec<PathBuf> {
    let own = library_path.map(|folders| std::env::split_paths(folders).collect::<Vec<_>>());
    let folders = own.into_iter().flatten().chain(FOLDERS.iter().map(PathBuf::from));
    let mut seen = HashSet::new();
    folders
        .filter(|folder| folder.is_absolute())
        .flat_map(|folder| copies(&folder))
        .filter(|path| file_id(path).is_some_and(|id| seen.insert(id)))
        .collect()
}

fn copies(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| {
            entry.file_name().to_str().and_then(Library::of_file_name) == Some(Library::Cuda)
        })
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_one_file_are_one_candidate() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("libcuda.so.580.1"), b"x").unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.1", folder.path().join("libcuda.so.1")).unwrap();
        fs::write(folder.path().join("libcudart.so.12"), b"x").unwrap();
        let found = libcuda(Some(folder.path().as_os_str()));
        let ours = found.iter().filter(|path| path.starts_with(folder.path())).count();
        assert_eq!(ours, 1, "{found:?}");
    }
}
