//! Running other programs: what is run is printed, what fails is named.

use anyhow::{Context as _, Result, bail};
use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The repository's root. Cargo names xtask's own folder when it runs it; a bare binary is
/// expected to be started in the root.
pub(crate) fn root() -> Result<PathBuf> {
    let root = match env::var_os("CARGO_MANIFEST_DIR") {
        Some(dir) => Path::new(&dir).parent().map(Path::to_owned).unwrap_or_default(),
        None => env::current_dir().context("find the current folder")?,
    };
    if !root.join("xtask/Cargo.toml").is_file() {
        bail!("{} is not vramscope's root: run this as `cargo xtask` in it", root.display());
    }
    Ok(root)
}

/// The folder cargo builds into, as cargo itself sees it (environment and configuration).
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = output(cargo()?.args(["metadata", "--no-deps", "--format-version=1"]))?;
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata).context("parse the output of `cargo metadata`")?;
    let dir = metadata["target_directory"].as_str();
    Ok(dir.context("`cargo metadata` names no target_directory")?.into())
}

/// A command that runs in the repository's root.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Result<Command> {
    let mut command = Command::new(program);
    command.current_dir(root()?);
    Ok(command)
}

/// `cargo` in the repository's root, of the toolchain that runs xtask.
pub(crate) fn cargo() -> Result<Command> {
    command("cargo")
}

/// The command as one would type it, without the environment.
pub(crate) fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| quote(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Prints and runs a command; an error unless it exits with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", line(command));
    let status = command.status().with_context(|| format!("run `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// What a command writes to stdout; an error with its stderr unless it exits with 0.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run `{}`", line(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}: {}", line(command), output.status, stderr.trim());
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("`{}` did not write UTF-8", line(command)))
}

/// Whether a command can be started and exits with 0; its output is dropped.
pub(crate) fn succeeds(program: impl AsRef<OsStr>, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Cargo's own folder, where the sources of dependencies are unpacked.
pub(crate) fn cargo_home() -> Option<PathBuf> {
    env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")))
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_line_can_be_pasted_into_a_shell() {
        let mut command = Command::new("echo");
        command.args(["a-b", "it's", "", "x y"]);
        assert_eq!(line(&command), r"echo a-b 'it'\''s' '' 'x y'");
    }

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let error = output(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("exit status: 3") && text.contains("why"), "{text}");
    }
}
