//! Who is who: processes from their beginnings to their ends, and their rows.

use std::time::{Duration, Instant};

use agent_common::life::{KIND_EXIT, RawLife};
use ledger::{
    call::{Input, ProcId},
    rows::ProcessRow,
};
use tracing::debug;

use super::{
    books::{Books, Opening},
    lives::Life,
};
use crate::{
    environ,
    host::{Env, Identity},
};

/// Time between looks for processes that are gone.
const LOOK_FOR: Duration = Duration::from_secs(5);

impl Books {
    /// A process began.
    pub(super) fn begin(&mut self, life: &RawLife) {
        self.lives.begin(life.tgid, life.start_ns).told.learn(life);
    }

    /// The life that a record belongs to. A process whose beginning was lost is looked up.
    pub(super) fn life_of(&mut self, tgid: u32, ts_ns: u64) -> &mut Life {
        if self.lives.at(tgid, ts_ns).is_none() {
            let start_ns = self.opening.host.start_boot_ns(tgid).unwrap_or(ts_ns);
            self.lives.begin(tgid, start_ns.min(ts_ns));
        }
        self.lives.at_or_begin(tgid, ts_ns)
    }

    /// First traced call of a process: who it is.
    pub(super) fn announce(&mut self, tgid: u32, proc_id: ProcId) {
        self.closed.processes += 1;
        let early = self.lives.by_id(proc_id).and_then(|life| life.early.take());
        // What was read when the program began is whole; a process that is ending by now has lost
        // its environment already.
        let row = match early.or_else(|| self.identity(tgid, proc_id)) {
            Some(identity) => {
                self.set_devices(tgid, proc_id, &identity.env);
                identity.row
            }
            None => self.told(tgid, proc_id),
        };
        debug!(tgid, command = row.command, "first traced call");
        let Some(life) = self.lives.by_id(proc_id) else { return };
        life.row = Some(row);
        let late = life.late;
        if late {
            self.ledger.set_attached_late(proc_id);
        }
        self.write_process(proc_id);
        self.write_libraries(tgid, proc_id);
    }

    /// What `/proc` says of a process, while it is there.
    fn identity(&self, tgid: u32, proc_id: ProcId) -> Option<Identity> {
        let identity = self.opening.host.identity(tgid, self.opening.commands);
        identity.filter(|identity| identity.row.proc_id == proc_id.0)
    }

    /// The row of a process of which `/proc` says nothing any more.
    fn told(&mut self, tgid: u32, proc_id: ProcId) -> ProcessRow {
        let row = ProcessRow {
            proc_id: proc_id.0,
            pid: tgid as i32,
            host: self.opening.host.name().to_owned(),
            ..ProcessRow::default()
        };
        let Some(life) = self.lives.by_id(proc_id) else { return row };
        ProcessRow {
            comm: life.told.comm.clone(),
            uid: life.told.uid.map(|uid| uid as i32),
            ppid: life.told.ppid.map(|ppid| ppid as i32),
            start_ns: Some(self.opening.anchor.epoch(life.start_ns)),
            ..row
        }
    }

    fn set_devices(&mut self, tgid: u32, proc_id: ProcId, env: &Env) {
        let Opening { devices, host, .. } = &mut self.opening;
        let before = devices.all(proc_id);
        let late = self.lives.by_id(proc_id).is_some_and(|life| life.late);
        if late && environ::now(host, tgid).is_some_and(|now| !now.same_devices(env)) {
            devices.unsettle(proc_id);
        } else {
            devices.by_environment(host, tgid, proc_id, env);
        }
        for (ordinal, _) in before {
            self.ledger.set_device(proc_id, ordinal, None);
        }
        for (ordinal, device) in self.opening.devices.all(proc_id) {
            self.ledger.set_device(proc_id, ordinal, device);
        }
    }

    /// The process has just counted its devices, by the environment that it had then: a program may
    /// have set its own since it was started.
    pub(super) fn count_devices(&mut self, tgid: u32, proc_id: ProcId) {
        // One that was attached to counted them before; what it has set since tells nothing.
        let first = |life: &&mut Life| !life.late && !life.counted_devices;
        let Some(life) = self.lives.by_id(proc_id).filter(first) else { return };
        life.counted_devices = true;
        let (Some(now), Some(given)) =
            (environ::now(&self.opening.host, tgid), self.opening.host.env(tgid))
        else {
            return;
        };
        if !now.same_devices(&given) {
            self.set_devices(tgid, proc_id, &now);
            if let Some(life) = self.lives.by_id(proc_id)
                && let Some(row) = life.row.as_mut()
            {
                let value = |name| now.get(name).map(str::to_owned);
                row.cuda_visible_devices = value("CUDA_VISIBLE_DEVICES");
                row.cuda_device_order = value("CUDA_DEVICE_ORDER");
            }
        }
    }

    fn write_libraries(&mut self, tgid: u32, proc_id: ProcId) {
        let now_ns = crate::clock::epoch_ns();
        for mut row in self.opening.host.library_rows(tgid, proc_id).unwrap_or_default() {
            row.ts_ns = now_ns;
            if let Some((probes, available)) = self.readings.probes_of(&row.path) {
                row.probes = probes;
                row.probes_available = available;
            }
            self.add(row);
        }
    }

    /// Writes what is known of a process now; readers take the latest row.
    pub(super) fn write_process(&mut self, proc_id: ProcId) {
        let from_start = self.ledger.from_start(proc_id);
        let Some(life) = self.lives.by_id(proc_id) else { return };
        let Some(known) = life.row.as_mut() else { return };
        // The ledger forgets a process that ended.
        known.from_start |= from_start;
        let mut row = known.clone();
        if let Some(communicator) = life.communicator {
            communicator.fill_in(&mut row);
        }
        row.attached_ns = life.attached_ns;
        row.ts_ns = crate::clock::epoch_ns();
        life.detail.unwrap_or(self.opening.detail).clone_into(&mut row.detail);
        self.add(row);
    }

    /// A process ended, or its program did.
    pub(super) fn end(&mut self, raw: &RawLife) {
        let ts_ns = self.opening.anchor.epoch(raw.ts_ns);
        let life = self.lives.begin(raw.tgid, raw.start_ns);
        let proc_id = life.proc_id;
        if raw.kind == KIND_EXIT {
            life.ended_ns = Some(raw.ts_ns);
            let exit_code = raw.exit_code;
            self.order.push(Input::Exit { proc_id, tgid: raw.tgid, ts_ns, exit_code });
        } else {
            life.told.learn(raw);
            self.order.push(Input::Exec { proc_id, tgid: raw.tgid, ts_ns });
            self.meet_again(raw.tgid, proc_id);
        }
    }

    /// Ends the processes that are gone although nobody told: the kernel half knows those that made a
    /// traced call, and NVML and the first look tell of others; and the record of an end can be lost.
    pub(super) fn end_missed(&mut self) {
        if self.looked_for.elapsed() < LOOK_FOR {
            return;
        }
        self.looked_for = Instant::now();
        let host = &self.opening.host;
        let missed = self.lives.missed(|life| host.proc_id(life.tgid) == Some(life.proc_id));
        let now_ns = crate::clock::boot_ns();
        for (proc_id, tgid) in missed {
            if let Some(life) = self.lives.by_id(proc_id) {
                (life.ended_ns, life.end_untold) = (Some(now_ns), true);
            }
            let ts_ns = self.opening.anchor.epoch(now_ns);
            self.order.push(Input::Exit { proc_id, tgid, ts_ns, exit_code: 0 });
        }
    }

    /// Another program: its name and environment are new. They are read when the record of the exec
    /// comes, not when it is applied: a short program is gone by then.
    pub(super) fn meet_again(&mut self, tgid: u32, proc_id: ProcId) {
        let identity = self.identity(tgid, proc_id);
        let Some(life) = self.lives.by_id(proc_id) else { return };
        life.communicator = None;
        let Some(row) = life.row.as_mut() else {
            life.early = identity;
            return;
        };
        row.from_start = false;
        life.counted_devices = false;
        if let Some(identity) = identity {
            *row = identity.row;
            let Opening { devices, host, .. } = &mut self.opening;
            devices.by_environment(host, tgid, proc_id, &identity.env);
        } else {
            self.opening.devices.forget(proc_id);
        }
    }

    /// The account of the new program begins, without any devices.
    pub(super) fn executed(&mut self, proc_id: ProcId) {
        for (ordinal, device) in self.opening.devices.all(proc_id) {
            self.ledger.set_device(proc_id, ordinal, device);
        }
        self.write_process(proc_id);
    }

    /// Writes the last of a process and forgets it.
    pub(super) fn finish_process(
        &mut self,
        proc_id: ProcId,
        tgid: u32,
        ts_ns: i64,
        exit_code: i32,
    ) {
        self.write_totals(Some(tgid));
        self.write_sites(Some(tgid));
        if let Some(life) = self.lives.by_id(proc_id)
            && let Some(row) = life.row.as_mut()
        {
            row.end_ns = Some(ts_ns);
            row.exit_code = (!life.end_untold).then(|| shell_code(exit_code));
            self.write_process(proc_id);
        }
        self.end_refusals(proc_id.0);
        self.write_losses();
        self.brake.forget(tgid);
        self.polled.forget(tgid, self.opening.anchor.boot(ts_ns));
        self.stacks.forget(tgid, proc_id);
        self.state.forget(proc_id.0);
        self.breakdown.forget(proc_id);
        self.opening.devices.forget(proc_id);
        self.readings.forget(proc_id);
    }

    /// A process that had the library before the recording began: what it holds is "before attach".
    pub(super) fn found_running(&mut self, tgid: u32) {
        let Some(start_ns) = self.opening.host.start_boot_ns(tgid) else { return };
        let life = self.lives.begin(tgid, start_ns);
        life.late = true;
        let proc_id = life.proc_id;
        if !self.opening.host_wide {
            self.announce(tgid, proc_id);
        }
        let text = "was running with the CUDA driver library loaded: what it held is one sum";
        self.annotate(Some(proc_id.0), "late_attach", text.to_owned(), None);
    }

    /// Writes the rows of what runs.
    pub(super) fn write_running(&mut self) {
        let running: Vec<ProcId> = self.lives.running().map(|life| life.proc_id).collect();
        for proc_id in running {
            self.write_process(proc_id);
        }
    }
}

/// `wait` status as shells show it.
fn shell_code(status: i32) -> i32 {
    match status & 0x7f {
        0 => status >> 8 & 0xff,
        signal => 128 + signal,
    }
}

#[cfg(test)]
mod tests {
    use super::shell_code;

    #[test]
    fn exit_codes_are_the_shells() {
        assert_eq!(shell_code(0), 0);
        assert_eq!(shell_code(3 << 8), 3);
        assert_eq!(shell_code(9), 137);
        assert_eq!(shell_code(0xb | 0x80), 139);
    }
}
