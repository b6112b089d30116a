//! A run as a recording of two training processes would leave it: every table has rows, events
//! have the shape that a PyTorch job gives them.

use ledger::{
    log::{ClockAnchor, LogError, Options, RunInfo, Writer},
    rows::{
        AnnotationRow, BreakdownRow, DeviceRow, DeviceSampleRow, EventRow, FrameRow, HostSampleRow,
        LiveRow, LossRow, OomRow, ProcessLibRow, ProcessRow, ProcessSampleRow, SiteUsageRow,
        StackRow,
    },
};

/// 2026-11-30 11:33:20 UTC.
const START_NS: i64 = 1_796_006_000_000_000_000;

const GPUS: [&str; 2] =
    ["GPU-5d0c4b7e-9a3f-4c55-8d0e-0f1a2b3c4d5e", "GPU-7e1d5c8f-0b4a-4d66-9e1f-102a3b4c5d6f"];

/// Tensors that one step allocates; the last few live on, as a leak does.
const STEP_TENSORS: usize = 530;
const STACKS: usize = 300;

/// xorshift64*: repeatable, and no dependency.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> i64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % limit) as i64
    }
}

/// One rank of the job.
struct Rank {
    number: i32,
    proc_id: i64,
    next_addr: i64,
    /// Freed addresses by stack: the caching allocator hands the last one out again.
    free: Vec<Vec<i64>>,
    live: Vec<EventRow>,
}

impl Rank {
    fn new(number: i32) -> Self {
        let proc_id = (i64::from(number) + 3).wrapping_mul(0x6eed_0e9d_a4d9_4a4f);
        let next_addr = 0x7f3a_0000_0000 + i64::from(number) * 0x10_0000_0000;
        Self { number, proc_id, next_addr, free: vec![Vec::new(); STACKS], live: Vec::new() }
    }

    fn pid(&self) -> i32 {
        41_000 + self.number
    }

    fn gpu(&self) -> &'static str {
        GPUS[self.number as usize % GPUS.len()]
    }
}

/// The job, and the counters of its run.
struct Job {
    random: Random,
    now_ns: i64,
    seq: i64,
    allocs: i64,
}

fn stack_id(stack: usize) -> i64 {
    (stack as i64 + 1).wrapping_mul(0x1e37_79b9_7f4a_7c15)
}

fn size_of(stack: usize) -> i64 {
    512 << (stack * 7 % 16)
}

impl Job {
    fn event(&mut self, rank: &Rank, event: EventRow) -> EventRow {
        self.seq += 1;
        self.now_ns += 500 + self.random.below(20_000);
        EventRow {
            seq: self.seq,
            ts_ns: self.now_ns,
            duration_ns: 300 + self.random.below(1_500),
            proc_id: rank.proc_id,
            pid: rank.pid(),
            level: "tensor".into(),
            nvml_index: Some(rank.number),
            gpu_uuid: Some(rank.gpu().into()),
            cuda_ordinal: Some(0),
            ..event
        }
    }

    fn alloc(&mut self, rank: &mut Rank, stack: usize) -> EventRow {
        let size = size_of(stack);
        let addr = rank.free[stack].pop().unwrap_or(rank.next_addr);
        rank.next_addr = rank.next_addr.max(addr + size);
        self.allocs += 1;
        let event = EventRow {
            tid: rank.pid() + i32::from(stack % 4 == 3),
            op: "alloc".into(),
            api: "c10".into(),
            addr,
            size_bytes: Some(size),
            delta_bytes: size,
            alloc_id: self.allocs,
            stack_id: stack_id(stack),
            backward_pass: (stack % 4 == 3).then_some(self.allocs / STEP_TENSORS as i64),
            ..Default::default()
        };
        let event = self.event(rank, event);
        rank.live.push(event.clone());
        event
    }

    fn free(&mut self, rank: &mut Rank, alloc: &EventRow, stack: usize) -> EventRow {
        rank.free[stack].push(alloc.addr);
        let free = EventRow { op: "free".into(), delta_bytes: -alloc.delta_bytes, ..alloc.clone() };
        self.event(rank, free)
    }

    /// A step: tensors are made front to back and freed back to front, not quite in order.
    fn step(&mut self, rank: &mut Rank, out: &mut dyn FnMut(&EventRow)) {
        let kept = rank.live.len();
        for tensor in 0..STEP_TENSORS {
            let rare = self.random.below(10) == 0;
            let stack = if rare { self.random.below(STACKS as u64) as usize } else { tensor % 46 };
            out(&self.alloc(rank, stack));
            if self.random.below(3) == 0 && rank.live.len() > kept + 4 {
                let last = rank.live.len() - 1 - self.random.below(4) as usize;
                self.free_one(rank, last, out);
            }
        }
        while rank.live.len() > kept + 2 {
            let last = rank.live.len() - 1;
            let jitter = self.random.below(3) as usize;
            self.free_one(rank, (last - jitter.min(last)).max(kept + 2), out);
        }
    }

    fn free_one(&mut self, rank: &mut Rank, index: usize, out: &mut dyn FnMut(&EventRow)) {
        let alloc = rank.live.swap_remove(index);
        let stack = (0..STACKS).find(|&stack| stack_id(stack) == alloc.stack_id).unwrap_or(0);
        out(&self.free(rank, &alloc, stack));
    }
}

/// Writes about `events` events and all that goes with them, then ends the run, or leaves it as a
/// killed recorder does. Returns the number of events.
pub(crate) fn write(
    dir: &std::path::Path,
    events: i64,
    options: Options,
    finish: bool,
) -> Result<i64, LogError> {
    let info = RunInfo {
        host: "node-17".to_owned(),
        boot_id: "5f2a7f0e-0000-4000-8000-000000000017".to_owned(),
        pid: 777,
        clock: ClockAnchor { boot_ns: 86_400_000_000_000, wall_ns: START_NS },
        tool_version: env!("CARGO_PKG_VERSION").to_owned(),
        command: vec!["vramscope".to_owned(), "record".to_owned()],
    };
    let mut writer = Writer::create(dir, &info, options)?;
    let mut ranks = [Rank::new(0), Rank::new(1)];
    let mut job = Job { random: Random(17), now_ns: START_NS, seq: 0, allocs: 0 };
    write_identity(&mut writer, &ranks);
    while job.seq < events {
        for rank in &mut ranks {
            job.step(rank, &mut |event| writer.push(event));
        }
        write_samples(&mut writer, &ranks, &job);
        if writer.tick(job.now_ns).checkpoint_due {
            checkpoint(&mut writer, &ranks, &job);
        }
    }
    checkpoint(&mut writer, &ranks, &job);
    write_failures(&mut writer, &ranks[0], &job);
    if finish {
        writer.finish(job.now_ns)?;
    } else {
        // What waits in memory reaches the journal.
        writer.tick(job.now_ns + options.flush_every_ns);
    }
    Ok(job.seq)
}

fn checkpoint(writer: &mut Writer, ranks: &[Rank], job: &Job) {
    let live = ranks.iter().flat_map(|rank| &rank.live).map(|alloc| LiveRow {
        estimated: Some(false),
        ts_ns: job.now_ns,
        seq: job.seq,
        proc_id: alloc.proc_id,
        alloc_id: alloc.alloc_id,
        level: alloc.level.clone().into(),
        nvml_index: alloc.nvml_index,
        gpu_uuid: alloc.gpu_uuid.clone(),
        cuda_ordinal: alloc.cuda_ordinal,
        addr: alloc.addr,
        size_bytes: alloc.size_bytes,
        api: alloc.api.clone().into(),
        stack_id: alloc.stack_id,
        alloc_ts_ns: alloc.ts_ns,
    });
    writer.checkpoint(job.seq, live);
}

fn write_identity(writer: &mut Writer, ranks: &[Rank]) {
    for rank in ranks {
        writer.push(&process(rank));
        writer.push(&ProcessLibRow {
            ts_ns: START_NS,
            proc_id: rank.proc_id,
            kind: "libcuda".into(),
            path: "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06".into(),
            version: Some("580.65.06".into()),
            probes: 60,
            probes_available: 64,
            ..Default::default()
        });
        writer.push(&DeviceRow {
            ts_ns: START_NS,
            nvml_index: rank.number,
            gpu_uuid: rank.gpu().into(),
            model: Some("NVIDIA H200".into()),
            total_bytes: Some(150_754_820_096),
            host: "node-17".into(),
            ..Default::default()
        });
    }
    for stack in 0..STACKS {
        write_stack(writer, stack);
    }
    let text = "record".to_owned();
    writer.push(&AnnotationRow {
        ts_ns: START_NS,
        kind: "start".into(),
        text,
        ..Default::default()
    });
}

fn process(rank: &Rank) -> ProcessRow {
    ProcessRow {
        ts_ns: START_NS,
        proc_id: rank.proc_id,
        pid: rank.pid(),
        comm: "python3".into(),
        command: Some("python3 train.py".into()),
        rank: Some(rank.number),
        local_rank: Some(rank.number),
        world_size: Some(2),
        job: Some("torchrun-42".into()),
        host: "node-17".into(),
        start_ns: Some(START_NS - 5_000_000_000),
        from_start: true,
        detail: "events".into(),
        ..Default::default()
    }
}

fn write_stack(writer: &mut Writer, stack: usize) {
    let line = 10 + stack as i32;
    let frame_ids = [1_000 + stack as i64, 1, 2];
    writer.push(&StackRow {
        stack_id: stack_id(stack),
        site: format!("train.py:{line} layer_{stack}"),
        folded: format!("main;forward;layer_{stack}"),
        frame_ids: frame_ids.to_vec(),
        complete: true,
        first_seen_ns: START_NS,
        ..Default::default()
    });
    writer.push(&FrameRow {
        frame_id: frame_ids[0],
        function: format!("layer_{stack}"),
        file: Some("train.py".into()),
        line: Some(line),
        kind: "python".into(),
        ..Default::default()
    });
}

fn write_samples(writer: &mut Writer, ranks: &[Rank], job: &Job) {
    let ts_ns = job.now_ns;
    for rank in ranks {
        let live_bytes: i64 = rank.live.iter().map(|alloc| alloc.delta_bytes).sum();
        let used = live_bytes + (600 << 20);
        write_breakdown(writer, rank, ts_ns, live_bytes, used);
        writer.push(&DeviceSampleRow {
            ts_ns,
            nvml_index: rank.number,
            gpu_uuid: rank.gpu().into(),
            used_bytes: Some(used),
            total_bytes: Some(150_754_820_096),
            read_ns: 40_000,
            ..Default::default()
        });
        writer.push(&ProcessSampleRow {
            ts_ns,
            proc_id: rank.proc_id,
            pid: rank.pid(),
            nvml_index: Some(rank.number),
            gpu_uuid: Some(rank.gpu().into()),
            nvml_used_bytes: Some(used),
            torch_allocated_bytes: Some(live_bytes),
            ..Default::default()
        });
        writer.push(&SiteUsageRow {
            ts_ns,
            proc_id: rank.proc_id,
            gpu_uuid: Some(rank.gpu().into()),
            level: "tensor".into(),
            live_bytes,
            floor_bytes: None,
            live_count: Some(rank.live.len() as i64),
            ..Default::default()
        });
    }
    writer.push(&HostSampleRow { ts_ns, cpus: Some(64), ..Default::default() });
}

fn write_breakdown(writer: &mut Writer, rank: &Rank, ts_ns: i64, live_bytes: i64, used: i64) {
    for (category, bytes) in
        [("nvml_used", used), ("live_device", live_bytes), ("unexplained", used - live_bytes)]
    {
        writer.push(&BreakdownRow {
            ts_ns,
            proc_id: rank.proc_id,
            gpu_uuid: rank.gpu().into(),
            category: category.into(),
            bytes,
            ..Default::default()
        });
    }
}

fn write_failures(writer: &mut Writer, rank: &Rank, job: &Job) {
    writer.push(&OomRow {
        ts_ns: job.now_ns,
        proc_id: rank.proc_id,
        tid: rank.pid(),
        api: "cuMemAlloc_v2".into(),
        size_bytes: Some(2 << 30),
        stack_id: stack_id(0),
        ..Default::default()
    });
    writer.push(&LossRow {
        ts_ns: job.now_ns,
        window_start_ns: job.now_ns - 1_000_000_000,
        reason: "ring_full".into(),
        count: 3,
        ..Default::default()
    });
}
