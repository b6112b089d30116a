//! Probes put in and taken out.

use std::{num::NonZeroU32, os::fd::OwnedFd, path::Path, sync::Arc};

use agent_common::{
    cookie::Cookie,
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
    /// Where the kernel half looks up whose calls they report.
    slot: Option<Arc<u16>>,
}

impl Links {
    /// As one of a file that is probed.
    #[cfg(test)]
    pub(crate) fn of_test() -> Self {
        let link = std::fs::File::open("/dev/null").unwrap().into();
        Self { multi: vec![link], ..Self::default() }
    }

    /// Whether there is no probe.
    pub fn is_empty(&self) -> bool {
        self.multi.is_empty() && self.single.is_empty()
    }

    /// Each of them alone: the kernel waits at each that goes, and can wait for all at once.
    pub fn split(self) -> impl Iterator<Item = Self> {
        let Self { multi, single, slot } = self;
        let of = |slot: &Option<Arc<u16>>| Self { slot: slot.clone(), ..Self::default() };
        let of_single = (!single.is_empty()).then(|| Self { single, ..of(&slot) });
        let multi = multi.into_iter();
        multi.map(move |link| Self { multi: vec![link], ..of(&slot) }).chain(of_single)
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

impl Kernel {
    /// Attaches every site's programs; all or none. Calls count from [`Self::arm`] on.
    pub fn attach_unarmed(
        &mut self,
        file: &Path,
        sites: &[Site],
        scope: Scope,
    ) -> Result<Links, KernelError> {
        let slot = self.slots.take().ok_or(KernelError::NoSlot)?;
        self.set_armed(*slot, NOBODY)?;
        let links = if self.multi.is_some() {
            self.attach_multi(file, sites, scope, *slot)
        } else {
            self.attach_single(file, sites, scope, *slot)
        }?;
        Ok(Links { slot: Some(slot), ..links })
    }

    /// From here on their calls count.
    pub fn arm(&mut self, links: &Links, scope: Scope) -> Result<(), KernelError> {
        let whose = match scope {
            Scope::Host => ANYBODY,
            Scope::Process(pid) => pid.get(),
        };
        links.slot.as_ref().map_or(Ok(()), |slot| self.set_armed(**slot, whose))
    }

    /// From here on their calls do not count any more.
    pub fn disarm(&mut self, links: &Links) -> Result<(), KernelError> {
        links.slot.as_ref().map_or(Ok(()), |slot| self.set_armed(**slot, NOBODY))
    }

    fn set_armed(&mut self, slot: u16, whose: u32) -> Result<(), KernelError> {
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
