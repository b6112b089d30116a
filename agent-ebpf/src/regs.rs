//! The registers that unwinding begins with.

use core::ffi::c_void;

/// Registers at a probe.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Registers {
    /// Where the function begins.
    pub(crate) ip: u64,
    /// Stack pointer.
    pub(crate) sp: u64,
    /// Frame pointer, as the caller left it.
    pub(crate) fp: u64,
    /// Return address on architectures that keep it in a register; 0 elsewhere.
    pub(crate) lr: u64,
}

/// Reads them from a probe's context.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn read(ctx: *mut c_void) -> Registers {
    // SAFETY: the context of a uprobe is the registers, and the verifier checks each load.
    let regs = unsafe { &*ctx.cast::<aya_ebpf::bindings::pt_regs>() };
    Registers { ip: regs.rip, sp: regs.rsp, fp: regs.rbp, lr: 0 }
}

/// Reads them from a probe's context.
#[cfg(bpf_target_arch = "aarch64")]
#[inline(always)]
pub(crate) fn read(ctx: *mut c_void) -> Registers {
    // SAFETY: the context of a uprobe is the registers, and the verifier checks each load.
    let regs = unsafe { &*ctx.cast::<aya_ebpf::bindings::user_pt_regs>() };
    Registers { ip: regs.pc, sp: regs.sp, fp: regs.regs[29], lr: regs.regs[30] }
}
