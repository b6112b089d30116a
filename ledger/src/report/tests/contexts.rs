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
        ["CONTEXT rank 1 (pid 4825) holds a context on GPU 0, created at train.py:31 torch.load \
             while it works on GPU 1."]
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
        ["CONTEXT rank 1 (pid 4825) holds a context on GPU 0 while it works on GPU 1."]
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
