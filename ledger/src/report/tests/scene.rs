//! Rows of a small made-up host, handed to the pass in the order in which a log is read.

use crate::{
    account::breakdown::{Breakdown, DeviceMoment, Moment},
    call::{Level, ProcId},
    log::{Manifest, Run8},
    report::{Model, collect::Collector},
    rows::{
        AnnotationRow, BreakdownRow, DeviceRow, DeviceSampleRow, EventRow, FrameRow, LossRow,
        OomRow, ProcessRow, ProcessSampleRow, SiteUsageRow, StackRow,
    },
};

/// 2026-11-30 14:03:20 UTC.
pub(super) const START: i64 = 1_796_047_400 * S;
pub(super) const S: i64 = 1_000_000_000;
pub(super) const MIB: i64 = 1 << 20;
pub(super) const GIB: i64 = 1 << 30;

pub(super) fn uuid(gpu: i32) -> String {
    format!("GPU-0000000{gpu}-1111-2222-3333-444444444444")
}

/// A row of what PyTorch holds on a GPU at a moment, without its sums.
pub(super) fn tensors(pid: i32, gpu: i32, ts_ns: i64) -> SiteUsageRow {
    SiteUsageRow {
        ts_ns,
        proc_id: pid.into(),
        nvml_index: Some(gpu),
        gpu_uuid: Some(uuid(gpu)),
        cuda_ordinal: Some(0),
        level: "tensor".to_owned(),
        ..SiteUsageRow::default()
    }
}

/// A sample of a process and GPU at a moment, without figures.
pub(super) fn sample(pid: i32, gpu: i32, ts_ns: i64) -> ProcessSampleRow {
    ProcessSampleRow {
        ts_ns,
        proc_id: pid.into(),
        pid,
        nvml_index: Some(gpu),
        gpu_uuid: Some(uuid(gpu)),
        ..ProcessSampleRow::default()
    }
}

#[derive(Debug)]
pub(super) struct Scene {
    pub(super) seconds: i64,
    pub(super) processes: Vec<ProcessRow>,
    pub(super) devices: Vec<DeviceRow>,
    pub(super) annotations: Vec<AnnotationRow>,
    pub(super) losses: Vec<LossRow>,
    pub(super) device_samples: Vec<DeviceSampleRow>,
    pub(super) process_samples: Vec<ProcessSampleRow>,
    pub(super) site_usage: Vec<SiteUsageRow>,
    pub(super) breakdown: Vec<BreakdownRow>,
    pub(super) ooms: Vec<OomRow>,
    pub(super) events: Vec<EventRow>,
    pub(super) stacks: Vec<StackRow>,
    pub(super) frames: Vec<FrameRow>,
    pub(super) ended: bool,
    allocations: i64,
}

/// Seconds after the start as log time.
pub(super) fn at(seconds: f64) -> i64 {
    START + (seconds * S as f64) as i64
}

impl Scene {
    /// A recording of that many seconds on a host with two GPUs.
    pub(super) fn new(seconds: i64) -> Self {
        let devices = (0..2).map(|gpu| DeviceRow {
            ts_ns: START,
            nvml_index: gpu,
            gpu_uuid: uuid(gpu),
            model: Some("NVIDIA H200".to_owned()),
            total_bytes: Some(80 * GIB),
            driver_version: Some("580.65.06".to_owned()),
            host: "node7".to_owned(),
            ..DeviceRow::default()
        });
        Self {
            seconds,
            processes: Vec::new(),
            devices: devices.collect(),
            annotations: Vec::new(),
            losses: Vec::new(),
            device_samples: Vec::new(),
            process_samples: Vec::new(),
            site_usage: Vec::new(),
            breakdown: Vec::new(),
            ooms: Vec::new(),
            events: Vec::new(),
            stacks: Vec::new(),
            frames: Vec::new(),
            ended: true,
            allocations: 0,
        }
    }

    /// A process, its id being its pid.
    pub(super) fn process(&mut self, pid: i32, command: &str) -> &mut ProcessRow {
        self.processes.push(ProcessRow {
            ts_ns: START,
            proc_id: pid.into(),
            pid,
            ns_pid: Some(pid),
            uid: Some(1000),
            comm: "main".to_owned(),
            command: Some(command.to_owned()),
            host: "node7".to_owned(),
            start_ns: Some(START),
            from_start: true,
            detail: "totals".to_owned(),
            ..ProcessRow::default()
        });
        self.processes.last_mut().unwrap()
    }

    fn row(&mut self, pid: i32, gpu: i32, seconds: f64, op: &'static str) -> &mut EventRow {
        self.events.push(EventRow {
            ts_ns: at(seconds),
            proc_id: pid.into(),
            pid,
            tid: pid,
            op: op.into(),
            api: "cuMemAlloc_v2".into(),
            level: "device".into(),
            nvml_index: Some(gpu),
            gpu_uuid: Some(uuid(gpu)),
            cuda_ordinal: Some(0),
            ..EventRow::default()
        });
        self.events.last_mut().unwrap()
    }

    /// An allocation; its `alloc_id`.
    pub(super) fn alloc(&mut self, pid: i32, gpu: i32, seconds: f64, size: i64) -> i64 {
        self.alloc_at(pid, gpu, seconds, size, "device", "cuMemAlloc_v2")
    }

    pub(super) fn alloc_at(
        &mut self,
        pid: i32,
        gpu: i32,
        seconds: f64,
        size: i64,
        level: &'static str,
        api: &'static str,
    ) -> i64 {
        self.allocations += 1;
        let alloc_id = self.allocations;
        let row = self.row(pid, gpu, seconds, "alloc");
        row.level = level.into();
        row.api = api.into();
        row.addr = alloc_id << 30;
        row.alloc_id = alloc_id;
        row.size_bytes = Some(size);
        row.delta_bytes = size;
        alloc_id
    }

    fn freed(&mut self, alloc_id: i64, seconds: f64) -> &mut EventRow {
        let of = |row: &&EventRow| row.alloc_id == alloc_id && row.op == "alloc";
        let alloc = self.events.iter().find(of).unwrap().clone();
        self.events.push(EventRow {
            ts_ns: at(seconds),
            op: "free".into(),
            api: "cuMemFree_v2".into(),
            delta_bytes: -alloc.delta_bytes,
            ..alloc
        });
        self.events.last_mut().unwrap()
    }

    pub(super) fn free(&mut self, alloc_id: i64, seconds: f64) {
        self.freed(alloc_id, seconds);
    }

    /// The end of a process, which frees what it held.
    pub(super) fn exit(&mut self, pid: i32, seconds: f64, code: i32) {
        let freed: Vec<i64> =
            self.events.iter().filter(|row| row.op == "free").map(|row| row.alloc_id).collect();
        let held = self.events.iter().filter(|row| row.pid == pid && row.op == "alloc");
        let held: Vec<i64> =
            held.map(|row| row.alloc_id).filter(|id| !freed.contains(id)).collect();
        for alloc_id in held {
            let row = self.freed(alloc_id, seconds);
            row.api = "exit".into();
            row.implicit = true;
        }
        for row in self.processes.iter_mut().filter(|row| row.pid == pid) {
            row.end_ns = Some(at(seconds));
            row.exit_code = Some(code);
        }
    }

    /// A failed call.
    pub(super) fn fail(&mut self, pid: i32, gpu: i32, seconds: f64, size: i64, result: i32) {
        let row = self.row(pid, gpu, seconds, "fail");
        row.size_bytes = Some(size);
        row.result = result;
    }

    /// A refusal, with the device that full.
    pub(super) fn oom(&mut self, pid: i32, gpu: i32, seconds: f64, size: i64, used: i64) {
        self.fail(pid, gpu, seconds, size, 2);
        self.ooms.push(OomRow {
            ts_ns: at(seconds),
            proc_id: pid.into(),
            tid: pid,
            api: "cuMemAlloc_v2".to_owned(),
            size_bytes: Some(size),
            nvml_index: Some(gpu),
            gpu_uuid: Some(uuid(gpu)),
            process_live_bytes: Some(70 * GIB),
            device_used_bytes: Some(used),
            device_total_bytes: Some(80 * GIB),
            ..OomRow::default()
        });
    }

    /// What NVML shows of a process, and the breakdown of it.
    pub(super) fn reading(&mut self, pid: i32, gpu: i32, seconds: f64, moment: &Moment) {
        let ts_ns = at(seconds);
        let moment = Moment { ts_ns, ..moment.clone() };
        self.process_samples.push(ProcessSampleRow {
            nvml_used_bytes: moment.nvml_used,
            live_device_bytes: Some(moment.live[Level::Device as usize]),
            ..sample(pid, gpu, ts_ns)
        });
        let used = moment.nvml_used;
        self.breakdown.extend(Breakdown::new().rows(ProcId(pid.into()), &uuid(gpu), moment));
        self.device_samples.push(DeviceSampleRow {
            ts_ns,
            nvml_index: gpu,
            gpu_uuid: uuid(gpu),
            used_bytes: used.map(|used| used + 500 * MIB),
            total_bytes: Some(80 * GIB),
            ..DeviceSampleRow::default()
        });
    }

    /// What a device holds, and what of that its processes.
    pub(super) fn device(&mut self, gpu: i32, seconds: f64, used_bytes: i64, listed_bytes: i64) {
        let reserved_bytes = Some(640 * MIB);
        let ts_ns = at(seconds);
        let moment =
            DeviceMoment { ts_ns, used_bytes, listed_bytes, unlisted_bytes: 0, reserved_bytes };
        self.breakdown.extend(moment.rows(&uuid(gpu)));
    }

    /// What PyTorch's allocator said of itself.
    pub(super) fn said(&mut self, pid: i32, gpu: i32, ts_ns: i64, used: i64, reserved: i64) {
        self.process_samples.push(ProcessSampleRow {
            torch_allocated_bytes: Some(used),
            torch_reserved_bytes: Some(reserved),
            torch_peak_allocated_bytes: Some(used + 100 * MIB),
            torch_peak_reserved_bytes: Some(reserved),
            ..sample(pid, gpu, ts_ns)
        });
    }

    /// PyTorch's totals.
    pub(super) fn torch(&mut self, pid: i32, gpu: i32, seconds: f64, used: i64, reserved: i64) {
        let ts_ns = at(seconds);
        self.site_usage.push(SiteUsageRow { live_bytes: used, ..tensors(pid, gpu, ts_ns) });
        self.said(pid, gpu, ts_ns, used, reserved);
    }

    /// A stack from frames, leaf first: `file:line function` for Python, a bare name for native
    /// ones. The first Python frame is its site, else the last frame.
    pub(super) fn stack(&mut self, frames: &[&str]) -> i64 {
        let ids: Vec<i64> = frames.iter().map(|text| self.frame(text)).collect();
        let site = frames.iter().find(|text| text.contains(".py:")).or(frames.last()).unwrap();
        let stack_id = ids.iter().fold(7, |hash: i64, id| hash.wrapping_mul(31).wrapping_add(*id));
        let folded: Vec<&str> = frames.iter().rev().copied().collect();
        if !self.stacks.iter().any(|row| row.stack_id == stack_id) {
            self.stacks.push(StackRow {
                stack_id,
                site: (*site).to_owned(),
                folded: folded.join(";"),
                frame_ids: ids,
                complete: true,
                incomplete_reason: None,
                first_seen_ns: START,
                library: None,
            });
        }
        stack_id
    }

    fn frame(&mut self, text: &str) -> i64 {
        let frame_id = 1 + text
            .bytes()
            .fold(5, |hash: i64, byte| hash.wrapping_mul(131).wrapping_add(byte.into()));
        let python = text.split_once(".py:").and_then(|(file, rest)| {
            let (line, function) = rest.split_once(' ')?;
            Some((format!("/data/u/{file}.py"), line.parse().ok()?, function.to_owned()))
        });
        let row = match python {
            Some((file, line, function)) => FrameRow {
                frame_id,
                function,
                file: Some(file),
                line: Some(line),
                kind: "python".to_owned(),
                ..FrameRow::default()
            },
            None => FrameRow {
                frame_id,
                function: text.to_owned(),
                module: Some("/opt/x/libx.so".to_owned()),
                offset: Some(0x1234),
                kind: "native".to_owned(),
                ..FrameRow::default()
            },
        };
        if !self.frames.iter().any(|known| known.frame_id == frame_id) {
            self.frames.push(row);
        }
        frame_id
    }

    pub(super) fn loss(&mut self, pid: Option<i32>, reason: &str, count: i64) {
        self.losses.push(LossRow {
            ts_ns: at(2.0),
            window_start_ns: at(1.0),
            proc_id: pid.map(i64::from),
            pid,
            reason: reason.to_owned(),
            count,
            bytes: None,
        });
    }

    pub(super) fn late(&mut self, pid: i32) {
        self.annotations.push(AnnotationRow {
            ts_ns: START,
            proc_id: Some(pid.into()),
            kind: "late_attach".to_owned(),
            text: "was running".to_owned(),
            value: None,
        });
    }

    pub(super) fn manifest(&self) -> Manifest {
        Manifest {
            schema_version: 1,
            run_id: "0123456789abcdef".to_owned(),
            host: "node7".to_owned(),
            boot_id: String::new(),
            pid: 1,
            tool_version: "0.1.0".to_owned(),
            command: vec!["record".to_owned()],
            clock_anchors: Vec::new(),
            start_ns: START,
            end_ns: self.ended.then_some(START + self.seconds * S),
            sealed: self.ended,
        }
    }

    /// Events by time, numbered.
    pub(super) fn sorted_events(&self) -> Vec<EventRow> {
        let mut events = self.events.clone();
        events.sort_by_key(|row| row.ts_ns);
        for (row, seq) in events.iter_mut().zip(1..) {
            row.seq = seq;
        }
        events
    }

    /// A call about a context; the process's number for the device is 1 more than for [`Self::row`].
    pub(super) fn context(
        &mut self,
        pid: i32,
        gpu: i32,
        seconds: f64,
        api: &'static str,
        stack_id: i64,
    ) {
        let row = self.row(pid, gpu, seconds, "ctx");
        (row.api, row.addr, row.stack_id) = (api.into(), 0xc0 + i64::from(gpu), stack_id);
        row.cuda_ordinal = Some(1);
    }

    /// The report.
    pub(super) fn model(&self) -> Model {
        self.pass().finish(vec!["vramscope-node7".to_owned()])
    }

    /// The pass over all rows.
    pub(super) fn pass(&self) -> Collector {
        let run = Run8::of("0123456789abcdef").unwrap();
        let mut pass = Collector::default();
        pass.manifest(&self.manifest());
        self.frames.iter().cloned().for_each(|row| pass.stacks.frame(row));
        self.stacks.iter().cloned().for_each(|row| pass.stacks.stack(row));
        self.processes.iter().cloned().for_each(|row| pass.process(row));
        self.devices.iter().cloned().for_each(|row| pass.device(row));
        self.annotations.iter().cloned().for_each(|row| pass.annotation(row));
        self.losses.iter().for_each(|row| pass.loss(row));
        self.device_samples.iter().for_each(|row| pass.device_sample(row));
        self.process_samples.iter().for_each(|row| pass.process_sample(row));
        self.site_usage.iter().for_each(|row| pass.site_usage(row));
        self.breakdown.iter().cloned().for_each(|row| pass.breakdown(row));
        self.ooms.iter().cloned().for_each(|row| pass.oom(row));
        self.sorted_events().iter().for_each(|row| pass.event(run, row));
        pass
    }
}
