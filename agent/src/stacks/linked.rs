//! Library code that lies in the user's own file: linked in statically, or made of a header.

use super::site::Named;

/// What functions of CUDA's libraries are called before a capital letter.
const INTERFACES: [&str; 12] = [
    "cuda", "__cuda", "cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nccl",
    "pnccl", "nvjpeg", "nvrtc",
];

/// Parts of paths of headers that are nobody's own: the system's and CUDA's.
const HEADERS: [&str; 8] = [
    "/usr/include/",
    "/usr/local/cuda",
    "/include/c++/",
    "/include/thrust/",
    "/include/cub/",
    "/include/cuda/std/",
    "-linux/include/",
    "/cuda_runtime.h",
];

/// By its name, a function of a library that was linked into the user's file. NVIDIA's static
/// libraries keep the names of their interface; all others become `libNAME_static_HASH`. They come
/// without debugging information, so what has a source file is not one of them.
pub(super) fn is_linked_in(frame: &Named) -> bool {
    let name = base_name(&frame.function);
    let is_hidden = name.starts_with("lib") && name.contains("_static_");
    let is_interface = INTERFACES.iter().any(|start| {
        let rest = name.strip_prefix(start);
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
    });
    !frame.python && frame.file.is_none() && (is_hidden || is_interface)
}

/// Made of a header that is not the user's own, such as a template or a wrapper of the runtime's.
pub(super) fn is_of_header(frame: &Named) -> bool {
    let path = frame.file.as_deref().unwrap_or_default();
    !frame.python && HEADERS.iter().any(|part| path.contains(part))
}

/// A function's name without arguments, and without the result that templates are written with.
fn base_name(function: &str) -> &str {
    let name = function.split(['(', '<']).next().unwrap_or_default();
    name.rsplit(' ').next().unwrap_or_default()
}
