//! Whole reports, held against files. `VRAMSCOPE_BLESS=1 cargo test -p ledger` writes them anew.

use std::path::Path;

use proptest::prelude::*;

use super::scene::{GIB, MIB, Scene, at, uuid};
use crate::{account::breakdown::Moment, report::Model, rows::AnnotationRow};

fn held_against(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/report/tests/golden").join(name);
    if std::env::var_os("VRAMSCOPE_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text, golden, "differs from {}", path.display());
}

/// A training job with a leak beside PyTorch, and a healthy one, on one device.
pub(super) fn busy() -> Scene {
    let mut scene = Scene::new(60);
    let row = scene.process(4824, "/usr/bin/python3 leak_job.py");
    (row.rank, row.world_size, row.ns_pid) = (Some(2), Some(8), Some(17));
    row.container_id = Some("0123456789abcdef".repeat(4));
    row.pod_uid = Some("2c48913c-b29f-11e7-9350-020968147796".to_owned());
    for step in 0..103 {
        scene.alloc(4824, 1, 2.0 + f64::from(step) * 0.55, 4 * MIB);
    }
    scene.alloc_at(4824, 1, 1.0, 2 * GIB, "device", "cuMemCreate");
    scene.alloc_at(4824, 1, 1.0, GIB, "host", "cuMemHostAlloc");
    let moment = Moment {
        nvml_used: Some(3 * GIB + 12 * MIB + 300_000),
        live_device: 2 * GIB + 412 * MIB,
        live_pool: 8 * MIB + 52_000,
        torch_allocated: Some(GIB),
        ..Moment::default()
    };
    scene.reading(4824, 1, 58.0, &moment);
    for step in 0..60 {
        scene.torch(4824, 1, f64::from(step), GIB, 2 * GIB);
    }
    let row = scene.process(4900, "./infer --model llama");
    row.from_start = false;
    scene.late(4900);
    scene.alloc(4900, 1, 3.0, 700 * MIB);
    let moment = Moment {
        nvml_used: Some(5 * GIB),
        baseline: Some(4 * GIB),
        live_device: 700 * MIB,
        live_managed: 3 * MIB,
        ..Moment::default()
    };
    scene.reading(4900, 1, 57.0, &moment);
    scene.exit(4900, 59.0, 137);
    scene.process(4810, "torchrun train.py");
    scene
}

/// Everything that can be wrong.
pub(super) fn troubled() -> Scene {
    let mut scene = busy();
    scene.ended = false;
    scene.oom(4824, 1, 40.0, 2 * GIB, 79 * GIB);
    scene.fail(4824, 1, 41.0, MIB, 201);
    scene.fail(4824, 1, 42.0, MIB, 12_345);
    scene.loss(Some(4824), "ring_full", 1_234);
    scene.loss(None, "library_not_probed", 1);
    scene.loss(None, "reading_dropped", 3);
    scene.annotations.push(AnnotationRow {
        ts_ns: at(1.5),
        proc_id: Some(4824),
        kind: "warning".to_owned(),
        text: "/opt/x/libcuda.so.1 was not probed: \x1b[31mnot an ELF file".to_owned(),
        value: None,
    });
    scene
}

#[test]
fn a_leaking_and_a_healthy_job() {
    held_against("busy.txt", &busy().model().text(false));
}

#[test]
fn everything_that_can_be_wrong() {
    held_against("troubled.txt", &troubled().model().text(false));
}

#[test]
fn nothing_at_all() {
    held_against("empty.txt", &Scene::new(5).model().text(false));
}

#[test]
fn colour_changes_nothing_but_colour() {
    let model = troubled().model();
    let (plain, mut colored) = (model.text(false), model.text(true));
    assert!(colored.contains("\x1b[1;31mLOST\x1b[0m"));
    assert!(!plain.contains('\x1b'), "not even from a warning's text");
    while let Some(start) = colored.find("\x1b[") {
        let end = start + colored[start..].find('m').unwrap();
        colored.replace_range(start..=end, "");
    }
    assert_eq!(colored, plain);
}

/// Lines of at most 100 columns, but for commands, which are to be pasted.
fn fits(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
        assert_eq!(line.trim_end(), line);
    }
}

#[test]
fn many_processes_are_bounded_and_counted() {
    let mut scene = Scene::new(30);
    for pid in 100..150 {
        scene.process(pid, &"long ".repeat(60));
        scene.alloc(pid, 0, 1.0, i64::from(pid) * MIB);
        let used = Some(i64::from(pid) * MIB);
        scene.reading(pid, 0, 9.0, &Moment { nvml_used: used, ..Moment::default() });
        scene.loss(Some(pid), "ring_full", 1);
        for api in 0..3 {
            scene.oom(pid, 0, f64::from(api), GIB, 79 * GIB);
        }
    }
    let text = scene.model().text(false);
    assert_eq!(text.matches("  running when the log ends").count(), 20);
    assert!(text.contains("and 30 more processes, "), "{text}");
    assert!(text.contains("OOM      40 more; --json lists them all."), "{text}");
    fits(&text);
}

/// The figures of the breakdown as printed, in tenths of a MiB.
fn printed_breakdown(model: &Model) -> (i64, Vec<i64>) {
    let text = model.text(false);
    let figure = |line: &str| {
        let figure = line.get(22..)?.split_whitespace().next()?;
        figure.replace('.', "").parse::<i64>().ok()
    };
    let mut lines = text.lines().skip_while(|line| !line.starts_with("    NVML used"));
    let total = figure(lines.next().unwrap()).unwrap();
    let parts = lines.take_while(|line| line.starts_with("      ") && figure(line).is_some());
    (total, parts.map(|line| figure(line).unwrap()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn printed_parts_add_up_to_the_printed_sum(
        nvml in 1..90 * GIB,
        live_device in 0..90 * GIB,
        live_pool in 0..GIB,
        baseline in prop::option::of(0..90 * GIB),
    ) {
        let mut scene = Scene::new(30);
        scene.process(7, "./app");
        let moment = Moment {
            nvml_used: Some(nvml), live_device, live_pool, baseline, ..Moment::default()
        };
        scene.reading(7, 0, 9.0, &moment);
        let (total, parts) = printed_breakdown(&scene.model());
        prop_assert!(parts.len() >= 2);
        prop_assert_eq!(parts.iter().sum::<i64>(), total);
        prop_assert!((total - nvml * 10 / MIB).abs() <= 1);
    }

    #[test]
    fn whatever_the_rows_say_it_is_printed_within_the_columns(
        command in "\\PC*", size in any::<i64>(), delta in any::<i64>(), seconds in any::<i64>(),
        op in prop::sample::select(vec!["alloc", "free", "fail", "map", "reserve", "?"]),
        level in prop::sample::select(vec!["device", "pool", "host", "virtual", "imported", "?"]),
        implicit: bool, result in any::<i32>(),
    ) {
        let mut scene = Scene::new(30);
        scene.process(7, &command);
        let alloc_id = scene.alloc(7, 0, 1.0, MIB);
        let mut row = scene.events[0].clone();
        (row.op, row.level, row.implicit, row.result) = (op.into(), level.into(), implicit, result);
        (row.size_bytes, row.delta_bytes, row.ts_ns) = (Some(size), delta, seconds);
        scene.events.push(row);
        scene.free(alloc_id, 2.0);
        let model = scene.model();
        fits(&model.text(false));
        prop_assert!(serde_json::to_string(&model).is_ok());
    }
}

#[test]
fn a_device_that_is_not_known_has_its_own_section() {
    let mut scene = Scene::new(30);
    scene.process(7, "./app");
    scene.alloc(7, 0, 1.0, 64 * MIB);
    let row = scene.events.last_mut().unwrap();
    (row.gpu_uuid, row.nvml_index) = (None, None);
    let text = scene.model().text(false);
    assert!(text.contains("GPU ?"), "{text}");
    assert!(text.contains("64.0 MiB in 1 block at the end"), "{text}");
}

#[test]
fn a_device_that_becomes_known_is_one_device() {
    let mut scene = Scene::new(30);
    scene.process(7, "./app");
    scene.alloc(7, 0, 1.0, 64 * MIB);
    let row = scene.events.last_mut().unwrap();
    (row.gpu_uuid, row.nvml_index) = (None, None);
    scene.alloc(7, 0, 2.0, 64 * MIB);
    let model = scene.model();
    assert_eq!(model.processes[0].shares.len(), 1);
    assert_eq!(model.processes[0].shares[0].gpu_uuid, Some(uuid(0)));
}
