//! From what the pass kept to the model.

use super::{
    collect::{Collector, ProcessFacts},
    findings,
    model::{Device, Failure, Loss, Model, Process, Run, SCHEMA, Warning},
    names, words,
};
use crate::{
    account::state,
    log::{Manifest, Run8},
};

impl Collector {
    /// The model of everything that was seen.
    pub(super) fn finish(mut self, logs: Vec<String>) -> Model {
        let ids: Vec<i64> = self.processes.keys().copied().collect();
        let devices = self.devices();
        let mut processes: Vec<Process> = Vec::with_capacity(ids.len());
        for proc_id in ids {
            let Some(facts) = self.processes.remove(&proc_id) else { continue };
            processes.push(self.process_model(proc_id, facts));
        }
        processes.sort_by_key(|process| {
            (std::cmp::Reverse(process.weight()), process.rank, process.pid, process.proc_id)
        });
        let mut model = Model {
            schema: SCHEMA,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            logs,
            hosts: self.hosts(&processes),
            start_ns: self.span.0.map(|span| span.0),
            end_ns: self.span.0.map(|span| span.1),
            events: self.events,
            runs: self.manifests.iter().map(run_model).collect(),
            findings: Vec::new(),
            devices,
            losses: self.losses(&processes),
            warnings: self.warnings(&processes),
            processes,
            problems: std::mem::take(&mut self.problems),
        };
        model.findings = findings::find(&model, &self.refusals);
        model
    }

    fn hosts(&self, processes: &[Process]) -> Vec<String> {
        let runs = self.manifests.iter().map(|manifest| manifest.host.clone());
        let named = processes.iter().filter_map(|process| process.host.clone());
        let mut hosts: Vec<String> = runs.chain(named).filter(|host| !host.is_empty()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    fn devices(&self) -> Vec<Device> {
        let mut devices: Vec<Device> = self
            .devices
            .iter()
            .map(|(uuid, facts)| Device {
                gpu_uuid: uuid.clone(),
                nvml_index: facts.nvml_index,
                host: facts.row.as_ref().map(|row| row.host.clone()),
                model: facts.row.as_ref().and_then(|row| row.model.clone()),
                driver_version: facts.row.as_ref().and_then(|row| row.driver_version.clone()),
                total_bytes: facts.total_bytes,
                used: facts.used.last,
                used_peak: facts.used.peak,
                reserved_bytes: facts.reserved_bytes,
            })
            .collect();
        devices.sort_by(|a, b| {
            (&a.host, a.nvml_index, &a.gpu_uuid).cmp(&(&b.host, b.nvml_index, &b.gpu_uuid))
        });
        devices
    }

    /// Latest run with events of the process: `alloc_id` and what was seen before start anew there.
    fn account_of(&self, proc_id: i64) -> Option<(Run8, &state::Process)> {
        self.states.iter().rev().find_map(|(run, state, _)| Some((*run, state.process(proc_id)?)))
    }

    fn process_model(&self, proc_id: i64, facts: ProcessFacts) -> Process {
        let account = self.account_of(proc_id);
        let run = account.map(|(run, _)| run).or(facts.run);
        let account = account.map(|(_, account)| account);
        let mut seen = facts.seen;
        for ns in account.and_then(state::Process::span_ns).into_iter().flat_map(|s| [s.0, s.1]) {
            seen.see(ns);
        }
        let end_ns = facts.end_ns();
        let end = match end_ns {
            Some(ns) => (ns, true),
            None => (self.run_end_ns(run).or(seen.0.map(|span| span.1)).unwrap_or(0), false),
        };
        let failures = facts.failures.iter().map(|((api, result), failure)| Failure {
            api: api.clone(),
            result: *result,
            result_name: words::result(*result),
            count: failure.count,
            last_ns: failure.last_ns,
        });
        let process = Process {
            proc_id,
            pid: account.map_or(facts.pid, state::Process::pid),
            late: facts.late,
            seen_ns: seen.0,
            failures: failures.collect(),
            ..identity(&facts)
        };
        Process { shares: self.shares(facts, account, end), ..process }
    }

    /// When the recording of a run ended; of a killed one, the last moment that the log tells of.
    fn run_end_ns(&self, run: Option<Run8>) -> Option<i64> {
        let of_run = |manifest: &&Manifest| run.is_none() || manifest.run8() == run;
        let manifest_end = self.manifests.iter().find(of_run).and_then(|manifest| manifest.end_ns);
        if self.manifests.len() <= 1 {
            return manifest_end.or(self.span.0.map(|span| span.1));
        }
        let run = run?;
        manifest_end.or_else(|| {
            let (.., span) = self.states.iter().find(|(of, ..)| *of == run)?;
            span.0.map(|span| span.1)
        })
    }

    fn losses(&self, processes: &[Process]) -> Vec<Loss> {
        let pid_of = |proc_id: i64| processes.iter().find(|p| p.proc_id == proc_id).map(|p| p.pid);
        let mut losses: Vec<Loss> = self
            .losses
            .iter()
            .map(|((reason, proc_id), facts)| {
                let (since_ns, until_ns) = facts.window.0.unwrap_or_default();
                Loss {
                    reason: reason.clone(),
                    meaning: words::loss(reason).map(|meaning| meaning.text),
                    pid: facts.pid.or_else(|| pid_of((*proc_id)?)),
                    proc_id: *proc_id,
                    count: facts.count,
                    bytes: facts.bytes,
                    since_ns,
                    until_ns,
                    affects_account: words::takes(reason) == words::Takes::Account,
                }
            })
            .collect();
        losses.sort_by(|a, b| {
            (b.affects_account, b.count, &a.reason).cmp(&(a.affects_account, a.count, &b.reason))
        });
        losses
    }

    fn warnings(&self, processes: &[Process]) -> Vec<Warning> {
        let pid_of = |proc_id: i64| processes.iter().find(|p| p.proc_id == proc_id).map(|p| p.pid);
        let mut warnings: Vec<Warning> = self
            .warnings
            .iter()
            .map(|row| Warning {
                ts_ns: row.ts_ns,
                pid: row.proc_id.and_then(pid_of),
                text: row.text.clone(),
            })
            .collect();
        if self.more_warnings > 0 {
            let text = format!("{} more warnings are in the table annotations", self.more_warnings);
            let ts_ns = warnings.last().map_or(0, |last| last.ts_ns);
            warnings.push(Warning { ts_ns, pid: None, text });
        }
        warnings
    }
}

fn run_model(manifest: &Manifest) -> Run {
    Run {
        run_id: manifest.run_id.clone(),
        host: manifest.host.clone(),
        tool_version: manifest.tool_version.clone(),
        start_ns: (manifest.start_ns > 0).then_some(manifest.start_ns),
        end_ns: manifest.end_ns,
        sealed: manifest.sealed,
    }
}

fn identity(facts: &ProcessFacts) -> Process {
    let Some(row) = facts.row.clone() else { return Process::default() };
    Process {
        ns_pid: row.ns_pid,
        name: names::short_name(&row),
        command: row.command,
        uid: row.uid,
        host: (!row.host.is_empty()).then_some(row.host),
        container_id: row.container_id,
        pod_uid: row.pod_uid,
        rank: row.rank,
        world_size: row.world_size,
        job: row.job,
        start_ns: row.start_ns,
        end_ns: row.end_ns,
        exit_code: row.exit_code,
        from_start: row.from_start,
        detail: row.detail,
        ..Process::default()
    }
}
