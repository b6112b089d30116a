//! The licence texts of every crate that is linked into the binary: their licences ask that they
//! travel with it.

use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// One text with all crates and their licences; equal texts once.
pub(super) fn collect() -> Result<String> {
    let linked = linked()?;
    let metadata = sh::output(sh::cargo()?.args(["metadata", "--locked", "--format-version=1"]))?;
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata).context("parse the output of `cargo metadata`")?;
    let mut crates_of_text = BTreeMap::<String, BTreeSet<String>>::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let title = format!("{} v{}", field("name"), field("version"));
        // Members have no source; their licence texts lie beside this file.
        if !linked.contains(&title) || package["source"].is_null() {
            continue;
        }
        let folder = Path::new(field("manifest_path")).parent().unwrap_or(Path::new("/"));
        let title = format!("{title} ({}), {}", field("license"), field("repository"));
        for text in texts(folder)? {
            crates_of_text.entry(text).or_default().insert(title.clone());
        }
    }
    if crates_of_text.is_empty() {
        bail!("no licence text was found among {} linked crates", linked.len());
    }
    Ok(render(&crates_of_text))
}

fn render(crates_of_text: &BTreeMap<String, BTreeSet<String>>) -> String {
    let rule = "=".repeat(80);
    let block = |(text, crates): (&String, &BTreeSet<String>)| {
        let crates = crates.iter().cloned().collect::<Vec<_>>().join("\n");
        format!("{rule}\n{crates}\n{rule}\n\n{}\n\n", text.trim_end())
    };
    crates_of_text.iter().map(block).collect()
}

/// `name vVERSION` of every crate of the agent.
fn linked() -> Result<BTreeSet<String>> {
    let mut tree = sh::cargo()?;
    tree.args(["tree", "--locked", "-p", "agent", "--edges", "normal", "--prefix", "none"]).args([
        "--no-dedupe",
        "--format",
        "{p}",
    ]);
    let words = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Ok(sh::output(&mut tree)?.lines().map(words).collect())
}

fn texts(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    let mut texts = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if ["LICENSE", "LICENCE", "COPYING", "NOTICE"].iter().any(|word| name.starts_with(word)) {
            let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            texts.push(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
    Ok(texts)
}
