//! The kernel half, loaded: the only place that uses `aya::Ebpf`.

mod attach;
pub mod btf;
mod cost;
mod counters;
mod multi;
pub mod returns;
pub mod sign;
mod slots;
pub mod trap;

use std::io;

use agent_common::{call::Structure, life::TOTALS_ONLY, quota::Quota};
use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{Array, HashMap, MapData, RingBuf},
    programs::{ProgramType, RawTracePoint},
    sys::{BpfHelper, is_helper_supported},
};
use aya_log::EbpfLogger;
use thiserror::Error;
use tracing::info;
use zerocopy::IntoBytes as _;

use self::{attach::program, counters::ToTracing, multi::MultiProgram, slots::Slots};
pub use self::{
    attach::{Links, Scope, Site},
    cost::{CostMeter, HitCost},
    counters::{Counters, Guides, ProcessLoss, Seen},
    multi::supported as has_multi_links,
};
use crate::probes::{self, PROBES};

#[cfg(target_arch = "x86_64")]
static OBJECT: &[u8] = include_bytes_aligned!("../../ebpf-objects/vramscope-x86_64.bpf.o");
#[cfg(target_arch = "aarch64")]
static OBJECT: &[u8] = include_bytes_aligned!("../../ebpf-objects/vramscope-aarch64.bpf.o");

/// Default size of the ring of calls: a second of 400,000 calls with nobody reading.
pub const RING_BYTES: u32 = 1 << 25;

/// Why the kernel half is not running.
#[derive(Debug, Error)]
pub enum KernelError {
    /// No offsets.
    #[error(transparent)]
    Btf(#[from] btf::BtfError),
    /// The kernel is too old.
    #[error(
        "this kernel cannot tell a program which probe it runs for (no attach cookies): vramscope \
         needs kernel 5.15 or later; `vramscope doctor` shows what else this machine lacks"
    )]
    NoCookies,
    /// The kernel refused the object.
    #[error(
        "load the eBPF programs (needs root, or CAP_BPF and CAP_PERFMON; see `vramscope doctor`)"
    )]
    Load(#[source] Box<aya::EbpfError>),
    /// A part that the object must have.
    #[error("the eBPF object has no usable {0}")]
    Part(&'static str),
    /// The kernel refused a program.
    #[error("load or attach the eBPF program {program}")]
    Program {
        /// Its name.
        program: &'static str,
        /// Why.
        source: Box<aya::programs::ProgramError>,
    },
    /// The kernel refused probes.
    #[error("attach {probes} probes")]
    Attach {
        /// How many.
        probes: usize,
        /// Why.
        source: io::Error,
    },
    /// Too many files in too many processes.
    #[error(
        "find a number for the probes: all are in use; record fewer processes at a time, or the whole \
         host (`record`), where one number serves a file in all of them"
    )]
    NoSlot,
    /// A map operation failed.
    #[error("use the eBPF map {map}")]
    Map {
        /// Its name.
        map: &'static str,
        /// Why.
        source: aya::maps::MapError,
    },
}

/// The rings, for the reader thread.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Rings {
    /// Calls.
    pub calls: RingBuf<MapData>,
    /// Process life, failures and notes.
    pub life: RingBuf<MapData>,
    /// Stacks and code objects.
    pub stacks: RingBuf<MapData>,
}

/// How the kernel half is loaded.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Size of the ring of calls, a power of two.
    pub ring_bytes: u32,
    /// How much is wanted of tensors, `agent_common::tensor::detail`.
    pub tensor_detail: u32,
    /// Stacks are taken.
    pub stacks: bool,
    /// Driver calls are labelled with the runtime function around them.
    pub runtime_labels: bool,
}

/// Words of the maps' values, as aya wants them.
const QUOTA_WORDS: usize = size_of::<Quota>() / 8;
const STRUCTURE_WORDS: usize = size_of::<Structure>() / 4;

/// The loaded programs and the maps that are written from here.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Kernel {
    ebpf: Ebpf,
    /// As [`UPROBES`]; `None` where this kernel has no multi links.
    multi: Option<[MultiProgram; UPROBES.len()]>,
    armed: Array<MapData, u32>,
    slots: Slots,
    known: HashMap<MapData, u32, u32>,
    quota: Array<MapData, [u64; QUOTA_WORDS]>,
}

/// Whether programs learn which probe they run for; `None` where the kernel does not tell.
pub fn has_cookies() -> Option<bool> {
    is_helper_supported(ProgramType::KProbe, BpfHelper::BPF_FUNC_get_attach_cookie).ok()
}

fn map_error(map: &'static str) -> impl Fn(aya::maps::MapError) -> KernelError {
    move |source| KernelError::Map { map, source }
}

fn program_error(program: &'static str) -> impl Fn(aya::programs::ProgramError) -> KernelError {
    move |source| KernelError::Program { program, source: Box::new(source) }
}

/// Takes a map out of the object.
fn take<T: TryFrom<aya::maps::Map, Error = aya::maps::MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<T, KernelError> {
    let map = ebpf.take_map(name).ok_or(KernelError::Part(name))?;
    T::try_from(map).map_err(map_error(name))
}

/// The programs of probes, and whether they run at return. Returns first: an entry without its
/// return would stay pending for ever.
const UPROBES: [(&str, bool); 2] = [("call_exit", true), ("enter", false)];
const LIFE: [(&str, &str); 3] = [
    ("process_fork", "sched_process_fork"),
    ("process_exec", "sched_process_exec"),
    ("process_exit", "sched_process_exit"),
];

impl Kernel {
    /// Loads the programs and follows process life; no probe is attached yet.
    pub fn load(options: LoadOptions) -> Result<Self, KernelError> {
        // Its own refusal would be a listing of the program. Where it does not tell, it will.
        if has_cookies() == Some(false) {
            return Err(KernelError::NoCookies);
        }
        let offsets = btf::offsets(&btf::Btf::of_kernel()?)?;
        let rows = PROBES.len() as u8;
        let take_stacks = u32::from(options.stacks);
        let runtime_labels = u32::from(options.runtime_labels);
        let mut ebpf = EbpfLoader::new()
            .override_global("OFFSETS", offsets.as_bytes(), true)
            .override_global("ROWS", &rows, true)
            .override_global("TAKE_STACKS", &take_stacks, true)
            .override_global("RUNTIME_LABELS", &runtime_labels, true)
            .override_global("TENSOR_DETAIL", &options.tensor_detail, true)
            .map_max_entries("CALLS", options.ring_bytes)
            .load(OBJECT)
            .map_err(|source| KernelError::Load(Box::new(source)))?;
        for (name, tracepoint) in LIFE {
            let program: &mut RawTracePoint = ebpf
                .program_mut(name)
                .and_then(|program| program.try_into().ok())
                .ok_or(KernelError::Part(name))?;
            program.load().map_err(program_error(name))?;
            program.attach(tracepoint).map_err(program_error(name))?;
        }
        let multi = multi::load(&ebpf, OBJECT, UPROBES)
            .inspect_err(|error| info!(%error, "one link a probe: detaching will be slow"))
            .ok();
        if multi.is_none() {
            // The verifier takes its time over each: not twice.
            for (name, _) in UPROBES {
                program(&mut ebpf, name)?.load().map_err(program_error(name))?;
            }
        }
        // Maps are taken out only after both loaders have seen them.
        tell_structures(&mut ebpf)?;
        let known = take(&mut ebpf, "KNOWN")?;
        let armed = take(&mut ebpf, "ARMED")?;
        let quota = take(&mut ebpf, "QUOTA")?;
        Ok(Self { ebpf, multi, armed, slots: Slots::default(), known, quota })
    }

    /// The rings; once.
    pub fn take_rings(&mut self) -> Result<Rings, KernelError> {
        Ok(Rings {
            calls: take(&mut self.ebpf, "CALLS")?,
            life: take(&mut self.ebpf, "LIFE")?,
            stacks: take(&mut self.ebpf, "STACKS")?,
        })
    }

    /// The counters and totals; once.
    pub fn take_counters(&mut self) -> Result<Counters, KernelError> {
        let diagnostics = EbpfLogger::init_with_logger(&mut self.ebpf, ToTracing)
            .inspect_err(|error| info!(%error, "no diagnostics from the kernel half"))
            .ok();
        Ok(Counters {
            loss_totals: take(&mut self.ebpf, "LOSS_TOTALS")?,
            losses: take(&mut self.ebpf, "LOSS_COUNTS")?,
            tensors: take(&mut self.ebpf, "TENSORS")?,
            sites: take(&mut self.ebpf, "SITES")?,
            blocks: take(&mut self.ebpf, "BLOCKS")?,
            diagnostics,
        })
    }

    /// What a hit costs, where meeting a probe costs `trap`; once.
    pub fn take_cost_meter(&mut self, trap: trap::Trap) -> Result<CostMeter, KernelError> {
        Ok(CostMeter::new(take(&mut self.ebpf, "COSTS")?, trap))
    }

    /// The keys that were seen; once.
    pub fn take_seen(&mut self) -> Result<Seen, KernelError> {
        Ok(Seen(take(&mut self.ebpf, "SEEN")?))
    }

    /// What the walk of stacks goes by; once.
    pub fn take_guides(&mut self) -> Result<Guides, KernelError> {
        Ok(Guides {
            python: take(&mut self.ebpf, "PYTHON")?,
            pages: take(&mut self.ebpf, "PAGES")?,
        })
    }

    /// Follows a process's life (`FOLLOW_CHILDREN` or 0) before its first call. What else was set for it
    /// stays.
    pub fn follow(&mut self, tgid: u32, flags: u32) -> Result<(), KernelError> {
        let flags = flags | self.known.get(&tgid, 0).unwrap_or_default();
        self.known.insert(tgid, flags, 0).map_err(map_error("KNOWN"))
    }

    /// Whether the calling thread may put probes in and use maps; what it lacks depends on the kernel.
    /// No probe is put in.
    pub fn may_attach(&self) -> bool {
        let links = self
            .multi
            .as_ref()
            .map_or_else(trap::may_probe, |programs| programs.iter().all(MultiProgram::may_attach));
        links && self.armed.get(&0, 0).is_ok()
    }

    /// Keeps no more than the totals of a process's `PyTorch` blocks from here on. One that has ended
    /// needs nothing.
    pub fn only_totals(&mut self, tgid: u32) {
        if let Ok(flags) = self.known.get(&tgid, 0) {
            drop(self.known.insert(tgid, flags | TOTALS_ONLY, BPF_EXIST));
        }
    }

    /// Limits what one user may add to the ring of calls, or lifts the limits.
    pub fn set_quota(&mut self, quota: Quota) -> Result<(), KernelError> {
        let words: [u64; QUOTA_WORDS] = zerocopy::transmute!(quota);
        self.quota.set(0, words, 0).map_err(map_error("QUOTA"))
    }
}

/// Says which words of their structures the rows want.
fn tell_structures(ebpf: &mut Ebpf) -> Result<(), KernelError> {
    let mut structures: Array<MapData, [u32; STRUCTURE_WORDS]> = take(ebpf, "STRUCTURES")?;
    for (row, probe) in probes::rows() {
        if let Some(structure) = probe.structure() {
            let words: [u32; STRUCTURE_WORDS] = zerocopy::transmute!(structure);
            structures.set(u32::from(row), words, 0).map_err(map_error("STRUCTURES"))?;
        }
    }
    Ok(())
}

/// `include/uapi/linux/bpf.h`: only where the key is there.
const BPF_EXIST: u64 = 2;
