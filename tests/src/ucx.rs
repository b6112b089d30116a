//! The real UCX, which patches the driver's functions in memory.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    machine::{self, Obstacle},
    sim::{SimDevice, build},
};

/// GPUs of the test's own whose programs find UCX; `None`, and a word on stdout, where this machine
/// can't have it.
pub fn gpus() -> Result<Option<SimDevice>> {
    if env::consts::ARCH != "x86_64" {
        machine::skip(&Obstacle::of_the_machine("UCX's libraries are pinned for x86-64 only"));
        return Ok(None);
    }
    let Some(device) = machine::gpus()? else { return Ok(None) };
    match fetch() {
        Ok(folder) => Ok(Some(device.set("UCX_LIB_DIR", &folder.display().to_string()))),
        Err(error) => {
            machine::skip(&Obstacle::avoidable(format!("no UCX from PyPI: {error:#}")));
            Ok(None)
        }
    }
}

/// The folder with `libucp.so.0`; fetched once, whoever asks first.
fn fetch() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = build::target_dir(here).join("ucx");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let lock = File::create(folder.join("lock")).context("create the lock file of UCX")?;
    lock.lock().context("lock the folder of UCX")?;
    let mut command = Command::new("python3");
    command.arg(here.join("ucx/fetch.py")).arg(folder.join("libraries"));
    let output = build::output(&mut command)?;
    Ok(String::from_utf8(output.stdout).context("the folder of UCX")?.trim_end().into())
}
