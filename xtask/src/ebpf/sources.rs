//! `sources.hash`: what the committed objects were built from.
//!
//! One line for each thing that decides an object: compiler, flags, locked dependencies, sources,
//! and the objects themselves. The file is in the form that `sha256sum -c` reads, so that a person
//! can check the objects without this program.

use super::{ARCHITECTURES, OBJECTS, TARGET, file_name, tools};
use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

const HEADER: &str = "\
# What the objects in this folder were built from: `cargo xtask ebpf` writes this file and
# `cargo xtask ebpf --check` compares it. In the root, `sha256sum -c` reads it too.";

/// The crates whose every file decides the objects.
const CRATES: [&str; 2] = ["agent-common", "agent-ebpf"];

/// Records the present sources and objects.
pub(super) fn write() -> Result<()> {
    let path = file()?;
    fs::write(&path, describe()?).with_context(|| format!("write {}", path.display()))?;
    println!("wrote {OBJECTS}/sources.hash");
    Ok(())
}

/// An error that names what changed since the objects were built.
pub(super) fn compare() -> Result<()> {
    let path = file()?;
    let recorded = fs::read_to_string(&path).with_context(|| {
        format!("read {}: build the objects with `cargo xtask ebpf`", path.display())
    })?;
    let changed = changed(&recorded, &describe()?);
    if !changed.is_empty() {
        bail!(
            "the objects in {OBJECTS} are older than their sources: run `cargo xtask ebpf` and \
             commit them; changed: {}",
            changed.join(", ")
        );
    }
    Ok(())
}

fn file() -> Result<PathBuf> {
    Ok(sh::root()?.join(OBJECTS).join("sources.hash"))
}

/// The operands of the lines that are in one text only.
fn changed(recorded: &str, present: &str) -> Vec<String> {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (recorded, present) = (lines(recorded), lines(present));
    let names: BTreeSet<_> =
        recorded.symmetric_difference(&present).map(|line| operand(line)).collect();
    names.into_iter().collect()
}

/// The file's name of a checksum line, or the text of a comment line.
fn operand(line: &str) -> String {
    line.split_once("  ").map_or(line.trim_start_matches("# "), |(_, name)| name).to_owned()
}

fn describe() -> Result<String> {
    let root = sh::root()?;
    let mut lines = vec![HEADER.to_owned()];
    lines.push(format!("# rustc {}, bpf-linker {}", tools::RUSTC, tools::BPF_LINKER));
    for arch in ARCHITECTURES {
        lines.push(format!("# {}: {}", file_name(arch), tools::decisive_flags(arch).join(" ")));
    }
    lines.extend(profile(&root)?.into_iter().map(|line| format!("# profile {line}")));
    lines.extend(dependencies()?.into_iter().map(|line| format!("# dependency {line}")));
    let mut files = Vec::new();
    for name in CRATES {
        walk(&root, Path::new(name), &mut files)?;
    }
    files.extend(ARCHITECTURES.map(|arch| Path::new(OBJECTS).join(file_name(arch))));
    for file in files {
        let path = root.join(&file);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        lines.push(format!("{}  {}", tools::sha256(&bytes), file.display()));
    }
    Ok(lines.join("\n") + "\n")
}

/// The settings of the release profiles, each with its section.
fn profile(root: &Path) -> Result<Vec<String>> {
    let path = root.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut section = "";
    let mut settings = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if line.starts_with('[') {
            section = line;
        } else if section.starts_with("[profile.release") && !line.is_empty() {
            settings.push(format!("{section} {line}"));
        }
    }
    Ok(settings)
}

/// The locked crates that are compiled into an object, with their features, and the macros that
/// write code of it. Members are covered by their files; what merely runs during the build is not.
fn dependencies() -> Result<BTreeSet<String>> {
    let compiled = tree("normal,no-proc-macro")?;
    let everything = tree("normal")?;
    let macros = everything.lines().filter(|line| line.contains("(proc-macro)"));
    let foreign = compiled.lines().chain(macros).filter(|line| !line.contains("(/"));
    Ok(foreign.map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect())
}

fn tree(edges: &str) -> Result<String> {
    let mut tree = sh::cargo()?;
    tree.args(["tree", "--locked", "--package", "agent-ebpf", "--target", TARGET]).args([
        "--edges",
        edges,
        "--prefix",
        "none",
        "--no-dedupe",
        "--format",
        "{p} {f}",
    ]);
    sh::output(&mut tree)
}

fn walk(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let path = root.join(folder);
    let entries = fs::read_dir(&path).with_context(|| format!("list {}", path.display()))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name()))
        .collect::<std::io::Result<Vec<_>>>()
        .with_context(|| format!("list {}", path.display()))?;
    names.sort();
    for name in names {
        let relative = folder.join(&name);
        if root.join(&relative).is_dir() {
            walk(root, &relative, files)?;
        } else if decides(&relative) {
            files.push(relative);
        }
    }
    Ok(())
}

/// Editors leave other files behind, which must not make the objects look old.
fn decides(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs" || extension == "toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_and_a_changed_dependency_are_named() {
        let old = "# dependency aya-ebpf v0.2.1\naa  agent-ebpf/src/main.rs\nbb  same.rs\n";
        let new = "# dependency aya-ebpf v0.3.0\ncc  agent-ebpf/src/main.rs\nbb  same.rs\n";
        assert_eq!(
            changed(old, new),
            ["agent-ebpf/src/main.rs", "dependency aya-ebpf v0.2.1", "dependency aya-ebpf v0.3.0"]
        );
        assert!(changed(old, old).is_empty());
    }

    #[test]
    fn the_description_covers_sources_flags_and_locked_crates() {
        let root = sh::root().unwrap();
        assert!(profile(&root).unwrap().iter().any(|line| line.contains("codegen-units = 1")));
        let crates = dependencies().unwrap();
        assert!(crates.iter().any(|line| line.starts_with("aya-ebpf v")), "{crates:?}");
        assert!(crates.iter().any(|line| line.starts_with("aya-ebpf-macros v")), "{crates:?}");
        for name in ["agent-common", "serde_json", "syn"] {
            assert!(!crates.iter().any(|line| line.starts_with(name)), "{crates:?}");
        }
        let mut files = Vec::new();
        walk(&root, Path::new("agent-ebpf"), &mut files).unwrap();
        assert!(files.contains(&PathBuf::from("agent-ebpf/src/main.rs")), "{files:?}");
    }
}
