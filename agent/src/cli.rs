//! The command line: types only.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Accounts for every byte of GPU memory on a host and names who allocated it.
#[derive(Debug, Parser)]
#[command(name = "vramscope", version, max_term_width = 100, subcommand_required = true)]
#[command(arg_required_else_help = true)]
pub struct Cli {
    /// Say more on stderr (twice: per process).
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Say nothing but errors.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// When to colour.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto)]
    pub color: Color,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// When to colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless `NO_COLOR` is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program and record its GPU memory, and its children's.
    ///
    /// The program runs as you, in your environment; only the recording half is elevated.
    #[cfg(feature = "live")]
    Run(Run),
    /// Record running processes, and their children, until Ctrl-C.
    #[cfg(feature = "live")]
    Attach(Attach),
    /// Record every process of the host until Ctrl-C: a deliberate choice, since every CUDA program
    /// on the host meets the probes.
    #[cfg(feature = "live")]
    Record(Record),
    /// Say what a log tells: who holds what, what grew, what failed, what was not seen.
    Report(Report),
    /// Print whole stacks, those that hold most first.
    Stacks(Stacks),
    /// Check what this machine needs: kernel, privileges, NVML, CUDA libraries.
    #[cfg(feature = "live")]
    Doctor(Doctor),
    /// Seal what a killed recorder left in its journal. Reports do not need it.
    Recover(Recover),
    /// Merge the many small files of recordings that have ended into few large ones; rows and
    /// reports stay the same.
    Compact(Compact),
    /// Print the log's tables and columns, or check a log against them.
    Schema(Schema),
    /// Print shell completions.
    Completions(Completions),
    /// Print the manual page.
    Man,
    /// Wait for the recorder, then become the program (used by `run`).
    #[cfg(feature = "live")]
    #[command(name = "__gate", hide = true)]
    Gate(Gate),
    /// The elevated half of `run`.
    #[cfg(feature = "live")]
    #[command(name = "__agent", hide = true)]
    Agent(Agent),
    /// The child that tries what return probes do to a filtered process.
    #[cfg(feature = "live")]
    #[command(name = crate::kernel::returns::VERB, hide = true)]
    Filtered(Filtered),
}

/// What every recording verb takes.
#[derive(Clone, Debug, Args)]
pub struct Recording {
    /// Folder for the log; %h is the host, %t the time. Several hosts may share one.
    #[arg(short, long, value_name = "DIR", default_value = "vramscope-%h-%t")]
    #[arg(env = "VRAMSCOPE_OUTPUT")]
    pub output: PathBuf,
    /// How much to record of PyTorch's tensors.
    #[arg(long, value_enum, default_value_t = Detail::Sites, env = "VRAMSCOPE_DETAIL")]
    pub detail: Detail,
    /// Delete the oldest finished files when the log exceeds this (10GiB, 500m).
    #[arg(long, value_name = "SIZE", value_parser = crate::units::parse_size)]
    pub max_disk: Option<u64>,
    /// Kernel buffer for calls; a larger one survives longer bursts.
    #[arg(long, value_name = "SIZE", value_parser = crate::units::parse_size)]
    #[arg(default_value = "32MiB")]
    pub ring_size: u64,
    /// Files with this in their path are your own code, even inside site-packages: reports name
    /// lines there. May be given several times.
    #[arg(long, value_name = "PART")]
    pub user_code: Vec<String>,
    /// Percent of a process's time that the probes may take, or "none" for as much as they do. Above it
    /// the process loses detail: first the lines of PyTorch's memory, then the functions that it calls
    /// most; each step is told and logged [default: 2 for record, 25 for run and attach].
    #[arg(long, value_name = "PERCENT", value_parser = MaxOverhead::parse)]
    pub max_overhead: Option<MaxOverhead>,
    /// Take no stacks: reports name processes and functions, not lines.
    #[arg(long)]
    pub no_stacks: bool,
    /// Say of each driver call which function of the CUDA runtime it was made in, where the runtime
    /// is a shared library (`runtime_api` of `events`). Costs two probes more a call.
    #[arg(long)]
    pub runtime_api: bool,
    /// Do not probe this function (its exact name, as `docs/functions.md` lists it); may be given several
    /// times. For a function whose probe is in doubt: what it takes or gives is then not seen, which
    /// the log and the report say.
    #[arg(long, value_name = "FUNCTION", value_parser = Function::parse)]
    pub leave_out: Vec<Function>,
    /// Record whole command lines, which may hold secrets.
    #[arg(long)]
    pub full_commands: bool,
    /// What is dared.
    #[command(flatten)]
    pub risks: Risks,
}

/// A row of the probe table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u8);

impl Function {
    /// The row of a function's exact name.
    #[cfg(feature = "live")]
    fn parse(name: &str) -> Result<Self, String> {
        let row = crate::probes::rows().find(|(_, probe)| probe.symbol == name);
        row.map(|(row, _)| Self(row))
            .ok_or_else(|| format!("{name} is no traced function; docs/functions.md lists them"))
    }

    /// Nothing is probed without the live half.
    #[cfg(not(feature = "live"))]
    fn parse(name: &str) -> Result<Self, String> {
        Err(format!("{name} is no traced function of this build, which only reads logs"))
    }
}

/// What vramscope does not do to a process unless told.
#[derive(Clone, Copy, Debug, Args)]
pub struct Risks {
    /// Record processes with UCX too, which then runs without its CUDA hooks and so more slowly.
    /// Code that UCX has patched already is never probed.
    #[arg(long)]
    pub force: bool,
    /// Probe processes under a seccomp filter too, on a kernel that may kill them for it.
    #[arg(long)]
    pub allow_return_probes: bool,
}

/// How much of a process's time the probes may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxOverhead(Option<f64>);

impl MaxOverhead {
    /// For processes that nobody asked to be recorded in particular.
    pub const OF_HOST: Self = Self(Some(2.0));
    /// For those that were named.
    pub const OF_NAMED: Self = Self(Some(25.0));

    /// As a share; `None` = as much as they do.
    pub fn share(self) -> Option<f64> {
        self.0.map(|percent| percent / 100.0)
    }

    /// Reads `2`, `2.5%` or `none`.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let percent = text.trim_end_matches('%').trim_end().parse().ok();
        let percent = percent.filter(|percent: &f64| percent.is_finite() && *percent > 0.0);
        percent.map(|percent| Self(Some(percent))).ok_or_else(|| {
            "write percent of a process's time, as in 2 or 0.5, or \"none\" for no limit".to_owned()
        })
    }
}

impl std::fmt::Display for MaxOverhead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(percent) => write!(f, "{percent}"),
            None => f.write_str("none"),
        }
    }
}

/// How much is recorded of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Detail {
    /// Nothing.
    Off,
    /// PyTorch's own totals and peaks per process and device.
    Totals,
    /// The same, and live bytes and counts for each place that allocates.
    Sites,
    /// The same, and every single block.
    Events,
}

impl Detail {
    /// The word in the log.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Totals => "totals",
            Self::Sites => "sites",
            Self::Events => "events",
        }
    }

    /// What the kernel half is told.
    #[cfg(feature = "live")]
    pub const fn in_kernel(self) -> u32 {
        use agent_common::tensor::detail;
        match self {
            Self::Off | Self::Totals => detail::TOTALS,
            Self::Sites => detail::SITES,
            Self::Events => detail::EVENTS,
        }
    }
}

/// `vramscope run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Where and what to record.
    #[command(flatten)]
    pub recording: Recording,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

/// `vramscope attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// Process ids as the host counts them.
    #[arg(required = true, value_delimiter = ',', value_name = "PID")]
    pub pids: Vec<std::num::NonZeroU32>,
    /// Stop after this long (30s, 10m, 2h).
    #[arg(long, value_name = "TIME", value_parser = crate::units::parse_duration)]
    pub duration: Option<Duration>,
    /// Where and what to record.
    #[command(flatten)]
    pub recording: Recording,
}

/// `vramscope record`.
#[derive(Debug, Args)]
pub struct Record {
    /// Stop after this long (30s, 10m, 2h).
    #[arg(long, value_name = "TIME", value_parser = crate::units::parse_duration)]
    pub duration: Option<Duration>,
    /// Where and what to record.
    #[command(flatten)]
    pub recording: Recording,
}

/// `vramscope report`.
#[derive(Debug, Args)]
pub struct Report {
    /// Log folders; also of a running or killed recorder.
    #[arg(required = true, value_name = "DIR")]
    pub logs: Vec<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// List what is alive of the places whose `file:line function` contains this, and how to ask
    /// the process who refers to it.
    #[arg(long, value_name = "SITE", conflicts_with_all = ["json", "fail_on"])]
    pub who: Option<String>,
    /// Exit with 10 for a leak, 11 for a refused allocation, 13 for lost records; the first that
    /// holds.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    pub fail_on: Vec<FailOn>,
}

/// What makes `vramscope report` fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum FailOn {
    /// Memory grows until the end (exit code 10); a growth in doubt does not count.
    Leak,
    /// An allocation was refused (exit code 11).
    Oom,
    /// Records are missing by which the account may be wrong (exit code 13).
    Loss,
}

/// `vramscope stacks`.
#[derive(Debug, Args)]
pub struct Stacks {
    /// Log folders; also of a running or killed recorder.
    #[arg(required = true, value_name = "DIR")]
    pub logs: Vec<PathBuf>,
    /// How many to print.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub top: usize,
    /// Of one kind of memory only.
    #[arg(long, value_name = "LEVEL")]
    #[arg(value_parser = ["device", "pool", "tensor", "managed", "host"])]
    pub level: Option<String>,
    /// What to sort by: bytes alive, bytes allocated in all, blocks alive.
    #[arg(long, value_enum, default_value_t = StacksBy::Live)]
    pub by: StacksBy,
    /// Of one process only.
    #[arg(long)]
    pub pid: Option<i32>,
}

/// What stacks are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StacksBy {
    /// Bytes alive at the end.
    Live,
    /// Bytes allocated in all.
    Allocated,
    /// Blocks alive at the end.
    Count,
}

/// `vramscope doctor`.
#[cfg(feature = "live")]
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Say nothing; exit 0 if recording is possible here, else 3.
    #[arg(long)]
    pub quick: bool,
}

/// `vramscope recover`.
#[derive(Debug, Args)]
pub struct Recover {
    /// Log folder.
    #[arg(value_name = "DIR")]
    pub log: PathBuf,
    /// Runs of other hosts too: whether their agents still run can't be seen from here.
    #[arg(long)]
    pub other_hosts: bool,
}

/// `vramscope compact`.
#[derive(Debug, Args)]
pub struct Compact {
    /// Log folder; recordings that go on there are left alone.
    #[arg(value_name = "DIR")]
    pub log: PathBuf,
    /// Change nothing, say what would be merged.
    #[arg(long)]
    pub dry_run: bool,
    /// Merge up to about this size (1GiB, 64m); files of half of it and more are left alone.
    #[arg(long, value_name = "SIZE", value_parser = crate::units::parse_size)]
    #[arg(default_value = "128MiB")]
    pub target_size: u64,
    /// Runs of other hosts too: whether their agents still run can't be seen from here.
    #[arg(long)]
    pub other_hosts: bool,
}

/// `vramscope schema`.
#[derive(Debug, Args)]
pub struct Schema {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Check the files of this log folder: exit with 1 where one does not fit.
    #[arg(long, value_name = "DIR", conflicts_with = "json")]
    pub check: Option<PathBuf>,
}

/// `vramscope completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// For which shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// The gate in front of the program of `run`.
#[cfg(feature = "live")]
#[derive(Debug, Args)]
pub struct Gate {
    /// Descriptor that says when to go.
    #[arg(long)]
    pub fd: i32,
    /// User to become.
    #[arg(long, requires = "gid")]
    pub uid: Option<u32>,
    /// Group to become.
    #[arg(long)]
    pub gid: Option<u32>,
    /// Supplementary groups.
    #[arg(long, value_delimiter = ',')]
    pub groups: Vec<u32>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<std::ffi::OsString>,
}

/// The child that tries what return probes do to a filtered process.
#[cfg(feature = "live")]
#[derive(Debug, Args)]
pub struct Filtered {
    /// Make a forbidden call.
    #[arg(long)]
    pub forbidden: bool,
}

/// The elevated half of `run`.
#[cfg(feature = "live")]
#[derive(Debug, Args)]
pub struct Agent {
    /// The waiting program.
    #[arg(long)]
    pub pid: std::num::NonZeroU32,
    /// Library folders of the program's environment.
    #[arg(long)]
    pub library_path: Option<std::ffi::OsString>,
    /// Where and what to record.
    #[command(flatten)]
    pub recording: Recording,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command)
    }

    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn reports_take_conditions_of_failure() {
        let Ok(Command::Report(args)) = parsed("vramscope report x --fail-on leak,loss") else {
            panic!("not parsed")
        };
        assert_eq!(args.fail_on, [FailOn::Leak, FailOn::Loss]);
        assert!(parsed("vramscope report x --fail-on imbalance").is_err());
        assert!(parsed("vramscope report x --who a.py --json").is_err());
    }

    #[test]
    fn stacks_take_a_level_that_exists() {
        assert!(parsed("vramscope stacks x --level tensor --by count --top 3 --pid 7").is_ok());
        assert!(parsed("vramscope stacks x --level ocean").is_err());
    }

    #[test]
    fn overheads_are_percent() {
        let share = |text: &str| MaxOverhead::parse(text).map(MaxOverhead::share);
        assert_eq!(share("2"), Ok(Some(0.02)));
        assert_eq!(share("0.5 %"), Ok(Some(0.005)));
        assert_eq!(share("none"), Ok(None));
        for wrong in ["", "0", "-1", "inf", "2x"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
        for max in [MaxOverhead::OF_HOST, MaxOverhead(None), MaxOverhead(Some(0.25))] {
            assert_eq!(MaxOverhead::parse(&max.to_string()), Ok(max));
        }
    }
}
