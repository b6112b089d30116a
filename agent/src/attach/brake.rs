//! Takes detail away from a process that pays too much for it.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
};

use tracing::warn;

use super::{Attacher, Notice, Place};
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
    pub(super) fn kept(&self, place: &Place<'_>, sites: &[Site]) -> Vec<Site> {
        let left_out = place.owner.and_then(|tgid| self.brakes.left_out.get(&tgid));
        let kept =
            sites.iter().filter(|site| left_out.is_none_or(|rows| !rows.contains(&site.row)));
        kept.copied().collect()
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
        let sources: Vec<_> = self
            .sources_of(tgid)
            .into_iter()
            .filter(|(_, source)| source.library == library)
            .collect();
        for (id, source) in sources {
            let Some(sites) = self.files.get(&id).cloned().flatten() else { continue };
            let place = Place { id, library, shown: &source.shown, owner: Some(tgid) };
            let fewer = self.attach_sites_unarmed(&place, &source.file, &sites);
            let switched = fewer.and_then(|links| self.replace(tgid, id, links));
            if let Err(error) = switched {
                self.failed(&place, super::chain(&error));
            }
        }
    }

    fn replace(&mut self, tgid: u32, id: FileId, links: Links) -> Result<(), KernelError> {
        let Some(attached) = self.process_links.get_mut(&(tgid, id)) else { return Ok(()) };
        let old = std::mem::replace(&mut attached.links, links);
        let scope = NonZeroU32::new(tgid).map_or(Scope::Host, Scope::Process);
        let result = self.kernel.switch(&[&old], &[(&attached.links, scope)]);
        self.throw_away(old);
        result
    }

    /// Gives each process probes of its own in the place of those of the whole host. The others lose
    /// nothing but the microseconds of the switch.
    fn part(&mut self, library: Library, why: &str) {
        if !self.guard.set_apart(library) {
            return;
        }
        let of_host: Vec<Links> = self
            .host_links
            .extract_if(|_, (of, _)| *of == library)
            .map(|(_, (_, links))| links)
            .collect();
        self.brakes.waiting = Some(Vec::new());
        for tgid in self.guard.users(library) {
            self.look_at(tgid);
        }
        let waiting = self.brakes.waiting.take().unwrap_or_default();
        let from: Vec<&Links> = of_host.iter().collect();
        let to: Vec<(&Links, Scope)> = waiting
            .iter()
            .filter_map(|key| {
                let links = &self.process_links.get(key)?.links;
                Some((links, Scope::Process(NonZeroU32::new(key.0)?)))
            })
            .collect();
        let switched = self.kernel.switch(&from, &to);
        if let Err(error) = switched {
            warn!(error = super::chain(&error), "probes of single processes do not count");
        }
        for links in of_host {
            self.throw_away(links);
        }
        let reason = format!("{why}; the other processes have probes of their own from here on");
        self.tell(Notice::Apart { library, reason, moved: Vec::new() });
    }
}
