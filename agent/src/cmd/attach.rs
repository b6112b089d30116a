//! `vramscope attach`: running processes and their children.

use std::process::ExitCode;

use super::{output, precondition, say, session};
use crate::{cli::Attach, host::Host, live::Target};

/// Records until Ctrl-C, the time is up, or the processes have ended.
pub(super) fn run(args: &Attach) -> anyhow::Result<ExitCode> {
    let host = Host::live();
    let pids: Vec<u32> = args.pids.iter().map(|pid| pid.get()).collect();
    for pid in &pids {
        if host.stat(*pid).is_none() {
            return Err(precondition(format!(
                "there is no process {pid}; `ps` or `nvidia-smi` shows the running ones"
            )));
        }
    }
    say(
        "attaching to running processes. From here on every allocation, free and failure is seen. \
         What they hold already is counted as one sum, \"before attach\" (NVML's figure now): it has \
         no allocation sites, and later frees of it are seen without their sizes.",
    );
    let folder = output::folder(&args.recording.output)?;
    let mut session = session::start(&args.recording, &folder, Target::Processes, "attach", &pids)?;
    if let Err(error) = session.follow_late(&with_descendants(&pids)) {
        session.stop()?;
        return Err(precondition(format!("attach to the processes: {error:#}")));
    }
    let what = format!("{} process(es)", pids.len());
    let end = session::wait(&folder, &what, args.duration, &pids)?;
    session::end(&mut session, &folder, end)
}

/// The processes and all that descend from them now.
fn with_descendants(roots: &[u32]) -> Vec<u32> {
    let host = Host::live();
    let parents: Vec<(u32, u32)> = crate::attach::all_processes()
        .into_iter()
        .filter_map(|pid| Some((pid, host.stat(pid)?.ppid)))
        .collect();
    let mut found = roots.to_vec();
    let mut at = 0;
    while let Some(parent) = found.get(at).copied() {
        let children = parents.iter().filter(|(_, ppid)| *ppid == parent).map(|(pid, _)| *pid);
        for child in children {
            if !found.contains(&child) {
                found.push(child);
            }
        }
        at += 1;
    }
    found
}
