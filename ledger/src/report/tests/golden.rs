//! Whole reports, held against files. `VRAMSCOPE_BLESS=1 cargo test -p ledger` writes them anew.

use std::path::Path;

use proptest::prelude::*;

use super::scene::{GIB, MIB, Scene, at, uuid};
use crate::{
    account::breakdown::{Holding, Moment, Split, Torch},
    rows::AnnotationRow,
};

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
    let pinning = scene.stack(&["roi.py:210 crop", "train.py:9 main"]);
    let split = Split {
        returnable_bytes: 700 * MIB + 52_000,
        graph_pools_bytes: 0,
        pinned_by_blocks: 12,
        pinned_by_stack_id: Some(pinning),
    };
    let libraries =
        [("libnccl", 300 * MIB), ("libcublas", 72 * MIB + 9_000), ("libmyop", 40 * MIB)];
    let moment = Moment {
        nvml_used: Some(3 * GIB + 12 * MIB + 300_000),
        holding: Holding {
            segments_bytes: 2 * GIB,
            libraries: libraries.map(|(name, bytes)| (Some(name.to_owned()), bytes)).into(),
            rounding_bytes: 77_000,
            split: Some(split),
        },
        torch: Some(Torch { allocated_bytes: GIB, reserved_bytes: 2 * GIB }),
        ..Moment::default()
    };
    scene.reading(4824, 1, 58.0, &moment);
    scene.device(1, 58.0, 8 * GIB + 70 * MIB, 8 * GIB + 12 * MIB);
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
        holding: held(700 * MIB),
        ..Moment::default()
    };
    scene.reading(4900, 1, 57.0, &moment);
    scene.exit(4900, 59.0, 137);
    scene.process(4810, "torchrun train.py");
    scene
}

/// Device memory of the program's own.
fn held(bytes: i64) -> Holding {
    Holding { libraries: [(Some("app".to_owned()), bytes)].into(), ..Holding::default() }
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

/// Every breakdown of a process as printed: the sum and its parts, in tenths.
fn printed(text: &str) -> Vec<(i64, Vec<i64>)> {
    let figure = |text: &str| text.replace('.', "").parse::<i64>().ok();
    let first = |line: &str| figure(line.get(22..)?.split_whitespace().next()?);
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(total) = line.strip_prefix("    NVML used").and_then(|_| first(line)) else {
            continue;
        };
        let mut parts = Vec::new();
        while let Some(line) = lines.next_if(|line| line.starts_with("      ")) {
            if line.starts_with(&" ".repeat(22)) {
                continue; // A note goes on.
            }
            let Some(part) = first(line).filter(|_| !line.contains("unexplained")) else {
                let listed = line.split(" · ").filter_map(|part| part.rsplit(' ').next());
                parts.extend(listed.filter_map(figure));
                break;
            };
            parts.push(part);
        }
        found.push((total, parts));
    }
    found
}

/// Libraries' figures add up to their own sum.
fn libraries_add_up(text: &str) {
    for line in text.lines().filter(|line| line.starts_with("      libraries")) {
        let tenths = |text: &str| text.replace('.', "").parse::<i64>().ok();
        let mut words = line.split_whitespace().skip(1).filter_map(tenths);
        let sum = words.next().unwrap();
        assert_eq!(words.sum::<i64>(), sum, "{line}");
    }
}

#[test]
fn every_printed_example_adds_up() {
    let document = include_str!("../../../../docs/breakdown.md");
    let readme = include_str!("../../../../README.md");
    let golden = include_str!("golden/busy.txt");
    let mut seen = 0;
    for text in [golden, document, readme] {
        for (total, parts) in printed(text) {
            assert_eq!(parts.iter().sum::<i64>(), total, "{text}");
            seen += 1;
        }
        libraries_add_up(text);
    }
    assert!(seen >= 3, "{seen}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn printed_parts_add_up_to_the_printed_sum(
        nvml in 1..90 * GIB,
        parts in prop::collection::vec(0..30 * GIB, 3),
        baseline in prop::option::of(0..90 * GIB),
    ) {
        let mut scene = Scene::new(30);
        scene.process(7, "./app");
        let library = Holding { segments_bytes: parts[0], ..held(parts[1]) };
        let torch = Torch { allocated_bytes: parts[2], reserved_bytes: parts[0] };
        let moment = Moment {
            nvml_used: Some(nvml), baseline, holding: library, torch: Some(torch),
            ..Moment::default()
        };
        scene.reading(7, 0, 9.0, &moment);
        let text = scene.model().text(false);
        let (total, parts) = printed(&text)[0].clone();
        prop_assert!(parts.len() >= 4);
        prop_assert_eq!(parts.iter().sum::<i64>(), total);
        let unit = if nvml < 10 * GIB { MIB } else { GIB };
        prop_assert!((total - nvml * 10 / unit).abs() <= 1);
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
