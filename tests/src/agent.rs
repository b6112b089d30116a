//! The agent under a test's control: `run`, `attach` and `record` on simulated GPUs.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    logs::Logged,
    sim::{
        Running, SimDevice,
        truth::{self, Live, Made},
    },
};

/// How long the agent may take to be ready or to end; far above what it takes.
const PATIENCE: Duration = Duration::from_mins(2);
const LOOK: Duration = Duration::from_millis(10);

/// The agent's binary: `VRAMSCOPE_BIN`, else the one that cargo built beside the tests.
pub fn binary() -> PathBuf {
    if let Some(path) = env::var_os("VRAMSCOPE_BIN") {
        return path.into();
    }
    let test = env::current_exe().unwrap_or_default();
    test.ancestors().nth(2).unwrap_or(Path::new(".")).join("vramscope")
}

/// `vramscope` with these arguments, run to its end.
pub fn vramscope(args: &[&OsStr]) -> Result<Output> {
    let binary = binary();
    let mut command = Command::new(&binary);
    command.args(args).stdin(Stdio::null());
    command.output().with_context(|| format!("run {}; is the agent built?", binary.display()))
}

/// What `vramscope report` prints of a log.
pub fn report(log: &Path) -> Result<String> {
    let output = vramscope(&["report".as_ref(), log.as_os_str()])?;
    if !output.status.success() {
        bail!("report failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A recording that is about to start.
#[derive(Clone, Debug)]
pub struct Agent<'a> {
    device: &'a SimDevice,
    log: PathBuf,
    options: Vec<String>,
    env: Vec<(String, String)>,
}

impl<'a> Agent<'a> {
    /// Records on these GPUs, into a log beside their state.
    pub fn new(device: &'a SimDevice) -> Self {
        let log = device.folder().join("log");
        Self { device, log, options: Vec::new(), env: Vec::new() }
    }

    /// Another folder for the log.
    #[must_use]
    pub fn log(mut self, folder: &Path) -> Self {
        folder.clone_into(&mut self.log);
        self
    }

    /// More options, `["--ring-size", "64KiB"]`.
    #[must_use]
    pub fn options(mut self, options: &[&str]) -> Self {
        self.options.extend(options.iter().map(|&option| option.to_owned()));
        self
    }

    /// A variable of the agent's environment, which `run` hands to the program.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// `vramscope VERB -o LOG OPTIONS`, in the environment of the GPUs.
    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(binary());
        command.arg(verb).arg("-o").arg(&self.log).args(&self.options);
        // What the simulation sets and removes is the same for every program.
        for (name, value) in self.device.program("smi").get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let nvml = self.device.lib_dir().join("libnvidia-ml.so.1");
        command.env("VRAMSCOPE_NVML_LIB", nvml).env_remove("SUDO_UID").env_remove("SUDO_GID");
        // Other tests' agents are none to this one, and have a kill switch of their own.
        command.env("VRAMSCOPE_SPACE", self.device.folder());
        command.env("VRAMSCOPE_STOP_FILE", self.device.folder().join("stop"));
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// `vramscope run ... -- PROGRAM ARGS`, for one of the programs of the simulation.
    pub fn run_command(&self, program: &str, args: &[&str]) -> Command {
        let program = self.device.program(program);
        let mut command = self.command("run");
        command.arg("--").arg(program.get_program()).args(program.get_args()).args(args);
        command
    }

    /// Starts `run` with this program; its steps are the test's to make.
    pub fn start(&self, program: &str, args: &[&str]) -> Result<Traced> {
        self.trace(self.run_command(program, args))
    }

    /// Starts a command of `run`.
    pub fn trace(&self, mut command: Command) -> Result<Traced> {
        let (said, file) = self.said()?;
        command.stderr(file);
        let running = Running::start(command)?;
        Ok(Traced { running, lines: Vec::new(), said, log: self.log.clone() })
    }

    /// A file for what the agent says on stderr.
    fn said(&self) -> Result<(PathBuf, File)> {
        let path = self.device.folder().join("agent.stderr");
        let file = File::create(&path).with_context(|| format!("make {}", path.display()))?;
        Ok((path, file))
    }

    /// Runs the program up to its first `READY`, where it ends without freeing anything.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<Recorded> {
        self.start(program, args)?.finish()
    }

    /// Attaches to running processes; the probes are in place when this returns.
    pub fn attach(&self, pids: &[u32]) -> Result<Recorder> {
        let mut command = self.command("attach");
        command.args(pids.iter().map(u32::to_string));
        self.recorder(command)
    }

    /// Records the whole host; the probes are in place when this returns.
    pub fn record(&self) -> Result<Recorder> {
        self.recorder(self.command("record"))
    }

    /// Starts a command of `attach` or `record`; the probes are in place when this returns.
    pub fn recording(&self, command: Command) -> Result<Recorder> {
        self.recorder(command)
    }

    /// Starts the command and waits until it says that it records.
    fn recorder(&self, mut command: Command) -> Result<Recorder> {
        let (said, file) = self.said()?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).spawn();
        let child = child.context("start the agent")?;
        let mut recorder = Recorder { child, said, log: self.log.clone() };
        recorder.wait_for("vramscope: recording ")?;
        Ok(recorder)
    }
}

fn read_said(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// A program under `vramscope run`.
#[derive(Debug)]
pub struct Traced {
    running: Running,
    lines: Vec<String>,
    said: PathBuf,
    log: PathBuf,
}

impl Traced {
    /// Process id of the agent.
    pub fn agent_pid(&self) -> u32 {
        self.running.pid()
    }

    /// Process id of the program, once it has said it.
    pub fn pid(&self) -> Result<u32> {
        pid_of(&self.lines)
    }

    /// The lines up to the next `READY`.
    pub fn until_ready(&mut self) -> Result<Vec<String>> {
        let lines = self.running.until_ready().with_context(|| read_said(&self.said))?;
        self.lines.extend_from_slice(&lines);
        Ok(lines)
    }

    /// Writes a line to the program's stdin and waits for its next `READY`.
    pub fn step(&mut self, order: &str) -> Result<Vec<String>> {
        self.running.go(order)?;
        self.until_ready()
    }

    /// Lets the program go on without waiting.
    pub fn go(&mut self, order: &str) -> Result<()> {
        self.running.go(order)
    }

    /// Waits until the agent has said the words.
    pub fn wait_for(&mut self, words: &str) -> Result<()> {
        let begin = Instant::now();
        while !read_said(&self.said).contains(words) {
            if begin.elapsed() > PATIENCE {
                bail!("the agent does not say {words:?}: {}", read_said(&self.said));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// What the agent has said so far.
    pub fn said(&self) -> String {
        read_said(&self.said)
    }

    /// The log while it is written.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Closes the program's stdin, waits for the end of program and agent.
    pub fn finish(self) -> Result<Recorded> {
        let (rest, status) = self.running.finish().with_context(|| read_said(&self.said))?;
        let lines = [self.lines, rest].concat();
        Ok(Recorded { lines, status, said: read_said(&self.said), log: self.log })
    }
}

/// `attach` or `record` at work. Dropping it kills it.
#[derive(Debug)]
pub struct Recorder {
    child: Child,
    said: PathBuf,
    log: PathBuf,
}

impl Recorder {
    /// Waits until the agent has said the words.
    pub fn wait_for(&mut self, words: &str) -> Result<()> {
        let begin = Instant::now();
        while !read_said(&self.said).contains(words) {
            if let Some(status) = self.child.try_wait().context("look at the agent")? {
                bail!("the agent ended ({status}): {}", read_said(&self.said));
            }
            if begin.elapsed() > PATIENCE {
                bail!("the agent does not say {words:?}: {}", read_said(&self.said));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Process id of the agent.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the recording as Ctrl-C does.
    pub fn stop(self) -> Result<Recorded> {
        signal(self.child.id(), Signal::INT)?;
        self.wait()
    }

    /// Waits for the agent to end by itself.
    pub fn wait(mut self) -> Result<Recorded> {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().context("wait for the agent")? {
                break status;
            }
            if begin.elapsed() > PATIENCE {
                bail!("the agent does not end: {}", read_said(&self.said));
            }
            thread::sleep(LOOK);
        };
        let (said, log) = (read_said(&self.said), self.log.clone());
        Ok(Recorded { lines: Vec::new(), status, said, log })
    }

    /// Ends the agent as `kill -9` does.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill the agent")?;
        self.child.wait().context("wait for the killed agent")?;
        Ok(())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Both fail where the agent is gone already, which is what is wanted.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Sends a signal.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let target = Pid::from_raw(i32::try_from(pid).context("a process id")?);
    kill_process(target.context("a process id is not 0")?, signal)
        .with_context(|| format!("send {signal:?} to {pid}"))
}

fn pid_of(lines: &[String]) -> Result<u32> {
    let line = truth::line(lines, "PID").context("the program did not say its pid")?;
    let pid = line.split(' ').nth(1).and_then(|pid| pid.parse().ok());
    pid.with_context(|| format!("no pid in {line:?}"))
}

/// A recording that ended.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// What the program of `run` printed.
    pub lines: Vec<String>,
    /// How the agent ended.
    pub status: ExitStatus,
    /// What the agent (and the program of `run`) wrote to stderr.
    pub said: String,
    /// Folder of the log.
    pub log: PathBuf,
}

impl Recorded {
    /// Process id of the program of `run`.
    pub fn pid(&self) -> Result<u32> {
        pid_of(&self.lines)
    }

    /// What the program held at its end, if it listed that once.
    pub fn live(&self) -> Vec<Live> {
        truth::live(&self.lines)
    }

    /// How many calls it made.
    pub fn made(&self) -> Result<Made> {
        truth::made(&self.lines).context("the program did not say how many calls it made")
    }

    /// The log.
    pub fn open(&self) -> Result<Logged> {
        Logged::open(&self.log)
    }

    /// What `vramscope report` prints of it.
    pub fn report(&self) -> Result<String> {
        report(&self.log)
    }
}
