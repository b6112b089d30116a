//! `cargo xtask ebpf`: builds the kernel half with the stable compiler and stores the objects.
//!
//! The objects are committed, so that building vramscope needs stable Rust and nothing else.
//! `sources.hash` beside them says which sources they were built from; `--check` compares it and,
//! where the tools are installed, builds again and compares the programs themselves.

mod object_file;
mod sources;
mod tools;

use crate::{paths, sh, tally::Tally};
use anyhow::{Context as _, Result};
use std::{fs, path::PathBuf, process::ExitCode};

/// The folder of the committed objects, relative to the root.
const OBJECTS: &str = "agent/ebpf-objects";
const TARGET: &str = "bpfel-unknown-none";

/// The architectures whose register layout (`pt_regs`) an object is built for.
const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare the committed objects with their sources and change nothing
    #[arg(long)]
    check: bool,
    /// Install rust-src and bpf-linker first, where they are missing
    #[arg(long, conflicts_with = "check")]
    install_tools: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if args.check {
        return Ok(check()?.exit_code());
    }
    if args.install_tools {
        tools::install()?;
    }
    let tools = tools::find().map_err(tools::Missing::explain)?;
    let folder = sh::root()?.join(OBJECTS);
    for arch in ARCHITECTURES {
        let path = folder.join(file_name(arch));
        let object = build(&tools, arch)?;
        fs::write(&path, &object).with_context(|| format!("write {}", path.display()))?;
        println!("wrote {OBJECTS}/{} ({} bytes)", file_name(arch), object.len());
    }
    sources::write()?;
    Ok(ExitCode::SUCCESS)
}

/// Compares what is committed with its sources; prints what differs.
pub(crate) fn check() -> Result<Tally> {
    if let Err(error) = sources::compare() {
        println!("ebpf --check: {error:#}");
        return Ok(Tally::FAILED);
    }
    println!("ebpf --check: {OBJECTS}/sources.hash agrees with the sources");
    let mut tally = Tally::PASSED;
    match tools::find() {
        Err(missing) => println!("ebpf --check: objects not built again: {}", missing.what),
        Ok(tools) => {
            for arch in ARCHITECTURES {
                tally += check_object(&tools, arch)?;
            }
        }
    }
    Ok(tally)
}

fn check_object(tools: &tools::Tools, arch: &str) -> Result<Tally> {
    let path = sh::root()?.join(OBJECTS).join(file_name(arch));
    let committed = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let built = build(tools, arch)?;
    let name = file_name(arch);
    if committed == built {
        println!("ebpf --check: {name}: a new build gives the same bytes");
        return Ok(Tally::PASSED);
    }
    let differing = object_file::differences(&committed, &built)
        .with_context(|| format!("compare {name} with a new build"))?;
    if differing.is_empty() {
        println!("ebpf --check: {name}: same programs and maps; only BTF differs");
        return Ok(Tally::PASSED);
    }
    println!(
        "ebpf --check: {name}: a new build differs in {}: run `cargo xtask ebpf` and commit",
        differing.join(", ")
    );
    Ok(Tally::FAILED)
}

/// Runs clippy over the kernel half; `None` with the reason where the tools are missing.
pub(crate) fn clippy() -> Result<Result<(), String>> {
    let tools = match tools::find() {
        Ok(tools) => tools,
        Err(missing) => return Ok(Err(missing.what)),
    };
    let mut command = cargo(&tools, "clippy", "x86_64")?;
    sh::run(command.args(["--", "-Dwarnings"]))?;
    Ok(Ok(()))
}

/// Builds one architecture's object and returns it without DWARF.
fn build(tools: &tools::Tools, arch: &str) -> Result<Vec<u8>> {
    sh::run(&mut cargo(tools, "build", arch)?)?;
    let path = target_dir(arch)?.join(TARGET).join("release/vramscope-ebpf");
    let object = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let object = object_file::without_dwarf(&object)
        .with_context(|| format!("remove DWARF from {}", path.display()))?;
    paths::refuse(&object).with_context(|| format!("look at the {arch} object"))?;
    Ok(object)
}

/// `cargo VERB` over the kernel half, with everything that decides the object.
fn cargo(tools: &tools::Tools, verb: &str, arch: &str) -> Result<std::process::Command> {
    let mut flags = tools::decisive_flags(arch);
    flags.extend(paths::remap_flags()?);
    let mut command = sh::cargo()?;
    command
        .args([verb, "--locked", "--release", "--package", "agent-ebpf", "--target", TARGET])
        .args(["-Z", "build-std=core"])
        .arg("--target-dir")
        .arg(target_dir(arch)?)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("LD_LIBRARY_PATH", tools.library_path())
        .env_remove("RUSTFLAGS");
    Ok(command)
}

/// Apart from the host's folder: `RUSTC_BOOTSTRAP` makes build scripts run again, and the lock of
/// a host build would block this one. One for each architecture: their flags differ, so that in a
/// common folder each build would throw the other's away.
fn target_dir(arch: &str) -> Result<PathBuf> {
    Ok(sh::target_dir()?.join("ebpf").join(arch))
}

fn file_name(arch: &str) -> String {
    format!("vramscope-{arch}.bpf.o")
}
