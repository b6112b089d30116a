//! Who keeps what a place allocated: its live allocations, and how to ask the process.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use super::{
    clock::Clock,
    collect::Collector,
    names::printable,
    read,
    units::{counted, show_bytes, show_duration},
};
use crate::{
    account::state::Process,
    call::Level,
    log::{Log, LogError, Row},
    rows::LiveRow,
};

/// Allocations that are listed for a process and level, and addresses in its lines of Python.
const LISTED: usize = 200;

/// Lines for a Python process: `ADDRESSES` stands for what is looked for. Views share a storage,
/// so that all tensors over an address are asked about.
const SNIPPET: &str = include_str!("who.py");

/// A live allocation.
#[derive(Clone, Debug, PartialEq)]
struct Block {
    addr: i64,
    size_bytes: Option<i64>,
    since_ns: i64,
}

/// Blocks of a process at a level, by site.
type Blocks = BTreeMap<(i64, Level, String), Vec<Block>>;

/// Lists what is alive of the sites that contain `site`, and prints the lines that find who refers
/// to it.
///
/// # Errors
///
/// A directory cannot be listed, or none of them holds a log.
pub fn who(dirs: &[PathBuf], site: &str) -> Result<String, LogError> {
    let mut pass = read::read(dirs)?;
    let checkpoint = tensors(dirs, &mut pass)?;
    Ok(text(&pass, site, &checkpoint))
}

/// Tensors of the last checkpoint of each run, where single tensor events are not in the log.
fn tensors(dirs: &[PathBuf], pass: &mut Collector) -> Result<Vec<LiveRow>, LogError> {
    let log = Log::open(dirs)?;
    let mut last = BTreeMap::new();
    for checkpoint in log.checkpoints() {
        last.insert(checkpoint.run, checkpoint);
    }
    let mut rows = Vec::new();
    for checkpoint in last.values() {
        for row in log.checkpoint_rows(checkpoint) {
            match row {
                Ok(row) if row.level == Level::Tensor.as_str() => rows.push(row),
                Ok(_) => {}
                Err(error) => pass.problem(error.to_string(), Some(LiveRow::TABLE.name)),
            }
        }
    }
    Ok(rows)
}

pub(super) fn text(pass: &Collector, wanted: &str, checkpoint: &[LiveRow]) -> String {
    let is_wanted = |stack_id: i64| pass.stacks.site(stack_id).filter(|site| matches(site, wanted));
    let mut blocks: Blocks = BTreeMap::new();
    let mut add = |proc_id: i64, level: Level, stack_id: i64, block: Block| {
        if let Some(site) = is_wanted(stack_id) {
            blocks.entry((proc_id, level, site.to_owned())).or_default().push(block);
        }
    };
    let mut exact = BTreeSet::new();
    for (proc_id, process) in pass.states.iter().flat_map(|(_, state, _)| state.processes()) {
        for (_, live) in process.live() {
            let (addr, size_bytes, since_ns) = (live.addr, live.size_bytes, live.ts_ns);
            if live.level == Level::Tensor {
                exact.insert(proc_id);
            }
            add(proc_id, live.level, live.stack_id, Block { addr, size_bytes, since_ns });
        }
    }
    for row in checkpoint.iter().filter(|row| !exact.contains(&row.proc_id)) {
        let (addr, size_bytes, since_ns) = (row.addr, row.size_bytes, row.alloc_ts_ns);
        add(row.proc_id, Level::Tensor, row.stack_id, Block { addr, size_bytes, since_ns });
    }
    if blocks.is_empty() {
        return none(pass, wanted);
    }
    let mut page = String::new();
    let as_of = checkpoint.iter().map(|row| row.ts_ns).max();
    for ((proc_id, level, site), list) in &mut blocks {
        list.sort_by_key(|block| (block.since_ns, block.addr));
        let as_of = as_of.filter(|_| *level == Level::Tensor && !exact.contains(proc_id));
        listed(&mut page, pass, (*proc_id, *level, site), list, as_of);
    }
    let mut asked: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
    for ((proc_id, level, _), list) in &blocks {
        if *level != Level::Virtual {
            asked.entry(*proc_id).or_default().extend(list.iter().map(|block| block.addr));
        }
    }
    for (proc_id, addresses) in asked {
        snippet(&mut page, pass, proc_id, &addresses);
    }
    page
}

/// A site by a part of it, or by `file:line` with the whole line number.
fn matches(site: &str, wanted: &str) -> bool {
    let is_line = wanted
        .rsplit_once(':')
        .is_some_and(|(_, line)| !line.is_empty() && line.chars().all(|c| c.is_ascii_digit()));
    site.match_indices(wanted).any(|(at, found)| {
        let next = site[at + found.len()..].chars().next();
        !is_line || !next.is_some_and(|c| c.is_ascii_digit())
    })
}

fn none(pass: &Collector, wanted: &str) -> String {
    let wanted = printable(wanted);
    let mut sites: Vec<(i64, &str)> = pass
        .sites
        .stacks
        .iter()
        .filter_map(|now| Some((now.bytes, pass.stacks.site(now.stack_id)?)))
        .collect();
    if sites.is_empty() {
        return format!("No stacks were recorded, so nothing is known of \"{wanted}\".\n");
    }
    let known = sites.iter().find(|(_, site)| matches(site, &wanted)).map(|(_, site)| *site);
    if let Some(site) = known {
        let detail = "single blocks of it are not in the log (tensors are listed where a \
                      checkpoint holds them, or with --detail events)";
        return format!("{}: nothing of it is alive, or {detail}.\n", printable(site));
    }
    sites.sort_unstable_by(|a, b| b.cmp(a));
    let mut names: Vec<&str> = Vec::new();
    for (_, site) in sites {
        if names.len() < 10 && !names.contains(&site) {
            names.push(site);
        }
    }
    let names: Vec<String> =
        names.into_iter().map(|name| format!("  {}\n", printable(name))).collect();
    format!("No site contains \"{wanted}\". These hold most:\n{}", names.concat())
}

fn listed(
    page: &mut String,
    pass: &Collector,
    (proc_id, level, site): (i64, Level, &str),
    blocks: &[Block],
    as_of: Option<i64>,
) {
    let clock = Clock::new(pass.span.0.map(|span| span.0));
    let end_ns = as_of.or(pass.span.0.map(|span| span.1)).unwrap_or(0);
    let bytes: i64 = blocks.iter().filter_map(|block| block.size_bytes).sum();
    let when = as_of.map(|ns| format!(" as of {}", clock.time(ns))).unwrap_or_default();
    page.extend([format!(
        "pid {}, {} ({}): {} in {}{when}\n",
        pid(pass, proc_id),
        printable(site),
        level.as_str(),
        show_bytes(bytes),
        counted(blocks.len() as u64, "block", "blocks"),
    )]);
    for block in blocks.iter().take(LISTED) {
        page.extend([format!(
            "  {:#018x}  {:>10}  {} ago, at {}\n",
            block.addr,
            block.size_bytes.map_or("? B".to_owned(), show_bytes),
            show_duration(end_ns.saturating_sub(block.since_ns)),
            clock.time(block.since_ns),
        )]);
    }
    let more = blocks.len().saturating_sub(LISTED);
    if more > 0 {
        page.extend([format!("  and {} later\n", counted(more as u64, "block", "blocks"))]);
    }
    page.push('\n');
}

fn pid(pass: &Collector, proc_id: i64) -> i32 {
    let state = pass.states.iter().rev().find_map(|(_, state, _)| state.process(proc_id));
    let facts = pass.processes.get(&proc_id).map(|facts| facts.pid);
    facts.filter(|pid| *pid != 0).or(state.map(Process::pid)).unwrap_or(0)
}

/// The lines for one process, oldest addresses first: what leaks is among them.
fn snippet(page: &mut String, pass: &Collector, proc_id: i64, addresses: &[i64]) {
    let pid = pid(pass, proc_id);
    let ended = pass.processes.get(&proc_id).is_some_and(|facts| facts.end_ns().is_some());
    page.push_str("Who refers to them: paste this into a Python prompt inside ");
    page.extend([if ended {
        format!("a process like pid {pid}, which ended:\n")
    } else {
        format!(
            "pid {pid} (`python -m pdb -p {pid}` from Python 3.14 on, then `interact`; or a \
             debugger, a signal handler):\n"
        )
    }]);
    let list: Vec<String> =
        addresses.iter().take(LISTED).map(|addr| format!("{addr:#x}")).collect();
    page.push('\n');
    *page += &SNIPPET.replace("ADDRESSES", &list.join(", "));
    page.push('\n');
}
