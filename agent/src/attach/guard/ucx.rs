//! Processes that have, or are about to have, UCX's CUDA hooks.
//!
//! UCX writes jumps over the beginnings of the driver's functions (`libucm_cuda`, mode `bistro`, its
//! default). Where it finds a breakpoint there it gives its hooks up, for the life of the process: its
//! caches of registered memory are off from then on. It looks less than a millisecond after it has
//! loaded `libucm_cuda`, sooner than any probe can be taken out; so `libucm`, which is loaded long
//! before, counts already, where the hooks are installed beside it.

use std::path::Path;

use crate::host::{Env, Host, Mapping};

/// The variable that has UCX leave the driver's code alone.
const MODE: &str = "UCX_MEM_CUDA_HOOK_MODE";
/// The mode that does not.
const PATCHES: &str = "bistro";
/// Folder of UCX's modules, beside its libraries.
const MODULES: &str = "ucx";
/// Names of the hooks there.
const HOOKS: [&str; 2] = ["libucm_cuda.so.0", "libucm_cuda.so"];

/// Whether a file name is one whose mapping may make a process a UCX process.
pub(crate) fn is_ucx(file_name: &[u8]) -> bool {
    is_library(file_name, b"libucm_cuda") || is_library(file_name, b"libucm")
}

/// `libucm.so.0`, and `libucm-a1b2c3d4.so.0`, as Python packages rename it.
fn is_library(file_name: &[u8], stem: &[u8]) -> bool {
    let rest = file_name.strip_prefix(stem);
    rest.is_some_and(|rest| rest.starts_with(b".") || rest.starts_with(b"-"))
}

/// Whether the process will have its driver library patched, as far as can be seen from outside.
pub(crate) fn patches(host: &Host, tgid: u32, mappings: &[Mapping]) -> bool {
    let ucx = mappings.iter().filter(|mapping| mapping.executable).filter(|mapping| {
        is_library(mapping.file_name(), b"libucm_cuda")
            || (is_library(mapping.file_name(), b"libucm") && has_hooks(host, tgid, &mapping.path))
    });
    ucx.count() > 0 && !host.env(tgid).is_some_and(|env| leaves_code_alone(&env))
}

/// Whether the hooks are installed beside UCX's own library, as the process sees its files.
fn has_hooks(host: &Host, tgid: u32, library: &Path) -> bool {
    let Some(folder) = library.parent() else { return false };
    let modules = folder.join(MODULES);
    HOOKS.iter().any(|hooks| host.exists_in_root(tgid, &modules.join(hooks)))
}

fn leaves_code_alone(env: &Env) -> bool {
    env.get(MODE).is_some_and(|modes| !modes.split(',').any(|mode| mode.trim() == PATCHES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    fn mapped(path: &str) -> Vec<Mapping> {
        let line = format!("7f00-7f80 r-xp 00000000 08:01 99 {path}");
        vec![Mapping::parse(line.as_bytes()).unwrap()]
    }

    #[test]
    fn names() {
        for name in ["libucm.so.0", "libucm_cuda.so.0", "libucm-0a1b2c3d.so.0", "libucm.so"] {
            assert!(is_ucx(name.as_bytes()), "{name}");
        }
        for name in ["libucp.so.0", "libucmx.so", "xlibucm.so.0", "libucm", "libucm_rocm.so.0"] {
            assert!(!is_ucx(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_process_with_the_hooks_patches_unless_it_was_told_not_to() {
        let tree = Tree::new();
        let maps = mapped("/opt/ucx/lib/ucx/libucm_cuda.so.0");
        assert!(patches(&tree.host(), 1, &maps), "an environment that can't be read tells nothing");
        let cases = [("", true), ("UCX_MEM_CUDA_HOOK_MODE=bistro", true), ("UCX_TLS=all", true)];
        let told = [("reloc", false), ("bistro,reloc", true), ("reloc, bistro", true), ("", false)];
        let told = told.map(|(modes, expected)| (format!("{MODE}={modes}"), expected));
        let cases = cases.map(|(text, expected)| (text.to_owned(), expected));
        for (environ, expected) in cases.into_iter().chain(told) {
            tree.write("proc/1/environ", format!("A=b\0{environ}\0"));
            assert_eq!(patches(&tree.host(), 1, &maps), expected, "{environ}");
        }
    }

    #[test]
    fn ucx_without_cuda_patches_nothing() {
        let tree = Tree::new();
        tree.write("proc/1/root/usr/lib/libucm.so.0", "");
        assert!(!patches(&tree.host(), 1, &mapped("/usr/lib/libucm.so.0")));
        tree.write("proc/1/root/usr/lib/ucx/libucm_cuda.so.0", "");
        assert!(patches(&tree.host(), 1, &mapped("/usr/lib/libucm.so.0")));
        assert!(!patches(&tree.host(), 1, &mapped("/usr/lib/libcuda.so.1")));
    }
}
