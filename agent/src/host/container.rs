//! A container's figures: rows of `host_samples` with a container.

use std::path::{Path, PathBuf};

use ledger::rows::HostSampleRow;

use super::{Cgroup, Host, system::Space, text};

/// A limit of v1 from this on means none: the kernel rounds the largest signed number down to
/// pages.
const V1_NO_LIMIT: u64 = 1 << 62;

impl Host {
    /// Memory, CPU and shared memory of the container of a process; `None` where it runs in none.
    ///
    /// Limits are the tightest on the way to the root: Kubernetes sets some on the pod. Shared
    /// memory is the process's own `/dev/shm`, where it is one. `ts_ns` is the caller's to fill in.
    pub fn container_sample(&self, pid: u32, cgroup: &Cgroup) -> Option<HostSampleRow> {
        let container_id = cgroup.container_id.clone()?;
        let shm = self.own_shm(pid);
        let row = HostSampleRow {
            container_id: Some(container_id),
            shm_used_bytes: shm.map(|space| space.used),
            shm_limit_bytes: shm.map(|space| space.total),
            ..HostSampleRow::default()
        };
        Some(self.with_v1(cgroup, self.with_v2(cgroup, row)))
    }

    fn with_v2(&self, cgroup: &Cgroup, row: HostSampleRow) -> HostSampleRow {
        let Some(directory) = cgroup.v2_path.as_deref() else { return row };
        // With both versions in use v2 hangs below `unified` and has no controllers.
        let Some(tree) = self.tree("", directory) else { return row };
        let stat = tree.read("cpu.stat").unwrap_or_default();
        let nanoseconds =
            |key: &str| text::field(&stat, key)?.parse::<i64>().ok()?.checked_mul(1000);
        HostSampleRow {
            cpu_ns: nanoseconds("usage_usec"),
            cpus: tree.tightest(|at| whole_cpus(&words(&at.read("cpu.max")?))),
            cpu_throttled_ns: nanoseconds("throttled_usec"),
            memory_used_bytes: tree.number("memory.current"),
            memory_limit_bytes: tree.tightest(|at| at.number("memory.max")),
            ..row
        }
    }

    /// Fills in what the v1 trees tell, where v2 told nothing.
    fn with_v1(&self, cgroup: &Cgroup, row: HostSampleRow) -> HostSampleRow {
        let tree = |controller: &str| {
            let mut trees = cgroup.v1_paths.iter();
            let (_, path) =
                trees.find(|(names, _)| names.split(',').any(|name| name == controller))?;
            self.tree(controller, path)
        };
        let (memory, cpu, usage) = (tree("memory"), tree("cpu"), tree("cpuacct"));
        let (memory, cpu) = (memory.as_ref(), cpu.as_ref());
        let throttled = || -> Option<i64> {
            text::field(&cpu?.read("cpu.stat")?, "throttled_time")?.parse().ok()
        };
        let quota = |at: &Tree| {
            let mut both = words(&at.read("cpu.cfs_quota_us")?);
            both.extend(words(&at.read("cpu.cfs_period_us")?));
            whole_cpus(&both)
        };
        let limit = |at: &Tree| {
            at.number("memory.limit_in_bytes").filter(|bytes| (*bytes as u64) < V1_NO_LIMIT)
        };
        HostSampleRow {
            cpu_ns: row.cpu_ns.or_else(|| usage?.number("cpuacct.usage")),
            cpus: row.cpus.or_else(|| cpu?.tightest(quota)),
            cpu_throttled_ns: row.cpu_throttled_ns.or_else(throttled),
            memory_used_bytes: row
                .memory_used_bytes
                .or_else(|| memory?.number("memory.usage_in_bytes")),
            memory_limit_bytes: row.memory_limit_bytes.or_else(|| memory?.tightest(limit)),
            ..row
        }
    }

    /// A cgroup below the mount of its tree: `/sys/fs/cgroup`, or `/sys/fs/cgroup/CONTROLLER`.
    fn tree(&self, controller: &str, path: &str) -> Option<Tree> {
        let mount = self.path("sys/fs/cgroup").join(controller);
        let directory = mount.join(path.trim_start_matches('/'));
        directory.is_dir().then_some(Tree { mount, directory })
    }

    /// Space of the process's own `/dev/shm`, if that is a `tmpfs`: asking a file system that
    /// another process serves could take for ever.
    fn own_shm(&self, pid: u32) -> Option<Space> {
        let mounts = self.read_process(pid, "mountinfo", super::TEXT_LIMIT)?;
        if !mounts.split(|byte| *byte == b'\n').any(is_shm) {
            return None;
        }
        let found = self.find_in_root(pid, Path::new("dev/shm"))?;
        Space::of(&rustix::fs::fstatvfs(found).ok()?)
    }
}

/// Whether a line of `mountinfo` mounts a `tmpfs` on `/dev/shm`: field 5 is the mount point, the
/// type follows the dash.
pub(super) fn is_shm(line: &[u8]) -> bool {
    let mut words = line.split(|byte| *byte == b' ');
    words.nth(4) == Some(b"/dev/shm")
        && words.find(|word| *word == b"-").is_some()
        && words.next() == Some(b"tmpfs")
}

/// One cgroup, and where its tree begins.
struct Tree {
    mount: PathBuf,
    directory: PathBuf,
}

impl Tree {
    fn read(&self, file: &str) -> Option<Vec<u8>> {
        text::read_bounded(&self.directory.join(file), super::TEXT_LIMIT)
    }

    fn number(&self, file: &str) -> Option<i64> {
        std::str::from_utf8(&self.read(file)?).ok()?.trim().parse().ok()
    }

    /// The smallest value of this cgroup and those above it; the root has no limits.
    fn tightest<T: Ord>(&self, of: impl Fn(&Self) -> Option<T>) -> Option<T> {
        let above = self.directory.ancestors().take_while(|at| *at != self.mount);
        above
            .filter_map(|at| of(&Self { mount: self.mount.clone(), directory: at.to_path_buf() }))
            .min()
    }
}

fn words(content: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(content).split_ascii_whitespace().map(str::to_owned).collect()
}

/// CPUs that a quota and a period (`max 100000`, `150000 100000`, v1: `-1`) allow, rounded up.
fn whole_cpus(quota_and_period: &[String]) -> Option<i32> {
    let [quota, period] = quota_and_period else { return None };
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    if period == 0 {
        return None;
    }
    i32::try_from(quota.div_ceil(period)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{parse_cgroup, testing};

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn v2_with_limits_of_pod_and_container() {
        let tree = testing::Tree::new();
        let pod = "sys/fs/cgroup/kubepods.slice/kubepods-pod1.slice";
        let own = format!("{pod}/cri-containerd-{ID}.scope");
        tree.write(&format!("{pod}/memory.max"), "4096\n");
        tree.write(&format!("{pod}/cpu.max"), "max 100000\n");
        tree.write(&format!("{own}/memory.max"), "max\n");
        tree.write(&format!("{own}/memory.current"), "1024\n");
        tree.write(&format!("{own}/cpu.max"), "150000 100000\n");
        tree.write(&format!("{own}/cpu.stat"), "usage_usec 5\nuser_usec 3\nthrottled_usec 2\n");
        tree.write("sys/fs/cgroup/memory.max", "1\n");
        let path = own.strip_prefix("sys/fs/cgroup").unwrap();
        let cgroup = parse_cgroup(format!("0::{path}/init.scope\n").as_bytes());
        let row = tree.host().container_sample(42, &cgroup).unwrap();
        let expected = HostSampleRow {
            container_id: Some(ID.to_owned()),
            cpu_ns: Some(5000),
            cpus: Some(2),
            cpu_throttled_ns: Some(2000),
            memory_used_bytes: Some(1024),
            memory_limit_bytes: Some(4096),
            ..HostSampleRow::default()
        };
        assert_eq!(row, expected);
    }

    #[test]
    fn v1_with_and_without_limits() {
        let tree = testing::Tree::new();
        let write = |controller: &str, file: &str, content: &str| {
            tree.write(&format!("sys/fs/cgroup/{controller}/docker/{ID}/{file}"), content);
        };
        write("memory", "memory.usage_in_bytes", "77\n");
        write("memory", "memory.limit_in_bytes", "9223372036854771712\n");
        write("cpu", "cpu.cfs_quota_us", "200000\n");
        write("cpu", "cpu.cfs_period_us", "100000\n");
        write("cpu", "cpu.stat", "nr_periods 1\nthrottled_time 33\n");
        write("cpuacct", "cpuacct.usage", "11\n");
        let cgroup = format!("4:memory:/docker/{ID}\n3:cpu,cpuacct:/docker/{ID}\n0::/\n");
        let cgroup = parse_cgroup(cgroup.as_bytes());
        let row = tree.host().container_sample(42, &cgroup).unwrap();
        assert_eq!((row.memory_used_bytes, row.memory_limit_bytes), (Some(77), None));
        assert_eq!((row.cpus, row.cpu_throttled_ns, row.cpu_ns), (Some(2), Some(33), Some(11)));
        write("cpu", "cpu.cfs_quota_us", "-1\n");
        write("memory", "memory.limit_in_bytes", "99\n");
        let row = tree.host().container_sample(42, &cgroup).unwrap();
        assert_eq!((row.memory_limit_bytes, row.cpus), (Some(99), None));
    }

    #[test]
    fn shared_memory_is_the_process_own_tmpfs() {
        let tree = testing::Tree::new();
        tree.write("proc/42/root/dev/shm/x", "");
        let cgroup = parse_cgroup(format!("0::/docker/{ID}\n").as_bytes());
        let shm = || tree.host().container_sample(42, &cgroup).unwrap().shm_limit_bytes;
        assert_eq!(shm(), None);
        tree.write("proc/42/mountinfo", "9 8 0:1 / /dev/shm rw master:1 - fuse.evil evil rw\n");
        assert_eq!(shm(), None);
        tree.write("proc/42/mountinfo", "9 8 0:1 / /dev/shm rw master:1 - tmpfs shm rw\n");
        assert!(shm().is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn no_container_is_no_row() {
        let tree = testing::Tree::new();
        assert_eq!(tree.host().container_sample(42, &parse_cgroup(b"0::/user.slice\n")), None);
    }

    #[test]
    fn quotas_round_up() {
        let cpus = |text: &str| whole_cpus(&words(text.as_bytes()));
        assert_eq!(cpus("150000 100000"), Some(2));
        assert_eq!(cpus("50000 100000"), Some(1));
        assert_eq!(cpus("max 100000"), None);
        assert_eq!(cpus("-1 100000"), None);
        assert_eq!(cpus("1 0"), None);
        assert_eq!(cpus(""), None);
    }
}
