//! Who wrote a run, when and how: `manifest-<run8>.json`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{
    dir::LogDir,
    error::{LogError, Result},
    name::{self, Run8},
};

/// Version of the schema. Appending nullable columns does not change it.
pub const SCHEMA_VERSION: u32 = 1;

/// One moment on two clocks, to place times of other logs of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockAnchor {
    /// `CLOCK_BOOTTIME`, nanoseconds.
    pub boot_ns: i64,
    /// `CLOCK_REALTIME`, nanoseconds since the epoch.
    pub wall_ns: i64,
}

impl ClockAnchor {
    /// What to add to boot time to get wall time.
    pub fn offset_ns(self) -> i64 {
        self.wall_ns.saturating_sub(self.boot_ns)
    }
}

/// What is known of a run when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunInfo {
    /// Name of the host.
    pub host: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// Process id of the agent.
    pub pid: u32,
    /// Start of the run; its `wall_ns` dates the first files.
    pub clock: ClockAnchor,
    /// Version of vramscope.
    pub tool_version: String,
    /// The command line of the agent.
    pub command: Vec<String>,
}

impl RunInfo {
    /// The run's id: a hash of host, boot, process and start, sixteen hexadecimal digits.
    pub fn run_id(&self) -> String {
        let (host, boot_id) = (&self.host, self.boot_id.trim());
        let text = format!("{host}\0{boot_id}\0{}\0{}", self.pid, self.clock.wall_ns);
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(text.as_bytes()))
    }
}

/// A run, as its manifest tells of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Id of the run; its files carry the first eight digits.
    pub run_id: String,
    /// Name of the host.
    pub host: String,
    /// Boot that the run belongs to.
    pub boot_id: String,
    /// Process id of the agent.
    pub pid: u32,
    /// Version of vramscope.
    pub tool_version: String,
    /// The command line of the agent.
    pub command: Vec<String>,
    /// The same moment on both clocks: at the start, and whenever they were seen to move apart.
    pub clock_anchors: Vec<ClockAnchor>,
    /// Start, nanoseconds since the epoch.
    pub start_ns: i64,
    /// End; `null` while the run goes on, and for ever where the agent was killed.
    pub end_ns: Option<i64>,
    /// Nothing of the run is left in `journal/`.
    pub sealed: bool,
}

impl Manifest {
    pub(crate) fn new(info: &RunInfo) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            run_id: info.run_id(),
            host: info.host.clone(),
            boot_id: info.boot_id.trim().to_owned(),
            pid: info.pid,
            tool_version: info.tool_version.clone(),
            command: info.command.clone(),
            clock_anchors: vec![info.clock],
            start_ns: info.clock.wall_ns,
            end_ns: None,
            sealed: false,
        }
    }

    /// For files of a run whose manifest is lost.
    pub(crate) fn unknown(run: Run8) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            run_id: run.to_string(),
            host: String::new(),
            boot_id: String::new(),
            pid: 0,
            tool_version: String::new(),
            command: Vec::new(),
            clock_anchors: Vec::new(),
            start_ns: 0,
            end_ns: None,
            sealed: false,
        }
    }

    /// The digits that the run's files carry.
    pub fn run8(&self) -> Option<Run8> {
        Run8::of(&self.run_id)
    }

    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| LogError::io("read", path, e))?;
        let manifest: Self = serde_json::from_slice(&bytes)
            .map_err(|source| LogError::Manifest { path: path.to_owned(), source })?;
        if manifest.run8().is_none() {
            return Err(LogError::content(path, "run_id is not a hexadecimal number"));
        }
        Ok(manifest)
    }

    pub(crate) fn write(&self, dir: &LogDir) -> Result<()> {
        let Some(run) = self.run8() else { return Ok(()) };
        let name = name::manifest(run);
        let json = serde_json::to_vec_pretty(self)
            .map_err(|source| LogError::Manifest { path: dir.path.join(&name), source })?;
        dir.replace(&name, &json)
    }

    /// What every Parquet file of the run says of itself.
    pub(crate) fn metadata(&self, table: &str) -> Vec<(String, String)> {
        let offset = self.clock_anchors.first().map(|anchor| anchor.offset_ns().to_string());
        let pairs = [
            ("schema_version", self.schema_version.to_string()),
            ("table", table.to_owned()),
            ("tool_version", self.tool_version.clone()),
            ("run_id", self.run_id.clone()),
            ("host", self.host.clone()),
            ("boot_id", self.boot_id.clone()),
            ("clock_offset_ns", offset.unwrap_or_default()),
            ("complete", "true".to_owned()),
        ];
        pairs.into_iter().map(|(key, value)| (format!("vramscope.{key}"), value)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn info(host: &str) -> RunInfo {
        RunInfo {
            host: host.to_owned(),
            boot_id: "5f2a7f0e-0000-4000-8000-000000000001".to_owned(),
            pid: 4242,
            clock: ClockAnchor { boot_ns: 5_000_000_000, wall_ns: 1_796_000_000_000_000_000 },
            tool_version: "0.1.0".to_owned(),
            command: vec!["vramscope".to_owned(), "record".to_owned()],
        }
    }

    #[test]
    fn runs_differ_by_host_boot_process_and_start() {
        let base = info("a");
        let mut others = vec![info("b"), base.clone(), base.clone(), base.clone()];
        others[1].boot_id.push('2');
        others[2].pid += 1;
        others[3].clock.wall_ns += 1;
        for other in others {
            assert_ne!(other.run_id(), base.run_id());
        }
        assert_eq!(base.run_id().len(), 16);
    }

    #[test]
    fn a_manifest_survives_a_round_trip() {
        let temp = tempfile::tempdir().unwrap();
        let dir = LogDir::create(temp.path()).unwrap();
        let manifest = Manifest::new(&info("a"));
        manifest.write(&dir).unwrap();
        let path = temp.path().join(name::manifest(manifest.run8().unwrap()));
        assert_eq!(Manifest::read(&path).unwrap(), manifest);

        std::fs::write(&path, b"{\"run_id\": 1").unwrap();
        assert!(Manifest::read(&path).unwrap_err().to_string().contains("manifest-"));
    }
}
