//! From what the pass kept to the model.

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    collect::{Collector, Figure, Place, PlaceFacts, ProcessFacts, allocs},
    findings,
    growth::{self, End},
    model::{
        Breakdown, Device, Failure, GROUPS, Group, LevelTotal, LevelUse, Loss, Model, Of, Process,
        Run, SCHEMA, Share, Torch, Trend, Warning,
    },
    names, words,
};
use crate::{
    account::state,
    call::Level,
    log::{Manifest, Run8},
    rows::BreakdownRow,
};

/// A device of the account at one place, as it was at its end.
struct EndState<'a> {
    index: usize,
    device: Cow<'a, state::Device>,
    /// When the end of a context or of the process freed what it held.
    torn_down_ns: Option<i64>,
}

/// All that is known of one process at one place.
#[derive(Default)]
struct Here<'a> {
    facts: PlaceFacts,
    devices: Vec<EndState<'a>>,
}

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

    fn shares(
        &self,
        mut facts: ProcessFacts,
        account: Option<&state::Process>,
        end: (i64, bool),
    ) -> Vec<Share> {
        let mut unfreed = account.map(state::Process::unfreed_groups).unwrap_or_default();
        unfreed.retain(|group| !matches!(group.level, Level::Virtual | Level::Imported));
        let mut shares: Vec<Share> = places(&mut facts, account)
            .into_iter()
            .map(|(place, here)| {
                let total = match &place {
                    Place::Gpu(uuid) => self.devices.get(uuid).and_then(|facts| facts.total_bytes),
                    _ => None,
                };
                let share = self.share_at(&place, &here);
                Share {
                    trends: trends(&here, end, total),
                    never_freed: never_freed(&here, &unfreed),
                    never_freed_totals: totals(&here, &unfreed),
                    ..share
                }
            })
            .collect();
        shares.sort_by_key(|share| std::cmp::Reverse(share.weight()));
        shares
    }

    fn share_at(&self, place: &Place, here: &Here) -> Share {
        let device = here.devices.first().map(|end| &end.device);
        let (uuid, ordinal) = match place {
            Place::Gpu(uuid) => (Some(uuid.clone()), None),
            Place::Ordinal(ordinal) => (None, Some(*ordinal)),
            Place::Unknown => (None, None),
        };
        let listed = uuid.as_ref().and_then(|uuid| self.devices.get(uuid)?.nvml_index);
        Share {
            gpu_uuid: uuid,
            nvml_index: listed.or(device.and_then(|device| device.nvml_index)),
            cuda_ordinal: device.and_then(|device| device.cuda_ordinal).or(ordinal),
            nvml_used: here.facts.nvml.last,
            nvml_peak: here.facts.nvml.peak,
            nvml_unavailable: here.facts.nvml_unavailable,
            breakdown: breakdown(&here.facts.breakdown),
            torch: torch(&here.facts),
            levels: levels(&here.devices),
            ..Share::default()
        }
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

/// Brings together what is known of a place under its several names.
fn places<'a>(
    facts: &mut ProcessFacts,
    account: Option<&'a state::Process>,
) -> BTreeMap<Place, Here<'a>> {
    let devices = account.map(state::Process::devices).unwrap_or_default();
    for device in devices {
        if let (Some(ordinal), Some(uuid)) = (device.cuda_ordinal, &device.gpu_uuid) {
            facts.ordinals.entry(ordinal).or_insert_with(|| uuid.clone());
        }
    }
    let resolve = |place: Place| match place {
        Place::Ordinal(ordinal) => {
            facts.ordinals.get(&ordinal).map_or(place, |uuid| Place::Gpu(uuid.clone()))
        }
        place => place,
    };
    let mut here: BTreeMap<Place, Here> = BTreeMap::new();
    for (place, its) in std::mem::take(&mut facts.places) {
        here.entry(resolve(place)).or_default().facts.absorb(its);
    }
    for (index, device) in devices.iter().enumerate() {
        let place = resolve(Place::of(device.gpu_uuid.as_deref(), device.cuda_ordinal));
        let end = match facts.teardown.remove(&index) {
            Some((before, ns)) if allocs(&before) == allocs(device) => {
                EndState { index, device: Cow::Owned(before), torn_down_ns: Some(ns) }
            }
            _ => EndState { index, device: Cow::Borrowed(device), torn_down_ns: None },
        };
        here.entry(place).or_default().devices.push(end);
    }
    adopt_unknown(&mut here);
    here
}

/// What has no device (pinned host memory, reservations) stands with the only device there is.
fn adopt_unknown(here: &mut BTreeMap<Place, Here>) {
    if here.len() != 2 {
        return;
    }
    let Some(unknown) = here.remove(&Place::Unknown) else { return };
    let on_a_device = |end: &EndState| {
        [Level::Device, Level::Pool].iter().any(|level| end.device.usage(*level).allocs > 0)
    };
    if unknown.devices.iter().any(on_a_device) {
        here.insert(Place::Unknown, unknown);
    } else if let Some(mut only) = here.first_entry() {
        only.get_mut().facts.absorb(unknown.facts);
        only.get_mut().devices.extend(unknown.devices);
    }
}

fn breakdown(rows: &[BreakdownRow]) -> Option<Breakdown> {
    let bytes = |category: &str| {
        let parts = rows.iter().filter(|row| row.category == category);
        parts.map(|row| row.bytes).reduce(i64::saturating_add)
    };
    Some(Breakdown {
        ts_ns: rows.first()?.ts_ns,
        nvml_used_bytes: bytes("nvml_used")?,
        live_device_bytes: bytes("live_device")?,
        live_pool_bytes: bytes("live_pool").unwrap_or(0),
        before_attach_bytes: bytes("before_attach"),
        unexplained_bytes: bytes("unexplained")?,
    })
}

fn torch(facts: &PlaceFacts) -> Option<Torch> {
    let last = |figure: &Figure| figure.last.map(|reading| reading.bytes);
    let ts_ns = [facts.allocated.last, facts.reserved.last].into_iter().flatten();
    let peak = |figure: &Figure, told: Option<i64>| told.max(figure.peak.map(|peak| peak.bytes));
    Some(Torch {
        ts_ns: ts_ns.map(|reading| reading.ts_ns).max()?,
        allocated_bytes: last(&facts.allocated),
        reserved_bytes: last(&facts.reserved),
        peak_allocated_bytes: peak(&facts.allocated, facts.peak_allocated),
        peak_reserved_bytes: peak(&facts.reserved, facts.peak_reserved),
    })
}

fn levels(devices: &[EndState]) -> Vec<LevelUse> {
    let of = |level: Level| {
        let used = devices.iter().map(|end| end.device.usage(level));
        let used = used.filter(|usage| usage.allocs + usage.unknown_frees + usage.live_count > 0);
        used.map(|usage| LevelUse {
            level,
            live_bytes: usage.live_bytes,
            live_count: usage.live_count,
            peak_bytes: usage.peak_bytes,
            peak_ns: usage.peak_ns,
            allocs: usage.allocs,
            frees: usage.frees,
            unknown_frees: usage.unknown_frees,
        })
        .reduce(both)
    };
    Level::ALL.into_iter().filter_map(of).collect()
}

/// Two names of one device: their peaks need not have been at one time, so the higher one holds.
fn both(a: LevelUse, b: LevelUse) -> LevelUse {
    let higher = if a.peak_bytes >= b.peak_bytes { a } else { b };
    LevelUse {
        live_bytes: a.live_bytes.saturating_add(b.live_bytes),
        live_count: a.live_count + b.live_count,
        allocs: a.allocs + b.allocs,
        frees: a.frees + b.frees,
        unknown_frees: a.unknown_frees + b.unknown_frees,
        ..higher
    }
}

fn trends(here: &Here, end: (i64, bool), device_bytes: Option<i64>) -> Vec<Trend> {
    let torn_down_ns = here.devices.iter().filter_map(|end| end.torn_down_ns).min();
    let (ns, of_process) = torn_down_ns.map_or(end, |ns| (ns, true));
    let judge = |of: Of, series: &state::Series, bytes: i64| {
        let trend = growth::judge(series, End { ns, bytes, of_process }, device_bytes)?;
        let growth::Trend { bytes_per_second, since_ns, until_ns, from_bytes, to_bytes, grows } =
            trend;
        Some(Trend { of, bytes_per_second, since_ns, until_ns, from_bytes, to_bytes, grows })
    };
    let facts = &here.facts;
    let torch = [(Of::Tensors, &facts.tensors), (Of::TorchReserved, &facts.torch_reserved)];
    let main = here.devices.iter().max_by_key(|end| end.device.usage(Level::Device).peak_bytes);
    let main = main.and_then(|end| {
        let live_bytes = end.device.usage(Level::Device).live_bytes;
        judge(Of::Device, &end.device.series, live_bytes)
    });
    let levels = [(Of::Pool, Level::Pool), (Of::Managed, Level::Managed), (Of::Host, Level::Host)];
    let courses =
        levels.into_iter().filter_map(|(of, level)| Some((of, facts.courses.get(&level)?)));
    let judged = torch.into_iter().chain(courses).filter_map(|(of, course)| {
        course.series.origin_ns()?;
        judge(of, &course.series, course.bytes)
    });
    main.into_iter().chain(judged).collect()
}

fn is_here<'a>(here: &'a Here) -> impl Fn(&&state::Group) -> bool + 'a {
    |group| here.devices.iter().any(|end| end.index == group.device)
}

fn never_freed(here: &Here, unfreed: &[state::Group]) -> Vec<Group> {
    let groups = unfreed.iter().filter(is_here(here)).take(GROUPS);
    groups
        .map(|group| Group {
            api: group.api.to_string(),
            level: group.level,
            size_bytes: group.size_bytes,
            count: group.count,
            bytes: group.bytes,
            first_ns: group.first_ns,
            last_ns: group.last_ns,
        })
        .collect()
}

fn totals(here: &Here, unfreed: &[state::Group]) -> Vec<LevelTotal> {
    let of = |level: Level| {
        let groups = unfreed.iter().filter(is_here(here)).filter(move |g| g.level == level);
        groups.fold(LevelTotal { level, bytes: 0, count: 0 }, |total, group| LevelTotal {
            level,
            bytes: total.bytes.saturating_add(group.bytes),
            count: total.count + group.count,
        })
    };
    Level::ALL.into_iter().map(of).filter(|total| total.count > 0).collect()
}
