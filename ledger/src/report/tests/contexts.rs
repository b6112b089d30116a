//! Contexts on devices that a process does not use.

use super::scene::{GIB, MIB, Scene};
use crate::{account::breakdown::Moment, report::Finding};

/// Rank 1 works on GPU 1 and has touched GPU 0.
fn touched() -> Scene {
    let mut scene = Scene::new(60);
    scene.process(4825, "python3 train.py").rank = Some(1);
    scene.alloc(4825, 1, 1.0, 20 * GIB);
    let stack = scene.stack(&["cuDevicePrimaryCtxRetain", "load", "train.py:31 torch.load"]);
    scene.context(4825, 0, 2.0, "cuDevicePrimaryCtxRetain", stack);
    scene
}

fn contexts(scene: &Scene) -> Vec<String> {
    let model = scene.model();
    let found = model.findings.iter().filter(|f| matches!(f, Finding::Context(_)));
    found.map(|f| format!("{} {}", f.tag(), f.sentence())).collect()
}

#[test]
fn a_stray_context_names_its_bytes_and_its_line() {
    let mut scene = touched();
    assert_eq!(
        contexts(&scene),
        [
            "CONTEXT rank 1 (pid 4825) holds a context on GPU 0 (size not known: no reading of NVML shows it), \
          created at train.py:31 torch.load while it works on GPU 1."
        ]
    );
    let moment = Moment { nvml_used: Some(518 * MIB), ..Moment::default() };
    scene.reading(4825, 0, 30.0, &moment);
    assert!(contexts(&scene)[0].contains("on GPU 0 (518.0 MiB), created at train.py:31"));
    assert!(scene.model().findings.iter().any(|f| f.tag() == "OK"), "nothing grew all the same");
}

#[test]
fn a_context_without_a_stack_is_told_without_a_line() {
    let mut scene = touched();
    scene.events.iter_mut().for_each(|row| row.stack_id = 0);
    assert_eq!(
        contexts(&scene),
        [
            "CONTEXT rank 1 (pid 4825) holds a context on GPU 0 (size not known: no reading of NVML shows it) \
          while it works on GPU 1."
        ]
    );
}

#[test]
fn a_context_that_was_given_back_is_none() {
    for (api, is_gone) in [
        ("cuDevicePrimaryCtxRelease_v2", true),
        ("cuDevicePrimaryCtxReset", true),
        ("cuDevicePrimaryCtxReset_v2", true),
        ("cuDevicePrimaryCtxGetState", false),
    ] {
        let mut scene = touched();
        if is_gone {
            scene.context(4825, 0, 9.0, api, 0);
        }
        assert_eq!(contexts(&scene).is_empty(), is_gone, "{api}");
    }
}

#[test]
fn each_retain_needs_its_release_and_a_context_may_come_back() {
    let mut scene = touched();
    scene.context(4825, 0, 3.0, "cuDevicePrimaryCtxRetain", 0);
    scene.context(4825, 0, 4.0, "cuDevicePrimaryCtxRelease_v2", 0);
    assert_eq!(contexts(&scene).len(), 1);
    scene.context(4825, 0, 5.0, "cuDevicePrimaryCtxRelease_v2", 0);
    assert_eq!(contexts(&scene).len(), 0);
    scene.context(4825, 0, 6.0, "cuDevicePrimaryCtxRetain", 0);
    assert_eq!(contexts(&scene).len(), 1);
}

#[test]
fn giving_all_back_at_the_very_end_changes_nothing() {
    let mut scene = touched();
    scene.context(4825, 0, 49.5, "cuDevicePrimaryCtxRelease_v2", 0);
    scene.exit(4825, 50.0, 0);
    assert!(contexts(&scene)[0].contains("held a context on GPU 0"));
}

#[test]
fn several_devices_in_real_use_are_the_programs_choice() {
    let mut scene = touched();
    scene.alloc(4825, 0, 3.0, 200 * MIB);
    scene.events.last_mut().unwrap().cuda_ordinal = Some(1);
    assert_eq!(contexts(&scene), [""; 0]);
}

#[test]
fn a_small_program_that_spreads_itself_uses_every_device() {
    for (bytes, stray) in [(2 * MIB, true), (26 * MIB, false)] {
        let mut scene = Scene::new(60);
        scene.process(7, "./app");
        scene.alloc(7, 1, 1.0, 28 * MIB);
        scene.context(7, 0, 2.0, "cuDevicePrimaryCtxRetain", 0);
        scene.alloc(7, 0, 3.0, bytes);
        assert_eq!(contexts(&scene).len(), usize::from(stray), "{bytes}");
    }
}

#[test]
fn without_memory_anywhere_no_device_is_the_main_one() {
    let mut scene = Scene::new(60);
    scene.process(7, "./app");
    scene.context(7, 0, 2.0, "cuCtxCreate_v4", 0);
    scene.context(7, 1, 2.0, "cuCtxCreate_v4", 0);
    assert_eq!(contexts(&scene), [""; 0]);
}

/// What PyTorch had on a GPU at a second: bytes alive, all that it ever handed out, reserved.
fn tensors(scene: &mut Scene, gpu: i32, second: f64, live: i64, handed: i64, reserved: i64) {
    scene.torch(4825, gpu, second, live, reserved);
    let row = scene.site_usage.last_mut().unwrap();
    (row.allocated_bytes, row.freed_bytes) = (handed, handed - live);
    row.cuda_ordinal = Some(1 - gpu);
    let sample = scene.process_samples.last_mut().unwrap();
    sample.torch_peak_allocated_bytes = Some(live);
}

/// 60 s of steps on a GPU: `held` stays, 300 MiB come and go in each second.
fn steps(scene: &mut Scene, gpu: i32, seconds: std::ops::Range<i64>, held: i64) {
    for second in seconds.clone() {
        let handed = held + (second - seconds.start + 1) * 300 * MIB;
        tensors(scene, gpu, second as f64, held, handed, held + 400 * MIB);
    }
}

/// Rank 1 loads `bytes` onto GPU 0 at 2 s, in `handed` of allocations, and has `kept` of it after
/// 3 s; it trains on GPU 1 from 4 s on.
fn loaded(bytes: i64, handed: i64, kept: i64) -> Scene {
    let mut scene = touched();
    tensors(&mut scene, 0, 2.2, bytes / 2, handed / 2, bytes);
    tensors(&mut scene, 0, 2.5, bytes, handed, bytes);
    tensors(&mut scene, 0, 3.0, kept, handed, bytes);
    scene.alloc(4825, 0, 2.2, bytes);
    scene.events.last_mut().unwrap().cuda_ordinal = Some(1);
    steps(&mut scene, 1, 4..60, 6 * GIB);
    scene
}

#[test]
fn a_checkpoint_on_the_wrong_device_is_found_however_large() {
    for bytes in [80 * MIB, 3 * GIB, 30 * GIB] {
        for kept in [0, 20 * MIB] {
            assert_eq!(contexts(&loaded(bytes, bytes, kept)).len(), 1, "{bytes}, kept {kept}");
        }
    }
    // Loading makes copies, but works with nothing.
    assert_eq!(contexts(&loaded(GIB, 2 * GIB, 0)).len(), 1);
    // A little work there, every second, next to a device whose tensors stay as they are.
    let mut little = touched();
    tensors(&mut little, 1, 2.0, 6 * GIB, 6 * GIB, 6 * GIB);
    for second in 4..60 {
        tensors(&mut little, 0, f64::from(second), MIB, i64::from(second) * MIB, 2 * MIB);
    }
    assert!(contexts(&little)[0].contains("context on GPU 0"));
    // Its tensors stay alive, such as in a variable of the script's.
    let found = contexts(&loaded(2 * GIB, 2 * GIB, 2 * GIB));
    assert_eq!(
        found,
        ["CONTEXT rank 1 (pid 4825) holds a context on GPU 0 (more than 2.0 GiB, which PyTorch \
          reserves there; no reading of NVML shows it), created at train.py:31 torch.load while it works on GPU \
          1. 2.0 GiB of tensors stay there since 14:03:22, and nothing was allocated there since."]
    );
}

#[test]
fn the_bytes_of_a_stray_context_are_nvmls_and_a_part_of_them_pytorchs() {
    let mut scene = loaded(80 * MIB, 80 * MIB, 0);
    assert_eq!(
        contexts(&scene),
        ["CONTEXT rank 1 (pid 4825) holds a context on GPU 0 (more than 80.0 MiB, which PyTorch \
          reserves there; no reading of NVML shows it), created at train.py:31 torch.load while it works on GPU \
          1."]
    );
    let moment = |used| Moment { nvml_used: Some(used), ..Moment::default() };
    scene.reading(4825, 0, 2.1, &moment(518 * MIB));
    assert!(contexts(&scene)[0].contains(
        "on GPU 0 (518.0 MiB at 14:03:22; at last PyTorch reserves 80.0 MiB there), created"
    ));
    scene.reading(4825, 0, 9.0, &moment(598 * MIB));
    assert!(
        contexts(&scene)[0]
            .contains("on GPU 0 (598.0 MiB, 80.0 MiB of it reserved by PyTorch), created at")
    );
}

#[test]
fn who_really_uses_two_devices_is_left_alone() {
    // Pipeline or model parallel: steps on both.
    let mut both = touched();
    steps(&mut both, 0, 3..60, 5 * GIB);
    steps(&mut both, 1, 3..60, 6 * GIB);
    // First here, then there: what was on GPU 0 is given back.
    let mut moved = touched();
    steps(&mut moved, 0, 3..20, 5 * GIB);
    tensors(&mut moved, 0, 20.0, 0, 30 * GIB, 5 * GIB);
    steps(&mut moved, 1, 21..60, 6 * GIB);
    let mut back = touched();
    steps(&mut back, 1, 3..20, 5 * GIB);
    tensors(&mut back, 1, 20.0, 0, 30 * GIB, 5 * GIB);
    steps(&mut back, 0, 21..60, 6 * GIB);
    // A model on both whose steps take nothing that is new on either.
    let mut still = touched();
    tensors(&mut still, 0, 3.0, 5 * GIB, 5 * GIB, 5 * GIB);
    tensors(&mut still, 1, 4.0, 6 * GIB, 6 * GIB, 6 * GIB);
    // What is there was not allocated by PyTorch alone.
    let mut beside = loaded(80 * MIB, 80 * MIB, 0);
    beside.alloc(4825, 0, 5.0, 300 * MIB);
    beside.events.last_mut().unwrap().cuda_ordinal = Some(1);
    // Attached to: how much was handed out before is not known.
    let mut late = loaded(3 * GIB, 3 * GIB, 0);
    late.late(4825);
    // Loaded just now: whether it will be worked with is not known.
    let mut young = touched();
    steps(&mut young, 1, 3..55, 6 * GIB);
    tensors(&mut young, 0, 54.0, 2 * GIB, 2 * GIB, 2 * GIB);
    for (name, scene) in [
        ("both", both),
        ("moved", moved),
        ("back", back),
        ("still", still),
        ("beside", beside),
        ("late", late),
        ("young", young),
    ] {
        assert_eq!(contexts(&scene), [""; 0], "{name}");
    }
}
