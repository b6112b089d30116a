//! `cargo xtask dist`: the self-contained tarball for x86-64 Linux.
//!
//! NVML is opened at run time, which a static binary can't do, so the binary needs the C library;
//! it is linked against an old one by way of zig, and what it really needs is read from it.

mod glibc;
mod notices;

use crate::{paths, sh};
use anyhow::{Context as _, Result, bail};
use glibc::Version;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// RHEL 8, Debian 10 and Ubuntu 20.04 have at least this C library.
const OLDEST_GLIBC: Version = Version(2, 28);
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Both are Python packages that carry a program.
const ZIG_PACKAGES: [&str; 2] = ["cargo-zigbuild==0.24.1", "ziglang==0.17.1"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Link against this machine's C library, without zig
    #[arg(long)]
    plain: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let folder = sh::target_dir()?.join("dist");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let binary = build(&folder, args.plain)?;
    check_binary(&binary, args.plain)?;
    let name = format!("vramscope-{}-{TARGET}", env!("CARGO_PKG_VERSION"));
    assemble(&binary, &folder.join(&name))?;
    let tarball = pack(&folder, &name)?;
    sh::run(Command::new("sha256sum").arg(&tarball))?;
    Ok(ExitCode::SUCCESS)
}

fn build(folder: &Path, plain: bool) -> Result<PathBuf> {
    let mut command = sh::cargo()?;
    if plain {
        command.args(["build", "--target", TARGET]);
    } else {
        let programs = zig(folder)?;
        let Version(major, minor) = OLDEST_GLIBC;
        command.arg("zigbuild").arg(format!("--target={TARGET}.{major}.{minor}"));
        command.env("PATH", programs);
    }
    command
        .args(["--locked", "--release", "-p", "agent", "--target-dir"])
        .arg(folder.join("build"))
        .env("CARGO_ENCODED_RUSTFLAGS", paths::remap_flags()?.join("\x1f"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "debuginfo")
        .env_remove("RUSTFLAGS");
    sh::run(&mut command)?;
    Ok(folder.join("build").join(TARGET).join("release/vramscope"))
}

/// Installs zig and cargo-zigbuild into a folder of their own; returns the PATH that finds them.
fn zig(folder: &Path) -> Result<std::ffi::OsString> {
    let venv = folder.join("zig");
    if !venv.join("bin/cargo-zigbuild").is_file() {
        sh::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        let mut pip = Command::new(venv.join("bin/python"));
        sh::run(pip.args(["-m", "pip", "install", "--quiet"]).args(ZIG_PACKAGES))
            .context("install zig (or build with `--plain`, against this machine's C library)")?;
    }
    let old = env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(venv.join("bin")).chain(env::split_paths(&old));
    env::join_paths(paths).context("add zig's folder to PATH")
}

/// Says what the binary needs of the machine it will run on. An error if that is more than stated,
/// or if the binary names folders of this machine.
fn check_binary(binary: &Path, plain: bool) -> Result<()> {
    let bytes = fs::read(binary).with_context(|| format!("read {}", binary.display()))?;
    paths::refuse(&bytes).with_context(|| format!("look at {}", binary.display()))?;
    let needs = glibc::needs(&bytes).with_context(|| format!("read {}", binary.display()))?;
    println!("needs {}; newest version symbol GLIBC_{}", needs.libraries.join(", "), needs.newest);
    let foreign = needs.libraries.iter().find(|library| !glibc::is_part(library));
    if let Some(library) = foreign {
        bail!("{} needs {library}, which a bare machine lacks", binary.display());
    }
    if !plain && needs.newest > OLDEST_GLIBC {
        bail!("{} needs glibc {}, not {OLDEST_GLIBC}", binary.display(), needs.newest);
    }
    Ok(())
}

fn assemble(binary: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    let root = sh::root()?;
    copy(binary, &folder.join("bin/vramscope"))?;
    for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&root.join(name), &folder.join(name))?;
    }
    for (shell, file) in [
        ("bash", "completions/vramscope.bash"),
        ("zsh", "completions/_vramscope"),
        ("fish", "completions/vramscope.fish"),
    ] {
        generate(binary, &["completions", shell], &folder.join(file))?;
    }
    generate(binary, &["man"], &folder.join("man/man1/vramscope.1"))?;
    write(&folder.join("LICENSES-OF-DEPENDENCIES"), notices::collect()?)?;
    for name in ["docs", "deploy"] {
        if root.join(name).is_dir() {
            sh::run(Command::new("cp").arg("-r").arg(root.join(name)).arg(folder))?;
        }
    }
    Ok(())
}

fn generate(binary: &Path, args: &[&str], to: &Path) -> Result<()> {
    let text = sh::output(Command::new(binary).args(args))?;
    if text.is_empty() {
        bail!("`vramscope {}` printed nothing", args.join(" "));
    }
    write(to, text)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    make_parent(to)?;
    fs::copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn write(to: &Path, text: String) -> Result<()> {
    make_parent(to)?;
    fs::write(to, text).with_context(|| format!("write {}", to.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))
}

/// The same files give the same tarball: owners, order and times are fixed.
fn pack(folder: &Path, name: &str) -> Result<PathBuf> {
    let tarball = folder.join(format!("{name}.tar.gz"));
    let commit = sh::output(sh::command("git")?.args(["log", "-1", "--format=%ct"]))?;
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=go-w"])
        .arg(format!("--mtime=@{}", commit.trim()))
        .args(["--use-compress-program=gzip -9n", "-cf"])
        .arg(&tarball)
        .arg("-C")
        .arg(folder)
        .arg(name);
    sh::run(&mut tar)?;
    Ok(tarball)
}
