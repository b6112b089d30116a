//! Compiles the simulated libraries and the programs, once for each state of their sources.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, Result, bail};

use super::{PROGRAM_SOURCES, Sim};

/// For libraries: position independent, only what NVIDIA's headers declare visible, and functions
/// that begin as those of driver 580 do: with `push %rbp`, each at an address of its own. A stack
/// protector in each function is the only way to have gcc keep the frame of small leaf functions;
/// the flags after it keep the optimizer from putting anything before the push, from one body for
/// two names, and from jumps in place of calls.
const LIBRARY_FLAGS: &[&str] = &[
    "-std=gnu11",
    "-O2",
    "-g",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-omit-frame-pointer",
    "-fstack-protector-all",
    "-fno-shrink-wrap",
    "-fno-schedule-insns2",
    "-fno-ipa-icf",
    "-fno-optimize-sibling-calls",
];
/// As the real libraries, which carry no `endbr64`.
#[cfg(target_arch = "x86_64")]
const ARCH_FLAGS: &[&str] = &["-fcf-protection=none"];
#[cfg(not(target_arch = "x86_64"))]
const ARCH_FLAGS: &[&str] = &[];
/// Stripped as the real one is; addresses differ from file offsets, so that a tool which takes one
/// for the other attaches in the wrong place. The real driver's functions have large frames: the long
/// form of `sub $n, %rsp` makes every prologue long enough for UCX, which replaces its first 12 bytes.
#[cfg(target_arch = "x86_64")]
const DRIVER_FLAGS: &[&str] =
    &["-s", "-Wl,-Ttext-segment=0x200000", "-mpreferred-stack-boundary=8"];
#[cfg(not(target_arch = "x86_64"))]
const DRIVER_FLAGS: &[&str] = &["-s", "-Wl,-Ttext-segment=0x200000"];
const WARNINGS: &[&str] =
    &["-Wall", "-Wextra", "-Werror", "-Wmissing-prototypes", "-Wno-deprecated-declarations"];
const PROGRAM_FLAGS: &[&str] =
    &["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread", "-Wall", "-Wextra"];

/// A shared library: its name, its sources, and what else the compiler is told.
struct Library {
    soname: &'static str,
    sources: &'static [&'static str],
    flags: &'static [&'static str],
}

const LIBRARIES: &[Library] = &[
    Library {
        soname: "libcuda.so.1",
        sources: &[
            "init.c",
            "device.c",
            "context.c",
            "green.c",
            "limit.c",
            "checkpoint.c",
            "stream.c",
            "object.c",
            "heap.c",
            "export.c",
            "linear.c",
            "old.c",
            "pool.c",
            "poolchoice.c",
            "poolshare.c",
            "opened.c",
            "ipc.c",
            "vmm.c",
            "multicast.c",
            "array.c",
            "sparse.c",
            "host.c",
            "external.c",
            "graph.c",
            "module.c",
            "range.c",
            "procaddr.c",
            "state.c",
        ],
        flags: DRIVER_FLAGS,
    },
    Library {
        soname: "libnvidia-ml.so.1",
        sources: &["nvml.c", "nvml_memory.c", "nvml_mig.c", "state.c"],
        flags: &["-s"],
    },
    Library {
        soname: "libcudart.so.12",
        sources: &["cudart.c"],
        flags: &["-s", "-DSIM_CUDART_SHARED"],
    },
    Library { soname: "libc10.so", sources: &["c10.c"], flags: &[] },
    Library {
        soname: "libc10_cuda.so",
        sources: &["c10_cuda.c", "c10_expandable.c"],
        flags: &["-l:libc10.so", "-l:libcudart.so.12", "-Wl,-rpath,$ORIGIN"],
    },
    Library {
        soname: "libtorch_cpu.so",
        sources: &["torch.c"],
        flags: &["-l:libc10_cuda.so", "-Wl,-rpath,$ORIGIN"],
    },
    Library {
        soname: "libnccl.so.2",
        sources: &["nccl.c"],
        flags: &["-s", "-l:libcudart.so.12", "-Wl,-rpath,$ORIGIN"],
    },
];

/// A program: its name, its sources, and what it is linked with.
const PROGRAMS: &[(&str, &str, &[&str])] = &[
    ("burst", "burst.c", &["-l:libcuda.so.1"]),
    ("costs", "costs.c", &["-l:libcuda.so.1"]),
    ("ctx", "ctx.c", &["-l:libcuda.so.1"]),
    ("dlopen_late", "dlopen_late.c", &["-ldl"]),
    (
        "every_row",
        "every_row.c every_row_memory.c every_row_contexts.c every_row_objects.c every_row_shared.c",
        &["-Wl,--no-as-needed", "-l:libcuda.so.1", "-ldl"],
    ),
    ("failed", "failed.c", &["-l:libcuda.so.1"]),
    ("fork_child", "fork_child.c", &["-l:libcuda.so.1"]),
    ("free_other_thread", "free_other_thread.c", &["-l:libcuda.so.1"]),
    ("hold", "hold.c", &["-l:libcuda.so.1"]),
    ("layers", "layers.c", &["-l:libc10_cuda.so", "-l:libcuda.so.1", "-ldl"]),
    ("libmyop.so", "native_user.c", &["-shared", "-fPIC", "-O2", "-DPREFIX=myop_"]),
    ("libfirst.so", "native_user.c", &["-shared", "-fPIC", "-O2", "-DPREFIX=first_"]),
    ("libother.so", "native_user.c", &["-shared", "-fPIC", "-O2", "-DPREFIX=other_", "-DLATER"]),
    (
        "native_stacks",
        "native_stacks.c",
        &["-l:libcuda.so.1", "-ldl", "-O2", "-fomit-frame-pointer", "-fPIE", "-pie"],
    ),
    (
        "native_stacks_fixed",
        "native_stacks.c",
        &["-l:libcuda.so.1", "-ldl", "-O2", "-fomit-frame-pointer", "-fno-pie", "-no-pie"],
    ),
    (
        "native_stacks_stripped",
        "native_stacks.c",
        &["-l:libcuda.so.1", "-ldl", "-O2", "-fomit-frame-pointer", "-s", "-rdynamic"],
    ),
    ("patcher", "patcher.c", &["-l:libcuda.so.1"]),
    ("proc_address", "proc_address.c", &["-Wl,--no-as-needed", "-l:libcuda.so.1", "-ldl"]),
    (
        "ranks",
        "ranks.c",
        &["-l:libnccl.so.2", "-Wl,--no-as-needed", "-l:libcuda.so.1", "-Wl,--as-needed"],
    ),
    ("runtime_shared", "runtime.c", &["-l:libcudart.so.12"]),
    ("runtime_static", "runtime.c", &["-l:libcudart_static.a", "-ldl"]),
    ("share", "share.c", &["-l:libcuda.so.1"]),
    ("smi", "smi.c", &["-l:libnvidia-ml.so.1"]),
    ("threads", "threads.c", &["-l:libcuda.so.1"]),
    ("chooses", "chooses.c", &["-l:libcuda.so.1"]),
    ("flood", "flood.c", &["-l:libc10_cuda.so", "-l:libcuda.so.1"]),
    ("torch_like", "torch_like.c", &["-l:libc10_cuda.so"]),
    ("ucx", "ucx.c", &["-l:libcuda.so.1", "-ldl"]),
    ("vmm_nccl", "vmm_nccl.c", &["-l:libcuda.so.1"]),
];

pub(super) fn build() -> Result<Sim> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (sim_dir, program_dir) = (here.join("sim"), PathBuf::from(PROGRAM_SOURCES));
    let root = target_dir(here).join("sim");
    fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
    let lock = File::create(root.join("lock"))
        .with_context(|| format!("create the lock file in {}", root.display()))?;
    lock.lock().with_context(|| format!("lock {}", root.display()))?;

    let built = root.join(format!("{:016x}", sources_hash(&[&sim_dir, &program_dir])?));
    if !built.exists() {
        let headers = fetch_headers(&sim_dir, &root)?;
        let building = tempfile::tempdir_in(&root).context("make a folder to build in")?;
        let compiler = Compiler { headers, sim_dir, program_dir: program_dir.clone() };
        compiler.build_all(building.path())?;
        // The folder appears whole or not at all, whatever ends this process.
        let done = building.keep();
        fs::rename(&done, &built).with_context(|| format!("rename to {}", built.display()))?;
        make_readable(&built)?;
    }
    Ok(Sim::in_folder(&built, &program_dir))
}

/// The folder that cargo builds into: where this program lies, else the workspace's own.
pub(crate) fn target_dir(here: &Path) -> PathBuf {
    let of_program = env::current_exe().ok().and_then(|program| {
        let tagged = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
        tagged.map(Path::to_owned)
    });
    of_program.unwrap_or_else(|| here.join("../target"))
}

fn make_readable(folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("open {} to other users", folder.display()))
}

/// A hash of every source, the flags and the compiler's version.
fn sources_hash(folders: &[&Path]) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    for folder in folders {
        let mut files: Vec<_> = fs::read_dir(folder)
            .and_then(|entries| entries.map(|entry| entry.map(|e| e.path())).collect())
            .with_context(|| format!("list {}", folder.display()))?;
        files.retain(|file| matches!(extension(file), "c" | "h"));
        files.sort();
        for file in files {
            file.file_name().hash(&mut hasher);
            fs::read(&file).with_context(|| format!("read {}", file.display()))?.hash(&mut hasher);
        }
    }
    include_str!("build.rs").hash(&mut hasher);
    let version = Command::new(compiler_name()).arg("--version").output().with_context(|| {
        format!("run {} --version; is a C compiler installed?", compiler_name())
    })?;
    version.stdout.hash(&mut hasher);
    Ok(hasher.finish())
}

fn extension(file: &Path) -> &str {
    file.extension().and_then(OsStr::to_str).unwrap_or_default()
}

fn compiler_name() -> String {
    env::var("CC").unwrap_or_else(|_| "cc".into())
}

/// NVIDIA's headers, fetched once for each version of the script that pins them.
fn fetch_headers(sim_dir: &Path, root: &Path) -> Result<PathBuf> {
    let script = sim_dir.join("fetch_headers.py");
    let mut hasher = DefaultHasher::new();
    fs::read(&script).with_context(|| format!("read {}", script.display()))?.hash(&mut hasher);
    let headers = root.join(format!("headers-{:016x}", hasher.finish()));
    if headers.exists() {
        return Ok(headers);
    }
    let fetching = tempfile::tempdir_in(root).context("make a folder for NVIDIA's headers")?;
    run(Command::new("python3").arg(&script).arg(fetching.path())).context(
        "fetch NVIDIA's headers from PyPI (the simulated GPU is compiled against them); \
         PIP_INDEX_URL names another index",
    )?;
    fs::rename(fetching.keep(), &headers)
        .with_context(|| format!("rename to {}", headers.display()))?;
    Ok(headers)
}

struct Compiler {
    headers: PathBuf,
    sim_dir: PathBuf,
    program_dir: PathBuf,
}

impl Compiler {
    fn build_all(&self, to: &Path) -> Result<()> {
        let (lib_dir, bin_dir) = (to.join("lib"), to.join("bin"));
        for folder in [&lib_dir, &bin_dir] {
            fs::create_dir(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        for library in LIBRARIES {
            self.library(library, &lib_dir, &[])?;
        }
        let other_dir = to.join("other");
        fs::create_dir(&other_dir).with_context(|| format!("create {}", other_dir.display()))?;
        for driver in LIBRARIES.iter().filter(|library| library.soname == "libcuda.so.1") {
            self.library(driver, &other_dir, &["-falign-functions=128"])?;
        }
        self.static_runtime(&lib_dir)?;
        for (name, sources, libraries) in PROGRAMS {
            self.program(&bin_dir.join(name), sources, libraries, &lib_dir)?;
        }
        Ok(())
    }

    fn cc(&self) -> Command {
        let mut command = Command::new(compiler_name());
        command.arg("-isystem").arg(&self.headers);
        command
    }

    fn library(&self, library: &Library, lib_dir: &Path, more: &[&str]) -> Result<()> {
        let sources = library.sources.iter().map(|source| self.sim_dir.join(source));
        let mut command = self.cc();
        command.args(LIBRARY_FLAGS).args(ARCH_FLAGS).args(WARNINGS);
        command.args(["-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic"]);
        command.arg(format!("-Wl,-soname,{}", library.soname)).args(sources);
        command.arg("-L").arg(lib_dir).args(library.flags).args(more);
        command.arg("-o").arg(lib_dir.join(library.soname));
        run(&mut command).with_context(|| format!("compile {}", library.soname))
    }

    /// The runtime as nvcc links it by default: hidden names, local in the finished program; those
    /// that are no interface made unreadable; nothing for debuggers.
    fn static_runtime(&self, lib_dir: &Path) -> Result<()> {
        let object = lib_dir.join("cudart.o");
        let mut command = self.cc();
        command.args(LIBRARY_FLAGS).args(ARCH_FLAGS).args(WARNINGS);
        command.arg("-g0").args(["load", "enter_device", "ready"].map(|name| {
            format!("-D{name}=libcudart_static_5382377d5c772c9d197c0cda9fd9742e_{name}")
        }));
        command.arg("-c").arg(self.sim_dir.join("cudart.c")).arg("-o").arg(&object);
        run(&mut command)?;
        let archive = lib_dir.join("libcudart_static.a");
        run(Command::new("ar").arg("rcs").arg(&archive).arg(&object))?;
        fs::remove_file(&object).with_context(|| format!("remove {}", object.display()))
    }

    fn program(&self, to: &Path, sources: &str, libraries: &[&str], lib_dir: &Path) -> Result<()> {
        let mut command = self.cc();
        command.args(PROGRAM_FLAGS).args(ARCH_FLAGS).args(["-Werror", "-I"]).arg(&self.sim_dir);
        command.args(sources.split(' ').map(|source| self.program_dir.join(source)));
        command.arg("-o").arg(to);
        command.arg("-L").arg(lib_dir).args(libraries);
        command.arg(format!("-Wl,-rpath-link,{}", lib_dir.display()));
        run(&mut command).with_context(|| format!("compile {sources}"))
    }
}

fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// What the command printed; an error where it fails.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(output)
}
