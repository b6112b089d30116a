//! The kill switch of every agent of a host: a file. While it exists none starts, and those that run
//! take their probes out at once.

use std::{fs, path::PathBuf};

/// Its place, where none is named. Only root can make it.
const PATH: &str = "/run/vramscope/stop";
/// The variable that names another one, for containers that have the host's elsewhere.
const VARIABLE: &str = "VRAMSCOPE_STOP_FILE";

/// Where it is looked for.
pub fn path() -> PathBuf {
    std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).map_or(PATH.into(), PathBuf::from)
}

/// Whether it is there, as whatever kind of file.
pub fn exists() -> bool {
    fs::symlink_metadata(path()).is_ok()
}

/// What is said when it ends a recording.
pub fn reason() -> String {
    format!("the stop file {} appeared: the probes were taken out", path().display())
}

/// What is said while it is there.
pub fn refusal() -> String {
    let path = path();
    let path = path.display();
    format!("recording is switched off on this host: {path} exists; remove it to record again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_in_a_folder_of_roots() {
        if std::env::var_os(VARIABLE).is_none() {
            assert_eq!(path(), PathBuf::from("/run/vramscope/stop"));
        }
    }
}
