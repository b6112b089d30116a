//! The allow-listed part of a process's environment: ranks, job, GPUs, settings of the allocator and
//! of UCX.
//!
//! `/proc/PID/environ` holds secrets; no key beside [`ALLOWED`] is ever kept.

use std::collections::BTreeMap;

use super::{Host, text};

/// The only variables that are read.
pub const ALLOWED: &[&str] = &[
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "JOB_COMPLETION_INDEX",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "UCX_MEM_CUDA_HOOK_MODE",
];

/// What CUDA's numbering of devices goes by.
const DEVICES: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];

/// Rank, local rank and world size by launcher, most specific first. The three numbers of a
/// process come from one launcher: under `srun torchrun` Slurm counts nodes, torchrun ranks.
const LAUNCHERS: &[[Option<&'static str>; 3]] = &[
    [Some("RANK"), Some("LOCAL_RANK"), Some("WORLD_SIZE")],
    [
        Some("OMPI_COMM_WORLD_RANK"),
        Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        Some("OMPI_COMM_WORLD_SIZE"),
    ],
    [Some("PMI_RANK"), None, Some("PMI_SIZE")],
    [Some("SLURM_PROCID"), Some("SLURM_LOCALID"), Some("SLURM_NTASKS")],
    [Some("JOB_COMPLETION_INDEX"), None, None],
];

/// Longest environment that is searched. The kernel allows a quarter of the stack limit, 2 MiB by
/// default.
const ENVIRON_LIMIT: u64 = 8 << 20;

/// The allow-listed variables of one process as they were at exec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Env(BTreeMap<&'static str, String>);

impl Env {
    /// Takes the allow-listed variables out of `NAME=value` strings separated by NUL. Of a name
    /// that stands twice the first holds, as for `getenv`.
    pub fn parse(environ: &[u8]) -> Self {
        let mut found = BTreeMap::new();
        for entry in environ.split(|byte| *byte == 0) {
            let Some(equals) = entry.iter().position(|byte| *byte == b'=') else { continue };
            let (name, value) = entry.split_at(equals);
            let Some(key) = ALLOWED.iter().find(|key| key.as_bytes() == name) else { continue };
            let value = value.get(1..).unwrap_or_default();
            found.entry(*key).or_insert_with(|| text::clean(value, 4096));
        }
        Self(found)
    }

    /// Whether CUDA makes the same devices of both.
    pub fn same_devices(&self, other: &Self) -> bool {
        DEVICES.iter().all(|name| self.get(name) == other.get(name))
    }

    /// The value of one variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Rank in the job.
    pub fn rank(&self) -> Option<i32> {
        self.launcher_number(0)
    }

    /// Rank on this host.
    pub fn local_rank(&self) -> Option<i32> {
        self.launcher_number(1)
    }

    /// Ranks of the job.
    pub fn world_size(&self) -> Option<i32> {
        self.launcher_number(2)
    }

    /// What names the job: torchrun's run id (its default, `none`, names nothing), else the Slurm
    /// job id.
    pub fn job(&self) -> Option<&str> {
        let run = self.get("TORCHELASTIC_RUN_ID").filter(|run| !run.is_empty() && *run != "none");
        run.or_else(|| self.get("SLURM_JOB_ID").filter(|job| !job.is_empty()))
    }

    /// Settings of PyTorch's allocator; the newer name holds where both are set.
    pub fn torch_alloc_conf(&self) -> Option<&str> {
        self.get("PYTORCH_ALLOC_CONF").or_else(|| self.get("PYTORCH_CUDA_ALLOC_CONF"))
    }

    /// A number of the first launcher that gave this process a rank.
    fn launcher_number(&self, which: usize) -> Option<i32> {
        let number = |name: &str| self.get(name)?.trim().parse::<i32>().ok().filter(|n| *n >= 0);
        let named = |keys: &[Option<&'static str>; 3], at: usize| keys.get(at).copied().flatten();
        let keys = LAUNCHERS.iter().find(|keys| named(keys, 0).and_then(number).is_some())?;
        named(keys, which).and_then(number)
    }
}

impl Host {
    /// The allow-listed environment of a process.
    pub fn env(&self, pid: u32) -> Option<Env> {
        self.read_process(pid, "environ", ENVIRON_LIMIT).map(|environ| Env::parse(&environ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(text: &str) -> Env {
        Env::parse(text.replace(' ', "\0").as_bytes())
    }

    #[test]
    fn only_allowed_keys_are_kept() {
        let kept = env("RANK=3 AWS_SECRET_ACCESS_KEY=x RANKS=9 =x LOCAL_RANK");
        assert_eq!(kept.0.len(), 1);
        assert!(!format!("{kept:?}").contains("SECRET"));
    }

    #[test]
    fn numbers_come_from_one_launcher() {
        type Case = (&'static str, Option<i32>, Option<i32>, Option<i32>);
        let cases: &[Case] = &[
            ("RANK=3 LOCAL_RANK=1 WORLD_SIZE=8", Some(3), Some(1), Some(8)),
            ("RANK=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2", Some(3), None, None),
            (
                "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=6",
                Some(5),
                Some(1),
                Some(6),
            ),
            ("PMI_RANK=2 PMI_SIZE=4", Some(2), None, Some(4)),
            ("SLURM_PROCID=7 SLURM_LOCALID=3 SLURM_NTASKS=16", Some(7), Some(3), Some(16)),
            ("JOB_COMPLETION_INDEX=2", Some(2), None, None),
            ("RANK=x PMI_RANK=1", Some(1), None, None),
            ("RANK=-1", None, None, None),
            ("RANK=99999999999", None, None, None),
            ("WORLD_SIZE=8", None, None, None),
        ];
        for (text, rank, local, world) in cases {
            let env = env(text);
            assert_eq!((env.rank(), env.local_rank(), env.world_size()), (*rank, *local, *world));
        }
    }

    #[test]
    fn the_first_of_a_doubled_name_holds() {
        assert_eq!(env("RANK=1 RANK=2").rank(), Some(1));
    }

    #[test]
    fn job_names() {
        assert_eq!(env("TORCHELASTIC_RUN_ID=abc SLURM_JOB_ID=7").job(), Some("abc"));
        assert_eq!(env("TORCHELASTIC_RUN_ID=none SLURM_JOB_ID=7").job(), Some("7"));
        assert_eq!(env("TORCHELASTIC_RUN_ID=none").job(), None);
    }
}
