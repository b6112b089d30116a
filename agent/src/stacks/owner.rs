//! Whose the memory is that a stack allocates: a library's, by name.

use std::path::Path;

use super::frame::{Frame, file_name, is_interpreter};

/// CUDA's own way from a call to the driver, by the beginning of file names.
const CUDA: [&str; 4] = ["libcuda.", "libcudart.", "libnvidia-", "libcudadebugger."];
/// What is on the way of every program.
const SYSTEM: [&str; 14] = [
    "libc.",
    "libc-",
    "libm.",
    "libstdc++",
    "libgcc_s",
    "libpthread",
    "libdl.",
    "librt.",
    "ld-linux",
    "ld-musl",
    "[",
    "libffi",
    "_ctypes.",
    "_cffi_backend.",
];
/// `PyTorch`'s own libraries but for its cache: whoever calls them is the owner, if there is one.
const FRAMEWORK: [&str; 5] = ["libtorch", "libc10.", "libshm.", "libcaffe2", "_C."];
/// The owner of what a Python program asks CUDA for itself.
const PYTHON: &str = "python";
/// What marks the name of an extension module of Python.
const EXTENSION: [&str; 2] = [".cpython-", ".abi3."];

/// The innermost library of a stack (innermost frame first) that is neither CUDA's nor a
/// framework's; without one, the framework's, or else the Python program. `None` where no frame
/// is in a file that says anything.
pub(super) fn library(frames: &[Frame]) -> Option<String> {
    let paths = || {
        frames.iter().filter_map(|frame| match frame {
            Frame::Native { module, .. } => Some(module.path.as_path()),
            _ => None,
        })
    };
    // Frames of the interpreter itself have given way to those of the code that it runs.
    let python = || frames.iter().any(|frame| matches!(frame, Frame::Python { .. }));
    owner(paths()).map(name).or_else(|| python().then(|| PYTHON.to_owned()))
}

fn owner<'a>(paths: impl Iterator<Item = &'a Path>) -> Option<&'a Path> {
    let (mut framework, mut python) = (None, None);
    for path in paths {
        let file = file_name(path);
        let begins = |with: &[&str]| with.iter().any(|beginning| file.starts_with(beginning));
        if begins(&CUDA) || begins(&SYSTEM) {
            continue;
        }
        if begins(&FRAMEWORK) {
            framework = framework.or(Some(path));
        } else if is_interpreter(&file) {
            python = python.or(Some(path));
        } else {
            return Some(path);
        }
    }
    framework.or(python)
}

/// `libnccl` of `…/libnccl.so.2`, `cupy_backends` of a module of that package, a program's own name.
fn name(path: &Path) -> String {
    let file = file_name(path);
    if EXTENSION.iter().any(|mark| file.contains(mark))
        && let Some(package) = package(path)
    {
        return package;
    }
    if is_interpreter(&file) {
        return PYTHON.to_owned();
    }
    let end = EXTENSION.iter().chain(&[".so"]).filter_map(|mark| file.find(mark)).min();
    file[..end.unwrap_or(file.len())].trim_end_matches(" (deleted)").to_owned()
}

/// The package that an installed extension module is a part of.
fn package(path: &Path) -> Option<String> {
    let mut parts = path.components().map(|part| part.as_os_str().to_string_lossy());
    parts.find(|part| part == "site-packages" || part == "dist-packages")?;
    let first = parts.next()?.into_owned();
    parts.next().map(|_| first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned_by(paths: &[&str]) -> Option<String> {
        owner(paths.iter().map(Path::new)).map(name)
    }

    #[test]
    fn the_innermost_library_owns_what_it_allocates() {
        let torch = "/v/site-packages/torch/lib";
        let (cuda, runtime) = ("/usr/lib/libcuda.so.580.159.04", "/v/nvidia/libcudart.so.12");
        let cases: [(&[&str], &str); 9] = [
            (&[cuda, "/v/nvidia/libnccl.so.2", &format!("{torch}/libtorch_cuda.so")], "libnccl"),
            (&[cuda, runtime, &format!("{torch}/libc10_cuda.so")], "libc10_cuda"),
            (&[cuda, "/v/nvidia/libcublasLt.so.12", "/usr/bin/python3.12"], "libcublasLt"),
            (&[cuda, runtime, &format!("{torch}/libtorch_cuda.so"), "/x/libmyop.so"], "libmyop"),
            (
                &[cuda, runtime, &format!("{torch}/libtorch_cuda.so"), "/bin/python3"],
                "libtorch_cuda",
            ),
            (&[cuda, runtime, "/lib/libc.so.6", "/data/app"], "app"),
            (&[cuda, "/v/xla_cuda12/xla_cuda_plugin.so", "/v/libjax_common.so"], "xla_cuda_plugin"),
            (
                &[cuda, "/v/lib/python3.12/site-packages/cupy_backends/api/runtime.cpython-312.so"],
                "cupy_backends",
            ),
            (&[cuda, "/v/_ctypes.cpython-312.so", "/lib/libffi.so.8", "/bin/python3"], "python"),
        ];
        for (paths, owner) in cases {
            assert_eq!(owned_by(paths).as_deref(), Some(owner), "{paths:?}");
        }
    }

    #[test]
    fn names_are_without_what_changes() {
        assert_eq!(name(Path::new("/x/op.cpython-311-x86_64-linux-gnu.so")), "op");
        assert_eq!(name(Path::new("/x/libmyop.so.1 (deleted)")), "libmyop");
        assert_eq!(name(Path::new("/x/app (deleted)")), "app");
        assert_eq!(name(Path::new("/v/site-packages/op.abi3.so")), "op");
    }

    #[test]
    fn a_stack_of_cuda_alone_has_no_owner() {
        assert_eq!(owned_by(&["/usr/lib/libcuda.so.1", "/lib/libc.so.6"]), None);
        assert_eq!(owned_by(&[]), None);
        assert_eq!(library(&[Frame::Jit, Frame::Unknown]), None);
        let python = Frame::Python { function: "f".into(), file: "a.py".into(), line: None };
        assert_eq!(library(&[Frame::Unknown, python]).as_deref(), Some("python"));
    }
}
