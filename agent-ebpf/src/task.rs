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
    task_mm: 0,
    task_thread_pointer: 0,
    task_utask: 0,
    utask_return_instances: 0,
    return_stack: 0,
    return_orig_ret_vaddr: 0,
    return_next: 0,
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

    /// Address of its memory descriptor: another after each exec.
    pub(crate) fn mm(self) -> u64 {
        field(self.0, offsets().task_mm)
    }

    /// What `pthread_self` is made of.
    pub(crate) fn thread_pointer(self) -> u64 {
        field(self.0, offsets().task_thread_pointer)
    }

    /// Its innermost pending return probe.
    pub(crate) fn return_instances(self) -> ReturnInstance {
        let utask: u64 = field(self.0, offsets().task_utask);
        if utask == 0 {
            return ReturnInstance(0);
        }
        ReturnInstance(field(utask, offsets().utask_return_instances))
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

/// A `return_instance`: a return address that a return probe replaced.
#[derive(Clone, Copy)]
pub(crate) struct ReturnInstance(u64);

impl ReturnInstance {
    /// There is none.
    pub(crate) fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Address of the slot on the stack.
    pub(crate) fn slot(self) -> u64 {
        field(self.0, offsets().return_stack)
    }

    /// What the slot held.
    pub(crate) fn address(self) -> u64 {
        field(self.0, offsets().return_orig_ret_vaddr)
    }

    /// The one outside it.
    pub(crate) fn next(self) -> Self {
        Self(field(self.0, offsets().return_next))
    }
}
