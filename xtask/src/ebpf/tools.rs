//! The tools of the kernel half's build: found, explained when missing, installed when asked.

use crate::sh;
use anyhow::{Context as _, Result, anyhow, bail};
use sha2::{Digest as _, Sha256};
use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

pub(super) const RUSTC: &str = "1.95.0";
/// The last series that can use rustc's own LLVM; 0.11 and later need a system LLVM that is at
/// least as new as rustc's.
pub(super) const BPF_LINKER: &str = "0.10.3";

/// Debian's package of the same release's library sources, for machines that reach a Debian
/// mirror but not rustup's server. The checksum is that of the pool's file.
const DEBIAN_RUST_SRC: &str =
    "http://deb.debian.org/debian/pool/main/r/rustc/rust-src_1.95.0+dfsg1-2~bpo13+1_all.deb";
const DEBIAN_RUST_SRC_SHA256: &str =
    "7b76db5b880a77f9e52975d2baa6209d2f76d2c9c2789515c3088cb960e2c83b";

/// What the build needs, found on this machine.
pub(super) struct Tools {
    sysroot: PathBuf,
}

/// A tool that is not there.
pub(super) struct Missing {
    /// What is missing, in a few words.
    pub(super) what: String,
}

impl Missing {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into() }
    }

    /// The error with the steps that install everything.
    pub(super) fn explain(self) -> anyhow::Error {
        anyhow!(
            "{what}\n\
             The committed objects are enough to build and run vramscope; only a change of the \
             kernel half needs these tools:\n  \
             rustup component add rust-src --toolchain {RUSTC}\n    \
             (or unpack usr/src/rustc-{RUSTC}/library of {DEBIAN_RUST_SRC}\n     \
             as $(rustc --print sysroot)/lib/rustlib/src/rust/library)\n  \
             cargo install bpf-linker --version {BPF_LINKER} --locked\n\
             `cargo xtask ebpf --install-tools` does both.",
            what = self.what
        )
    }
}

/// Looks for the compiler, its library sources and the linker.
pub(super) fn find() -> Result<Tools, Missing> {
    let sysroot = sysroot()?;
    if !library_sources(&sysroot).join("core/src/lib.rs").is_file() {
        return Err(Missing::new(format!("rust-src {RUSTC} is not installed")));
    }
    match bpf_linker_version() {
        Some(version) if version == BPF_LINKER => Ok(Tools { sysroot }),
        Some(version) => {
            Err(Missing::new(format!("bpf-linker is {version}, {BPF_LINKER} is needed")))
        }
        None => Err(Missing::new(format!("bpf-linker {BPF_LINKER} is not installed"))),
    }
}

fn sysroot() -> Result<PathBuf, Missing> {
    let rustc = |args: &[&str]| {
        sh::command("rustc").and_then(|mut rustc| sh::output(rustc.args(args))).ok()
    };
    let version = rustc(&["--version"]).unwrap_or_default();
    if version.split(' ').nth(1) != Some(RUSTC) {
        return Err(Missing::new(format!("rustc is '{}', {RUSTC} is needed", version.trim())));
    }
    rustc(&["--print", "sysroot"])
        .map(|path| path.trim().into())
        .ok_or_else(|| Missing::new("`rustc --print sysroot` failed"))
}

fn library_sources(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib/src/rust/library")
}

fn bpf_linker_version() -> Option<String> {
    let output = sh::output(Command::new("bpf-linker").arg("--version")).ok()?;
    output.split_whitespace().nth(1).map(str::to_owned)
}

impl Tools {
    /// Where bpf-linker finds the compiler's LLVM; rustup sets this by itself, others do not.
    pub(super) fn library_path(&self) -> OsString {
        let mut paths = vec![self.sysroot.join("lib")];
        if let Some(old) = env::var_os("LD_LIBRARY_PATH") {
            paths.extend(env::split_paths(&old));
        }
        env::join_paths(paths).unwrap_or_else(|_| self.sysroot.join("lib").into())
    }
}

/// The flags that decide the object, the same on every machine.
pub(super) fn decisive_flags(arch: &str) -> Vec<String> {
    // Debug information is the source of BTF; bpf-linker drops BTF without `--btf`.
    let arch = format!("--cfg=bpf_target_arch=\"{arch}\"");
    vec![arch, "-Cdebuginfo=2".into(), "-Clink-arg=--btf".into()]
}

/// Installs what [`find`] misses. Prints each command.
pub(super) fn install() -> Result<()> {
    let sysroot = sysroot().map_err(Missing::explain)?;
    if !library_sources(&sysroot).join("core/src/lib.rs").is_file() {
        install_rust_src(&sysroot)?;
    }
    if bpf_linker_version().as_deref() != Some(BPF_LINKER) {
        let args = ["install", "bpf-linker", "--version", BPF_LINKER, "--locked", "--force"];
        sh::run(sh::cargo()?.args(args))?;
    }
    Ok(())
}

fn install_rust_src(sysroot: &Path) -> Result<()> {
    let mut rustup = sh::command("rustup")?;
    rustup.args(["component", "add", "rust-src", "--toolchain", RUSTC]);
    let Err(error) = sh::run(&mut rustup) else { return Ok(()) };
    println!("{error:#}; trying Debian's package");
    let folder = sh::target_dir()?.join("rust-src");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let deb = folder.join("rust-src.deb");
    sh::run(Command::new("curl").args(["-fsSL", "-o"]).arg(&deb).arg(DEBIAN_RUST_SRC))?;
    verify(&deb)?;
    // A .deb is an ar archive around data.tar.*; GNU tar finds the compression by itself.
    sh::run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&folder))?;
    let from = folder.join(format!("usr/src/rustc-{RUSTC}/library"));
    let to = library_sources(sysroot);
    let parent = to.parent().context("the toolchain's source folder has no parent")?;
    fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
    sh::run(Command::new("cp").arg("-a").arg(from).arg(to))
}

fn verify(deb: &Path) -> Result<()> {
    let bytes = fs::read(deb).with_context(|| format!("read {}", deb.display()))?;
    let found = sha256(&bytes);
    if found != DEBIAN_RUST_SRC_SHA256 {
        bail!("{DEBIAN_RUST_SRC} has sha256 {found}, not {DEBIAN_RUST_SRC_SHA256}: not used");
    }
    Ok(())
}

/// The SHA-256 of bytes in lower-case hexadecimal.
pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}
