//! What the kernel half counts and what its walk of stacks goes by: maps that are read and written
//! while it runs.

use agent_common::{
    loss::{LOSSES, Loss},
    python::PythonConfig,
    stack::{ExecutablePages, WANTED},
    tensor::{Block, BlockKey, SiteKey, SiteTotals, TensorKey, TensorTotals},
};
use aya::maps::{Array, HashMap, MapData};
use aya_log::EbpfLogger;
use tracing::warn;

use super::{BPF_EXIST, KernelError, map_error};

/// Words of the maps' values, as aya wants them.
const PYTHON_WORDS: usize = size_of::<PythonConfig>() / 8;
const PAGES_WORDS: usize = size_of::<ExecutablePages>() / 8;

/// Loss counters and `PyTorch` totals, polled.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Counters {
    pub(super) loss_totals: Array<MapData, u64>,
    pub(super) losses: HashMap<MapData, [u32; 2], u64>,
    pub(super) tensors: HashMap<MapData, [u32; 2], [u64; 10]>,
    pub(super) sites: HashMap<MapData, [u64; 2], [u64; 10]>,
    pub(super) blocks: HashMap<MapData, [u64; 2], [u64; 4]>,
    pub(super) diagnostics: Option<EbpfLogger<ToTracing>>,
}

/// Rare words of the kernel half, never one per event, handed on to our own log.
#[derive(Debug)]
pub(super) struct ToTracing;

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
    pub(super) python: HashMap<MapData, u32, [u64; PYTHON_WORDS]>,
    pub(super) pages: HashMap<MapData, u32, [u64; PAGES_WORDS]>,
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
pub struct Seen(pub(super) HashMap<MapData, u64, u32>);

impl Seen {
    /// Asks for the stack again at its next meeting, with the large copy.
    pub fn want_large(&mut self, key: u64) {
        // One that fell out meanwhile is sent again anyhow.
        drop(self.0.insert(key, WANTED, BPF_EXIST));
    }
}
