//! The only place that wires threads and channels; no logic.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use agent_common::tensor;
use anyhow::Context as _;
use ledger::{
    log,
    rows::{AnnotationRow, DeviceRow, LossRow},
};
use tracing::{debug, info, warn};

use super::{
    Message,
    books::{Books, Opening},
    brake::{Brake, Limits},
    descriptors,
    devices::Devices,
    reader,
    sink::{self, AnyRow, ToLog, Written},
    spares::{Buffers, Spares},
};
use crate::{
    attach::{
        Attacher, Breadth,
        examine::{Examiner, ToExaminer},
        guard::Sparing,
        mmaps::MappingEvents,
        worker::{self, Command},
    },
    cli::{Detail, MaxOverhead},
    clock::{self, Anchor},
    heap,
    host::{CommandDetail, Host},
    kernel::{Guides, Kernel, Links, LoadOptions, sign::Sign, trap::Trap},
    nvml::{self, Driver, Gpu, GpuReader as _, NvmlReader, Sampler, SamplerThread, Trigger},
    privileges::{self, Kept},
    probes::{Library, PROBES},
    stacks::{
        namer,
        resolver::{Resolver, ToResolver},
        site,
    },
};

/// Messages that wait for the state thread: above that the senders wait.
const MESSAGES: usize = 64;
/// Row batches that wait for the log.
const ROW_BATCHES: usize = 64;
/// Threads that remove probes. The kernel waits a grace period at each link, and for all that go at
/// once it is the same one: a job that forks hundreds of processes a second needs several.
const DETACHERS: usize = 8;
/// Batches that wait for the resolver.
const BATCHES: usize = 16;
/// Pace of host samples.
const HOST_PERIOD: Duration = Duration::from_secs(1);

/// Whom to record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Every process of the host.
    Host,
    /// Those that are followed, and their children.
    Processes,
}

/// Whether this process may probe itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelfTest {
    /// It may.
    Harmless,
    /// It is under a seccomp filter, on a kernel that may kill it for a return probe.
    Dangerous,
}

/// What to record, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of the log.
    pub folder: PathBuf,
    /// User and group that the log belongs to, where that is not this process's.
    pub owner: Option<(u32, u32)>,
    /// Whom.
    pub target: Target,
    /// How much of tensors.
    pub detail: Detail,
    /// Size that the log may have.
    pub max_disk_bytes: Option<u64>,
    /// Size of the ring of calls, a power of two.
    pub ring_bytes: u32,
    /// Whole command lines.
    pub full_commands: bool,
    /// Stacks are taken.
    pub stacks: bool,
    /// Driver calls are labelled with the runtime function around them.
    pub runtime_labels: bool,
    /// Parts of paths of what is the user's own code, wherever it is installed.
    pub user_code: Vec<String>,
    /// How much of a process's time the probes may take.
    pub max_overhead: MaxOverhead,
    /// What a probe costs may be measured in this process.
    pub self_test: SelfTest,
    /// Whom not.
    pub sparing: Sparing,
    /// Rows of the probe table that are not probed.
    pub left_out: Vec<u8>,
    /// The verb, for the manifest.
    pub command: String,
    /// What stays of the caller's capabilities.
    pub kept: Kept,
}

/// What a recording came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Rows of `events`.
    pub events: u64,
    /// Processes that made a traced call.
    pub processes: u64,
    /// Things that were not seen or not written.
    pub lost: u64,
    /// Size of the log.
    pub log_bytes: u64,
}

/// A thread with what it returns.
type Thread<T> = JoinHandle<T>;

/// A running recording.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Session {
    stop: Arc<AtomicBool>,
    commands: Sender<Command>,
    messages: SyncSender<Message>,
    nvml: Option<SamplerThread>,
    /// Stopped in this order.
    reader: Option<Thread<()>>,
    resolver: Option<Thread<()>>,
    namer: Option<Thread<()>>,
    helpers: Vec<Thread<()>>,
    books: Option<Thread<()>>,
    log: Option<Thread<anyhow::Result<Written>>>,
    /// Seen by other agents as long as this one records.
    _sign: Sign,
}

fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<Thread<T>> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .with_context(|| format!("start the {name} thread"))
}

impl Session {
    /// Opens the log first, then loads the kernel half; for `Target::Host` the probes are in place
    /// when this returns. The calling thread has given up by then what recording does not need, so
    /// programs that must have the caller's rights are started before.
    pub fn start(options: &Options, sign: Sign) -> anyhow::Result<Self> {
        heap::settle();
        // Before what that takes is given up.
        descriptors::raise();
        let host = Host::live();
        let anchor = Anchor::of_process();
        let (messages, inbox) = sync_channel(MESSAGES);
        let (rows, row_batches) = sync_channel(ROW_BATCHES);
        let spares = Buffers::default();
        let written = (row_batches, spares.rows.clone());
        let log = start_log(options, &host, anchor, written, messages.clone())?;
        let trap = measure_trap(options);
        let mut kernel = Kernel::load(LoadOptions {
            ring_bytes: options.ring_bytes,
            tensor_detail: options.detail.in_kernel(),
            stacks: options.stacks,
            runtime_labels: options.runtime_labels,
        })?;
        let events = worker::open_events();
        NvmlReader::make_device_files();
        // From here on threads are made, which inherit what is left; NVML has one too.
        privileges::record_with(options.kept, || kernel.may_attach());
        let (reader, gpus) = open_nvml();
        let beginnings = first_rows(reader.as_ref(), &gpus, &host, options);
        rows.send(ToLog::Rows(beginnings)).context("hand the first rows to the log")?;
        let rings = kernel.take_rings()?;
        let counters = kernel.take_counters()?;
        let cost = kernel.take_cost_meter(trap)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (commands, command_box) = mpsc::channel();
        let mut seen = kernel.take_seen()?;
        let (looks, look_box) = sync_channel(BATCHES);
        let (examiner, examine_box) = mpsc::channel();
        let guides = kernel.take_guides()?;
        let examining = Examining { guides, looks: looks.clone(), inbox: examine_box };
        let (examine, commands_too) = (examiner.clone(), commands.clone());
        let attaching = Attaching { kernel, events, examining, examiner, commands: commands_too };
        let mut helpers = start_attaching(attaching, options, &messages, command_box, &stop)?;
        let (new_stacks, stack_box) = mpsc::channel();
        let (rule, to_log) = (site::Rule::new(&options.user_code), rows.clone());
        let namer = spawn("namer", move || namer::run(rule, &stack_box, &to_log))?;
        let (home, out) = (host.clone(), messages.clone());
        let resolver = spawn("resolver", move || {
            // Made here: its symbolizer stays on one thread.
            let want_large = Box::new(move |key| seen.want_large(key));
            Resolver::new(home, anchor, want_large, new_stacks, examine).run(&look_box, &out);
        })?;

        let nvml = start_nvml(reader, &messages);
        let opening = Opening {
            host,
            anchor,
            devices: Devices::new(gpus),
            detail: options.detail.as_str(),
            every_tensor: options.detail == Detail::Events,
            sites: options.detail.in_kernel() != tensor::detail::TOTALS,
            commands: if options.full_commands {
                CommandDetail::Whole
            } else {
                CommandDetail::Redacted
            },
            opened_ns: clock::boot_ns(),
            host_wide: options.target == Target::Host,
            hasten_nvml: nvml.as_ref().and_then(SamplerThread::trigger),
        };
        let limits = Limits {
            max_overhead: options.max_overhead,
            totals_only: options.detail.in_kernel() == tensor::detail::TOTALS,
            ring_bytes: options.ring_bytes,
        };
        let brake = Brake::new(limits, cost, commands.clone());
        let books = Books::new(opening, counters, brake, rows, spares.clone());
        let books = spawn("books", move || books.run(&inbox))?;
        let (reader_stop, attach) = (Arc::clone(&stop), commands.clone());
        let ring_reader = spawn("reader", move || {
            reader::run(rings, &reader_stop, &attach, &looks, &spares.calls);
        })?;
        helpers.push(start_host_samples(options, &messages, &stop)?);

        let session = Self {
            stop,
            commands,
            messages,
            nvml,
            reader: Some(ring_reader),
            resolver: Some(resolver),
            namer: Some(namer),
            helpers,
            books: Some(books),
            log: Some(log),
            _sign: sign,
        };
        if options.target == Target::Host {
            session.ask(Command::HostWide)?;
        }
        Ok(session)
    }

    /// Sends a command and waits for its answer.
    fn ask(
        &self,
        command: impl FnOnce(Sender<Result<(), String>>) -> Command,
    ) -> anyhow::Result<()> {
        let (answer, answers) = mpsc::channel();
        self.commands.send(command(answer)).context("reach the attaching thread")?;
        let result = answers.recv().context("hear from the attaching thread")?;
        result.map_err(|error| anyhow::anyhow!(error))
    }

    /// Follows processes that have not made a CUDA call yet.
    pub fn follow(&self, pids: &[u32]) -> anyhow::Result<()> {
        self.ask(|answer| Command::Follow(pids.to_vec(), answer))
    }

    /// Follows processes that run already.
    pub fn follow_late(&self, pids: &[u32]) -> anyhow::Result<()> {
        self.ask(|answer| Command::FollowRunning(pids.to_vec(), answer))?;
        if let Some(nvml) = &self.nvml {
            // What they hold now is "before attach".
            nvml.trigger().iter().for_each(Trigger::pull);
        }
        Ok(())
    }

    /// Probes files for a process that is about to load one of them.
    pub fn prepare(&self, files: Vec<PathBuf>, pid: u32) {
        let command = Command::Prepare(files, std::num::NonZeroU32::new(pid));
        // `follow`, which comes next, reports a dead thread.
        self.commands.send(command).unwrap_or_default();
    }

    /// Takes every probe out, before anything else is finished, and has the log say why.
    pub fn detach(&self, why: &str) -> anyhow::Result<()> {
        self.ask(Command::Detach)?;
        let note = AnnotationRow {
            ts_ns: clock::epoch_ns(),
            proc_id: None,
            kind: "warning".to_owned(),
            text: why.to_owned(),
            value: None,
        };
        self.messages.send(Message::Rows(vec![note.into()])).context("reach the books")
    }

    /// Detaches, applies and writes everything that was seen.
    pub fn stop(&mut self) -> anyhow::Result<Summary> {
        if let Some(nvml) = self.nvml.take() {
            nvml.stop();
        }
        self.stop.store(true, Ordering::Release);
        // The reader empties the rings after the stop; only then are the books complete.
        join(self.reader.take(), "reader")?;
        // Ends with the reader, and the namer, whose rows go to the log, with it.
        join(self.resolver.take(), "resolver")?;
        join(self.namer.take(), "namer")?;
        let (answer, answers) = mpsc::channel();
        self.messages.send(Message::Stop(answer)).context("reach the books")?;
        let closed = answers.recv().context("close the books")?;
        join(self.books.take(), "books")?;
        self.commands.send(Command::Stop).unwrap_or_default();
        let written = join(self.log.take(), "log")?.transpose()?.unwrap_or_default();
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            join(Some(helper), "helper")?;
        }
        Ok(Summary {
            events: written.events,
            processes: closed.processes,
            lost: closed.lost + written.dropped,
            log_bytes: written.log_bytes,
        })
    }
}

fn join<T>(thread: Option<Thread<T>>, name: &str) -> anyhow::Result<Option<T>> {
    let Some(thread) = thread else { return Ok(None) };
    match thread.join() {
        Ok(value) => Ok(Some(value)),
        Err(_) => anyhow::bail!("the {name} thread panicked (see above): please report it"),
    }
}

/// What meeting a probe costs on this machine. Measured before the first probe is put in: some kernels
/// hold a lock that every new probe needs for a tenth of a second when one like this goes.
fn measure_trap(options: &Options) -> Trap {
    if options.max_overhead.share().is_none() || options.self_test == SelfTest::Dangerous {
        return Trap::default();
    }
    let measured = Trap::measure();
    debug!(?measured, "what a probe costs");
    measured
        .inspect_err(
            |error| info!(%error, "what a probe costs was not measured: the usual is taken"),
        )
        .unwrap_or_default()
}

fn start_log(
    options: &Options,
    host: &Host,
    anchor: Anchor,
    (rows, spares): (Receiver<ToLog>, Spares<AnyRow>),
    asks: SyncSender<Message>,
) -> anyhow::Result<Thread<anyhow::Result<Written>>> {
    let now_ns = clock::epoch_ns();
    let start = sink::Start {
        folder: options.folder.clone(),
        owner: options.owner,
        run: log::RunInfo {
            host: host.name().to_owned(),
            boot_id: host.boot_id().to_owned(),
            pid: std::process::id(),
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            command: vec!["vramscope".to_owned(), options.command.clone()],
            clock: log::ClockAnchor { wall_ns: now_ns, boot_ns: now_ns - anchor.offset_ns() },
        },
        options: log::Options { max_disk_bytes: options.max_disk_bytes, ..log::Options::default() },
    };
    let (opened, answer) = sync_channel(1);
    let thread = spawn("log", move || sink::run(&start, &rows, &asks, &opened, &spares))?;
    answer.recv().context("hear from the log thread")??;
    Ok(thread)
}

fn open_nvml() -> (Option<NvmlReader>, Vec<Gpu>) {
    match NvmlReader::open() {
        Ok(reader) => {
            let gpus = reader.devices().to_vec();
            (Some(reader), gpus)
        }
        Err(absent) => {
            warn!("{absent}: device totals and the breakdown will be missing");
            (None, Vec::new())
        }
    }
}

/// The rows that a log begins with: the devices and how the recording was asked for.
fn first_rows(
    reader: Option<&NvmlReader>,
    gpus: &[Gpu],
    host: &Host,
    options: &Options,
) -> Vec<AnyRow> {
    let now_ns = clock::epoch_ns();
    let none = Driver::default();
    let driver = reader.map_or(&none, |reader| reader.driver());
    let devices = gpus.iter().map(|gpu| -> DeviceRow { gpu.row(now_ns, driver, host.name()) });
    let start = AnnotationRow {
        ts_ns: now_ns,
        proc_id: None,
        kind: "start".to_owned(),
        text: format!("vramscope {} {}", env!("CARGO_PKG_VERSION"), options.command),
        value: None,
    };
    let left_out = options.left_out.iter().flat_map(|row| left_out(*row, now_ns));
    devices.map(AnyRow::from).chain([start.into()]).chain(left_out).collect()
}

/// A function that is not probed because somebody asked for that: its calls are not seen, whoever
/// makes them.
fn left_out(row: u8, ts_ns: i64) -> Vec<AnyRow> {
    let Some(probe) = PROBES.get(usize::from(row)) else { return Vec::new() };
    let note = AnnotationRow {
        ts_ns,
        proc_id: None,
        kind: "warning".to_owned(),
        text: format!("{} is left out: what it takes or gives is not seen", probe.symbol),
        value: None,
    };
    let loss = LossRow {
        ts_ns,
        window_start_ns: ts_ns,
        reason: "left_out".to_owned(),
        count: 1,
        ..LossRow::default()
    };
    vec![note.into(), loss.into()]
}

/// What the attaching is given.
struct Attaching {
    kernel: Kernel,
    events: Option<MappingEvents>,
    examining: Examining,
    examiner: Sender<ToExaminer>,
    commands: Sender<Command>,
}

/// What the examining is given.
struct Examining {
    guides: Guides,
    looks: SyncSender<ToResolver>,
    inbox: Receiver<ToExaminer>,
}

/// What is probed.
fn libraries(options: &Options) -> Vec<Library> {
    let mut libraries = vec![Library::Cuda, Library::Nccl];
    if options.detail != Detail::Off {
        libraries.extend([Library::C10, Library::TorchCpu]);
    }
    if options.runtime_labels {
        libraries.push(Library::Cudart);
    }
    libraries
}

fn start_attaching(
    attaching: Attaching,
    options: &Options,
    messages: &SyncSender<Message>,
    command_box: Receiver<Command>,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<Vec<Thread<()>>> {
    let Attaching { kernel, events, examining, examiner, commands } = attaching;
    let (notices, notice_box) = mpsc::channel();
    let (garbage, garbage_box) = mpsc::channel::<Links>();
    let breadth = Breadth {
        host_wide: options.target == Target::Host,
        libraries: libraries(options),
        sparing: options.sparing,
        left_out: options.left_out.clone(),
    };
    let Examining { guides, looks, inbox } = examining;
    let examining = Examiner::new(Host::live(), guides, looks, notices.clone());
    let attacher = Attacher::new(kernel, breadth, notices, garbage, examiner);
    let mut threads = vec![spawn("examine", move || examining.run(&inbox))?];
    let events_work = events.is_some();
    threads.push(spawn("attach", move || worker::run(attacher, &command_box, events_work))?);
    let garbage_box = Arc::new(Mutex::new(garbage_box));
    for _ in 0..DETACHERS {
        let garbage_box = Arc::clone(&garbage_box);
        threads.push(spawn("detach", move || detach(&garbage_box))?);
    }
    let out = messages.clone();
    threads.push(spawn("notices", move || {
        for notice in notice_box {
            // The books are closed only when the recording ends.
            out.send(Message::Notice(notice)).unwrap_or_default();
        }
    })?);
    if let Some(events) = events {
        let stop = Arc::clone(stop);
        threads.push(spawn("mappings", move || worker::watch(events, &stop, &commands))?);
    }
    Ok(threads)
}

/// Drops links until nobody sends any more.
fn detach(garbage: &Mutex<Receiver<Links>>) {
    while let Some(links) = garbage.lock().ok().and_then(|garbage| garbage.recv().ok()) {
        drop(links);
    }
}

fn start_nvml(reader: Option<NvmlReader>, messages: &SyncSender<Message>) -> Option<SamplerThread> {
    let out = messages.clone();
    let sink = move |sample| out.try_send(Message::Sample(sample)).is_ok();
    nvml::spawn(Sampler::new(reader?), sink)
        .inspect_err(|error| warn!(%error, "no NVML thread: device totals will be missing"))
        .ok()
}

fn start_host_samples(
    options: &Options,
    messages: &SyncSender<Message>,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<Thread<()>> {
    let (out, stop, folder) = (messages.clone(), Arc::clone(stop), options.folder.clone());
    spawn("host", move || {
        let host = Host::live();
        while !stop.load(Ordering::Acquire) {
            let mut row = host.sample(&folder);
            row.ts_ns = clock::epoch_ns();
            // A sample that finds no room is one sample less.
            out.try_send(Message::Rows(vec![row.into()])).unwrap_or_default();
            thread::park_timeout(HOST_PERIOD);
        }
        info!("host samples ended");
    })
}
