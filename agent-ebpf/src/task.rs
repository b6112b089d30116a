//! Reads of the kernel's task structures, at offsets that the agent took from the running BTF.

use agent_common::offsets::Offsets;
use aya_ebpf::helpers::bpf_probe_read_kernel;

#[unsafe(no_mangle)]
static OFFSETS: Offsets = Offsets {
    task_tgid: 0,
    task_group_leader: 0,
    task_start_boottime: 0,
    task_signal: 0,
    task_exit_code: 0,
    signal_live: 0,
    signal_group_exit_code: 0,
    signal_flags: 0,
};

const SIGNAL_GROUP_EXIT: u32 = 4; // include/linux/sched/signal.h

/// The offsets. Volatile, or the compiler would fold the zeros above into the program.
#[inline(always)]
fn offsets() -> Offsets {
    // SAFETY: a valid static that nobody writes while the program is loaded.
    unsafe { core::ptr::read_volatile(&raw const OFFSETS) }
}

/// Reads a field; 0 where the read fails.
#[inline(always)]
fn field<T: Copy + Default>(base: u64, offset: u32) -> T {
    let address = (base + u64::from(offset)) as *const T;
    // SAFETY: the helper checks the address and fails instead of faulting.
    unsafe { bpf_probe_read_kernel(address) }.unwrap_or_default()
}

/// A `task_struct`.
#[derive(Clone, Copy)]
pub(crate) struct Task(pub(crate) u64);

impl Task {
    pub(crate) fn tgid(self) -> u32 {
        field(self.0, offsets().task_tgid)
    }

    /// Start of the process (its group leader), nanoseconds of `CLOCK_BOOTTIME`.
    pub(crate) fn process_start_ns(self) -> u64 {
        let leader: u64 = field(self.0, offsets().task_group_leader);
        field(leader, offsets().task_start_boottime)
    }

    fn signal(self) -> u64 {
        field(self.0, offsets().task_signal)
    }

    /// Threads of the process that have not ended. `do_exit` counts down before its tracepoint.
    pub(crate) fn live_threads(self) -> i32 {
        field(self.signal(), offsets().signal_live)
    }

    /// The whole process is being ended (`exit_group`, a fatal signal, exec).
    pub(crate) fn in_group_exit(self) -> bool {
        let flags: u32 = field(self.signal(), offsets().signal_flags);
        flags & SIGNAL_GROUP_EXIT != 0
    }

    /// `wait` status: the group's, else the thread's own.
    pub(crate) fn exit_code(self) -> i32 {
        let group: i32 = field(self.signal(), offsets().signal_group_exit_code);
        if group != 0 { group } else { field(self.0, offsets().task_exit_code) }
    }
}
