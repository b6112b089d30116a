//! Small file systems, which can be filled.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::sim::SimDevice;

/// A small file system of its own; gone when dropped.
#[derive(Debug)]
pub struct Disk(PathBuf);

impl Disk {
    /// Mounts one in the device's folder, with options of tmpfs, `size=24m` for example. Needs root.
    pub fn new(device: &SimDevice, options: &str) -> Result<Self> {
        let folder = device.folder().join("disk");
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "vramscope-test"]).arg(&folder);
        ensure!(mount.status().context("run mount")?.success(), "mount {}", folder.display());
        Ok(Self(folder))
    }

    /// Makes one whose inode numbers are given to new files as soon as others are deleted. `None`
    /// where the machine can't.
    pub fn with_ext4(device: &SimDevice) -> Result<Option<Self>> {
        let folder = device.folder().join("disk");
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let image = device.folder().join("disk.img");
        let file = File::create(&image).with_context(|| format!("create {}", image.display()))?;
        file.set_len(64 << 20).with_context(|| format!("size {}", image.display()))?;
        let done =
            |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        let made = done(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))
            && done(Command::new("mount").args(["-o", "loop"]).args([&image, &folder]));
        Ok(made.then_some(Self(folder)))
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Takes all that is free; gives the file that gives it back when removed.
    pub fn fill(&self) -> Result<PathBuf> {
        let path = self.0.join("filler");
        let mut file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        while file.write_all(&[1; 4096]).is_ok() {}
        Ok(path)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(&self.0).status().ok();
    }
}
