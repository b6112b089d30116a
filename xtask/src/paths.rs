//! Paths of the machine that builds: kept out of what is built, found where they are not wanted.

use crate::sh;
use anyhow::{Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The compiler's flags that replace the paths of this machine, so that every machine builds the
/// same bytes and no message names its folders.
pub(crate) fn remap_flags() -> Result<Vec<String>> {
    let flag = |(from, to): &(PathBuf, _)| format!("--remap-path-prefix={}={to}", from.display());
    Ok(remaps()?.iter().map(flag).collect())
}

/// An error where a built file still names one of the paths.
pub(crate) fn refuse(built: &[u8]) -> Result<()> {
    for (path, _) in remaps()? {
        let path = path.display().to_string();
        if occurrences(built, &path).next().is_some() {
            bail!("it names {path}, a path of this machine, which the remaps should replace");
        }
    }
    Ok(())
}

/// What is replaced by what. Later entries win, so the ones inside others come last.
fn remaps() -> Result<Vec<(PathBuf, &'static str)>> {
    let mut remaps = vec![(sh::root()?, ".")];
    if let Some(home) = sh::cargo_home() {
        remaps.extend(with_real(&home, "/cargo"));
        // The registry's folder has a name that depends on the mirror in use.
        for registry in fs::read_dir(home.join("registry/src")).into_iter().flatten().flatten() {
            remaps.extend(with_real(&registry.path(), "/crates"));
        }
    }
    let sysroot = sh::output(sh::command("rustc")?.args(["--print", "sysroot"]))?;
    let sysroot = Path::new(sysroot.trim());
    remaps.extend(with_real(sysroot, "/rust"));
    // rust-src may be a link to where a distribution keeps it.
    remaps.extend(with_real(&sysroot.join("lib/rustlib/src/rust"), "/rust-src"));
    Ok(remaps)
}

fn with_real(path: &Path, to: &'static str) -> Vec<(PathBuf, &'static str)> {
    let mut pairs = vec![(path.to_owned(), to)];
    if let Ok(real) = fs::canonicalize(path)
        && real != path
    {
        pairs.push((real, to));
    }
    pairs
}

/// The offsets at which `prefix` (`/opt/x/`) begins a path, rather than continuing one, as it does
/// in `/proc/1/opt/x/`.
pub(crate) fn occurrences<'a>(
    bytes: &'a [u8],
    prefix: &'a str,
) -> impl Iterator<Item = usize> + 'a {
    let found = bytes.windows(prefix.len()).enumerate();
    found
        .filter(move |(at, window)| {
            *window == prefix.as_bytes() && begins_a_path(bytes[..*at].last())
        })
        .map(|(at, _)| at)
}

fn begins_a_path(before: Option<&u8>) -> bool {
    before.is_none_or(|byte| !byte.is_ascii_alphanumeric() && !b"_-.~*>})]$".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_where_it_begins_and_not_inside_another() {
        for (text, expected) in [
            ("/opt/x/a", 1),
            ("PATH=/bin:/opt/x/bin \"/opt/x/b\"", 2),
            ("\0/opt/x/a\0", 1),
            ("/proc/1/opt/x/a", 0),
            ("{pid}/opt/x/a", 0),
        ] {
            assert_eq!(occurrences(text.as_bytes(), "/opt/x/").count(), expected, "{text}");
        }
    }
}
