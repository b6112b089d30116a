//! The log's tables: every column declared once, with its meaning.
//!
//! Conventions: signed integers only (readers widen unsigned ones differently); every time column
//! pair is `ts` (microseconds, UTC, for people and SQL engines; filled in by the writer from
//! `ts_ns`) and `ts_ns` (nanoseconds since the epoch); unknown is NULL, except `stack_id` and
//! `alloc_id`, where 0 means none. `Option` fields are the nullable columns.

use std::borrow::Cow;

use crate::table::table;

table! {
    /// What happened to memory, one row an event, in the order of effect times.
    EventRow, "events" {
        /// Number of the row in this run; gaps never occur.
        seq: i64,
        /// Effect time: a free's entry, an allocation's return.
        ts_ns: i64,
        /// Time inside the call; 0 for implicit frees.
        duration_ns: i64,
        /// Key into `processes`.
        proc_id: i64,
        /// Process id on the host.
        pid: i32,
        /// Thread id on the host; 0 for events without a thread.
        tid: i32,
        /// alloc, free, map, unmap, retain, import, export, reserve, fail, ctx, module, pool, graph,
        /// capture, captured (a stream begins and ends to be recorded into a graph).
        op: Cow<'static, str>,
        /// The function called; `exit`, `exec` for what the end of a process freed, `reused` for a
        /// block whose free was never seen although its address was handed out again.
        api: Cow<'static, str>,
        /// The runtime (libcudart) function around it, where labels are recorded.
        runtime_api: Option<String>,
        /// device, pool, tensor, managed, host, virtual, imported. Bytes add up within one level only.
        level: Cow<'static, str>,
        /// NVML's number of the device.
        nvml_index: Option<i32>,
        /// UUID of the device or MIG instance, with its `GPU-` or `MIG-` prefix.
        gpu_uuid: Option<String>,
        /// The number that the process uses for the device.
        cuda_ordinal: Option<i32>,
        /// Address; or the handle of physical memory, an array, a pool, a context, a module or a
        /// graph; or the `CUlimit` of `cuCtxSetLimit`.
        addr: i64,
        /// Bytes of the block, bytes asked for by a failed call, or the value of a limit or pool size.
        size_bytes: Option<i64>,
        /// Change of live bytes at this level; 0 for frees of unknown addresses.
        delta_bytes: i64,
        /// The allocation that the event is about; 0 = none known.
        alloc_id: i64,
        /// Stack of the *allocation*, on its free too; 0 = none taken.
        stack_id: i64,
        /// Freed by context or pool destruction or by the end of the process, not by a call.
        implicit: bool,
        /// `CUresult`; 0 = success.
        result: i32,
        /// Number of the backward pass, where the program runs autograd.
        backward_pass: Option<i64>,
        /// `size_bytes` is the least that the block takes (arrays, which the driver pads).
        estimated: Option<bool>,
    }
}

table! {
    /// Live bytes by place of allocation, a row a second and stack on change. `stack_id` 0 carries
    /// the totals of a process and device, which PyTorch tells itself: what they hold beyond the
    /// stacks' sum was allocated before the recording began, or its stack is not known.
    SiteUsageRow, "site_usage" {
        /// End of the window that the row tells of.
        ts_ns: i64,
        /// Key into `processes`.
        proc_id: i64,
        /// NVML's number of the device.
        nvml_index: Option<i32>,
        /// UUID of the device.
        gpu_uuid: Option<String>,
        /// The number that the process uses for the device.
        cuda_ordinal: Option<i32>,
        /// Level of the bytes, `tensor` for PyTorch's blocks.
        level: String,
        /// Key into `stacks`; 0 = all of the process on this device; -1 = blocks whose stack was not taken, or lost.
        stack_id: i64,
        /// Bytes alive.
        live_bytes: i64,
        /// Lowest bytes alive in the second before; NULL where it is not known.
        floor_bytes: Option<i64>,
        /// Blocks alive; NULL where the agent came late and cannot know.
        live_count: Option<i64>,
        /// Bytes allocated since the agent saw the process.
        allocated_bytes: i64,
        /// Bytes freed since then.
        freed_bytes: i64,
        /// Allocations since then.
        allocs: i64,
        /// Frees since then.
        frees: i64,
        /// Number of the backward pass.
        backward_pass: Option<i64>,
    }
}

table! {
    /// Where a process's memory on a device went, at one moment. The parts of one
    /// (ts_ns, proc_id, gpu_uuid) add up to its `nvml_used` row, those of proc_id 0, the device as a
    /// whole, to its `device_used` row.
    BreakdownRow, "breakdown" {
        /// The moment.
        ts_ns: i64,
        /// Key into `processes`; 0 = the device as a whole.
        proc_id: i64,
        /// UUID of the device.
        gpu_uuid: String,
        /// nvml_used (the sum); tensors, reusable, returnable, graph_pools, cached, library, pools, rounding, context, modules, before_attach, unexplained (its parts); not_traced (all of a process of which NVML alone tells); live_device, live_pool, live_managed, live_host, live_imported, torch_allocated, torch_reserved (beside it). Of a device: device_used (the sum); processes, unlisted, unexplained (its parts); driver_reserved (beside it).
        category: String,
        /// Owning library, where the category is `library`; NULL there: the owner is not known.
        library: Option<String>,
        /// Bytes; unexplained may be negative.
        bytes: i64,
        /// The figure is a bound or an estimate, not a measurement.
        estimated: bool,
        /// Where the category is `reusable`: live blocks of PyTorch that keep it from being given back.
        pinned_by_blocks: Option<i64>,
        /// The stack whose blocks keep the most of it.
        pinned_by_stack_id: Option<i64>,
    }
}

table! {
    /// The live set at each rotation, so that deleting old files never leaves frees without their
    /// allocations.
    LiveRow, "live" {
        /// Moment of the checkpoint.
        ts_ns: i64,
        /// `seq` of the last event before it.
        seq: i64,
        /// Key into `processes`.
        proc_id: i64,
        /// The allocation.
        alloc_id: i64,
        /// Its level.
        level: String,
        /// NVML's number of the device.
        nvml_index: Option<i32>,
        /// UUID of the device.
        gpu_uuid: Option<String>,
        /// The number that the process uses for the device.
        cuda_ordinal: Option<i32>,
        /// Address or handle.
        addr: i64,
        /// Bytes; NULL where the allocation's size could not be read.
        size_bytes: Option<i64>,
        /// Function that allocated.
        api: String,
        /// Stack of the allocation; 0 = none taken.
        stack_id: i64,
        /// Effect time of the allocation.
        alloc_ts_ns: i64,
        /// `size_bytes` is the least that the block takes.
        estimated: Option<bool>,
    }
}

table! {
    /// NVML's totals of a device.
    DeviceSampleRow, "device_samples" {
        /// When the reading was taken.
        ts_ns: i64,
        /// NVML's number of the device.
        nvml_index: i32,
        /// UUID of the device.
        gpu_uuid: String,
        /// Memory in use, as NVML reports it.
        used_bytes: Option<i64>,
        /// Memory free.
        free_bytes: Option<i64>,
        /// Memory in all.
        total_bytes: Option<i64>,
        /// Memory that the driver keeps for itself.
        reserved_bytes: Option<i64>,
        /// GPU busy, percent of the sampling period.
        utilization_percent: Option<i32>,
        /// Memory interface busy, percent.
        memory_utilization_percent: Option<i32>,
        /// Core temperature, degrees Celsius.
        temperature_celsius: Option<i32>,
        /// Board power, milliwatts.
        power_milliwatts: Option<i64>,
        /// Time that NVML took to answer for this row.
        read_ns: i64,
    }
}

table! {
    /// What NVML and the host say of a process, beside what the account says.
    ProcessSampleRow, "process_samples" {
        /// When the reading was taken.
        ts_ns: i64,
        /// Key into `processes`.
        proc_id: i64,
        /// Process id on the host.
        pid: i32,
        /// NVML's number of the device; NULL on rows about the host side of the process.
        nvml_index: Option<i32>,
        /// UUID of the device.
        gpu_uuid: Option<String>,
        /// Device memory that NVML charges to the process; NULL where it says "not available".
        nvml_used_bytes: Option<i64>,
        /// Live device-level bytes of the account at the same moment.
        live_device_bytes: Option<i64>,
        /// `torch.cuda.memory_allocated()` as PyTorch last reported it.
        torch_allocated_bytes: Option<i64>,
        /// `torch.cuda.memory_reserved()`.
        torch_reserved_bytes: Option<i64>,
        /// Highest allocated value since the agent saw the process.
        torch_peak_allocated_bytes: Option<i64>,
        /// Highest reserved value since then.
        torch_peak_reserved_bytes: Option<i64>,
        /// CPU time used since the process started, nanoseconds.
        cpu_ns: Option<i64>,
        /// Resident host memory.
        rss_bytes: Option<i64>,
        /// State of the process in `/proc` (R, S, D, Z, ...), or gone; on rows of NVML's lists.
        state: Option<String>,
    }
}

table! {
    /// The host, and each container with a traced process (`container_id` set).
    HostSampleRow, "host_samples" {
        /// When the reading was taken.
        ts_ns: i64,
        /// NULL on the host's own rows.
        container_id: Option<String>,
        /// Busy CPU time since boot (host) or of the container's life, nanoseconds.
        cpu_ns: Option<i64>,
        /// Online CPUs, or the container's quota rounded up.
        cpus: Option<i32>,
        /// Time that the container was throttled by its CPU quota, nanoseconds.
        cpu_throttled_ns: Option<i64>,
        /// Memory in use.
        memory_used_bytes: Option<i64>,
        /// Memory in all, or the container's limit.
        memory_limit_bytes: Option<i64>,
        /// Space used in /dev/shm as the process sees it.
        shm_used_bytes: Option<i64>,
        /// Size of that /dev/shm.
        shm_limit_bytes: Option<i64>,
        /// Free space of the file system that holds the log (host rows only).
        log_disk_free_bytes: Option<i64>,
    }
}

table! {
    /// Who a `proc_id` is. Written again when something becomes known (the end, a rank): the
    /// latest row of a `proc_id` holds.
    ProcessRow, "processes" {
        /// When the row was written.
        ts_ns: i64,
        /// Hash of (boot id, pid, start time): one life of a pid.
        proc_id: i64,
        /// Process id on the host.
        pid: i32,
        /// Process id inside its innermost pid namespace.
        ns_pid: Option<i32>,
        /// Parent's process id on the host.
        ppid: Option<i32>,
        /// Real user id.
        uid: Option<i32>,
        /// Name of the main thread (`/proc/PID/comm`).
        comm: String,
        /// Path of the executable.
        exe: Option<String>,
        /// Command, redacted to program and script unless asked for whole.
        command: Option<String>,
        /// Container id from its cgroup.
        container_id: Option<String>,
        /// Kubernetes pod UID from its cgroup.
        pod_uid: Option<String>,
        /// Rank in the job: RANK and its kin from the allow-listed environment; where none of them is
        /// set, that in the largest NCCL communicator (of two ranks and more) that it was seen to join,
        /// the first of several.
        rank: Option<i32>,
        /// Rank on this host.
        local_rank: Option<i32>,
        /// Ranks of the job, from where the rank is.
        world_size: Option<i32>,
        /// What names the job: launcher's run id, Slurm job; else `nccl-` and a hash of the id of that
        /// communicator, which is the same on all its ranks, on every host.
        job: Option<String>,
        /// `CUDA_VISIBLE_DEVICES` when the process called `cuInit`, where that was seen; else at exec.
        cuda_visible_devices: Option<String>,
        /// `CUDA_DEVICE_ORDER` likewise.
        cuda_device_order: Option<String>,
        /// Allocator settings at exec (`PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`).
        torch_alloc_conf: Option<String>,
        /// Name of the host.
        host: String,
        /// Start time, nanoseconds since the epoch.
        start_ns: Option<i64>,
        /// End, once seen.
        end_ns: Option<i64>,
        /// Exit status 0..255, or 128 + signal.
        exit_code: Option<i32>,
        /// When the agent's first probe was in place for this process.
        attached_ns: Option<i64>,
        /// The process was seen from before its first CUDA call: nothing is "before attach".
        from_start: bool,
        /// How much is recorded of tensors: off, totals, sites, events.
        detail: String,
    }
}

table! {
    /// Libraries that decide what a process's calls mean.
    ProcessLibRow, "process_libs" {
        /// When it was seen.
        ts_ns: i64,
        /// Key into `processes`.
        proc_id: i64,
        /// libcuda, libcudart, libcudnn, libnccl, libc10, libtorch, python.
        kind: String,
        /// Path as mapped, in the process's own mount namespace.
        path: String,
        /// Version, from the file name where it tells one.
        version: Option<String>,
        /// GNU build id, hex.
        build_id: Option<String>,
        /// Probes attached in this file.
        probes: i32,
        /// Probes of the table that exist in this file.
        probes_available: i32,
    }
}

table! {
    /// GPUs of the host.
    DeviceRow, "devices" {
        /// When it was read.
        ts_ns: i64,
        /// NVML's number.
        nvml_index: i32,
        /// UUID.
        gpu_uuid: String,
        /// Model name.
        model: Option<String>,
        /// Memory in all.
        total_bytes: Option<i64>,
        /// PCI address.
        pci_bus_id: Option<String>,
        /// Driver version.
        driver_version: Option<String>,
        /// CUDA version of the driver, 13000 for 13.0.
        cuda_driver_version: Option<i32>,
        /// UUID of the GPU that a MIG instance is a part of.
        mig_parent_uuid: Option<String>,
        /// Name of the host.
        host: String,
    }
}

table! {
    /// Call stacks, one row a content hash.
    StackRow, "stacks" {
        /// Content hash of the frames.
        stack_id: i64,
        /// Innermost frame of the user's own code, as `file:line function`.
        site: String,
        /// Frames root first, joined by `;`.
        folded: String,
        /// Keys into `frames`, leaf first.
        frame_ids: Vec<i64>,
        /// The stack reaches its thread's start.
        complete: bool,
        /// Why not, where it does not.
        incomplete_reason: Option<String>,
        /// When it was first seen.
        first_seen_ns: i64,
        /// Whose what it allocates is: its innermost library that is neither CUDA's nor, where
        /// there is another, a framework's; libc10_cuda is PyTorch's cache.
        library: Option<String>,
    }
}

table! {
    /// Frames of the stacks.
    FrameRow, "frames" {
        /// Content hash.
        frame_id: i64,
        /// Function, demangled.
        function: String,
        /// Source file.
        file: Option<String>,
        /// Line.
        line: Option<i32>,
        /// Library or executable.
        module: Option<String>,
        /// Offset inside it.
        offset: Option<i64>,
        /// GNU build id, hex.
        build_id: Option<String>,
        /// python, native, jit, kernel.
        kind: String,
        /// Inlined into the next frame.
        inlined: bool,
    }
}

table! {
    /// Refused allocations with what was held at the time.
    OomRow, "oom" {
        /// When the call returned, or PyTorch reported it.
        ts_ns: i64,
        /// Key into `processes`.
        proc_id: i64,
        /// Thread.
        tid: i32,
        /// Function that refused, or `c10` for PyTorch's own report.
        api: String,
        /// Bytes asked for.
        size_bytes: Option<i64>,
        /// NVML's number of the device.
        nvml_index: Option<i32>,
        /// UUID of the device.
        gpu_uuid: Option<String>,
        /// Stack of the request.
        stack_id: i64,
        /// Live device bytes of the process.
        process_live_bytes: Option<i64>,
        /// Memory in use on the device by NVML's last reading.
        device_used_bytes: Option<i64>,
        /// Memory of the device that programs can have: all, less what the driver reserves.
        device_total_bytes: Option<i64>,
        /// PyTorch's allocated bytes.
        torch_allocated_bytes: Option<i64>,
        /// PyTorch's reserved bytes.
        torch_reserved_bytes: Option<i64>,
        /// What there was not enough of: device, host (pinned memory), address_space.
        memory: Option<String>,
        /// retried (another try of the same size went well, mostly after PyTorch gave its cache back),
        /// raised (PyTorch gave up: the program saw an exception), refused (the program was told so).
        outcome: Option<String>,
        /// Memory of other processes on the device, by NVML's last reading.
        others_bytes: Option<i64>,
    }
}

table! {
    /// Things said about time: steps, attach and detach, detail changes, what the agent warns of.
    AnnotationRow, "annotations" {
        /// When.
        ts_ns: i64,
        /// Key into `processes`; NULL for the whole run.
        proc_id: Option<i64>,
        /// start, stop, attach, detach, late_attach, detail, step, warning, deleted (by --max-disk),
        /// clock (the wall clock was stepped), brake (a process lost detail: --max-overhead), after_death
        /// (memory of a process that is gone, a zombie, stuck, or without its parent).
        kind: String,
        /// In words.
        text: String,
        /// Its number, where it has one.
        value: Option<i64>,
    }
}

table! {
    /// What was not seen. Reports never claim "no leak" over a row here.
    LossRow, "losses" {
        /// End of the window in which it was noticed.
        ts_ns: i64,
        /// Start of that window.
        window_start_ns: i64,
        /// Process; NULL where it cannot be told.
        proc_id: Option<i64>,
        /// Host pid; NULL where it cannot be told.
        pid: Option<i32>,
        /// ring_full, pending_full, ... as `vramscope schema` lists them.
        reason: String,
        /// Events lost in the window.
        count: i64,
        /// Bytes that they were about, where known.
        bytes: Option<i64>,
    }
}
