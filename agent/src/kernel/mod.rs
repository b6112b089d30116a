//! The kernel half, loaded: the only place that uses `aya::Ebpf`.

pub mod btf;
mod multi;
pub mod returns;
pub mod sign;

use std::{io, num::NonZeroU32, os::fd::OwnedFd, path::Path};

use agent_common::{
    call::Structure,
    cookie::Cookie,
    loss::{LOSSES, Loss},
    python::PythonConfig,
    scope::{ANYBODY, NOBODY},
    stack::{ExecutablePages, WANTED},
    tensor::{Block, BlockKey, SiteKey, SiteTotals, TensorKey, TensorTotals},
};
use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{Array, HashMap, MapData, RingBuf},
    programs::{
        ProgramType, RawTracePoint, UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeScope},
    },
    sys::{BpfHelper, is_helper_supported},
};
use aya_log::EbpfLogger;
use thiserror::Error;
use tracing::{info, warn};
use zerocopy::IntoBytes as _;

use self::multi::MultiProgram;
pub use self::multi::supported as has_multi_links;
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
    /// A map operation failed.
    #[error("use the eBPF map {map}")]
    Map {
        /// Its name.
        map: &'static str,
        /// Why.
        source: aya::maps::MapError,
    },
}

/// Probes of one file in one scope; dropping them detaches, which can wait for the kernel.
#[derive(Debug, Default)]
pub struct Links {
    multi: Vec<OwnedFd>,
    single: Vec<UProbeLink>,
}

impl Links {
    /// Each of them alone: the kernel waits at each that goes, and can wait for all at once.
    pub fn split(self) -> impl Iterator<Item = Self> {
        let multi = self.multi.into_iter().map(|link| Self { multi: vec![link], single: vec![] });
        let single = (!self.single.is_empty()).then_some(self.single);
        multi.chain(single.map(|single| Self { multi: Vec::new(), single }))
    }
}

/// A row of the probe table and where its function starts in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// Row of the probe table.
    pub row: u8,
    /// Offset in the file.
    pub offset: u64,
}

/// Whose calls a probe reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every process that maps the file.
    Host,
    /// One process (its task, so an exec keeps it; a fork does not).
    Process(NonZeroU32),
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
const PYTHON_WORDS: usize = size_of::<PythonConfig>() / 8;
const PAGES_WORDS: usize = size_of::<ExecutablePages>() / 8;
const STRUCTURE_WORDS: usize = size_of::<Structure>() / 4;

/// The loaded programs and the maps that are written from here.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Kernel {
    ebpf: Ebpf,
    /// As [`UPROBES`]; `None` where this kernel has no multi links.
    multi: Option<[MultiProgram; UPROBES.len()]>,
    armed: Array<MapData, u32>,
    next_slot: u16,
    known: HashMap<MapData, u32, u32>,
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
        Ok(Self { ebpf, multi, armed, next_slot: 0, known })
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

    /// Follows a process's life (`FOLLOW_CHILDREN` or 0) before its first call.
    pub fn follow(&mut self, tgid: u32, flags: u32) -> Result<(), KernelError> {
        self.known.insert(tgid, flags, 0).map_err(map_error("KNOWN"))
    }

    /// Whether the calling thread may put probes in and use maps; what it lacks depends on the kernel.
    /// No probe is put in.
    pub fn may_attach(&self) -> bool {
        let links = self.multi.as_ref().map_or_else(returns::may_probe, |programs| {
            programs.iter().all(MultiProgram::may_attach)
        });
        links && self.armed.get(&0, 0).is_ok()
    }

    /// Attaches every site's programs; all or none. Calls count from when the last one is in place.
    pub fn attach(
        &mut self,
        file: &Path,
        sites: &[Site],
        scope: Scope,
    ) -> Result<Links, KernelError> {
        let slot = self.next_slot;
        self.next_slot = slot.wrapping_add(1);
        self.arm(slot, NOBODY)?;
        let links = if self.multi.is_some() {
            self.attach_multi(file, sites, scope, slot)
        } else {
            self.attach_single(file, sites, scope, slot)
        }?;
        let whose = match scope {
            Scope::Host => ANYBODY,
            Scope::Process(pid) => pid.get(),
        };
        self.arm(slot, whose)?;
        Ok(links)
    }

    fn arm(&mut self, slot: u16, whose: u32) -> Result<(), KernelError> {
        self.armed.set(u32::from(slot), whose, 0).map_err(map_error("ARMED"))
    }

    /// A link for all entries, one for all returns.
    fn attach_multi(
        &self,
        file: &Path,
        sites: &[Site],
        scope: Scope,
        slot: u16,
    ) -> Result<Links, KernelError> {
        let Some(programs) = &self.multi else {
            return Err(KernelError::Part("programs for multi links"));
        };
        let pid = match scope {
            Scope::Host => None,
            Scope::Process(pid) => Some(pid.get()),
        };
        let mut links = Links::default();
        for (program, (_, returns)) in programs.iter().zip(UPROBES) {
            let (offsets, cookies): (Vec<u64>, Vec<u64>) = probed(sites, returns, slot)
                .map(|(site, cookie)| (site.offset, cookie.pack()))
                .unzip();
            if !offsets.is_empty() {
                let link = program
                    .attach(file, &offsets, &cookies, pid)
                    .map_err(|source| KernelError::Attach { probes: offsets.len(), source })?;
                links.multi.push(link);
            }
        }
        Ok(links)
    }

    /// A link for each program and function.
    fn attach_single(
        &mut self,
        file: &Path,
        sites: &[Site],
        scope: Scope,
        slot: u16,
    ) -> Result<Links, KernelError> {
        let mut links = Links::default();
        for (name, returns) in UPROBES {
            for (site, cookie) in probed(sites, returns, slot) {
                self.attach_one(name, file, cookie, site.offset, scope, &mut links)?;
            }
        }
        Ok(links)
    }

    fn attach_one(
        &mut self,
        name: &'static str,
        file: &Path,
        cookie: Cookie,
        offset: u64,
        scope: Scope,
        links: &mut Links,
    ) -> Result<(), KernelError> {
        let scope = match scope {
            Scope::Host => UProbeScope::AllProcesses,
            Scope::Process(pid) => UProbeScope::OneProcess(pid),
        };
        let location = UProbeAttachLocation::AbsoluteOffset(offset);
        let point = UProbeAttachPoint { location, cookie: Some(cookie.pack()) };
        let program = program(&mut self.ebpf, name)?;
        let id = program.attach(point, file, scope).map_err(program_error(name))?;
        links.single.push(program.take_link(id).map_err(program_error(name))?);
        Ok(())
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

/// Sites that are probed at entry, or those at return, with their cookies.
fn probed(sites: &[Site], returns: bool, slot: u16) -> impl Iterator<Item = (&Site, Cookie)> {
    sites.iter().filter_map(move |site| {
        let probe = PROBES.get(usize::from(site.row))?;
        let cookie = Cookie { slot, ..probe.cookie(site.row) };
        (!returns || cookie.kind.returns()).then_some((site, cookie))
    })
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut UProbe, KernelError> {
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or(KernelError::Part(name))
}

/// Loss counters and `PyTorch` totals, polled.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Counters {
    loss_totals: Array<MapData, u64>,
    losses: HashMap<MapData, [u32; 2], u64>,
    tensors: HashMap<MapData, [u32; 2], [u64; 10]>,
    sites: HashMap<MapData, [u64; 2], [u64; 10]>,
    blocks: HashMap<MapData, [u64; 2], [u64; 4]>,
    diagnostics: Option<EbpfLogger<ToTracing>>,
}

/// Rare words of the kernel half, never one per event, handed on to our own log.
#[derive(Debug)]
struct ToTracing;

impl log::Log for ToTracing {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        warn!("kernel half: {}", record.args());
    }

    fn flush(&self) {}
}

/// A loss counter of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessLoss {
    /// Process.
    pub tgid: u32,
    /// Reason.
    pub reason: Loss,
    /// Times since the agent started.
    pub count: u64,
}

impl Counters {
    /// Totals by reason, in the order of [`Loss::ALL`].
    pub fn loss_totals(&self) -> Result<[u64; LOSSES], KernelError> {
        let mut totals = [0; LOSSES];
        for (total, reason) in totals.iter_mut().zip(Loss::ALL) {
            *total =
                self.loss_totals.get(&(*reason as u32), 0).map_err(map_error("LOSS_TOTALS"))?;
        }
        Ok(totals)
    }

    /// Hands on what the kernel half had to say.
    pub fn tell_diagnostics(&mut self) {
        if let Some(logger) = &mut self.diagnostics {
            logger.flush();
        }
    }

    /// Counters per process, as far as the kernel had room for them.
    pub fn losses(&self) -> Vec<ProcessLoss> {
        self.losses
            .iter()
            .flatten()
            .filter_map(|([tgid, reason], count)| {
                let reason = *Loss::ALL.get(reason as usize)?;
                Some(ProcessLoss { tgid, reason, count })
            })
            .collect()
    }

    /// `PyTorch` totals per process and device. A copy taken during an update is taken again.
    pub fn tensors(&self) -> Vec<(TensorKey, TensorTotals)> {
        let keys: Vec<[u32; 2]> = self.tensors.keys().flatten().collect();
        keys.into_iter()
            .filter_map(|key| {
                let totals = self.stable_totals(key)?;
                Some((TensorKey { tgid: key[0], ordinal: key[1] }, totals))
            })
            .collect()
    }

    fn stable_totals(&self, key: [u32; 2]) -> Option<TensorTotals> {
        stable(&self.tensors, &key).map(|words| zerocopy::transmute!(words))
    }

    /// `PyTorch`'s blocks summed by process, device and stack.
    pub fn sites(&self) -> Vec<(SiteKey, SiteTotals)> {
        let keys: Vec<[u64; 2]> = self.sites.keys().flatten().collect();
        keys.into_iter()
            .filter_map(|key| {
                let totals = stable(&self.sites, &key)?;
                Some((zerocopy::transmute!(key), zerocopy::transmute!(totals)))
            })
            .collect()
    }

    /// `PyTorch`'s live blocks, as far as they were seen to be handed out.
    pub fn blocks(&self) -> Vec<(BlockKey, Block)> {
        let found = self.blocks.iter().flatten();
        found.map(|(key, block)| (zerocopy::transmute!(key), zerocopy::transmute!(block))).collect()
    }

    /// Drops an ended process's counters.
    pub fn forget(&mut self, tgid: u32) {
        let ours = |keys: Vec<[u32; 2]>| keys.into_iter().filter(move |key| key[0] == tgid);
        for key in ours(self.tensors.keys().flatten().collect()) {
            // Fails only where the entry is gone already.
            drop(self.tensors.remove(&key));
        }
        for key in ours(self.losses.keys().flatten().collect()) {
            drop(self.losses.remove(&key));
        }
        // The process is the lower half of the key's first word.
        let keys: Vec<[u64; 2]> = self.sites.keys().flatten().collect();
        for key in keys.into_iter().filter(|key| key[0] as u32 == tgid) {
            drop(self.sites.remove(&key));
        }
    }

    /// Drops the blocks of ended processes: by process, with when it ended, since its id may have
    /// another owner by now.
    pub fn sweep_blocks(&mut self, ended: &std::collections::HashMap<u32, u64>) {
        let gone = self.blocks().into_iter().filter(|(key, block)| {
            ended.get(&(key.tgid as u32)).is_some_and(|end_ns| block.since_ns <= *end_ns)
        });
        for (key, _) in gone {
            let key: [u64; 2] = zerocopy::transmute!(key);
            drop(self.blocks.remove(&key));
        }
    }
}

/// A value with a version in its first word, odd while it is written. A copy taken during an update
/// is taken again.
fn stable<K: aya::Pod, const N: usize>(
    map: &HashMap<MapData, K, [u64; N]>,
    key: &K,
) -> Option<[u64; N]> {
    for _ in 0..8 {
        let first = map.get(key, 0).ok()?;
        let second = map.get(key, 0).ok()?;
        if first == second && first[0].is_multiple_of(2) {
            return Some(first);
        }
    }
    None
}

/// What the walk of a process's stacks goes by.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Guides {
    python: HashMap<MapData, u32, [u64; PYTHON_WORDS]>,
    pages: HashMap<MapData, u32, [u64; PAGES_WORDS]>,
}

impl Guides {
    /// Says where a process's interpreter is: its Python frames are walked from here on.
    pub fn set_python(&mut self, tgid: u32, config: &PythonConfig) -> Result<(), KernelError> {
        let words: [u64; PYTHON_WORDS] = zerocopy::transmute!(*config);
        self.python.insert(tgid, words, 0).map_err(map_error("PYTHON"))
    }

    /// Drops what was said of a process; that it is gone already is as well.
    pub fn forget(&mut self, tgid: u32) {
        drop(self.python.remove(&tgid));
        drop(self.pages.remove(&tgid));
    }

    /// Says where a process has executable code.
    pub fn set_pages(&mut self, tgid: u32, pages: &ExecutablePages) -> Result<(), KernelError> {
        let words: &[u64; PAGES_WORDS] = zerocopy::transmute_ref!(pages);
        self.pages.insert(tgid, words, 0).map_err(map_error("PAGES"))
    }
}

/// The keys of stacks that the kernel half has met.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Seen(HashMap<MapData, u64, u32>);

impl Seen {
    /// Asks for the stack again at its next meeting, with the large copy.
    pub fn want_large(&mut self, key: u64) {
        // One that fell out meanwhile is sent again anyhow.
        drop(self.0.insert(key, WANTED, BPF_EXIST));
    }
}

/// `include/uapi/linux/bpf.h`: only where the key is there.
const BPF_EXIST: u64 = 2;
