//! Containers as runtimes make them: an overlay over the layers of an image, and a process in
//! namespaces of its own that has it for its root.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    machine::{Obstacle, skip},
    sim::{Running, SimDevice},
    wait::eventually,
};

/// Where the image has the driver library.
pub const LIBRARIES: &str = "/opt/cuda/lib";
/// Where it has the program.
const PROGRAM: &str = "/opt/hold";
/// Becomes the container's process: takes the folder for its root, with the GPUs' state in it, forgets
/// the host's, and executes the program.
const ENTER: &str = r#"
import ctypes, os, platform, sys
root, shared = sys.argv[1:3]
libc = ctypes.CDLL(None, use_errno=True)
def must(failed, what):
    if failed:
        sys.exit(what + ": " + os.strerror(ctypes.get_errno()))
def bind(what, where):
    must(libc.mount(what.encode(), where.encode(), None, 4096 | 16384, None), "bind " + what)
bind(root, root)
bind(shared, root + shared)
# The simulated driver knows processes by the host's numbers, as the real one does.
bind("/proc", root + "/proc")
os.chdir(root)
pivot_root = 155 if platform.machine() == "x86_64" else 41
must(libc.syscall(pivot_root, b".", b"."), "pivot_root")
must(libc.umount2(b".", 2), "let the host's root go")
os.chdir("/")
os.execv(sys.argv[3], sys.argv[3:])
"#;

/// What a container has of its own beside its mounts.
pub const ALL: &[&str] =
    &["--pid", "--fork", "--user", "--map-root-user", "--cgroup", "--ipc", "--uts"];
/// As a privileged container without a user namespace.
pub const PRIVILEGED: &[&str] = &["--pid", "--fork", "--ipc"];

/// What keeps containers from being made here.
pub fn obstacle() -> Option<Obstacle> {
    let namespaces = ["--mount"].iter().chain(ALL);
    let made = Command::new("unshare").args(namespaces).arg("true").output();
    let works = made.is_ok_and(|output| output.status.success());
    let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !works {
        return Some(Obstacle::of_the_machine(
            "`unshare --user --pid --mount --cgroup` is refused",
        ));
    }
    (!filesystems.contains("\toverlay\n"))
        .then(|| Obstacle::of_the_machine("the kernel has no overlayfs"))
}

/// GPUs whose state containers can share; `None`, and a word on stdout, where there can be none.
pub fn gpus() -> Result<Option<SimDevice>> {
    let Some(device) = crate::machine::gpus()? else { return Ok(None) };
    if let Some(obstacle) = obstacle() {
        skip(&obstacle);
        return Ok(None);
    }
    let shared = shared(&device);
    fs::create_dir(&shared).with_context(|| format!("create {}", shared.display()))?;
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777))?;
    Ok(Some(device.set("SIM_STATE", &shared.join("state").display().to_string())))
}

fn shared(device: &SimDevice) -> PathBuf {
    device.folder().join("gpu")
}

fn mount(arguments: &[&str]) -> Result<()> {
    let output = Command::new("mount").args(arguments).output().context("run mount")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "mount {arguments:?}: {said}");
    Ok(())
}

/// A file system in memory; gone when dropped.
#[derive(Debug)]
struct Memory(PathBuf);

impl Memory {
    fn mount(at: PathBuf) -> Result<Self> {
        fs::create_dir_all(&at).with_context(|| format!("create {}", at.display()))?;
        mount(&["-t", "tmpfs", "vramscope-test", &at.display().to_string()])?;
        Ok(Self(at))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(&self.0).status().ok();
    }
}

/// The lowest layer of containers: the program, its loader and its libraries.
#[derive(Debug)]
pub struct Image {
    layer: Memory,
}

impl Image {
    /// An image with the driver library of the device.
    pub fn new(device: &SimDevice, name: &str) -> Result<Self> {
        let layer = Memory::mount(device.folder().join(name))?;
        let image = Self { layer };
        let hold = device.program("hold");
        image.take(Path::new(hold.get_program()), PROGRAM)?;
        image.take(&device.lib_dir().join("libcuda.so.1"), &format!("{LIBRARIES}/libcuda.so.1"))?;
        let output = Command::new("ldd").arg(hold.get_program()).output().context("run ldd")?;
        for word in String::from_utf8_lossy(&output.stdout).split_whitespace() {
            if word.starts_with('/') && !word.contains("libcuda") {
                image.take(&fs::canonicalize(word)?, word)?;
            }
        }
        Ok(image)
    }

    /// Where it lies on the host.
    pub fn folder(&self) -> &Path {
        &self.layer.0
    }

    fn take(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.folder().join(to.trim_start_matches('/'));
        let folder = to.parent().context("a file has a folder")?;
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        fs::copy(from, &to).with_context(|| format!("copy to {}", to.display()))?;
        Ok(())
    }
}

/// A container's root: an overlay with a layer of its own; gone when dropped.
#[derive(Debug)]
pub struct Root {
    options: String,
    merged: PathBuf,
    shared: PathBuf,
    /// Its own layer; unmounted last.
    _own: Memory,
}

impl Root {
    /// Mounts it, as a runtime does in the host's mount namespace.
    pub fn new(device: &SimDevice, image: &Image, name: &str) -> Result<Self> {
        let own = Memory::mount(device.folder().join(name))?;
        let (merged, shared) = (device.folder().join(format!("{name}-root")), shared(device));
        let (upper, work) = (own.0.join("upper"), own.0.join("work"));
        let mount_points = [upper.join(shared.strip_prefix("/")?), upper.join("proc")];
        for folder in [&merged, &upper, &work].into_iter().chain(&mount_points) {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        let (lower, upper, work) = (image.folder().display(), upper.display(), work.display());
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        mount(&["-t", "overlay", "-o", &options, "overlay", &merged.display().to_string()])?;
        Ok(Self { options, merged, shared, _own: own })
    }

    /// Where the host sees it.
    pub fn folder(&self) -> &Path {
        &self.merged
    }

    /// The command that runs `hold` in it, with namespaces of its own ([`ALL`], for example).
    pub fn command(&self, device: &SimDevice, namespaces: &[&str], arguments: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command.arg("--mount").args(namespaces).args(["python3", "-c", ENTER]);
        command.args([&self.merged, &self.shared]).arg(PROGRAM).args(arguments);
        command.envs(device.env()).env("LD_LIBRARY_PATH", LIBRARIES);
        command
    }

    /// Starts `hold` in it.
    pub fn start(
        &self,
        device: &SimDevice,
        namespaces: &[&str],
        arguments: &[&str],
    ) -> Result<Container> {
        start(self.command(device, namespaces, arguments))
    }

    /// `hold` with nothing of its own but its root.
    pub fn start_in_mount_namespace_of_the_host(&self, device: &SimDevice) -> Result<Running> {
        for shared in [&self.shared, Path::new("/proc")] {
            let inside = self.merged.join(shared.strip_prefix("/")?);
            mount(&["--bind", &shared.display().to_string(), &inside.display().to_string()])?;
        }
        let mut command = Command::new("chroot");
        command.arg(&self.merged).args([PROGRAM, "1048576", "1"]);
        command.envs(device.env()).env("LD_LIBRARY_PATH", LIBRARIES);
        let mut running = Running::start(command)?;
        running.until_ready()?;
        Ok(running)
    }

    /// Unmounts it and waits until the kernel has let its file system go, in all namespaces: only then
    /// may another overlay have its folders.
    ///
    /// # Panics
    /// Where that takes longer than a minute.
    pub fn must_go(&self) {
        let unmount = || {
            let output = Command::new("umount").arg("-R").arg(&self.merged).output();
            output.is_ok_and(|output| output.status.success())
        };
        eventually(&format!("umount {}", self.merged.display()), unmount);
        let options = format!("{},index=on", self.options);
        let merged = self.merged.display().to_string();
        eventually("the overlay's layers are free", || {
            mount(&["-t", "overlay", "-o", &options, "overlay", &merged]).is_ok()
        });
        assert!(unmount());
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        Command::new("umount").args(["-R", "-l"]).arg(&self.merged).output().ok();
    }
}

/// A cgroup of the v2 tree; gone when dropped, by when its processes must have ended.
#[derive(Debug)]
pub struct Cgroup {
    /// The outermost folder that was made.
    top: PathBuf,
    folder: PathBuf,
}

impl Cgroup {
    /// Makes it, with those above it. `None` where the machine has no v2 tree that can be written to.
    pub fn new(path: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        let tree = Path::new(line.split(' ').nth(4)?);
        let folder = tree.join(path);
        fs::create_dir_all(&folder).ok()?;
        let top = tree.join(Path::new(path).components().next()?);
        Some(Self { top, folder })
    }

    /// The command, run in it.
    pub fn command(&self, inner: &Command) -> Command {
        let mut command = Command::new("sh");
        let script = r#"echo $$ >"$1/cgroup.procs" && shift && exec "$@""#;
        command.args(["-c", script, "sh"]).arg(&self.folder);
        command.arg(inner.get_program()).args(inner.get_args());
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let ours = self.folder.ancestors().take_while(|folder| folder.starts_with(&self.top));
        for folder in ours {
            fs::remove_dir(folder).ok();
        }
    }
}

/// Starts a command of [`Root::command`].
pub fn start(command: Command) -> Result<Container> {
    let mut running = Running::start(command)?;
    running.until_ready()?;
    let pid = child_of(running.pid()).context("the container has no process")?;
    Ok(Container { running, pid })
}

/// The first child of a process.
pub fn child_of(pid: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// `hold` in a container.
#[derive(Debug)]
pub struct Container {
    /// It and what started it.
    pub running: Running,
    /// Its process, as the host numbers it.
    pub pid: u32,
}

impl Container {
    /// Allocates so many bytes.
    pub fn alloc(&mut self, bytes: u64) -> Result<()> {
        self.running.step(&format!("alloc {bytes}")).map(drop)
    }

    /// Lets it end.
    pub fn finish(self) -> Result<()> {
        let (_, status) = self.running.finish()?;
        ensure!(status.success(), "the container ended with {status}");
        Ok(())
    }
}
