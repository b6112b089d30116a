//! The site of a stack: the innermost frame of the user's own code.

use super::{
    frame::{file_name, is_interpreter},
    linked::{is_linked_in, is_of_header},
};

/// A frame as the rule sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Python, or native.
    pub python: bool,
    /// Function.
    pub function: String,
    /// Source file, where it is known.
    pub file: Option<String>,
    /// Line in it.
    pub line: Option<i32>,
    /// Base name of the library or executable.
    pub module: Option<String>,
}

/// Native libraries that are nobody's own code, by the beginning of their names.
const LIBRARIES: [&str; 38] = [
    // CUDA and its libraries.
    "libcuda",
    "libnv",
    "libcu",
    "libnccl",
    "libnpp",
    "libcaffe2",
    "libcupti",
    "libmps",
    // Frameworks and their wrappers.
    "libtorch",
    "libc10",
    "libshm",
    "_C.",
    "libjax",
    "libxla",
    "xla_",
    "libpjrt",
    "libtensorflow",
    "_pywrap_",
    "pywrap_",
    "libonnxruntime",
    "onnxruntime_",
    "librmm",
    "libtriton",
    "_cffi",
    "_ctypes",
    "libffi",
    "_raylet",
    // The system's.
    "libc.",
    "libc-",
    "libm.",
    "libstdc++",
    "libgcc",
    "libpthread",
    "libdl",
    "ld-linux",
    "ld-musl",
    "[",
    "libgomp",
];

/// Parts of paths of Python files that are not the user's own.
const INSTALLED: [&str; 4] = ["/site-packages/", "/dist-packages/", "<frozen ", "/torch/_"];

/// Whose code is the user's own.
#[derive(Clone, Debug, Default)]
pub struct Rule {
    /// Files with this in their path are the user's own, wherever they are installed.
    user_code: Vec<String>,
}

impl Rule {
    /// The rule, with `--user-code` patterns: plain parts of paths.
    pub fn new(user_code: &[String]) -> Self {
        Self { user_code: user_code.to_vec() }
    }

    /// The frame is the user's own code.
    pub fn is_own(&self, frame: &Named) -> bool {
        if is_linked_in(frame) {
            return false;
        }
        let path = frame.file.as_deref().or(frame.module.as_deref()).unwrap_or_default();
        if self.user_code.iter().any(|part| path.contains(part.as_str())) {
            return true;
        }
        if frame.python {
            return !path.is_empty() && !is_installed(path);
        }
        frame.module.as_deref().is_some_and(|module| !is_library(module)) && !is_of_header(frame)
    }

    /// The site of a stack, whose frames come innermost first: `file:line function` of the innermost
    /// frame of the user's own code; without one, of the innermost Python frame; without one, the
    /// name of the innermost library that is not CUDA's, a framework's or the system's; without
    /// one, the outermost frame's module. `None` for a stack without frames.
    ///
    /// Python is preferred: what a Python program calls into is on the way, not where it is at.
    pub fn site(&self, frames: &[Named]) -> Option<String> {
        let python = frames.iter().find(|frame| frame.python && self.is_own(frame));
        let native = || frames.iter().find(|frame| self.is_own(frame));
        let installed = || frames.iter().find(|frame| frame.python);
        if let Some(frame) = python.or_else(native).or_else(installed) {
            return Some(text(frame));
        }
        let modules = || frames.iter().filter_map(|frame| frame.module.as_deref());
        let driver = |module: &&str| module.starts_with("libcuda") || is_system(module);
        modules().find(|module| !driver(module)).or_else(|| modules().next()).map(str::to_owned)
    }
}

fn is_installed(path: &str) -> bool {
    INSTALLED.iter().any(|part| path.contains(part)) || is_standard_library(path)
}

/// `…/lib/python3.11/…`, and its archive.
fn is_standard_library(path: &str) -> bool {
    path.match_indices("/python3").any(|(at, found)| {
        let before = &path[..at];
        let rest =
            path[at + found.len()..].trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
        let in_library = before.ends_with("/lib") || before.ends_with("/lib64");
        in_library && (rest.starts_with('/') || rest.starts_with("zip/"))
    })
}

fn is_library(module: &str) -> bool {
    LIBRARIES.iter().any(|beginning| module.starts_with(beginning)) || is_interpreter(module)
}

fn is_system(module: &str) -> bool {
    ["libc.", "libc-", "libstdc++", "libgcc", "libpthread", "ld-linux", "["]
        .iter()
        .any(|beginning| module.starts_with(beginning))
}

/// Its function, or `?`.
pub fn function_or_unknown(frame: &Named) -> &str {
    if frame.function.is_empty() { "?" } else { &frame.function }
}

/// A frame as sites are written.
pub fn text(frame: &Named) -> String {
    let function = function_or_unknown(frame);
    match (&frame.file, frame.line, &frame.module) {
        (Some(file), Some(line), _) => {
            format!("{}:{line} {function}", file_name(file.as_ref()))
        }
        (Some(file), None, _) => format!("{} {function}", file_name(file.as_ref())),
        (None, _, Some(module)) => format!("{function} ({module})"),
        (None, ..) => function.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn py(file: &str, line: i32, function: &str) -> Named {
        Named {
            python: true,
            function: function.to_owned(),
            file: Some(file.to_owned()),
            line: Some(line),
            module: None,
        }
    }

    fn so(module: &str, function: &str) -> Named {
        Named {
            python: false,
            function: function.to_owned(),
            file: None,
            line: None,
            module: Some(module.to_owned()),
        }
    }

    fn site(frames: &[Named]) -> String {
        Rule::default().site(frames).unwrap()
    }

    #[test]
    fn the_innermost_python_frame_of_ones_own() {
        let frames = [
            so("libc10.so", "report"),
            so("libtorch_cpu.so", "at::empty"),
            py("/venv/lib/python3.12/site-packages/torch/nn/linear.py", 125, "forward"),
            py("/data/ann/model.py", 87, "Block.forward"),
            py("/data/ann/train.py", 41, "main"),
        ];
        assert_eq!(site(&frames), "model.py:87 Block.forward");
    }

    #[test]
    fn the_standard_library_is_not_ones_own() {
        for path in [
            "/usr/lib/python3.11/threading.py",
            "/opt/pyenv/versions/3.8.18/lib/python3.8/runpy.py",
            "/opt/x/lib64/python3.13/functools.py",
            "/usr/lib/python311.zip/x.py",
            "<frozen importlib._bootstrap>",
            "/usr/lib/python3/dist-packages/numpy/core.py",
        ] {
            assert!(!Rule::default().is_own(&py(path, 1, "f")), "{path}");
        }
        for path in ["/data/lib/python3x/a.py", "/srv/python3/train.py", "<stdin>", "train.py"] {
            assert!(Rule::default().is_own(&py(path, 1, "f")), "{path}");
        }
    }

    #[test]
    fn a_native_program_is_its_own() {
        let main =
            Named { file: Some("/src/app.cu".to_owned()), line: Some(9), ..so("app", "main") };
        assert_eq!(
            site(&[so("libcuda.so.1", "cuMemAlloc_v2"), so("libcudart.so.12", "cudaMalloc"), main]),
            "app.cu:9 main"
        );
        assert_eq!(site(&[so("libcuda.so.1", "cuMemAlloc_v2"), so("app", "grow")]), "grow (app)");
    }

    fn source(file: &str, line: i32, function: &str) -> Named {
        Named { file: Some(file.to_owned()), line: Some(line), ..so("app", function) }
    }

    #[test]
    fn a_runtime_that_is_linked_in_is_on_the_way() {
        let hidden = so("app", "libcudart_static_5382377d5c772c9d197c0cda9fd9742ee6ad893c");
        let grow = source("/src/sites.cu", 29, "grow_plain(unsigned long)");
        for (inner, outer) in [
            (hidden.clone(), so("app", "cudaMalloc")),
            (hidden.clone(), source("/x/include/cuda_runtime.h", 709, "cudaMalloc<float>")),
            (so("app", "__cudaRegisterFatBinary"), so("app", "cudaMallocAsync")),
            (so("app", "libcublasLt_static_0123abcd"), so("app", "cublasLtCreate")),
            (so("app", "ncclCuMemAlloc(void**, int)"), so("app", "pncclCommInitRank")),
            (
                so("app", "cudaError cudaMalloc<int>(int**, unsigned long)"),
                so("app", "cufftPlan1d"),
            ),
            (
                source("/usr/include/c++/13/bits/invoke.h", 61, "__invoke_impl<void>"),
                source("/cuda/include/thrust/device_vector.h", 77, "device_vector"),
            ),
        ] {
            let frames = [so("libcuda.so.1", "cuMemAlloc_v2"), inner, outer, grow.clone()];
            assert_eq!(site(&frames), "sites.cu:29 grow_plain(unsigned long)", "{frames:?}");
            let everywhere = Rule::new(&["app".to_owned()]);
            assert!(!everywhere.is_own(&hidden), "nobody's own, whatever is asked for");
        }
        // Nothing of the user's own: the file is all that can be named.
        let frames = [so("libcuda.so.1", "cuMemAlloc_v2"), hidden, so("libc.so.6", "clone")];
        assert_eq!(site(&frames), "app");
    }

    #[test]
    fn ones_own_functions_may_be_named_as_the_runtimes_are() {
        for frame in [
            source("/src/util.cu", 12, "cudaCheckedMalloc"),
            source("/src/include/pool.h", 3, "Pool::Pool"),
            so("app", "cudasim_step"),
            so("app", "nccl_test_main"),
            so("app", "curandom"),
            so("app", "cudaError my_alloc<float>(float**, unsigned long)"),
        ] {
            assert!(Rule::default().is_own(&frame), "{frame:?}");
        }
    }

    #[test]
    fn an_extension_called_from_python_is_on_the_way() {
        let frames = [
            so("libcuda.so.1", "cuMemAlloc_v2"),
            so("libmyop.so", "run"),
            py("/data/ann/train.py", 7, "step"),
        ];
        assert_eq!(site(&frames), "train.py:7 step");
    }

    #[test]
    fn without_ones_own_code_the_library_is_named() {
        let frames = [
            so("libcuda.so.1", "cuMemCreate"),
            so("libnccl.so.2", "ncclProxy"),
            so("libc.so.6", "clone"),
        ];
        assert_eq!(site(&frames), "libnccl.so.2");
        assert_eq!(site(&[so("libcuda.so.1", "cuMemAlloc_v2")]), "libcuda.so.1");
        assert_eq!(Rule::default().site(&[]), None);
    }

    #[test]
    fn user_code_patterns_win() {
        let rule = Rule::new(&["site-packages/ourlib/".to_owned()]);
        let frames = [
            py("/v/lib/python3.12/site-packages/ourlib/layer.py", 3, "f"),
            py("/data/ann/train.py", 1, "main"),
        ];
        assert_eq!(rule.site(&frames).unwrap(), "layer.py:3 f");
    }
}
