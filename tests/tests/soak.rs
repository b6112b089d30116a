//! Many processes for a long time: nothing of the agent grows, and the account is exact.
//!
//! The plain form takes seconds; `VRAMSCOPE_FULL=1` (`cargo xtask test --full`) makes it ten minutes.
//! `VRAMSCOPE_TEST_SOAK_S` and `VRAMSCOPE_TEST_SOAK_RATE` (processes a minute) say otherwise. A machine
//! that can't make so many is told of, with what it did make.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests and their helpers may panic")]
#![allow(clippy::print_stdout, clippy::use_debug, reason = "figures are what a soak is run for")]

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use agent_tests::{
    agent::{Agent, Recorded, Recorder},
    logs::Logged,
    machine,
    sim::{Running, SimDevice},
    usage::Usage,
    wait::eventually,
};
use ledger::rows::{LossRow, ProcessRow};

/// Processes a minute.
const RATE: u64 = 5_000;
/// One in so many uses CUDA.
const SHARE: u64 = 5;
/// Threads that start them, each one at a time.
const STARTERS: u64 = 8;
/// Blocks that each program on the GPU leaves, at the least.
const BLOCKS: u64 = 3;
/// Time between two looks at the agent.
const LOOK: Duration = Duration::from_millis(500);

fn number(name: &str, otherwise: u64) -> u64 {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn is_full() -> bool {
    env::var_os("VRAMSCOPE_FULL").is_some()
}

/// What programs made.
#[derive(Debug, Default)]
struct Made {
    processes: AtomicU64,
    on_gpu: AtomicU64,
    allocs: AtomicU64,
    frees: AtomicU64,
}

/// Starts programs that end soon, at the rate.
struct Crowd<'a> {
    device: &'a SimDevice,
    program: &'a Path,
    /// What those on the GPU are told, for those that free: `alloc`, then `free`.
    orders: PathBuf,
    rate: u64,
    length: Duration,
    next: AtomicU64,
    made: Made,
}

impl<'a> Crowd<'a> {
    fn new(device: &'a SimDevice, program: &'a Path, rate: u64, length: Duration) -> Self {
        let orders = device.folder().join("orders");
        fs::write(&orders, "alloc 8192\nfree\nfree\n").unwrap();
        let (next, made) = (AtomicU64::new(0), Made::default());
        Self { device, program, orders, rate, length, next, made }
    }

    /// Blocks until the time is over.
    fn run(&self) {
        let begin = Instant::now();
        thread::scope(|scope| {
            for _ in 0..STARTERS {
                scope.spawn(|| while self.one(begin) {});
            }
        });
    }

    /// One process, at its time; false when the time is over.
    fn one(&self, begin: Instant) -> bool {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let due = Duration::from_millis(number * 60_000 / self.rate);
        if due > self.length || begin.elapsed() > self.length {
            return false;
        }
        thread::sleep(due.saturating_sub(begin.elapsed()));
        if number.is_multiple_of(SHARE) {
            self.on_gpu(number / SHARE);
        } else {
            assert!(Command::new("true").status().unwrap().success());
        }
        self.made.processes.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn on_gpu(&self, number: u64) {
        let frees = number.is_multiple_of(2);
        let input = if frees { File::open(&self.orders).unwrap() } else { nothing() };
        let mut program = holding(self.device, self.program);
        let status = program.stdin(input).status().unwrap();
        assert!(status.success(), "a program on the GPU failed: {status}");
        self.made.on_gpu.fetch_add(1, Ordering::Relaxed);
        self.made.allocs.fetch_add(BLOCKS + u64::from(frees), Ordering::Relaxed);
        self.made.frees.fetch_add(2 * u64::from(frees), Ordering::Relaxed);
    }
}

fn nothing() -> File {
    File::open("/dev/null").unwrap()
}

/// `hold` under a name of its own: the whole host is recorded, and others may use its GPUs. Of a
/// program that ended at once the log may have its name only.
fn own_program(device: &SimDevice) -> PathBuf {
    let path = device.folder().join(format!("soak{}", std::process::id()));
    fs::copy(device.program("hold").get_program(), &path).unwrap();
    path
}

fn holding(device: &SimDevice, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["65536", &BLOCKS.to_string()]).envs(device.env()).stdout(Stdio::null());
    command
}

/// A program that has the library mapped all the time: it is probed from the start of the recording.
fn idle(device: &SimDevice, program: &Path) -> Running {
    let mut command = Command::new(program);
    command.args(["4096", "0"]).envs(device.env());
    let mut idle = Running::start(command).unwrap();
    idle.until_ready().unwrap();
    idle
}

/// Looks at the agent until the crowd is over.
fn watch(recording: &Recorder, crowd: &Crowd<'_>) -> Vec<Usage> {
    thread::scope(|scope| {
        let running = scope.spawn(|| crowd.run());
        let mut seen = Vec::new();
        while !running.is_finished() {
            seen.push(Usage::of(recording.pid()).unwrap());
            thread::sleep(LOOK);
        }
        seen
    })
}

fn mean(seen: &[Usage], of: impl Fn(&Usage) -> usize) -> f64 {
    let sum: usize = seen.iter().map(of).sum();
    sum as f64 / seen.len().max(1) as f64
}

/// What may be more in the last third than in the second: how many processes live at a moment is
/// chance.
const MORE: f64 = 4.0;
/// The same of descriptors: other programs on this host may come with libraries of their own, each
/// with a few. One that each process on the GPU left would be 60 and more.
const MORE_FILES: f64 = 32.0;
/// The same of memory, KiB: the log's columns grow until their file is finished, once a minute.
const MORE_KIB: f64 = 4096.0;

/// Nothing is more in the last third than in the second.
fn assert_flat(seen: &[Usage]) {
    let third = seen.len() / 3;
    let (second, last) = (&seen[third..2 * third], &seen[2 * third..]);
    let mut compared = BTreeMap::from([
        (
            "descriptors".to_owned(),
            (mean(second, |u| u.descriptors), mean(last, |u| u.descriptors)),
        ),
        ("threads".to_owned(), (mean(second, |u| u.threads), mean(last, |u| u.threads))),
        ("memory".to_owned(), (mean(second, |u| u.memory_kib), mean(last, |u| u.memory_kib))),
    ]);
    // Blocks of PyTorch: ours have none, but other programs may.
    let others = ["BLOCKS", "SITES"];
    for name in seen[0].entries.keys().filter(|name| !others.contains(&name.as_str())) {
        let of = |usage: &Usage| usage.entries.get(name).copied().unwrap_or(0);
        compared.insert(format!("map {name}"), (mean(second, of), mean(last, of)));
    }
    for (name, (second, last)) in &compared {
        println!("{name}: {second:.1} in the second third, {last:.1} in the last");
    }
    for (name, (second, last)) in compared {
        let more = match name.as_str() {
            "memory" => MORE_KIB,
            "descriptors" => MORE_FILES,
            _ => MORE,
        };
        assert!(last <= second + more, "{name} grew from {second:.1} to {last:.1}");
    }
}

/// The latest row of every process of the program.
fn processes(logged: &Logged, program: &Path) -> BTreeMap<i64, ProcessRow> {
    let name = program.file_name().unwrap().to_str().unwrap();
    let rows = logged.rows::<ProcessRow>().unwrap().into_iter().filter(|row| row.comm == name);
    rows.map(|row| (row.proc_id, row)).collect()
}

/// What was lost of these processes, or of nobody known.
fn lost(logged: &Logged, processes: &BTreeMap<i64, ProcessRow>) -> BTreeMap<String, i64> {
    let rows = logged.rows::<LossRow>().unwrap().into_iter();
    let own = rows.filter(|row| match row.proc_id {
        Some(proc_id) => processes.contains_key(&proc_id),
        None => row.pid.is_none(),
    });
    let mut lost = BTreeMap::new();
    own.for_each(|row| *lost.entry(row.reason).or_default() += row.count);
    lost
}

/// The log has every call or counts it as lost, every process with its end, and nothing live.
fn assert_exact(recorded: &Recorded, program: &Path, on_gpu: u64, allocs: u64, frees: u64) {
    let logged = recorded.open().unwrap();
    let processes = processes(&logged, program);
    assert_eq!(logged.defects().unwrap(), Vec::<String>::new());
    let (mut allocated, mut given_back, mut left) = (0_u64, 0_u64, 0_u64);
    let mut live: BTreeMap<i64, i64> = BTreeMap::new();
    logged
        .each_event(|event| {
            if !processes.contains_key(&event.proc_id) {
                return;
            }
            allocated += u64::from(&*event.api == "cuMemAlloc_v2" && event.op == "alloc");
            given_back += u64::from(&*event.api == "cuMemFree_v2");
            left += u64::from(event.implicit && event.level == "device");
            *live.entry(event.proc_id).or_default() += event.delta_bytes;
        })
        .unwrap();
    let losses = lost(&logged, &processes);
    let lost: i64 = losses.values().sum();
    if lost == 0 {
        assert_eq!(
            (allocated, given_back, left),
            (allocs, frees, allocs - frees),
            "{}",
            recorded.said
        );
    } else {
        println!("lost: {losses:?}");
        assert_eq!(losses.keys().collect::<Vec<_>>(), ["ring_full"], "{}", recorded.said);
        // What is lost may also be a call that sets a context.
        assert!(allocated + given_back <= allocs + frees);
        assert!(allocated + given_back + lost as u64 >= allocs + frees, "lost, and not counted");
    }
    let unended: Vec<_> = processes.values().filter(|row| row.end_ns.is_none()).collect();
    assert!(unended.is_empty(), "without an end: {} of them, {:?}", unended.len(), unended.first());
    // One of which every call is lost is not known at all.
    let (known, unknown) = (processes.len() as u64, if lost == 0 { 0 } else { lost as u64 });
    assert!(known <= on_gpu && known + unknown >= on_gpu, "{known} of {on_gpu} processes");
    live.retain(|_, bytes| *bytes != 0);
    assert_eq!(live, [].into(), "live after the end");
}

/// Waits until the log has the ends of all of them; what is missing after a minute is told later.
fn all_ended(log: &Path, program: &Path, count: u64) {
    let begin = Instant::now();
    let ended = || {
        Logged::open(log).map_or(0, |logged| {
            let processes = processes(&logged, program);
            processes.values().filter(|row| row.end_ns.is_some()).count() as u64
        })
    };
    while ended() < count && begin.elapsed() < Duration::from_mins(1) {
        thread::sleep(LOOK);
    }
}

#[test]
fn processes_that_come_and_go_leave_nothing_behind() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(1);
    let length = number("VRAMSCOPE_TEST_SOAK_S", if is_full() { 600 } else { 12 });
    let program = own_program(&device);
    let crowd = Crowd::new(
        &device,
        &program,
        number("VRAMSCOPE_TEST_SOAK_RATE", RATE).max(1),
        Duration::from_secs(length),
    );
    let idle = idle(&device, &program);
    let recording = Agent::new(&device).record().unwrap();
    let begin = Instant::now();
    let seen = watch(&recording, &crowd);
    let minutes = begin.elapsed().as_secs_f64() / 60.0;
    let [made, on_gpu, allocs, frees] =
        [&crowd.made.processes, &crowd.made.on_gpu, &crowd.made.allocs, &crowd.made.frees]
            .map(|count| count.load(Ordering::Relaxed));
    println!(
        "{made} processes, {on_gpu} of them on the GPU, {:.0} a minute of {} wanted",
        made as f64 / minutes,
        crowd.rate
    );
    // It makes no call while it is recorded, but NVML tells of it.
    idle.finish().unwrap();
    let on_gpu = on_gpu + 1;
    all_ended(&device.folder().join("log"), &program, on_gpu);
    let recorded = recording.stop().unwrap();
    assert_flat(&seen);
    assert_exact(&recorded, &program, on_gpu, allocs, frees);
}

/// Processes that hold a context at once.
const AT_ONCE: u64 = 500;

#[test]
fn five_hundred_processes_at_once_are_all_accounted_for() {
    let Some(device) = machine::gpus().unwrap() else { return };
    let device = device.context_mib(1);
    let program = own_program(&device);
    let idle = idle(&device, &program);
    let recording = Agent::new(&device).record().unwrap();
    let before = Usage::of(recording.pid()).unwrap();
    let start = |_| holding(&device, &program).stdin(Stdio::piped()).spawn().unwrap();
    let programs: Vec<Child> = (0..AT_ONCE).map(start).collect();
    let pids: BTreeSet<i32> = programs.iter().map(|program| program.id() as i32).collect();
    let log = device.folder().join("log");
    eventually("every block is in the log", || {
        let mut held = BTreeSet::new();
        let mut take = |event: &ledger::rows::EventRow| {
            if event.op == "alloc" && pids.contains(&event.pid) {
                held.insert((event.proc_id, event.addr));
            }
        };
        // What can't be read yet is read the next time.
        Logged::open(&log).and_then(|log| log.each_event(&mut take)).ok();

        held.len() as u64 == AT_ONCE * BLOCKS
    });
    let during = Usage::of(recording.pid()).unwrap();
    // At the end of its input each ends without freeing.
    for mut program in programs {
        drop(program.stdin.take());
        assert!(program.wait().unwrap().success());
    }
    idle.finish().unwrap();
    all_ended(&log, &program, AT_ONCE + 1);
    eventually("what was kept of them is gone", || {
        let after = Usage::of(recording.pid()).unwrap();
        let more = |(name, count): (&String, &usize)| *count > before.entries[name] + MORE as usize;
        !after.entries.iter().any(more)
    });
    let after = Usage::of(recording.pid()).unwrap();
    println!("before: {before:?}\nduring: {during:?}\nafter: {after:?}");
    assert_eq!((during.threads, after.threads), (before.threads, before.threads));
    // The log's files and those of libraries are opened with the first processes, none for each.
    let most = before.descriptors + AT_ONCE as usize / 5;
    assert!(during.descriptors < most && after.descriptors < most);
    assert_exact(&recording.stop().unwrap(), &program, AT_ONCE + 1, AT_ONCE * BLOCKS, 0);
}
