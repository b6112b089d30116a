//! The folder for files that targets make up.

use std::{env, fs, path::PathBuf};

/// Names the folder; whoever sets it removes it.
pub const SCRATCH_ENV: &str = "VRAMSCOPE_FUZZ_SCRATCH";

/// The folder of this process.
pub fn folder() -> PathBuf {
    let own = || env::temp_dir().join(format!("vramscope-fuzz-{}", std::process::id()));
    env::var_os(SCRATCH_ENV).map_or_else(own, PathBuf::from)
}

/// Removes the folder, unless somebody else set it.
pub fn remove() {
    if env::var_os(SCRATCH_ENV).is_none() {
        // Most targets make none.
        fs::remove_dir_all(folder()).unwrap_or_default();
    }
}
