//! Names of the files of a log: `<table>-<run8>-<seq6>` with an extension that says what it is.

use std::fmt;

use super::schema::{TABLES, table_index};

/// Extension of a sealed file.
pub(crate) const PARQUET: &str = "parquet";
/// Extension of a journal.
pub(crate) const ARROWS: &str = "arrows";
/// Extension of a file that is not finished.
pub(crate) const TMP: &str = "tmp";

/// The first eight hexadecimal digits of a run's id: what tells runs in one directory apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run8([u8; 8]);

impl Run8 {
    /// The digits at the start of a run id, if it starts with eight lower-case ones.
    pub fn of(run_id: &str) -> Option<Self> {
        let digits: [u8; 8] = run_id.as_bytes().get(..8)?.try_into().ok()?;
        digits
            .iter()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
            .then_some(Self(digits))
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for Run8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Run8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which file of which table of which run. Ordered by table, run and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileName {
    /// Position in [`TABLES`].
    pub(crate) table: usize,
    pub(crate) run: Run8,
    pub(crate) seq: u32,
}

impl FileName {
    /// The name with an extension.
    pub(crate) fn with(self, extension: &str) -> String {
        let table = TABLES.get(self.table).map_or("", |table| table.name);
        format!("{table}-{}-{:06}.{extension}", self.run, self.seq)
    }

    /// What a name with this extension says, if it is one of ours.
    pub(crate) fn parse(name: &str, extension: &str) -> Option<Self> {
        let stem = name.strip_suffix(extension)?.strip_suffix('.')?;
        let (rest, seq) = stem.rsplit_once('-')?;
        let (table, run) = rest.rsplit_once('-')?;
        let well_formed =
            run.len() == 8 && seq.len() >= 6 && seq.bytes().all(|b| b.is_ascii_digit());
        let name = Self { table: table_index(table)?, run: Run8::of(run)?, seq: seq.parse().ok()? };
        well_formed.then_some(name)
    }
}

/// The `date=` directory for a moment, nanoseconds since the epoch. Moments outside the calendar's
/// range go to the epoch's day: the directory is only a place, `ts_ns` holds the truth.
pub(crate) fn date_dir(ts_ns: i64) -> String {
    let moment = jiff::Timestamp::from_nanosecond(i128::from(ts_ns)).unwrap_or_default();
    moment.strftime("date=%Y-%m-%d").to_string()
}

/// The manifest of a run.
pub(crate) fn manifest(run: Run8) -> String {
    format!("manifest-{run}.json")
}

/// The file that a compaction holds a lock on, inside `staging/`.
pub(crate) const COMPACTION_LOCK: &str = "compaction.lock";

/// The file that a live run holds a lock on, inside `journal/`.
pub(crate) fn lock(run: Run8) -> String {
    format!("run-{run}.lock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        let run = Run8::of("0123abcdffff").unwrap();
        for (table, seq) in [(0, 0), (1, 42), (TABLES.len() - 1, 1_234_567)] {
            let name = FileName { table, run, seq };
            assert_eq!(FileName::parse(&name.with(PARQUET), PARQUET), Some(name));
        }
        assert_eq!(FileName { table: 0, run, seq: 7 }.with(TMP), "events-0123abcd-000007.tmp");
    }

    #[test]
    fn foreign_names_are_refused() {
        for name in [
            "part-0.parquet",
            "events-0123abcd-1.parquet",
            "events-0123ABCD-000001.parquet",
            "events-0123abcd-00000x.parquet",
            "events-0123abcd-000001.parquet.tmp",
            "events-0123abcd00-000001.parquet",
            "secrets-0123abcd-000001.parquet",
            "events-0123abcd-99999999999.parquet",
            "parquet",
            "",
        ] {
            assert_eq!(FileName::parse(name, PARQUET), None, "{name}");
        }
        assert_eq!(Run8::of("short"), None);
        assert_eq!(Run8::of("0123abcé"), None);
    }

    #[test]
    fn a_day_begins_at_midnight_utc() {
        assert_eq!(date_dir(0), "date=1970-01-01");
        assert_eq!(date_dir(-1), "date=1969-12-31");
        assert_eq!(date_dir(1_796_083_199_999_999_999), "date=2026-11-30");
        assert_eq!(date_dir(1_796_083_200_000_000_000), "date=2026-12-01");
        assert_eq!(date_dir(i64::MAX), "date=2262-04-11");
    }
}
