//! Probes put in and taken out.

use std::{
    num::NonZeroU32,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex},
};

use agent_common::{
    cookie::{Cookie, SLOTS},
    scope::{ANYBODY, NOBODY},
};
use aya::{
    Ebpf,
    programs::{
        UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeScope},
    },
};

use super::{Kernel, KernelError, UPROBES, map_error, program_error};
use crate::probes::PROBES;

/// Probes of one file in one scope; dropping them detaches, which can wait for the kernel.
#[derive(Debug, Default)]
pub struct Links {
    multi: Vec<OwnedFd>,
    single: Vec<UProbeLink>,
    /// Given back when the last link is gone.
    slot: Option<Arc<Slot>>,
}

impl Links {
    /// Each of them alone: the kernel waits at each that goes, and can wait for all at once.
    pub fn split(self) -> impl Iterator<Item = Self> {
        let Self { multi, single, slot } = self;
        let of_single = (!single.is_empty()).then(|| Self { single, ..Self::of(slot.clone()) });
        let multi = multi.into_iter();
        multi.map(move |link| Self { multi: vec![link], ..Self::of(slot.clone()) }).chain(of_single)
    }

    fn of(slot: Option<Arc<Slot>>) -> Self {
        Self { slot, ..Self::default() }
    }
}

/// The number of an attachment, in its probes' cookies; no other has it as long as this lives.
#[derive(Debug)]
struct Slot {
    number: u16,
    free: Arc<Mutex<Vec<u16>>>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Nothing panics while it holds the lock.
        if let Ok(mut free) = self.free.lock() {
            free.push(self.number);
        }
    }
}

/// Numbers for attachments.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Those that were used and came back.
    free: Arc<Mutex<Vec<u16>>>,
    used: u32,
}

impl Slots {
    fn take(&mut self) -> Result<Slot, KernelError> {
        let back = self.free.lock().ok().and_then(|mut free| free.pop());
        let number = match back {
            Some(number) => number,
            None if self.used < SLOTS => {
                self.used += 1;
                (self.used - 1) as u16
            }
            None => return Err(KernelError::Slots(SLOTS)),
        };
        Ok(Slot { number, free: Arc::clone(&self.free) })
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

impl Scope {
    const fn whose(self) -> u32 {
        match self {
            Self::Host => ANYBODY,
            Self::Process(pid) => pid.get(),
        }
    }
}

impl Kernel {
    /// Attaches every site's programs; all or none. Calls count from when the last one is in place.
    pub fn attach(
        &mut self,
        file: &Path,
        sites: &[Site],
        scope: Scope,
    ) -> Result<Links, KernelError> {
        let links = self.attach_unarmed(file, sites, scope)?;
        self.arm_links(&links, scope.whose())?;
        Ok(links)
    }

    /// The same, but calls count only from when these are put in the place of others
    /// ([`Self::switch`]).
    pub fn attach_unarmed(
        &mut self,
        file: &Path,
        sites: &[Site],
        scope: Scope,
    ) -> Result<Links, KernelError> {
        let slot = self.slots.take()?;
        let number = slot.number;
        self.arm(number, NOBODY)?;
        let links = if self.multi.is_some() {
            self.attach_multi(file, sites, scope, number)
        } else {
            self.attach_single(file, sites, scope, number)
        }?;
        Ok(Links { slot: Some(Arc::new(slot)), ..links })
    }

    /// Has calls count by other probes from here on. Between the two only microseconds pass; a call
    /// that is in flight then returns to the new ones.
    pub fn switch(&mut self, from: &[&Links], to: &[(&Links, Scope)]) -> Result<(), KernelError> {
        from.iter().try_for_each(|links| self.arm_links(links, NOBODY))?;
        to.iter().try_for_each(|(links, scope)| self.arm_links(links, scope.whose()))
    }

    fn arm_links(&mut self, links: &Links, whose: u32) -> Result<(), KernelError> {
        links.slot.as_ref().map_or(Ok(()), |slot| self.arm(slot.number, whose))
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

/// Sites that are probed at entry, or those at return, with their cookies.
fn probed(sites: &[Site], returns: bool, slot: u16) -> impl Iterator<Item = (&Site, Cookie)> {
    sites.iter().filter_map(move |site| {
        let probe = PROBES.get(usize::from(site.row))?;
        let cookie = Cookie { slot, ..probe.cookie(site.row) };
        (!returns || cookie.kind.returns()).then_some((site, cookie))
    })
}

pub(super) fn program<'a>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut UProbe, KernelError> {
    ebpf.program_mut(name)
        .and_then(|program| program.try_into().ok())
        .ok_or(KernelError::Part(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachments_number_is_given_again_only_after_its_last_link() {
        let mut slots = Slots::default();
        let first = Arc::new(slots.take().unwrap());
        let halves = (Links::of(Some(Arc::clone(&first))), Links::of(Some(first)));
        assert_eq!(slots.take().unwrap().number, 1);
        assert_eq!(slots.take().unwrap().number, 1, "it came back");
        drop(halves.0);
        let (second, third) = (slots.take().unwrap(), slots.take().unwrap());
        assert_eq!((second.number, third.number), (1, 2), "the other half is still there");
        drop(halves.1);
        assert_eq!(slots.take().unwrap().number, 0);
    }

    #[test]
    fn more_attachments_than_numbers_are_refused() {
        let mut slots = Slots::default();
        let all: Vec<Slot> = (0..SLOTS).map(|_| slots.take().unwrap()).collect();
        assert!(matches!(slots.take(), Err(KernelError::Slots(_))));
        drop(all);
        assert!(slots.take().is_ok());
    }
}
