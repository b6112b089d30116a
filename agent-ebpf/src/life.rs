//! Process life: which processes are known, and when they fork, execute and end.
//!
//! Raw tracepoints of the scheduler: in every kernel, no system call is touched.

use agent_common::{
    cookie::MAX_ROWS,
    life::{FOLLOW_CHILDREN, KIND_EXEC, KIND_EXIT, KIND_FORK, KIND_SEEN, RawLife},
    loss::Loss,
};
use aya_ebpf::{
    helpers::{
        bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        bpf_ktime_get_boot_ns, generated::bpf_get_current_task,
    },
    macros::{map, raw_tracepoint},
    maps::HashMap,
    programs::RawTracePointContext,
};
use zerocopy::IntoBytes as _;

use crate::{backward, call, emit, lose::lose, runtime, stack, task::Task, thread};

/// Rows of the agent's probe table; the agent writes it before the programs are loaded.
#[unsafe(no_mangle)]
static ROWS: u8 = MAX_ROWS;

fn rows() -> u8 {
    // SAFETY: a valid static that nobody writes while the program is loaded. Volatile, or the
    // compiler would fold the value above into the program.
    unsafe { core::ptr::read_volatile(&raw const ROWS) }
}

/// Processes that the agent follows: inserted by it for `run` and `attach`, here at a first traced
/// call and at a fork of a followed process. The value is a set of `FOLLOW_*` flags.
#[map]
static KNOWN: HashMap<u32, u32> = HashMap::with_max_entries(65536, 0);

fn send(event: &RawLife) {
    let bytes = event.as_bytes();
    let urgent = event.kind == KIND_FORK || event.kind == KIND_EXEC;
    if !(if urgent { emit::life_at_once(bytes) } else { emit::life(bytes) }) {
        lose(event.tgid, Loss::LifeRingFull);
    }
}

fn event(kind: u8, tgid: u32, task: Task) -> RawLife {
    RawLife {
        kind,
        pad: [0; 3],
        exit_code: 0,
        tgid,
        parent_tgid: 0,
        // SAFETY: a helper without arguments.
        ts_ns: unsafe { bpf_ktime_get_boot_ns() },
        start_ns: task.process_start_ns(),
        uid: bpf_get_current_uid_gid() as u32,
        exec_tid: 0,
        comm: bpf_get_current_comm().unwrap_or_default(),
    }
}

/// Tells of a process at its first traced call; gives its flags.
#[inline(always)]
pub(crate) fn note_process(tgid: u32) -> u32 {
    if let Some(flags) = KNOWN.get_ptr(tgid) {
        // SAFETY: a map value, valid until the program returns.
        return unsafe { *flags };
    }
    first_call(tgid);
    0
}

fn first_call(tgid: u32) {
    if KNOWN.insert(tgid, 0u32, 0).is_err() {
        lose(tgid, Loss::ProcessTableFull);
        return;
    }
    send(&event(KIND_SEEN, tgid, current()));
}

fn current() -> Task {
    // SAFETY: a helper without arguments.
    Task(unsafe { bpf_get_current_task() })
}

fn current_ids() -> (u64, u32) {
    let ids = bpf_get_current_pid_tgid();
    (ids, (ids >> 32) as u32)
}

/// `sched_process_fork(parent, child)`: threads are not processes.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
pub(crate) fn process_fork(ctx: RawTracePointContext) -> i32 {
    let (parent, child) = (Task(ctx.arg(0)), Task(ctx.arg(1)));
    let (parent_tgid, tgid) = (parent.tgid(), child.tgid());
    if parent_tgid == tgid {
        return 0;
    }
    let Some(flags) = KNOWN.get_ptr(parent_tgid) else { return 0 };
    stack::fork(parent_tgid, tgid);
    // SAFETY: a map value, valid until the program returns.
    let flags = unsafe { *flags };
    if flags & FOLLOW_CHILDREN == 0 {
        return 0;
    }
    if KNOWN.insert(tgid, FOLLOW_CHILDREN, 0).is_err() {
        lose(tgid, Loss::ProcessTableFull);
        return 0;
    }
    let mut fork = event(KIND_FORK, tgid, child);
    fork.parent_tgid = parent_tgid;
    send(&fork);
    0
}

/// `sched_process_exec(task, old_pid, bprm)`: runs in the process, after its other threads ended.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub(crate) fn process_exec(ctx: RawTracePointContext) -> i32 {
    let (ids, tgid) = current_ids();
    forget_program(tgid);
    let exec_tid: u32 = ctx.arg(1);
    for ids in [ids, u64::from(tgid) << 32 | u64::from(exec_tid)] {
        thread::forget(ids);
    }
    if KNOWN.get_ptr(tgid).is_some() {
        forget_calls(ids, tgid, true);
        let mut exec = event(KIND_EXEC, tgid, current());
        exec.exec_tid = exec_tid;
        send(&exec);
    }
    0
}

/// `sched_process_exit`: once a thread; the process ends with its last one.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub(crate) fn process_exit(_ctx: RawTracePointContext) -> i32 {
    let (ids, tgid) = current_ids();
    let task = current();
    if KNOWN.get_ptr(tgid).is_none() {
        // It may have got its parent's interpreter at a fork all the same.
        if ids as u32 == tgid {
            forget_program(tgid);
        }
        return 0;
    }
    thread::forget(ids);
    forget_calls(ids, tgid, task.in_group_exit());
    if task.live_threads() == 0 {
        forget_program(tgid);
        let mut exit = event(KIND_EXIT, tgid, task);
        exit.exit_code = task.exit_code();
        // Removing cannot fail here: the entry was just seen.
        KNOWN.remove(tgid).unwrap_or_default();
        send(&exit);
    }
    0
}

/// Drops what is known of the program that a process ran.
fn forget_program(tgid: u32) {
    stack::forget(tgid);
    backward::forget(tgid);
}

/// Drops the entries of calls whose exit will never come; thread ids are reused, so a stale one
/// would pair with a stranger's exit.
#[inline(always)]
fn forget_calls(ids: u64, tgid: u32, process_ends: bool) {
    runtime::forget(ids);
    let rows = rows();
    for row in 0..MAX_ROWS {
        if row >= rows {
            break;
        }
        if call::forget(ids, row) && !process_ends {
            lose(tgid, Loss::CallInterrupted);
        }
    }
}
