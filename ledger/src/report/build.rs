//! From what the pass kept to the model.

use super::{
    collect::{Collector, Place, ProcessFacts},
    findings::{self, Found},
    model::{Breakdown, Device, Failure, Loss, Model, Process, Run, SCHEMA, StackShare, Warning},
    names, words,
};
use crate::{
    account::state,
    call::Level,
    log::{Manifest, Run8},
};

impl Collector {
    /// The model of everything that was seen.
    pub(super) fn finish(mut self, logs: Vec<String>) -> Model {
        self.sites.settle();
        self.refusals.finish();
        let ids: Vec<i64> = self.processes.keys().copied().collect();
        let devices = self.devices();
        let (mut suspects, mut by_site) = (Vec::new(), Vec::new());
        let mut processes: Vec<Process> = Vec::with_capacity(ids.len());
        for proc_id in ids {
            let Some(mut facts) = self.processes.remove(&proc_id) else { continue };
            self.learn_ordinals(proc_id, &mut facts);
            let end = self.end_of(proc_id, &facts);
            let (rising, judged) = self.suspects(proc_id, &facts, end);
            suspects.extend(rising);
            by_site.extend(judged);
            self.locate_contexts(proc_id, &facts);
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
            stacks: self.stack_share(),
            losses: self.losses(&processes),
            warnings: self.warnings(&processes),
            processes,
            problems: std::mem::take(&mut self.problems),
        };
        let found = Found {
            refusals: &self.refusals.by_key,
            suspects: &suspects,
            by_site: &by_site,
            contexts: &self.contexts,
            stacks: &self.stacks,
        };
        model.findings = findings::find(&model, &found);
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
                breakdown: Breakdown::of(&facts.breakdown, &self.stacks),
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
        let account = account.map(|(_, account)| account);
        let mut seen = facts.seen;
        for ns in account.and_then(state::Process::span_ns).into_iter().flat_map(|s| [s.0, s.1]) {
            seen.see(ns);
        }
        let end = self.end_of(proc_id, &facts);
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

    /// When a process ended, or was seen last, and whether it ended.
    fn end_of(&self, proc_id: i64, facts: &ProcessFacts) -> (i64, bool) {
        if let Some(ns) = facts.end_ns() {
            return (ns, true);
        }
        let account = self.account_of(proc_id);
        let run = account.map(|(run, _)| run).or(facts.run);
        let in_rows = facts.seen.0.map(|span| span.1);
        let in_account = account.and_then(|(_, account)| account.span_ns()).map(|span| span.1);
        (self.run_end_ns(run).or(in_rows.max(in_account)).unwrap_or(0), false)
    }

    /// Devices by the process's numbers, as the account learnt them.
    fn learn_ordinals(&self, proc_id: i64, facts: &mut ProcessFacts) {
        let account = self.account_of(proc_id).map(|(_, account)| account.devices());
        for device in account.unwrap_or_default() {
            if let (Some(ordinal), Some(uuid)) = (device.cuda_ordinal, &device.gpu_uuid) {
                facts.ordinals.entry(ordinal).or_insert_with(|| uuid.clone());
            }
        }
    }

    /// Gives the contexts of a process the UUIDs of their devices, where these became known.
    fn locate_contexts(&mut self, proc_id: i64, facts: &ProcessFacts) {
        for (_, context) in self.contexts.range_mut((proc_id, i64::MIN)..=(proc_id, i64::MAX)) {
            if let Place::Ordinal(ordinal) = context.place
                && let Some(uuid) = facts.ordinals.get(&ordinal)
            {
                context.place = Place::Gpu(uuid.clone());
            }
        }
    }

    /// How much has a stack.
    fn stack_share(&self) -> StackShare {
        let (taken, complete) = self.stacks.counts();
        let mut share = StackShare {
            taken,
            complete,
            incomplete: self.stacks.reasons(),
            allocs_without: self.sites.without_stack,
            ..StackShare::default()
        };
        let mut missing = std::collections::BTreeSet::new();
        for now in &self.sites.stacks {
            let allocs = now.allocs.max(0) as u64;
            share.allocs_with += allocs;
            match self.stacks.get(now.stack_id) {
                Some(stack) if stack.complete => share.allocs_complete += allocs,
                Some(_) => {}
                None => {
                    missing.insert(now.stack_id);
                }
            }
        }
        share.missing = missing.len() as u64;
        let told = |holder| {
            let own = self.sites.stacks.iter().filter(move |now| now.holder == holder);
            own.map(|now| now.allocs).sum::<i64>()
        };
        for (holder, total) in &self.sites.totals {
            if let (Level::Tensor, Some(allocs)) = (holder.level, total.allocs) {
                let told = told(*holder);
                let missing = if told > 0 { allocs.saturating_sub(told).max(0) } else { 0 };
                share.allocs_without += missing as u64;
            }
        }
        share
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
        let told = self.warnings.iter().map(|row| Warning {
            ts_ns: row.ts_ns,
            pid: row.proc_id.and_then(pid_of),
            text: row.text.clone(),
        });
        let mut warnings: Vec<Warning> = self.deleted.warnings().into_iter().chain(told).collect();
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
