//! The simulated GPU: real shared libraries with NVIDIA's and `PyTorch`'s symbol names over one
//! state file, and programs that use them and print what is true.
//!
//! [`Sim::build`] compiles `tests/sim` and `tests/programs` (once, whoever asks first);
//! [`Sim::device`] gives a test GPUs of its own; [`SimDevice::program`] is a command that runs on
//! them; [`Running`] drives it and [`truth`] reads what it prints.

pub(crate) mod build;
mod program;
#[cfg(test)]
mod tests;
pub mod truth;

use std::{
    collections::BTreeMap,
    env, fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

pub use program::Running;

/// Variables of the caller's environment that would change what a program sees.
const FOREIGN: [&str; 5] =
    ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RANK", "LOCAL_RANK", "WORLD_SIZE"];

/// Where the programs' sources are.
const PROGRAM_SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");

/// The built libraries and programs.
#[derive(Clone, Debug)]
pub struct Sim {
    /// Holds `libcuda.so.1`, `libcudart.so.12`, `libcudart_static.a`, `libnvidia-ml.so.1`,
    /// `libc10.so`, `libc10_cuda.so`, `libtorch_cpu.so` and `libnccl.so.2`.
    pub lib_dir: PathBuf,
    /// Holds another version of `libcuda.so.1`, with its functions in other places.
    pub other_dir: PathBuf,
    /// Holds the compiled programs.
    pub bin_dir: PathBuf,
    /// Holds the Python programs (in the source tree).
    pub script_dir: PathBuf,
}

impl Sim {
    /// Builds the libraries and programs, unless they are there for exactly these sources.
    ///
    /// Any number of processes may call it at once: one builds, the others wait. Fails where the
    /// C compiler is missing or NVIDIA's headers can't be fetched; the error says which.
    ///
    /// `VRAMSCOPE_TEST_SIM` names a folder that has them already, where there is no compiler.
    pub fn build() -> Result<Self> {
        env::var_os("VRAMSCOPE_TEST_SIM").map_or_else(build::build, |folder| {
            Ok(Self::in_folder(Path::new(&folder), Path::new(PROGRAM_SOURCES)))
        })
    }

    fn in_folder(built: &Path, programs: &Path) -> Self {
        let (lib_dir, other_dir) = (built.join("lib"), built.join("other"));
        Self { lib_dir, other_dir, bin_dir: built.join("bin"), script_dir: programs.to_owned() }
    }

    /// The environment of Python programs: where `simtorch` is. Nothing is written into the source
    /// tree, which may be another user's.
    pub fn python_env(&self) -> [(String, String); 2] {
        let packages = self.script_dir.join("site-packages").display().to_string();
        [("PYTHONPATH".into(), packages), ("PYTHONDONTWRITEBYTECODE".into(), "1".into())]
    }

    /// New GPUs that no other test sees: two of 80 GiB, without the real driver's start-up times.
    pub fn device(&self) -> Result<SimDevice> {
        let folder = tempfile::Builder::new()
            .prefix("vramscope-sim-")
            .tempdir()
            .context("make a folder for the simulated GPUs' state")?;
        // Programs of other users share the GPUs: they write the state and files beside it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777))
            .with_context(|| format!("open {} to other users", folder.path().display()))?;
        let mut device =
            SimDevice { sim: self.clone(), settings: BTreeMap::new(), folder, own_lib_dir: None };
        device.settings.insert("SIM_STATE".into(), device.state_path().display().to_string());
        Ok(device.init_ms(0).context_ms(0))
    }
}

/// Simulated GPUs of a test's own. They are gone when this is dropped, so programs must end before.
#[derive(Debug)]
pub struct SimDevice {
    sim: Sim,
    settings: BTreeMap<String, String>,
    folder: TempDir,
    own_lib_dir: Option<PathBuf>,
}

impl SimDevice {
    /// How many GPUs there are (2 unless told; at most 16).
    #[must_use]
    pub fn gpus(self, count: u32) -> Self {
        self.set("SIM_GPUS", &count.to_string())
    }

    /// What programs can have of each GPU, in MiB (81,920 unless told). NVML's total is
    /// `SIM_RESERVED_MIB` (512) larger.
    #[must_use]
    pub fn memory_mib(self, mib: u64) -> Self {
        self.set("SIM_MEMORY_MIB", &mib.to_string())
    }

    /// What a context costs, in MiB (500 unless told).
    #[must_use]
    pub fn context_mib(self, mib: u64) -> Self {
        self.set("SIM_CONTEXT_MIB", &mib.to_string())
    }

    /// How long the first `cuInit` of a process takes; the real one takes 100 ms and more, in
    /// which an agent attaches. `VRAMSCOPE_TEST_SLOWNESS` says how many times slower this machine is
    /// than a real one, where its processor is emulated.
    #[must_use]
    pub fn init_ms(self, ms: u64) -> Self {
        let slowness = env::var("VRAMSCOPE_TEST_SLOWNESS").ok().and_then(|n| n.parse().ok());
        self.set("SIM_INIT_MS", &(ms * slowness.unwrap_or(1)).to_string())
    }

    /// How long it takes to make a context.
    #[must_use]
    pub fn context_ms(self, ms: u64) -> Self {
        self.set("SIM_CTX_MS", &ms.to_string())
    }

    /// Sets a variable of the simulation (tests/README.md lists them) or of the program. GPUs,
    /// sizes and costs are settled by the first program that runs.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.insert(name.into(), value.into());
        self
    }

    /// Gives these GPUs copies of the libraries, so that probes on them (which belong to the file)
    /// are not hit by the programs of other tests.
    pub fn own_libraries(mut self) -> Result<Self> {
        let lib_dir = self.folder.path().join("lib");
        fs::create_dir(&lib_dir)
            .and_then(|()| copy_files(&self.sim.lib_dir, &lib_dir))
            .with_context(|| format!("copy the simulated libraries to {}", lib_dir.display()))?;
        self.own_lib_dir = Some(lib_dir);
        Ok(self)
    }

    /// The folder of the libraries that programs on these GPUs load.
    pub fn lib_dir(&self) -> &Path {
        self.own_lib_dir.as_deref().unwrap_or(&self.sim.lib_dir)
    }

    /// The folder of another version of the driver library, with its functions in other places.
    pub fn other_lib_dir(&self) -> &Path {
        &self.sim.other_dir
    }

    /// The state file; it is there once a program or NVML has used the GPUs.
    pub fn state_path(&self) -> PathBuf {
        self.settings
            .get("SIM_STATE")
            .map_or_else(|| self.folder.path().join("state"), PathBuf::from)
    }

    /// A folder that lives as long as the GPUs, for a test's own files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The environment of everything that uses or watches these GPUs.
    pub fn env(&self) -> Vec<(String, String)> {
        let libraries = ("LD_LIBRARY_PATH".to_owned(), self.lib_dir().display().to_string());
        let settings = self.settings.iter().map(|(name, value)| (name.clone(), value.clone()));
        settings.chain([libraries]).chain(self.sim.python_env()).collect()
    }

    /// A command that runs the program (`hold`, or `leak_job.py` for a Python program) on these
    /// GPUs.
    pub fn program(&self, name: &str) -> Command {
        let is_script = Path::new(name).extension().is_some_and(|extension| extension == "py");
        let mut command = if is_script {
            let mut python = Command::new("python3");
            python.arg(self.sim.script_dir.join(name));
            python
        } else {
            Command::new(self.sim.bin_dir.join(name))
        };
        for name in FOREIGN {
            command.env_remove(name);
        }
        command.envs(self.env());
        command
    }

    /// Starts the program with these arguments; see [`Running`].
    pub fn start(&self, name: &str, args: &[&str]) -> Result<Running> {
        let mut command = self.program(name);
        command.args(args);
        Running::start(command)
    }

    /// What NVML says about these GPUs now, asked by a process of its own.
    pub fn smi(&self) -> Result<truth::Smi> {
        let output = self.program("smi").output().context("run smi")?;
        if !output.status.success() {
            bail!("smi failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(truth::Smi::parse(&String::from_utf8_lossy(&output.stdout)))
    }
}

fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}
