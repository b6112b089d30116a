//! One agent a host: a sign that other agents see, whatever container they run in.
//!
//! A file or a socket is seen in its own mount or network namespace only, and a killed agent may leave
//! it behind. A BPF map has a name and an id that the whole kernel knows, and it is gone with the last
//! descriptor of it. So each agent holds a small map that says who it is, and looks for those of
//! others: it makes its own first, and of two that start at once the one with the higher id gives
//! way.

use std::{fs, path::Path, time::Duration};

use aya::maps::{Array, Map, MapData, MapError, loaded_maps};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::info;

use crate::{
    host::{Host, text},
    privileges::OF_AGENTS,
};

/// What is in the map.
type Value = [u8; ROOM];

/// Name of the map.
const NAME: &str = "vramscope_agent";
/// `BPF_MAP_TYPE_ARRAY`.
const ARRAY: u32 = 2;
/// Longest text in it.
const ROOM: usize = 8192;
/// Processes that are named in it at most.
const PIDS: usize = 256;
/// How much longer each attempt waits for a sign that is not written yet.
const PAUSE: Duration = Duration::from_millis(10);
/// The variable that sets agents of tests apart: those with another value are not there for us.
const SPACE: &str = "VRAMSCOPE_SPACE";

/// Who an agent is, and what it records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Its process id.
    pub pid: u32,
    /// The verb.
    pub verb: String,
    /// Folder of its log.
    pub log: String,
    /// It records every process.
    pub host_wide: bool,
    /// Processes that it records, with their descendants.
    pub roots: Vec<u32>,
    /// See [`SPACE`].
    #[serde(default)]
    space: String,
}

impl Who {
    /// This process.
    pub fn this(verb: &str, log: &Path, host_wide: bool, roots: &[u32]) -> Self {
        Self {
            pid: std::process::id(),
            verb: verb.to_owned(),
            log: text::clean(log.as_os_str().as_encoded_bytes(), 1000),
            host_wide,
            roots: roots.iter().copied().take(PIDS).collect(),
            space: std::env::var(SPACE).unwrap_or_default().chars().take(100).collect(),
        }
    }
}

/// Why an agent must not start.
#[derive(Debug, Error)]
pub enum SignError {
    /// There is one already.
    #[error(
        "vramscope {} runs already (pid {}, log {}), and a second set of probes would slow down \
         what it records: stop it first (kill -INT {}), or wait for its end{}",
        .0.verb, .0.pid, .0.log, .0.pid,
        if .0.host_wide { "; its log has every process of this host" } else { "" }
    )]
    Taken(Box<Who>),
    /// There is one, of another version or kind.
    #[error(
        "another vramscope runs already, of another version or in a container whose processes \
         can't be seen from here: stop it first"
    )]
    Unknown,
    /// No map.
    #[error("make the eBPF map {NAME} (needs root; see `vramscope doctor`)")]
    Map(#[from] MapError),
    /// No text.
    #[error("write who this agent is")]
    Text(#[from] serde_json::Error),
}

/// Held as long as the agent records.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Sign {
    _map: Array<MapData, Value>,
}

impl Sign {
    /// Puts up the sign, unless another agent's scope and this one's overlap.
    pub fn put_up(host: &Host, who: &Who) -> Result<Self, SignError> {
        let definition = aya_obj::Map::new_from_params(ARRAY, 4, ROOM as u32, 1, 0);
        let map = MapData::create(definition, NAME, None)?;
        let id = map.info()?.id();
        let mut map: Array<MapData, Value> = Array::try_from(Map::Array(map))?;
        map.set(0, value(who)?, 0)?;
        for other_id in ids().filter(|other_id| *other_id < id) {
            let other = read_written(other_id);
            match (holder(host, other_id, other.as_ref()), other) {
                (Holder::Nobody, _) => {}
                (_, Some(other)) if overlap(host, who, &other) => {
                    return Err(SignError::Taken(Box::new(other)));
                }
                (_, Some(_)) => {}
                (_, None) => return Err(SignError::Unknown),
            }
        }
        Ok(Self { _map: map })
    }
}

/// The agents that run, as far as they can be seen from here.
pub fn running(host: &Host) -> Vec<Who> {
    let space = Who::this("", Path::new(""), false, &[]).space;
    let seen = ids().filter_map(|id| Some((id, read_written(id)?)));
    seen.filter(|(id, who)| who.space == space && holder(host, *id, Some(who)) != Holder::Nobody)
        .map(|(_, who)| who)
        .collect()
}

fn value(who: &Who) -> Result<Value, SignError> {
    let mut value = [0; ROOM];
    for (to, from) in value.iter_mut().zip(serde_json::to_vec(who)?) {
        *to = from;
    }
    Ok(value)
}

/// The signs that are up.
fn ids() -> impl Iterator<Item = u32> {
    let told = |error: &MapError| {
        info!(%error, "a map that can't be looked at: other agents may not be seen");
    };
    let maps = loaded_maps().filter_map(move |map| map.inspect_err(told).ok());
    maps.filter(|map| map.name() == NAME.as_bytes()).map(|map| map.id())
}

/// What a sign says. Its agent makes it first, and writes it then.
fn read_written(id: u32) -> Option<Who> {
    (0..5).find_map(|attempt| {
        std::thread::sleep(PAUSE * attempt);
        read(id)
    })
}

fn read(id: u32) -> Option<Who> {
    let map: Array<MapData, Value> =
        Array::try_from(Map::Array(MapData::from_id(id).ok()?)).ok()?;
    let value = map.get(&0, 0).ok()?;
    serde_json::from_slice(value.split(|byte| *byte == 0).next()?).ok()
}

/// Who holds a sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// A process of root's, or one with what agents keep.
    Agent,
    /// A process that can't be seen from here.
    Hidden,
    /// A user's process, which may make maps of any name, but no probes.
    Nobody,
}

fn holder(host: &Host, id: u32, says: Option<&Who>) -> Holder {
    let told = says.map(|who| who.pid).filter(|pid| holds(host, *pid, id));
    let found = told.or_else(|| host.pids().into_iter().find(|pid| holds(host, *pid, id)));
    match found {
        None => Holder::Hidden,
        Some(pid) if is_agent(host, pid) => Holder::Agent,
        Some(_) => Holder::Nobody,
    }
}

/// Whether the process has a descriptor of the map.
fn holds(host: &Host, pid: u32, id: u32) -> bool {
    let Ok(entries) = fs::read_dir(host.process_path(pid, "fd")) else { return false };
    let maps = entries.flatten().filter(|entry| {
        let target = fs::read_link(entry.path());
        target.is_ok_and(|target| target.as_os_str() == "anon_inode:bpf-map")
    });
    maps.into_iter().any(|entry| {
        let info = host.process_path(pid, "fdinfo").join(entry.file_name());
        let text = fs::read_to_string(info).unwrap_or_default();
        let ids = text.lines().filter_map(|line| line.strip_prefix("map_id:"));
        ids.into_iter().any(|found| found.trim().parse() == Ok(id))
    })
}

/// By its effective user, the second of four (the folder of a process that gave root up belongs to
/// root still), or by a capability that every agent has.
fn is_agent(host: &Host, pid: u32) -> bool {
    let status = text::read_bounded(&host.process_path(pid, "status"), 1 << 16).unwrap_or_default();
    let permitted =
        text::field(&status, "CapPrm").and_then(|set| u64::from_str_radix(set, 16).ok());
    let permitted = CapabilitySet::from_bits_retain(permitted.unwrap_or(0));
    text::values(&status, "Uid").and_then(|mut users| users.nth(1)) == Some("0")
        || permitted.contains(OF_AGENTS)
}

/// Whether some process would meet the probes of both.
fn overlap(host: &Host, one: &Who, other: &Who) -> bool {
    if one.space != other.space {
        return false;
    }
    let within = |roots: &[u32], others: &[u32]| {
        roots.iter().any(|root| line_of(host, *root).iter().any(|pid| others.contains(pid)))
    };
    one.host_wide
        || other.host_wide
        || within(&one.roots, &other.roots)
        || within(&other.roots, &one.roots)
}

/// A process and its ancestors.
fn line_of(host: &Host, pid: u32) -> Vec<u32> {
    let mut line = vec![pid];
    while let Some(parent) = line.last().and_then(|pid| host.stat(*pid)).map(|stat| stat.ppid) {
        // A parent may end, and its id come back, while we look.
        if parent == 0 || line.contains(&parent) {
            break;
        }
        line.push(parent);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::Tree;

    fn who(host_wide: bool, roots: &[u32]) -> Who {
        Who { host_wide, roots: roots.to_vec(), ..Who::default() }
    }

    #[test]
    fn scopes_overlap_where_a_process_is_in_both() {
        let tree = Tree::new();
        for (pid, parent) in [(1, 0), (10, 1), (11, 10), (20, 1)] {
            tree.write(&format!("proc/{pid}/stat"), Tree::stat_line(pid, "x", parent, 1));
        }
        let overlap = |one: &Who, other: &Who| overlap(&tree.host(), one, other);
        assert!(overlap(&who(true, &[]), &who(false, &[20])));
        assert!(overlap(&who(false, &[20]), &who(true, &[])));
        assert!(!overlap(&who(false, &[10]), &who(false, &[20])));
        assert!(overlap(&who(false, &[11]), &who(false, &[10])));
        assert!(overlap(&who(false, &[10]), &who(false, &[20, 11])));
        assert!(overlap(&who(false, &[99]), &who(false, &[99])), "even one that is gone");
        let elsewhere = Who { space: "test".into(), ..who(true, &[]) };
        assert!(!overlap(&elsewhere, &who(true, &[])));
    }

    #[test]
    fn a_holder_is_an_agent_by_its_effective_user_or_its_capability() {
        let tree = Tree::new();
        let processes = [
            (1, "0\t0\t0\t0", "0"),
            (2, "0\t65534\t0\t0", "0"),
            (3, "1000\t0\t0\t0", "0"),
            (4, "1000\t1000\t1000\t1000", "0000010000080004"),
        ];
        for (pid, users, permitted) in processes {
            tree.write(
                &format!("proc/{pid}/status"),
                format!("Name:\tx\nUid:\t{users}\nGid:\t0\nCapPrm:\t{permitted}\n"),
            );
        }
        let are = [1, 2, 3, 4, 5].map(|pid| is_agent(&tree.host(), pid));
        assert_eq!(are, [true, false, true, true, false]);
    }

    #[test]
    fn a_sign_has_room_for_the_longest_path_and_many_processes() {
        let path = "\u{1f980}".repeat(5000);
        let pids: Vec<u32> = (0..1000).map(|n| u32::MAX - n).collect();
        let who = Who::this("record", Path::new(&path), true, &pids);
        let text = value(&who).unwrap();
        assert_eq!(text.last(), Some(&0), "it ends before the room does");
    }
}
