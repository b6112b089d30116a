//! Takes detail away from a process that pays too much for it.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
};

use tracing::warn;

use super::{Attacher, Notice, Place, chain};
use crate::{
    host::FileId,
    kernel::{KernelError, Links, Scope, Site},
    probes::{Library, PROBES},
};

/// What is taken away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Of `PyTorch`'s blocks only the totals are kept.
    Totals,
    /// These functions, rows of the probe table, are not probed any more.
    Rows(Vec<u8>),
}

/// A step, and why it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Braking {
    /// Process.
    pub tgid: u32,
    /// What it loses.
    pub step: Step,
    /// For the user.
    pub why: String,
}

/// What was taken away, and probes that wait for others to go.
#[derive(Debug, Default)]
pub(super) struct Brakes {
    /// Rows that are not probed in a process.
    left_out: HashMap<u32, HashSet<u8>>,
    /// Probes of processes that count once those of the whole host do not.
    waiting: Option<Vec<(u32, FileId)>>,
}

impl Brakes {
    pub(super) fn forget(&mut self, tgid: u32) {
        self.left_out.remove(&tgid);
    }
}

impl Attacher {
    /// Makes a step. One that fails leaves things as they are, and says so.
    pub(super) fn brake(&mut self, braking: Braking) {
        let tgid = braking.tgid;
        match &braking.step {
            Step::Totals => self.kernel.only_totals(tgid),
            Step::Rows(rows) => {
                self.brakes.left_out.entry(tgid).or_default().extend(rows);
                let libraries: HashSet<Library> = rows
                    .iter()
                    .filter_map(|row| PROBES.get(usize::from(*row)))
                    .map(|probe| probe.library)
                    .collect();
                for library in libraries {
                    if self.host_wide && !self.guard.is_apart(library) {
                        self.part(library, &braking.why);
                    } else {
                        self.reattach(tgid, library);
                    }
                }
            }
        }
        warn!("{}", braking.why);
        self.tell(Notice::Braked(braking));
    }

    /// The functions that are probed in this scope.
    pub(super) fn kept(&self, scope: Scope, sites: &[Site]) -> Vec<Site> {
        let left_out = match scope {
            Scope::Host => None,
            Scope::Process(tgid) => self.brakes.left_out.get(&tgid.get()),
        };
        let kept = |site: &&Site| {
            !self.left_out.contains(&site.row)
                && left_out.is_none_or(|rows| !rows.contains(&site.row))
        };
        sites.iter().filter(kept).copied().collect()
    }

    /// Whether new probes of a process count at once.
    pub(super) fn must_wait(&mut self, place: &Place<'_>) -> bool {
        match (&mut self.brakes.waiting, place.owner) {
            (Some(waiting), Some(tgid)) => {
                waiting.push((tgid, place.id));
                true
            }
            _ => false,
        }
    }

    /// Puts the functions that are left into the place of all.
    fn reattach(&mut self, tgid: u32, library: Library) {
        let Some(scope) = NonZeroU32::new(tgid).map(Scope::Process) else { return };
        let sources = self.sources_of(tgid);
        for (id, source) in sources.into_iter().filter(|(_, source)| source.library == library) {
            let fewer = self.links(&source, scope);
            if let Err(error) = fewer.and_then(|links| self.replace((tgid, id), scope, links)) {
                let shown = source.shown.as_path();
                self.failed(&Place { id, library, shown, owner: Some(tgid) }, chain(&error));
            }
        }
    }

    fn replace(
        &mut self,
        key: (u32, FileId),
        scope: Scope,
        links: Links,
    ) -> Result<(), KernelError> {
        let Some(attached) = self.process_links.get_mut(&key) else { return Ok(()) };
        let old = std::mem::replace(&mut attached.links, links);
        // Between the two only microseconds pass; a call that is in flight then returns to the new ones.
        let disarmed = self.kernel.disarm(&old);
        let armed = disarmed.and_then(|()| self.kernel.arm(&attached.links, scope));
        self.throw_away(old);
        armed
    }

    /// Gives each process probes of its own in the place of those of the whole host. The others lose
    /// nothing but the microseconds of the switch.
    fn part(&mut self, library: Library, why: &str) {
        if !self.guard.set_apart(library) {
            return;
        }
        self.brakes.waiting = Some(Vec::new());
        for tgid in self.guard.users(library) {
            self.look_at(tgid);
        }
        let of_host = self.shared.take(library);
        if let Err(error) = self.take_over(&of_host) {
            warn!(error = chain(&error), "probes of single processes may not count");
        }
        for links in of_host {
            self.throw_away(links);
        }
        let reason = format!("{why}; the other processes have probes of their own from here on");
        self.tell(Notice::Apart { library, reason, moved: Vec::new() });
    }

    /// Has calls count by the probes that waited, and no more by those of the host.
    fn take_over(&mut self, of_host: &[Links]) -> Result<(), KernelError> {
        for links in of_host {
            self.kernel.disarm(links)?;
        }
        for key in self.brakes.waiting.take().unwrap_or_default() {
            let scope = NonZeroU32::new(key.0).map(Scope::Process);
            if let (Some(attached), Some(scope)) = (self.process_links.get(&key), scope) {
                self.kernel.arm(&attached.links, scope)?;
            }
        }
        Ok(())
    }
}
