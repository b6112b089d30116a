//! Capabilities: those of a process's threads, and programs that start with others.

use std::{collections::BTreeMap, fs, process::Command};

use anyhow::{Context as _, Result};

/// What `/proc` says of one thread, as hexadecimal numbers without zeros before them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Privileges {
    /// Name of the thread.
    pub thread: String,
    /// `CapInh`, `CapPrm`, `CapEff`, `CapBnd`, `CapAmb` and `NoNewPrivs`.
    pub sets: BTreeMap<String, u64>,
}

impl Privileges {
    /// From the lines of a `status`.
    pub fn parse(status: &str) -> Self {
        let mut found = Self::default();
        for (key, value) in status.lines().filter_map(|line| line.split_once(":\t")) {
            if key == "Name" {
                value.clone_into(&mut found.thread);
            } else if (key.starts_with("Cap") || key == "NoNewPrivs")
                && let Ok(value) = u64::from_str_radix(value.trim(), 16)
            {
                found.sets.insert(key.to_owned(), value);
            }
        }
        found
    }

    /// Those of this thread.
    pub fn own() -> Result<Self> {
        let status =
            fs::read_to_string("/proc/thread-self/status").context("read the own status")?;
        Ok(Self::parse(&status))
    }
}

/// Those of every thread of a process.
pub fn of_threads(pid: u32) -> Result<Vec<Privileges>> {
    let folder = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&folder).with_context(|| format!("list {folder}"))?;
    let statuses = threads.flatten().filter_map(|thread| {
        // One may end meanwhile.
        fs::read_to_string(thread.path().join("status")).ok()
    });
    Ok(statuses.map(|status| Privileges::parse(&status)).collect())
}

/// The command, run by `setpriv` with these options. Its streams and its folder are not taken over.
pub fn setpriv(options: &[&str], command: &Command) -> Command {
    under("setpriv", options, command)
}

/// The command, executed by a tool that changes something of its process first.
pub fn under(tool: &str, options: &[&str], command: &Command) -> Command {
    let mut changed = Command::new(tool);
    changed.args(options).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => changed.env(name, value),
            None => changed.env_remove(name),
        };
    }
    changed
}
