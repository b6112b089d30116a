//! The kill switch of every agent of a host: a file. While it exists none starts, and those that run
//! take their probes out at once.

use std::{fs, path::PathBuf};

use super::precondition;

/// Its place, where none is named. Only root can make it.
const PATH: &str = "/run/vramscope/stop";
/// The variable that names another one, for containers that have the host's elsewhere.
const VARIABLE: &str = "VRAMSCOPE_STOP_FILE";

/// Where it is looked for.
pub(super) fn path() -> PathBuf {
    std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).map_or(PATH.into(), PathBuf::from)
}

/// Whether it is there, as whatever kind of file.
pub(super) fn exists() -> bool {
    fs::symlink_metadata(path()).is_ok()
}

/// Fails while it is there.
pub(super) fn check() -> anyhow::Result<()> {
    if exists() {
        let path = path();
        return Err(precondition(format!(
            "recording is switched off on this host: {} exists; remove it to record again",
            path.display()
        )));
    }
    Ok(())
}

/// What is said when it ends a recording.
pub(super) fn reason() -> String {
    format!("the stop file {} appeared: the probes were taken out", path().display())
}
