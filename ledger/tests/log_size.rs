//! What a log of a training job weighs. Ignored: it writes a million events.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test")]

#[path = "../examples/sample_log/sample.rs"]
mod sample;

use std::{collections::BTreeMap, fs, path::Path, time::Instant};

use ledger::log::{Log, Options};
use parquet::file::{
    metadata::RowGroupMetaData,
    reader::{FileReader, SerializedFileReader},
};

fn bytes_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).unwrap().flatten();
    entries
        .map(|entry| match entry.metadata().unwrap() {
            meta if meta.is_dir() => bytes_below(&entry.path()),
            meta => meta.len(),
        })
        .sum()
}

/// Bytes of each column of the events, over all files.
fn column_sizes(dir: &Path) -> BTreeMap<String, i64> {
    let mut sizes = BTreeMap::new();
    for day in fs::read_dir(dir.join("events")).unwrap().flatten() {
        for file in fs::read_dir(day.path()).unwrap().flatten() {
            let file = SerializedFileReader::new(fs::File::open(file.path()).unwrap()).unwrap();
            let groups = file.metadata().row_groups().iter();
            for column in groups.flat_map(RowGroupMetaData::columns) {
                *sizes.entry(column.column_path().string()).or_default() +=
                    column.compressed_size();
            }
        }
    }
    sizes
}

#[test]
#[ignore = "writes a million events"]
fn an_event_takes_at_most_12_bytes() {
    let temp = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let events = sample::write(temp.path(), 1_000_000, Options::default(), true).unwrap();
    let written = begun.elapsed();
    println!("{:#?}", column_sizes(temp.path()));
    let per_event = bytes_below(&temp.path().join("events")) as f64 / events as f64;
    let begun = Instant::now();
    let read = Log::open(&[temp.path().to_owned()]).unwrap().events().flatten().count();
    println!(
        "{events} events, {per_event:.2} bytes each, written in {written:?}, read in {:?}",
        begun.elapsed()
    );
    assert_eq!(read as i64, events);
    assert!(per_event <= 12.0, "{per_event} bytes an event");
}
