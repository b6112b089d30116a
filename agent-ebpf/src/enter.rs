//! Entry of traced functions: one program for every kind, since the walk of a stack is in it, over
//! which the verifier takes its time.

use agent_common::{
    cookie::{Cookie, Kind},
    cost::Part,
};
use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_pid_tgid, bpf_ktime_get_boot_ns, generated::bpf_get_attach_cookie},
    macros::uprobe,
    programs::ProbeContext,
};

use crate::{backward, call, cost, note, runtime, stack, tensor};

/// What the beginning of an entry finds out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// No more of this call.
    Nothing,
    /// The call.
    Call,
    /// The call and the stack that made it.
    Stack,
}

/// What the agent said of the probe.
pub(crate) fn cookie(ctx: *mut core::ffi::c_void) -> Cookie {
    // SAFETY: the context that the kernel handed to this program.
    Cookie::unpack(unsafe { bpf_get_attach_cookie(ctx) })
}

/// Entry of a traced function.
///
/// Beginning and end ask for the cookie each: a kind that is known from before the stack would have
/// the verifier go through the stack for each kind.
#[uprobe]
pub(crate) fn enter(ctx: ProbeContext) -> u32 {
    let ids = bpf_get_current_pid_tgid();
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_boot_ns() };
    let Cookie { kind, row, .. } = cookie(ctx.as_ptr());
    let wanted = match kind {
        Kind::Call | Kind::Note => call::begin(&ctx, ids),
        Kind::Tensor => tensor::begin(&ctx, ids, now_ns),
        Kind::Backward => backward::begin(ids),
        Kind::Runtime => {
            runtime::enter(ctx.as_ptr(), ids, row);
            Wanted::Nothing
        }
    };
    let mut key = 0;
    match wanted {
        Wanted::Nothing => {
            if kind == Kind::Tensor {
                cost::ran(Part::Totals, now_ns);
            }
            return 0;
        }
        Wanted::Call => {}
        Wanted::Stack => {
            key = stack::key(ctx.as_ptr(), ids, now_ns, kind != Kind::Tensor);
        }
    }
    match cookie(ctx.as_ptr()).kind {
        Kind::Call => {
            call::end(&ctx, ids, key);
            cost::ran(Part::Entry, now_ns);
        }
        Kind::Tensor => {
            tensor::end(&ctx, ids, now_ns, key);
            cost::ran(Part::Block, now_ns);
        }
        Kind::Backward => backward::end(&ctx, ids, now_ns, key),
        Kind::Note => note::end(&ctx, ids, now_ns, key),
        Kind::Runtime => {}
    }
    0
}
