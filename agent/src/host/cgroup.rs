//! Container, pod and Slurm job of a process from its `/proc/PID/cgroup`.

use super::{Host, text};

/// Where a process stands in the cgroup trees, and what the names on the way tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// Id (or name, for LXC) of the innermost container.
    pub container_id: Option<String>,
    /// UID of the Kubernetes pod, with dashes.
    pub pod_uid: Option<String>,
    /// Number of the Slurm job.
    pub slurm_job: Option<String>,
    /// Path of the container's cgroup in the v2 tree; `None` where the process has no container
    /// there.
    pub v2_path: Option<String>,
    /// Controllers and path of the container's cgroup in each v1 tree.
    pub v1_paths: Vec<(String, String)>,
}

impl Host {
    /// The cgroups of a process.
    pub fn cgroup(&self, pid: u32) -> Option<Cgroup> {
        self.read_process(pid, "cgroup", super::TEXT_LIMIT).map(|content| parse(&content))
    }
}

/// Parses a `/proc/PID/cgroup`: one line `number:controllers:path` for each tree, 0 being v2.
///
/// The trees of one process normally tell the same; the first that names a container holds.
pub fn parse(content: &[u8]) -> Cgroup {
    let mut found = Cgroup::default();
    for line in content.split(|byte| *byte == b'\n') {
        let Ok(line) = std::str::from_utf8(line) else { continue };
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        found.take_path(path);
        let Some(directory) = container_directory(path) else { continue };
        if number == "0" && controllers.is_empty() {
            found.v2_path = Some(directory.to_owned());
        } else {
            found.v1_paths.push((controllers.to_owned(), directory.to_owned()));
        }
    }
    found
}

impl Cgroup {
    /// Takes what the path names and no earlier one did.
    fn take_path(&mut self, path: &str) {
        let innermost = |what: fn(&str) -> Option<String>| path.rsplit('/').find_map(what);
        self.container_id = self.container_id.take().or_else(|| innermost(container_id));
        self.pod_uid = self.pod_uid.take().or_else(|| innermost(pod_uid));
        self.slurm_job = self.slurm_job.take().or_else(|| innermost(slurm_job));
    }
}

/// The path down to the innermost component that names a container. A path that leaves the
/// agent's own cgroup namespace (`/../..`) cannot be followed from here.
fn container_directory(path: &str) -> Option<&str> {
    if path.split('/').any(|component| component == "..") {
        return None;
    }
    let mut end = path.len();
    for component in path.rsplit('/') {
        if container_id(component).is_some() {
            return path.get(..end);
        }
        end = end.checked_sub(component.len() + 1)?;
    }
    None
}

/// The container that one path component names:
/// `ID` (cgroupfs drivers), `docker-ID.scope`, `cri-containerd-ID.scope`, `crio-ID.scope`,
/// `libpod-ID.scope` (systemd drivers), `…slice:cri-containerd:ID` (containerd under a systemd
/// kubelet), `TASK-NUMBER` (ECS Fargate), `lxc.payload.NAME`.
/// The monitors `crio-conmon-ID` and `libpod-conmon-ID` are outside the container.
fn container_id(component: &str) -> Option<String> {
    if let Some(name) = component.strip_prefix("lxc.payload.") {
        return (!name.is_empty()).then(|| text::clean(name.as_bytes(), 128));
    }
    if component.contains("-conmon-") {
        return None;
    }
    let name = component.strip_suffix(".scope").unwrap_or(component);
    let last = name.rsplit([':', '-']).next()?;
    if last.len() == 64 && is_hex(last) {
        return Some(last.to_owned());
    }
    let (task, number) = name.split_once('-')?;
    let fargate = task.len() == 32
        && is_hex(task)
        && (6..=16).contains(&number.len())
        && number.bytes().all(|byte| byte.is_ascii_digit());
    fargate.then(|| name.to_owned())
}

/// The pod that one path component names: `podUID` (cgroupfs) or `kubepods-burstable-podUID.slice`
/// with underscores for dashes (systemd). Static pods have a UID of 32 digits without dashes.
fn pod_uid(component: &str) -> Option<String> {
    let at = component.rfind("pod")?;
    let before = component.get(..at)?;
    if !(before.is_empty() || before.ends_with('-')) {
        return None;
    }
    let uid: String = component
        .get(at + 3..)?
        .chars()
        .take_while(|c| matches!(c, '0'..='9' | 'a'..='f' | '-' | '_'))
        .map(|c| if c == '_' { '-' } else { c })
        .collect();
    matches!(uid.len(), 32..=36).then_some(uid)
}

/// The Slurm job that one path component names: `job_NUMBER`.
fn slurm_job(component: &str) -> Option<String> {
    let number = component.strip_prefix("job_")?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| number.to_owned())
}

fn is_hex(word: &str) -> bool {
    word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const OUTER: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
    const POD: &str = "2c48913c-b29f-11e7-9350-020968147796";
    const STATIC_POD: &str = "5f3c1e0f9a7b4c2d8e6f0a1b2c3d4e5f";
    const TASK: &str = "0123456789abcdef0123456789abcdef";

    /// Replaces the names of identifiers in a layout by the identifiers.
    fn fill(layout: &str) -> String {
        layout
            .replace("OUTER", OUTER)
            .replace("PODU", &POD.replace('-', "_"))
            .replace("STATIC", STATIC_POD)
            .replace("POD", POD)
            .replace("TASK", TASK)
            .replace("ID", ID)
    }

    #[test]
    fn every_layout_tells_its_container_and_pod() {
        // Layout, container, pod, Slurm job, directory of the container.
        type Case =
            (&'static str, Option<&'static str>, Option<&'static str>, Option<&'static str>);
        let cases: &[Case] = &[
            // cgroupfs driver
            ("/kubepods/burstable/podPOD/ID", Some(ID), Some(POD), None),
            ("/kubepods/podPOD/ID", Some(ID), Some(POD), None),
            ("/kubepods/besteffort/podSTATIC/ID", Some(ID), Some(STATIC_POD), None),
            ("/docker/ID", Some(ID), None, None),
            ("/libpod_parent/libpod-ID", Some(ID), None, None),
            // systemd driver
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podPODU.slice/cri-containerd-ID.scope",
                Some(ID),
                Some(POD),
                None,
            ),
            ("/kubepods.slice/kubepods-podPODU.slice/crio-ID.scope", Some(ID), Some(POD), None),
            (
                "/kubepods.slice/kubepods-podPODU.slice/crio-ID.scope/container",
                Some(ID),
                Some(POD),
                None,
            ),
            (
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
                 kubelet-kubepods-besteffort-podPODU.slice/cri-containerd-ID.scope",
                Some(ID),
                Some(POD),
                None,
            ),
            ("/kubepods.slice/kubepods-podPODU.slice/docker-ID.scope", Some(ID), Some(POD), None),
            ("/system.slice/docker-ID.scope", Some(ID), None, None),
            ("/machine.slice/libpod-ID.scope/container", Some(ID), None, None),
            (
                "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope",
                Some(ID),
                None,
                None,
            ),
            (
                "/system.slice/containerd.service/kubepods-burstable-podPODU.slice:cri-containerd:ID",
                Some(ID),
                Some(POD),
                None,
            ),
            // inside a container: systemd of its own, or a cluster in a container
            ("/docker/ID/init.scope", Some(ID), None, None),
            ("/docker/OUTER/kubelet/kubepods/burstable/podPOD/ID", Some(ID), Some(POD), None),
            // Amazon
            ("/ecs/TASK/ID", Some(ID), None, None),
            ("/ecs/cluster/TASK/TASK-1234567890", Some("TASK-1234567890"), None, None),
            // LXC
            ("/lxc.payload.web/system.slice/x.service", Some("web"), None, None),
            // monitors are outside
            ("/machine.slice/libpod-conmon-ID.scope", None, None, None),
            ("/kubepods.slice/kubepods-podPODU.slice/crio-conmon-ID.scope", None, Some(POD), None),
            // Slurm
            ("/slurm/uid_1000/job_42/step_0/task_1", None, None, Some("42")),
            ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", None, None, Some("42")),
            // none
            ("/", None, None, None),
            ("/user.slice/user-1000.slice/session-3.scope", None, None, None),
            ("/tripod0123456789abcdef0123456789abcdef0123", None, None, None),
            ("/system.slice/job_control.service", None, None, None),
        ];
        for (layout, container, pod, job) in cases {
            let expected = container.map(fill);
            for line in ["0::", "4:memory:"] {
                let found = parse(fill(&format!("{line}{layout}\n")).as_bytes());
                assert_eq!(found.container_id, expected, "{layout}");
                assert_eq!(found.pod_uid.as_deref(), *pod, "{layout}");
                assert_eq!(found.slurm_job.as_deref(), *job, "{layout}");
            }
        }
    }

    #[test]
    fn directories_end_at_the_container() {
        let content = fill(
            "12:pids:/docker/ID\n4:memory:/docker/ID/init.scope\n3:cpu,cpuacct:/docker/ID\n\
             1:name=systemd:/docker/ID/init.scope\n0::/system.slice/docker-ID.scope/a/b (deleted)\n",
        );
        let found = parse(content.as_bytes());
        assert_eq!(found.container_id.as_deref(), Some(ID));
        assert_eq!(found.v2_path, Some(fill("/system.slice/docker-ID.scope")));
        assert!(found.v1_paths.contains(&("memory".to_owned(), fill("/docker/ID"))));
        assert!(found.v1_paths.contains(&("cpu,cpuacct".to_owned(), fill("/docker/ID"))));
    }

    #[test]
    fn a_path_outside_the_agents_namespace_names_a_container_without_a_directory() {
        let found =
            parse(fill("0::/../../kubepods-podPODU.slice/cri-containerd-ID.scope").as_bytes());
        assert_eq!(found.container_id.as_deref(), Some(ID));
        assert_eq!(found.v2_path, None);
    }

    #[test]
    fn nonsense_gives_nothing() {
        for content in [&b""[..], b"\n\n", b"0", b"0:", b"x:y:\xff\xff", b"0::docker"] {
            assert_eq!(parse(content), Cgroup::default(), "{content:?}");
        }
    }
}
