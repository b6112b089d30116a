//! A test program that runs under a test's control: it prints truths up to `READY`, waits for a
//! line on its stdin, and goes on.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How long a program may take to its next line; far above what any takes.
const PATIENCE: Duration = Duration::from_mins(2);

/// A running program. Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    orders: Option<ChildStdin>,
    lines: Receiver<String>,
    name: String,
}

impl Running {
    /// Starts the program with pipes to its stdin and from its stdout.
    pub fn start(mut command: Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let orders = child.stdin.take();
        let output = child.stdout.take().with_context(|| format!("take the output of {name}"))?;
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, orders, lines, name })
    }

    /// The program's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The lines up to the next `READY`. Fails if the program ends or falls silent before.
    pub fn until_ready(&mut self) -> Result<Vec<String>> {
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) if line == "READY" => return Ok(seen),
                Ok(line) => seen.push(line),
                Err(RecvTimeoutError::Timeout) => bail!("{} is silent after {seen:?}", self.name),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{} ended before READY, after {seen:?}", self.name)
                }
            }
        }
    }

    /// Lets the program go on: writes a line to its stdin (`""`, or an order that it knows).
    pub fn go(&mut self, order: &str) -> Result<()> {
        let orders = self.orders.as_mut().with_context(|| format!("{} was let go", self.name))?;
        writeln!(orders, "{order}").with_context(|| format!("tell {} {order:?}", self.name))
    }

    /// [`Self::go`], then [`Self::until_ready`].
    pub fn step(&mut self, order: &str) -> Result<Vec<String>> {
        self.go(order)?;
        self.until_ready()
    }

    /// Ends the program as `kill -9` does and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().with_context(|| format!("kill {}", self.name))?;
        self.child.wait().with_context(|| format!("wait for {}", self.name))?;
        Ok(())
    }

    /// Closes the program's stdin (at which it ends, freeing nothing), and gives the lines that it
    /// still prints and its exit status.
    pub fn finish(mut self) -> Result<(Vec<String>, ExitStatus)> {
        self.orders = None;
        let (mut seen, begin) = (Vec::new(), Instant::now());
        loop {
            match self.lines.recv_timeout(PATIENCE.saturating_sub(begin.elapsed())) {
                Ok(line) => seen.push(line),
                Err(RecvTimeoutError::Timeout) => bail!("{} does not end", self.name),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let status = self.child.wait().with_context(|| format!("wait for {}", self.name))?;
        Ok((seen, status))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail where the program is gone already, which is what is wanted.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
