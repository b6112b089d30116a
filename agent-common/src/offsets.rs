//! Offsets into the running kernel's structures, read from its BTF by the agent.

use zerocopy::{Immutable, IntoBytes};

/// Byte offsets; the agent writes them into the program before it is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct Offsets {
    /// `task_struct.tgid`.
    pub task_tgid: u32,
    /// `task_struct.group_leader`.
    pub task_group_leader: u32,
    /// `task_struct.start_boottime`.
    pub task_start_boottime: u32,
    /// `task_struct.signal`.
    pub task_signal: u32,
    /// `task_struct.exit_code`.
    pub task_exit_code: u32,
    /// `task_struct.mm`.
    pub task_mm: u32,
    /// `task_struct.thread`, and in it the thread pointer: `fsbase` (x86-64), `uw.tp_value`
    /// (aarch64).
    pub task_thread_pointer: u32,
    /// `task_struct.utask`.
    pub task_utask: u32,
    /// `uprobe_task.return_instances`.
    pub utask_return_instances: u32,
    /// `return_instance.stack`.
    pub return_stack: u32,
    /// `return_instance.orig_ret_vaddr`.
    pub return_orig_ret_vaddr: u32,
    /// `return_instance.next`.
    pub return_next: u32,
    /// `signal_struct.live`.
    pub signal_live: u32,
    /// `signal_struct.group_exit_code`.
    pub signal_group_exit_code: u32,
    /// `signal_struct.flags`.
    pub signal_flags: u32,
}
