//! Reports of logs on disk: finished, running, damaged, with their first files gone.

use std::path::Path;

use super::{golden::busy, scene::Scene};
use crate::{
    log::{ClockAnchor, Compaction, Options, RunInfo, Writer, compact},
    report::Model,
    rows::{EventRow, LiveRow},
};

pub(super) fn writer(dir: &Path, scene: &Scene) -> Writer {
    writer_with(dir, scene, Options::default())
}

fn writer_with(dir: &Path, scene: &Scene, options: Options) -> Writer {
    let manifest = scene.manifest();
    let info = RunInfo {
        host: manifest.host,
        boot_id: "boot".to_owned(),
        pid: 1,
        clock: ClockAnchor { boot_ns: 0, wall_ns: manifest.start_ns },
        tool_version: "0.1.0".to_owned(),
        command: manifest.command,
    };
    let mut writer = Writer::create(dir, &info, options).unwrap();
    scene.frames.iter().for_each(|row| writer.push(row));
    scene.stacks.iter().for_each(|row| writer.push(row));
    scene.processes.iter().for_each(|row| writer.push(row));
    scene.devices.iter().for_each(|row| writer.push(row));
    scene.annotations.iter().for_each(|row| writer.push(row));
    scene.losses.iter().for_each(|row| writer.push(row));
    scene.device_samples.iter().for_each(|row| writer.push(row));
    scene.process_samples.iter().for_each(|row| writer.push(row));
    scene.site_usage.iter().for_each(|row| writer.push(row));
    scene.breakdown.iter().for_each(|row| writer.push(row));
    scene.ooms.iter().for_each(|row| writer.push(row));
    writer
}

fn without_names(mut model: Model) -> Model {
    model.logs.clear();
    model.runs.clear();
    model
}

#[test]
fn a_finished_log_says_what_its_rows_say() {
    let (temp, scene) = (tempfile::tempdir().unwrap(), busy());
    let mut writer = writer(temp.path(), &scene);
    scene.sorted_events().iter().for_each(|row| writer.push(row));
    writer.finish(scene.manifest().end_ns.unwrap()).unwrap();
    let read = Model::read(&[temp.path().to_owned()]).unwrap();
    assert_eq!(without_names(read), without_names(scene.model()));
}

#[test]
fn a_compacted_log_says_what_it_said_before() {
    let (temp, scene) = (tempfile::tempdir().unwrap(), busy());
    let small = Options { batch_rows: 3, max_file_rows: 3, ..Options::default() };
    let mut writer = writer_with(temp.path(), &scene, small);
    scene.sorted_events().iter().for_each(|row| writer.push(row));
    writer.finish(scene.manifest().end_ns.unwrap()).unwrap();
    let read = || Model::read(&[temp.path().to_owned()]).unwrap();
    let before = read();
    let everywhere = Compaction { other_hosts: true, ..Compaction::default() };
    let compacted = compact(temp.path(), everywhere).unwrap();
    assert!(compacted.tables["events"].files_before > 10, "{compacted:?}");
    let after = read();
    assert_eq!(after.text(false), before.text(false));
    assert_eq!(after, before);
}

#[test]
fn a_running_log_is_read_as_far_as_it_is_written() {
    let (temp, scene) = (tempfile::tempdir().unwrap(), busy());
    let mut writer = writer(temp.path(), &scene);
    scene.sorted_events().iter().for_each(|row| writer.push(row));
    writer.tick(scene.manifest().end_ns.unwrap());
    let model = Model::read(&[temp.path().to_owned()]).unwrap();
    assert_eq!(model.events, scene.events.len() as u64);
    assert!(model.text(false).contains("1 recording has not ended"));
}

#[test]
fn a_checkpoint_stands_in_for_deleted_events() {
    let (temp, scene) = (tempfile::tempdir().unwrap(), busy());
    let events = scene.sorted_events();
    let (gone, kept) = events.split_at(50);
    let mut writer = writer(temp.path(), &scene);
    writer.checkpoint(50, gone.iter().map(live_row));
    for row in kept {
        writer.push(row);
    }
    writer.finish(scene.manifest().end_ns.unwrap()).unwrap();
    let model = Model::read(&[temp.path().to_owned()]).unwrap();
    assert_eq!(model.events, kept.len() as u64);
    let whole = scene.model();
    for (read, told) in model.processes.iter().zip(&whole.processes) {
        assert_eq!(read.pid, told.pid);
        for (read, told) in read.shares.iter().zip(&told.shares) {
            assert_eq!(read.never_freed_totals, told.never_freed_totals);
        }
    }
    assert_eq!(model.losses[0].reason, "rows_before_checkpoint");
    assert!(!model.losses[0].affects_account);
    let [begin] = &model.warnings[..] else { panic!("{:?}", model.warnings) };
    assert_eq!(begin.ts_ns, gone.last().unwrap().ts_ns);
    assert!(begin.text.contains("begins here, with the 50 allocations"), "{}", begin.text);
}

#[test]
fn events_that_are_missing_without_a_checkpoint_are_a_loss() {
    let (temp, scene) = (tempfile::tempdir().unwrap(), busy());
    let mut writer = writer(temp.path(), &scene);
    scene.sorted_events().iter().skip(10).for_each(|row| writer.push(row));
    writer.finish(scene.manifest().end_ns.unwrap()).unwrap();
    let model = Model::read(&[temp.path().to_owned()]).unwrap();
    assert_eq!((model.losses[0].reason.as_str(), model.losses[0].count), ("rows_missing", 10));
    assert!(model.losses[0].affects_account);
}

#[test]
fn a_damaged_file_is_told_and_the_rest_is_read() {
    let (temp, scene) = (tempfile::tempdir().unwrap(), busy());
    let mut writer = writer(temp.path(), &scene);
    scene.sorted_events().iter().for_each(|row| writer.push(row));
    writer.finish(scene.manifest().end_ns.unwrap()).unwrap();
    let foreign = temp.path().join("events/date=2026-11-30");
    std::fs::create_dir_all(&foreign).unwrap();
    std::fs::write(foreign.join("events-01234567-000099.parquet"), b"PAR1").unwrap();
    let model = Model::read(&[temp.path().to_owned()]).unwrap();
    assert_eq!(model.events, scene.events.len() as u64);
    assert_eq!(model.problems.len(), 1, "{:?}", model.problems);
    assert!(model.text(false).contains("events-01234567-000099.parquet"));
}

#[test]
fn what_is_no_log_is_an_error_that_names_it() {
    let temp = tempfile::tempdir().unwrap();
    let missing = temp.path().join("nothing-here");
    let error = Model::read(std::slice::from_ref(&missing)).unwrap_err();
    assert!(error.to_string().contains("nothing-here"), "{error}");
    let error = Model::read(&[temp.path().to_owned()]).unwrap_err();
    assert!(error.to_string().contains("no log of vramscope"), "{error}");
}

fn live_row(row: &EventRow) -> LiveRow {
    assert_eq!(row.op, "alloc");
    LiveRow {
        estimated: row.estimated,
        ts_ns: row.ts_ns,
        seq: 50,
        proc_id: row.proc_id,
        alloc_id: row.alloc_id,
        level: row.level.to_string(),
        nvml_index: row.nvml_index,
        gpu_uuid: row.gpu_uuid.clone(),
        cuda_ordinal: row.cuda_ordinal,
        addr: row.addr,
        size_bytes: row.size_bytes,
        api: row.api.to_string(),
        stack_id: row.stack_id,
        alloc_ts_ns: row.ts_ns,
    }
}
