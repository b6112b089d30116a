//! Whether return probes kill processes under a seccomp filter on this kernel.
//!
//! From 6.11 on x86-64 returns from a probed function by a system call of its own, `uretprobe` (335),
//! which no filter of that time allows; many filters kill for it. Since 6.14 seccomp lets it pass
//! (`seccomp_uprobe_exception`), and distributions have put that into older kernels, so the number
//! decides nothing: a child of ours, under a filter that allows next to nothing, returns from a probed
//! function here, and lives or not.

use std::{
    ffi::{CStr, OsStr},
    hint::black_box,
    io::{self, Read as _, Write as _},
    os::unix::{ffi::OsStrExt as _, process::ExitStatusExt as _},
    process::{Command, ExitStatus, Stdio},
    sync::Arc,
};

use perf_event::{
    Builder,
    events::{Event, EventData},
};
use perf_event_open_sys::bindings::perf_event_attr;

use crate::host::{Host, text};

/// The verb of the child.
pub const VERB: &str = "__filtered";
/// This program, whatever became of its path.
const ITSELF: &CStr = c"/proc/self/exe";
/// Kernels with the fault, unless somebody mended it there.
const FAULTY: std::ops::Range<(u32, u32)> = (6, 11)..(6, 14);

/// What is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Returns {
    /// A filtered process survived a return probe.
    Harmless,
    /// It was killed.
    Kill,
    /// It could not be tried: why.
    Untried(String),
}

impl Returns {
    /// Tries it.
    pub fn of_this_kernel() -> Self {
        if cfg!(not(target_arch = "x86_64")) {
            // There it stays a breakpoint.
            return Self::Harmless;
        }
        attempt().map_or_else(
            |error| Self::Untried(error.to_string()),
            |(status, hits)| judge(status, hits),
        )
    }

    /// Whether filtered processes must be spared; by the kernel's number where it was not tried.
    pub fn kill(&self, release: Option<(u32, u32)>) -> bool {
        match self {
            Self::Harmless => false,
            Self::Kill => true,
            Self::Untried(_) => release.is_none_or(|release| FAULTY.contains(&release)),
        }
    }
}

/// What the child's end says.
fn judge(status: ExitStatus, hits: u64) -> Returns {
    if status.signal() == Some(libc::SIGSYS) {
        return Returns::Kill;
    }
    match (status.success(), hits) {
        (true, 0) => Returns::Untried("the probe was not met".to_owned()),
        (true, _) => Returns::Harmless,
        (false, _) => Returns::Untried(format!("the filtered process ended ({status})")),
    }
}

/// A return probe in this program, as an event that counts.
struct ReturnProbe {
    kind: u32,
    offset: u64,
}

impl ReturnProbe {
    fn at(offset: u64) -> io::Result<Self> {
        let kind = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let kind = kind.trim().parse().map_err(io::Error::other)?;
        Ok(Self { kind, offset })
    }
}

impl Event for ReturnProbe {
    fn update_attrs(self, attr: &mut perf_event_attr) {
        self.update_attrs_with_data(attr);
    }

    fn update_attrs_with_data(self, attr: &mut perf_event_attr) -> Option<Arc<dyn EventData>> {
        attr.type_ = self.kind;
        // `format/retprobe` of the events' source.
        attr.config = 1;
        attr.uprobe_path = ITSELF.as_ptr() as u64;
        attr.probe_offset = self.offset;
        // The path is no part of this value.
        None
    }
}

/// Whether the kernel lets the calling thread make a probe that is an event.
pub(super) fn may_probe() -> bool {
    let probe = offset_of_probed().and_then(|offset| ReturnProbe::at(offset).ok());
    probe.is_some_and(|probe| Builder::new(probe).observe_self().any_cpu().build().is_ok())
}

/// Has a child meet the probe.
fn attempt() -> io::Result<(ExitStatus, u64)> {
    let offset = offset_of_probed()
        .ok_or_else(|| io::Error::other("this program's own mapping was not found"))?;
    let mut child = Command::new(OsStr::from_bytes(ITSELF.to_bytes()))
        .arg(VERB)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let probed = ReturnProbe::at(offset).and_then(|probe| {
        let mut counter = Builder::new(probe).observe_pid(child.id() as i32).any_cpu().build()?;
        counter.enable()?;
        Ok(counter)
    });
    if let (Ok(_), Some(stdin)) = (&probed, child.stdin.as_mut()) {
        stdin.write_all(&[1])?;
    }
    // Without its byte the child ends at once.
    drop(child.stdin.take());
    let status = child.wait()?;
    Ok((status, probed?.read()?))
}

/// Where [`probed`] is in this program's file.
fn offset_of_probed() -> Option<u64> {
    let address = probed as *const () as u64;
    let mappings = Host::live().mappings(std::process::id())?;
    let within = |map: &&crate::host::Mapping| (map.start..map.end).contains(&address);
    let mapping = mappings.iter().find(within)?;
    (address - mapping.start).checked_add(mapping.offset)
}

/// The function that the child returns from.
#[inline(never)]
extern "C" fn probed(value: u64) -> u64 {
    black_box(value) + 1
}

/// The child: waits for its byte, forbids itself everything but its end, and returns from the probed
/// function; with `forbidden`, does what the filter forbids.
pub fn child(forbidden: bool) -> io::Result<()> {
    let mut byte = [0];
    io::stdin().read_exact(&mut byte)?;
    allow_only_the_end()?;
    if forbidden {
        // SAFETY: a call without arguments and without effect.
        unsafe { libc::getppid() };
    }
    black_box(probed(black_box(1)));
    // SAFETY: ends this process, nothing of which is needed any more. Unwinding and destructors could
    // make forbidden calls.
    unsafe { libc::_exit(0) }
}

/// One statement of a filter's program.
const fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// From here on every system call but `exit_group` kills this process.
fn allow_only_the_end() -> io::Result<()> {
    let end = libc::SYS_exit_group as u32;
    let is_end = libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ, end) };
    let mut program = [
        // The number of the call, the first word of `struct seccomp_data`.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is_end,
        statement(libc::BPF_RET, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET, libc::SECCOMP_RET_KILL_PROCESS),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: sets a flag of this process.
    let mut failed = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    if failed == 0 {
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: the kernel copies the program, which lives until this returns.
        failed = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
    }
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Host {
    /// Whether a process is under a seccomp filter; `None` where that can't be read.
    pub fn is_filtered(&self, pid: u32) -> Option<bool> {
        let status = text::read_bounded(&self.process_path(pid, "status"), 1 << 16)?;
        // 1 is the strict mode, 2 a filter.
        Some(text::field(&status, "Seccomp")? != "0")
    }

    /// Major and minor number of the running kernel.
    pub fn kernel_release(&self) -> Option<(u32, u32)> {
        let release = text::read_bounded(&self.path("proc/sys/kernel/osrelease"), 256)?;
        let release = String::from_utf8_lossy(&release);
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    #[test]
    fn the_childs_end_says_what_return_probes_do() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        assert_eq!(judge(exited(0), 1), Returns::Harmless);
        assert_eq!(judge(ExitStatus::from_raw(libc::SIGSYS), 0), Returns::Kill);
        // A core dump sets the eighth bit.
        assert_eq!(judge(ExitStatus::from_raw(libc::SIGSYS | 0x80), 0), Returns::Kill);
        assert!(matches!(judge(exited(0), 0), Returns::Untried(_)), "nothing was tried");
        assert!(matches!(judge(exited(1), 1), Returns::Untried(_)));
        assert!(matches!(judge(ExitStatus::from_raw(libc::SIGSEGV), 1), Returns::Untried(_)));
    }

    #[test]
    fn the_kernels_number_counts_only_where_nothing_was_tried() {
        let untried = Returns::Untried(String::new());
        let cases = [
            (&Returns::Harmless, Some((6, 12)), false),
            (&Returns::Kill, Some((6, 18)), true),
            (&untried, Some((6, 10)), false),
            (&untried, Some((6, 11)), true),
            (&untried, Some((6, 13)), true),
            (&untried, Some((6, 14)), false),
            (&untried, None, true),
        ];
        for (returns, release, kill) in cases {
            assert_eq!(returns.kill(release), kill, "{returns:?} {release:?}");
        }
    }

    #[test]
    fn filters_and_releases() {
        let tree = Tree::new();
        tree.write("proc/1/status", "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n");
        tree.write("proc/2/status", "Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n");
        let filtered = [1, 2, 3].map(|pid| tree.host().is_filtered(pid));
        assert_eq!(filtered, [Some(true), Some(false), None]);
        tree.write("proc/sys/kernel/osrelease", "6.12.3-amd64\n");
        assert_eq!(tree.host().kernel_release(), Some((6, 12)));
    }

    #[test]
    fn the_probed_function_is_found_in_this_program() {
        assert!(offset_of_probed().is_some());
        assert_eq!(probed(1), 2);
    }
}
