//! What is found, and what is not.

use super::scene::{GIB, MIB, Scene, at};
use crate::report::{Finding, Model, Of};

fn growths(model: &Model) -> Vec<&crate::report::Growth> {
    model
        .findings
        .iter()
        .filter_map(|finding| match finding {
            Finding::Growth(growth) => Some(growth),
            _ => None,
        })
        .collect()
}

fn sentences(model: &Model) -> Vec<String> {
    model.findings.iter().map(|f| format!("{} {}", f.tag(), f.sentence())).collect()
}

fn leak(scene: &mut Scene, pid: i32, seconds: i64) {
    for step in 0..seconds * 4 {
        scene.alloc(pid, 1, step as f64 / 4.0, 4 * MIB);
    }
}

#[test]
fn a_leak_names_process_function_size_rate_and_since_when() {
    let mut scene = Scene::new(30);
    scene.process(4824, "python3 leak_job.py").rank = Some(2);
    leak(&mut scene, 4824, 30);
    assert_eq!(
        sentences(&scene.model()),
        [
            "LEAK? pid 4824 rank 2 (leak_job.py) grows by 16.0 MiB/s on GPU 1: it holds 480.0 MiB in \
          120 blocks of 4.0 MiB from cuMemAlloc_v2 that it never freed, the first at 14:03:20. \
          No stacks were recorded, so where it was allocated is not known."
        ]
    );
}

#[test]
fn a_leak_of_an_ended_process_is_found_although_its_end_freed_all() {
    let mut scene = Scene::new(40);
    scene.process(7, "./app");
    leak(&mut scene, 7, 30);
    scene.exit(7, 30.0, 0);
    let text = sentences(&scene.model()).remove(0);
    assert!(
        text.contains("grew by 16.0 MiB/s on GPU 1 until its end: it held 480.0 MiB"),
        "{text}"
    );
}

#[test]
fn memory_held_at_exit_is_no_finding() {
    let mut scene = Scene::new(40);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.1, 30 * GIB);
    scene.exit(7, 30.0, 0);
    let model = scene.model();
    assert_eq!(
        sentences(&model),
        ["OK No process grew over the 40.0 s recorded, and no allocation was refused."]
    );
    let share = &model.processes[0].shares[0];
    assert_eq!(share.never_freed_totals[0].bytes, 30 * GIB);
    assert_eq!(share.levels[0].live_bytes, 30 * GIB, "as it was before the end");
}

#[test]
fn a_context_made_again_does_not_hide_a_later_leak() {
    let mut scene = Scene::new(60);
    scene.process(7, "./app");
    let first = scene.alloc(7, 1, 0.0, 900 * MIB);
    scene.free(first, 5.0);
    let row = scene.events.last_mut().unwrap();
    (row.implicit, row.api) = (true, "cuCtxDestroy_v2".into());
    for step in 24..240 {
        scene.alloc(7, 1, f64::from(step) / 4.0, 4 * MIB);
    }
    scene.exit(7, 60.0, 0);
    let model = scene.model();
    assert_eq!(growths(&model).len(), 1);
    assert_eq!(growths(&model)[0].blocks.as_ref().unwrap().count, 216);
}

#[test]
fn a_short_log_claims_nothing_about_growth() {
    let mut scene = Scene::new(2);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.1, GIB);
    assert_eq!(
        sentences(&scene.model()),
        [
            "NOTE The 2.0 s recorded are too short to tell whether anything grows, and no allocation \
          was refused."
        ]
    );
}

#[test]
fn losses_forbid_to_claim_that_nothing_grew() {
    let mut scene = Scene::new(40);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.1, GIB);
    scene.loss(Some(7), "ring_full", 1_234);
    assert_eq!(
        sentences(&scene.model()),
        [
            "LOST 1,234 calls or other records were not seen: what pid 7 holds may be wrong, and \
             growth cannot be ruled out there. \"Not seen\" below says what is missing.",
            "NOTE No process grew over the 40.0 s recorded, and no allocation was refused, as far \
             as was seen: with calls missing, neither is certain.",
        ]
    );
}

#[test]
fn a_lost_reading_leaves_the_account_whole() {
    let mut scene = Scene::new(40);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.1, GIB);
    scene.loss(None, "reading_dropped", 2);
    let sentences = sentences(&scene.model());
    assert!(sentences[0].contains("the account of allocations is whole"), "{sentences:?}");
    assert!(sentences[1].starts_with("OK No process grew"), "{sentences:?}");
}

#[test]
fn what_is_missing_beside_the_account_is_said_with_what_it_means() {
    for (losses, said) in [
        (
            vec![("stack_mismatch", 1)],
            "LOST 1 stack that was verified did not match what it was counted under: some \
             allocations may be credited to another line; the account of allocations is whole.",
        ),
        (
            vec![("reading_dropped", 1)],
            "LOST 1 reading or fact about processes was not seen; the account of allocations is \
             whole.",
        ),
        (
            vec![("stack_ring_full", 3), ("tensor_table_full", 2), ("block_table_full", 4)],
            "LOST 2 reports of PyTorch's totals were not counted: these may be wrong; 7 \
             allocations or stacks were not told to a line: what a line holds may be wrong; the \
             account of allocations is whole.",
        ),
    ] {
        let mut scene = Scene::new(40);
        scene.process(7, "./app");
        scene.alloc(7, 0, 0.1, GIB);
        for (reason, count) in &losses {
            scene.loss(Some(7), reason, *count);
        }
        let sentences = sentences(&scene.model());
        assert_eq!(sentences[0], said);
        let lost = sentences[1].contains("were lost: what grows there may not show");
        assert_eq!(lost, losses.len() == 3, "{sentences:?}");
    }
}

#[test]
fn unknown_losses_are_taken_for_the_worst() {
    let mut scene = Scene::new(40);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.1, GIB);
    scene.loss(None, "gremlins", 1);
    let model = scene.model();
    assert!(sentences(&model)[0].contains("what any process holds may be wrong"));
    assert!(model.text(false).contains("  1  gremlins\n"), "{}", model.text(false));
}

#[test]
fn growth_under_losses_is_told_with_the_doubt() {
    let mut scene = Scene::new(30);
    scene.process(7, "./app");
    leak(&mut scene, 7, 30);
    scene.loss(Some(8), "ring_full", 1);
    assert!(!sentences(&scene.model())[0].contains("may be less"), "another process's loss");
    scene.loss(None, "ring_full", 1);
    assert!(sentences(&scene.model())[0].ends_with("Calls are missing, so it may be less."));
}

#[test]
fn late_processes_grow_from_when_they_were_met() {
    let mut scene = Scene::new(30);
    scene.process(7, "./app").from_start = false;
    scene.late(7);
    leak(&mut scene, 7, 30);
    assert_eq!(growths(&scene.model()).len(), 1);

    let mut scene = Scene::new(30);
    scene.process(7, "./app").from_start = false;
    scene.late(7);
    scene.alloc(7, 0, 1.0, GIB);
    let text = sentences(&scene.model()).remove(0);
    assert!(
        text.ends_with(
            "What 1 process held before the recording began is one sum, not told apart."
        ),
        "{text}"
    );
}

#[test]
fn a_late_process_that_makes_no_call_did_not_grow() {
    let mut scene = Scene::new(30);
    scene.process(7, "./app").from_start = false;
    scene.late(7);
    let moment = crate::account::breakdown::Moment {
        nvml_used: Some(3 * GIB),
        baseline: Some(3 * GIB),
        ..Default::default()
    };
    scene.reading(7, 0, 9.0, &moment);
    assert!(sentences(&scene.model())[0].starts_with("OK No process grew"));
}

#[test]
fn tensors_tell_of_programs_that_use_pytorch() {
    let mut scene = Scene::new(60);
    scene.process(7, "python3 train.py");
    for step in 0..60 {
        let used = i64::from(step) * 20 * MIB;
        scene.torch(7, 0, f64::from(step), used, used + 100 * MIB);
        scene.alloc_at(7, 0, f64::from(step), 20 * MIB, "device", "cuMemCreate");
    }
    let model = scene.model();
    let growths = growths(&model);
    assert_eq!(growths.len(), 1, "{growths:?}");
    assert_eq!(growths[0].trend.of, Of::Tensors);
    assert!(growths[0].sentence.contains("its PyTorch tensors went from"), "{growths:?}");
}

#[test]
fn a_cache_that_grows_under_steady_tensors_is_told_apart() {
    let mut scene = Scene::new(60);
    scene.process(7, "python3 train.py");
    for step in 0..60 {
        scene.torch(7, 0, f64::from(step), GIB, GIB + i64::from(step) * 20 * MIB);
        scene.alloc(7, 0, f64::from(step), 20 * MIB);
    }
    let texts = sentences(&scene.model());
    assert!(
        texts[0].starts_with("CACHE pid 7 (train.py) grows by 20.0 MiB/s on GPU 0"),
        "{texts:?}"
    );
    assert_eq!(texts.len(), 1);
}

#[test]
fn an_extension_that_leaks_beside_pytorch_is_told_apart() {
    let mut scene = Scene::new(60);
    scene.process(7, "python3 train.py");
    for step in 0..60 {
        scene.torch(7, 0, f64::from(step), GIB, 2 * GIB);
        scene.alloc(7, 0, f64::from(step), 20 * MIB);
    }
    let texts = sentences(&scene.model());
    assert!(texts[0].contains("on GPU 0 outside PyTorch: it holds 1.2 GiB"), "{texts:?}");
}

#[test]
fn pools_managed_and_pinned_memory_are_watched_too() {
    for (level, api, words) in [
        ("pool", "cuMemAllocAsync", "of stream-ordered pool memory on GPU 1"),
        ("managed", "cuMemAllocManaged", "of managed memory on GPU 1"),
        ("host", "cuMemHostAlloc", "of pinned host memory until its end: it held 960.0 MiB"),
    ] {
        let mut scene = Scene::new(60);
        scene.process(7, "./app");
        for step in 0..240 {
            scene.alloc_at(7, 1, f64::from(step) / 4.0, 4 * MIB, level, api);
        }
        scene.exit(7, 60.0, 0);
        let text = sentences(&scene.model()).remove(0);
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn blocks_of_many_sizes_are_told_together() {
    let mut scene = Scene::new(60);
    scene.process(7, "./app");
    for step in 0..600 {
        scene.alloc(7, 1, f64::from(step) / 10.0, MIB + i64::from(step) * 512);
    }
    let text = sentences(&scene.model()).remove(0);
    assert!(text.contains("in 600 blocks from cuMemAlloc_v2 that it never freed"), "{text}");
}

#[test]
fn refusals_say_how_much_when_and_whether_it_could_fit() {
    let mut scene = Scene::new(20);
    scene.process(7, "./app");
    scene.alloc(7, 0, 0.0, 70 * GIB);
    scene.oom(7, 0, 3.0, 2 * GIB, 79 * GIB);
    for n in 0..5 {
        scene.oom(7, 0, 4.0 + f64::from(n), 1 << 50, 79 * GIB);
    }
    scene.oom(7, 1, 9.5, GIB, 20 * GIB);
    let mut texts = sentences(&scene.model());
    assert_eq!(
        texts.remove(1),
        "OOM pid 7 (app) was refused 2.0 GiB by cuMemAlloc_v2 at 14:03:23: GPU 0 had 1.0 GiB of \
         80.0 GiB free by NVML's last reading; the process itself held 70.0 GiB."
    );
    assert!(texts[0].contains("although GPU 1 had 60.0 GiB of 80.0 GiB free"), "{texts:?}");
    assert_eq!(
        texts[1],
        "OOM pid 7 (app) was refused memory by cuMemAlloc_v2 5 times from 14:03:24 to 14:03:28, at \
         last 1.0 PiB: that could never fit on GPU 0, which has 80.0 GiB."
    );
    assert_eq!(texts.len(), 2);
}

#[test]
fn a_refusal_on_an_unknown_device_claims_nothing() {
    let mut scene = Scene::new(20);
    scene.process(7, "./app");
    scene.oom(7, 0, 3.0, 2 * GIB, 79 * GIB);
    let row = scene.ooms.last_mut().unwrap();
    (row.gpu_uuid, row.device_total_bytes, row.device_used_bytes) = (None, None, None);
    let text = sentences(&scene.model()).remove(0);
    assert!(text.ends_with("and whether it could have fitted, is not known."), "{text}");
}

#[test]
fn an_empty_log_says_so_and_what_to_check() {
    let model = Scene::new(5).model();
    assert_eq!(
        sentences(&model),
        ["NOTE No CUDA memory call was recorded over the 5.0 s of this log."]
    );
    assert!(model.text(false).contains("vramscope doctor"));
}

#[test]
fn a_process_of_two_runs_is_told_by_the_later_one() {
    use crate::{log::Run8, report::collect::Collector};
    let mut scene = Scene::new(30);
    scene.process(7, "./app");
    scene.alloc(7, 0, 1.0, MIB);
    let mut pass = Collector::default();
    pass.process(scene.processes[0].clone());
    for (run, size) in [("00000001", 1), ("00000002", 3)] {
        let mut row = scene.events[0].clone();
        row.size_bytes = Some(size * MIB);
        row.delta_bytes = size * MIB;
        pass.event(Run8::of(run).unwrap(), &row);
    }
    let model = pass.finish(Vec::new());
    assert_eq!(model.processes[0].shares[0].levels[0].live_bytes, 3 * MIB);
}

#[test]
fn a_killed_recording_ends_with_the_last_row() {
    let mut scene = Scene::new(30);
    scene.ended = false;
    scene.process(7, "./app");
    for step in 0..40 {
        scene.alloc(7, 1, f64::from(step) / 4.0, 4 * MIB);
    }
    scene.device_samples.push(crate::rows::DeviceSampleRow {
        ts_ns: at(300.0),
        gpu_uuid: super::scene::uuid(1),
        ..Default::default()
    });
    let model = scene.model();
    assert_eq!(model.end_ns, Some(at(300.0)));
    assert!(growths(&model).is_empty(), "ten seconds of growth, then nothing for minutes");
    assert!(model.text(false).contains("vramscope recover vramscope-node7"));
}
