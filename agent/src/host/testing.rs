//! A made-up root directory for tests.

use std::{fs, os::unix::fs::symlink, path::Path};

use super::Host;

/// A temporary tree with `proc`, `sys` and so on.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn host(&self) -> Host {
        Host::at(self.root())
    }

    pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub(crate) fn link(&self, target: impl AsRef<Path>, path: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// A line of `/proc/PID/stat`; 2 s of CPU time, 3 resident pages.
    pub(crate) fn stat_line(pid: u32, comm: &str, parent: u32, start_ticks: u64) -> String {
        format!(
            "{pid} ({comm}) S {parent} 1 1 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 1 0 {start_ticks} \
             4096 3 18446744073709551615 1 1"
        )
    }
}
