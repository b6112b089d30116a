//! Who a process is: the row of `processes`.

use std::os::unix::ffi::OsStrExt as _;

use ledger::{call::ProcId, rows::ProcessRow};

use super::{Cgroup, Env, Host, TICK_NS, command, text};

/// Longest command line that is read.
const CMDLINE_LIMIT: u64 = 64 << 10;

/// How much of the command line goes into the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandDetail {
    /// Program and script path or module only: arguments may hold secrets.
    Redacted,
    /// Every argument.
    Whole,
}

/// What is known of a process.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its row; `ts_ns`, `end_ns`, `exit_code`, `attached_ns`, `from_start` and `detail` are the
    /// caller's to fill in.
    pub row: ProcessRow,
    /// The allow-listed environment.
    pub env: Env,
    /// Its place in the cgroup trees.
    pub cgroup: Cgroup,
}

impl Host {
    /// The key of this life of a pid; `None` once the process is gone.
    pub fn proc_id(&self, pid: u32) -> Option<ProcId> {
        Some(ProcId::new(&self.boot_id, pid, self.stat(pid)?.start_ticks))
    }

    /// Reads who a process is; `None` where it is gone, or its pid was reused meanwhile.
    pub fn identity(&self, pid: u32, detail: CommandDetail) -> Option<Identity> {
        let stat = self.stat(pid)?;
        let status = self.read_process(pid, "status", super::TEXT_LIMIT).unwrap_or_default();
        let env = self.env(pid).unwrap_or_default();
        let cgroup = self.cgroup(pid).unwrap_or_default();
        let exe = std::fs::read_link(self.process_path(pid, "exe")).ok();
        let exe_bytes = exe.as_ref().map(|path| path.as_os_str().as_bytes());
        let cmdline = self.read_process(pid, "cmdline", CMDLINE_LIMIT).unwrap_or_default();
        let last_number = |key: &str| text::values(&status, key)?.last()?.parse().ok();
        let row = ProcessRow {
            proc_id: ProcId::new(&self.boot_id, pid, stat.start_ticks).0,
            pid: i32::try_from(pid).ok()?,
            ns_pid: last_number("NSpid"),
            ppid: i32::try_from(stat.ppid).ok(),
            uid: text::field(&status, "Uid").and_then(|uid| uid.parse::<u32>().ok()).map(signed),
            comm: stat.comm,
            exe: exe_bytes.map(|path| text::clean(path, 4096)),
            command: match detail {
                CommandDetail::Redacted => command::redacted(&cmdline, exe_bytes),
                CommandDetail::Whole => command::whole(&cmdline),
            },
            container_id: cgroup.container_id.clone(),
            pod_uid: cgroup.pod_uid.clone(),
            start_ns: self.start_ns(stat.start_ticks),
            host: self.name.clone(),
            ..from_env(&env, &cgroup)
        };
        // The files above are read one by one: only if the pid still is the same process do they
        // belong together.
        let unchanged = self.stat(pid)?.start_ticks == stat.start_ticks;
        unchanged.then_some(Identity { row, env, cgroup })
    }

    /// When a process started, nanoseconds since the epoch.
    fn start_ns(&self, start_ticks: u64) -> Option<i64> {
        let after_boot = i64::try_from(start_ticks.checked_mul(TICK_NS)?).ok()?;
        self.boot_ns?.checked_add(after_boot)
    }
}

/// The fields of the row that the environment (or, for the job, the cgroup) tells.
fn from_env(env: &Env, cgroup: &Cgroup) -> ProcessRow {
    let owned = |value: Option<&str>| value.map(str::to_owned);
    ProcessRow {
        rank: env.rank(),
        local_rank: env.local_rank(),
        world_size: env.world_size(),
        job: owned(env.job()).or_else(|| cgroup.slurm_job.clone()),
        cuda_visible_devices: owned(env.get("CUDA_VISIBLE_DEVICES")),
        cuda_device_order: owned(env.get("CUDA_DEVICE_ORDER")),
        torch_alloc_conf: owned(env.torch_alloc_conf()),
        ..ProcessRow::default()
    }
}

/// User ids are unsigned, columns are not; the bits are kept (4294967295, the overflow id, is -1).
fn signed(uid: u32) -> i32 {
    uid.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    fn tree() -> Tree {
        let tree = Tree::new();
        tree.write("proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n");
        tree.write("proc/sys/kernel/hostname", "node7\n");
        tree.write("proc/stat", "cpu  1 2 3 4\nbtime 1700000000\n");
        tree.write("proc/42/stat", Tree::stat_line(42, "python3", 7, 12_345));
        tree.write("proc/42/status", "Name:\tpython3\nUid:\t1000\t0\t0\t0\nNSpid:\t42\t9\t3\n");
        tree.write("proc/42/cmdline", "python3\0train.py\0--key\0SECRET\0");
        tree.write(
            "proc/42/environ",
            "RANK=2\0WORLD_SIZE=4\0TOKEN=SECRET\0CUDA_VISIBLE_DEVICES=1\0",
        );
        tree.write("proc/42/cgroup", "0::/system.slice/slurmstepd.scope/job_77/step_0\n");
        tree.link("/usr/bin/python3.11", "proc/42/exe");
        tree
    }

    #[test]
    fn a_row_tells_who_the_process_is() {
        let tree = tree();
        let host = tree.host();
        let identity = host.identity(42, CommandDetail::Redacted).unwrap();
        let row = &identity.row;
        assert_eq!(row.proc_id, ProcId::new("11111111-2222-3333-4444-555555555555", 42, 12_345).0);
        assert_eq!(Some(ProcId(row.proc_id)), host.proc_id(42));
        assert_eq!((row.pid, row.ns_pid, row.ppid, row.uid), (42, Some(3), Some(7), Some(1000)));
        assert_eq!(row.comm, "python3");
        assert_eq!(row.exe.as_deref(), Some("/usr/bin/python3.11"));
        assert_eq!(row.command.as_deref(), Some("python3 train.py"));
        assert_eq!((row.rank, row.local_rank, row.world_size), (Some(2), None, Some(4)));
        assert_eq!(row.job.as_deref(), Some("77"));
        assert_eq!(row.cuda_visible_devices.as_deref(), Some("1"));
        assert_eq!(row.start_ns, Some(1_700_000_123_450_000_000));
        assert_eq!(row.host, "node7");
        assert!(!format!("{identity:?}").contains("SECRET"));
    }

    #[test]
    fn the_whole_command_is_shown_on_demand_only() {
        let tree = tree();
        let row = tree.host().identity(42, CommandDetail::Whole).unwrap().row;
        assert_eq!(row.command.as_deref(), Some("python3 train.py --key SECRET"));
    }

    #[test]
    fn unreadable_files_leave_unknown_fields() {
        let tree = Tree::new();
        tree.write("proc/42/stat", Tree::stat_line(42, "x", 1, 5));
        let row = tree.host().identity(42, CommandDetail::Redacted).unwrap().row;
        assert_eq!((row.ns_pid, row.uid, row.start_ns), (None, None, None));
        assert_eq!((row.exe, row.command, row.container_id), (None, None, None));
        assert!(tree.host().identity(43, CommandDetail::Redacted).is_none());
    }
}
