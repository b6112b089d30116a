//! Every way in which the kernel half can lose data.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! losses {
    ($($(#[doc = $doc:literal])* $variant:ident = $value:literal, $name:literal;)*) => {
        /// A reason; each has a counter per process and one in all.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Loss {
            $($(#[doc = $doc])* $variant = $value,)*
        }

        impl Loss {
            /// Every reason.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The word in the log's `reason` column.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// What it means, for people.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),*),)* }
            }
        }
    };
}

losses! {
    /// The ring of calls was full: a call is missing.
    RingFull = 0, "ring_full";
    /// The ring of process life was full: the agent learns of the process later, or by polling.
    LifeRingFull = 1, "life_ring_full";
    /// The table of calls in flight was full: a call is missing.
    PendingFull = 2, "pending_full";
    /// A function was entered again on one thread before it returned: the outer call is missing.
    PendingOverwritten = 3, "pending_overwritten";
    /// A call returned whose entry was not seen (it was in flight when the probe came).
    ExitWithoutEnter = 4, "exit_without_enter";
    /// A thread ended inside a call: whether the call had an effect is not known.
    CallInterrupted = 5, "call_interrupted";
    /// A result behind an out-pointer was not readable: the call is there, its address is not.
    OutFault = 6, "out_fault";
    /// A structure behind a pointer was not readable: the call is there, a property is not.
    StructFault = 7, "struct_fault";
    /// The table of processes was full: the process's life is not followed.
    ProcessTableFull = 8, "process_table_full";
    /// The table of PyTorch totals was full: totals of a process are missing.
    TensorTableFull = 9, "tensor_table_full";
    /// The ring of stacks was full: a call is there, its stack is not.
    StackRingFull = 10, "stack_ring_full";
    /// The table of threads was full: a call is there, its stack is not.
    ThreadTableFull = 11, "thread_table_full";
    /// The table of PyTorch's live blocks was full: a block is not counted at its site.
    BlockTableFull = 12, "block_table_full";
    /// The table of sites was full: a block is not counted at its site.
    SiteTableFull = 13, "site_table_full";
    /// A block of PyTorch was handed out again whose free went by unseen.
    TensorFreeMissed = 14, "tensor_free_missed";
    /// The ring of calls was more than half full, and the process's user had used up its share: a call
    /// is missing.
    QuotaExceeded = 15, "quota_exceeded";
}

/// Number of reasons.
pub const LOSSES: usize = 16;

const _: () = assert!(Loss::ALL.len() == LOSSES);

/// Key of the per-process counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LossKey {
    /// Process.
    pub tgid: u32,
    /// [`Loss`] as a number.
    pub reason: u32,
}
