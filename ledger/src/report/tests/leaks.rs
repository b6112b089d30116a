//! Leaks of many shapes are found at their sites, healthy jobs of many shapes have none.

use super::{
    jobs::{Job, PID, found, noise},
    scene::{GIB, MIB, S, Scene, at},
};
use crate::{
    call::Level,
    report::{Confidence, Finding, Leak, Model},
};

const SEEDS: i64 = 6;
const LEAK: &str = "loop.py:33 train";
const KIB: i64 = 1024;

/// A leak, by name, with the sites at which it is to be found.
fn leaking(seed: i64) -> Vec<(&'static str, Job, Vec<&'static str>)> {
    let job = |seconds| Job::training(seconds, seed);
    let one = vec![LEAK];
    let mut list: Vec<(&'static str, Job, Vec<&'static str>)> = vec![
        ("steady", job(90).tensors(LEAK, |t| (3 * t, MIB)), one.clone()),
        ("slow", job(600).tensors(LEAK, |t| (t, 50 * KIB)), one.clone()),
        ("bursty", job(300).tensors(LEAK, |t| (t / 20 * 16, 4 * MIB)), one.clone()),
        (
            "irregular",
            job(200).tensors(LEAK, move |t| ((0..t).map(|t| noise(seed, t, 5) / 4).sum(), 6 * MIB)),
            one.clone(),
        ),
        (
            "two at once",
            job(150).tensors(LEAK, |t| (t, 2 * MIB)).tensors("z.py:9 hook", |t| (t / 2, 5 * MIB)),
            vec![LEAK, "z.py:9 hook"],
        ),
        ("pinned host", job(120).at(Level::Host, LEAK, |t| (t / 2, 8 * MIB)), one.clone()),
        ("an extension's", job(120).at(Level::Device, LEAK, |t| (t / 3, 8 * MIB)), one.clone()),
        ("managed", job(120).at(Level::Managed, LEAK, |t| (t / 3, 8 * MIB)), one.clone()),
        ("pool", job(120).at(Level::Pool, LEAK, |t| (t / 3, 8 * MIB)), one.clone()),
        ("no PyTorch", Job::new(120).at(Level::Device, LEAK, |t| (t / 3, 8 * MIB)), one.clone()),
        (
            "under its own noise",
            job(300).tensors(LEAK, move |t| (t + noise(seed + 9, t, 60), 2 * MIB)),
            one.clone(),
        ),
        ("begun late", job(200).tensors(LEAK, |t| (10 + (t - 110).max(0), 2 * MIB)), one.clone()),
        ("each evaluation", job(400).tensors(LEAK, |t| ((t + 20) / 40 * 8, 8 * MIB)), one.clone()),
        ("a block that grows", job(120).tensors(LEAK, |t| (1, 64 * MIB + t * MIB)), one.clone()),
        ("a few passes a block", job(240).tensors(LEAK, |t| (t / 7, 4 * MIB)), one.clone()),
    ];
    list.push((
        "under churn",
        job(400).tensors(LEAK, |t| (t, 4 * MIB)).churning(300 * MIB),
        one.clone(),
    ));
    let mut inference = job(90).tensors(LEAK, |t| (3 * t, MIB));
    inference.step_ms = None;
    list.push(("no autograd", inference, one.clone()));
    let mut ended = job(120).at(Level::Device, LEAK, |t| (t / 3, 8 * MIB));
    ended.exits = true;
    list.push(("ended", ended, one.clone()));
    let mut idle = job(120).tensors(LEAK, |t| (2 * t, MIB));
    idle.step_ms = Some(20);
    list.push(("fast steps", idle, one));
    list
}

fn healthy(seed: i64) -> Vec<(&'static str, Job)> {
    let job = |seconds| Job::training(seconds, seed);
    let mut list = vec![
        ("plain training", job(120)),
        ("warm-up", job(200).tensors(LEAK, |t| (t.min(50), 8 * MIB))),
        (
            "variable shapes",
            job(200).tensors(LEAK, move |t| {
                (1 + noise(seed, t, 7), (1 + noise(seed + 1, t, 64)) * MIB)
            }),
        ),
        ("sawtooth", job(200).tensors(LEAK, move |t| ((t + seed * 7) % 45, 8 * MIB))),
        (
            "evaluation",
            job(230).tensors(LEAK, move |t| (((t + seed * 11) % 60 - 40).max(0), 20 * MIB)),
        ),
        ("checkpointing", job(200).tensors(LEAK, |t| (if t % 50 > 45 { 900 } else { 0 }, 3 * MIB))),
        ("a cache that fills", job(240).tensors(LEAK, |t| (t.min(120), 8 * MIB))),
        (
            "a cache that turns over",
            job(240).tensors(LEAK, move |t| (t.min(40) * 5 - noise(seed, t, 6), 2 * MIB)),
        ),
        (
            "steps with noise",
            job(200).tensors(LEAK, move |t| (t / 70 * 50 + noise(seed, t, 30), 4 * MIB)),
        ),
        (
            "saturating",
            job(300)
                .tensors(LEAK, |t| ((200.0 * (1.0 - (-t as f64 / 25.0).exp())) as i64, 2 * MIB)),
        ),
        (
            "one place's for another's",
            job(200)
                .tensors(LEAK, |t| (t / 2, 8 * MIB))
                .tensors("old.py:1 fill", |t| (100 - t / 2, 8 * MIB)),
        ),
        (
            "samples that drift through a step",
            job(90).tensors(LEAK, |t| (t * 4, 2 * MIB)).churning(800 * MIB),
        ),
        ("a curriculum", job(200).tensors(LEAK, |t| (1, (300 + t) * MIB)).churning(700 * MIB)),
        ("requests", job(200).tensors(LEAK, move |t| ((t * 13 + seed) % 97, 4 * MIB))),
        ("pinned buffers", job(200).at(Level::Host, LEAK, |t| (t.min(8), 64 * MIB))),
        (
            "a workspace made anew",
            job(200).at(Level::Device, LEAK, |t| (1, (32 + t % 5 * 8) * MIB)),
        ),
        ("less and less", job(200).tensors(LEAK, |t| (400 - t, 4 * MIB))),
        ("little", job(200).tensors(LEAK, |t| (t, 512))),
    ];
    let mut fragmented = job(200);
    fragmented.slack = |t| (t.min(180) * 4) * MIB;
    list.push(("fragmentation", fragmented));
    let mut ended = job(90);
    ended.exits = true;
    list.push(("ended", ended));
    list
}

#[test]
fn every_leak_is_found_at_its_site_and_nothing_else() {
    let mut wrong = Vec::new();
    for seed in 0..SEEDS {
        for (name, job, sites) in leaking(seed) {
            let found = found(&job.scene().model());
            if found != sites {
                wrong.push(format!("{name}, seed {seed}: {found:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn healthy_jobs_have_no_leak() {
    let mut wrong = Vec::new();
    for seed in 0..SEEDS * 2 {
        for (name, job) in healthy(seed) {
            let found = found(&job.scene().model());
            if !found.is_empty() {
                wrong.push(format!("{name}, seed {seed}: {found:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn wherever_the_log_ends_a_healthy_job_is_healthy() {
    for seconds in (20..200).step_by(3) {
        for (name, mut job) in healthy(seconds) {
            job.seconds = job.seconds.min(seconds);
            // Until it is full, a cache cannot be told from a leak.
            let full = match name {
                "a cache that fills" => 200,
                "warm-up" | "steps with noise" => 90,
                "saturating" => 110,
                "a cache that turns over" => 75,
                "sawtooth" => 100,
                "evaluation" => 130,
                _ => 0,
            };
            if seconds >= full {
                assert_eq!(found(&job.scene().model()), [""; 0], "{name}, {seconds} s");
            }
        }
    }
}

fn leaks(model: &Model) -> Vec<&Leak> {
    model
        .findings
        .iter()
        .filter_map(|finding| match finding {
            Finding::Leak(leak) => Some(leak),
            _ => None,
        })
        .collect()
}

#[test]
fn the_sentence_says_who_how_fast_since_when_where_and_how_many() {
    let model = Job::training(600, 1).tensors(LEAK, |t| (2 * t, MIB)).scene().model();
    let first = &model.findings[0];
    assert_eq!(
        format!("{} {}", first.tag(), first.sentence()),
        "LEAK rank 3 (pid 4824) grows 2.0 MiB/s since 14:03:20; 100 % allocated at loop.py:33 \
         train (called from train.py:41 main), 1 block a backward pass, 1,198 alive."
    );
    assert_eq!(leaks(&model)[0].confidence, Confidence::High);
    let text = model.text(false);
    assert!(text.contains("vramscope report vramscope-node7 --who 'loop.py:33 train'"), "{text}");
    assert!(text.contains("\nstacks   5 taken, 5 of them complete; of "), "{text}");
}

#[test]
fn single_blocks_have_an_age_and_end_with_their_process() {
    let job = Job::training(300, 1).at(Level::Device, LEAK, |t| (t / 3, 8 * MIB));
    let model = job.scene().model();
    let leak = leaks(&model)[0];
    assert!(leak.sentence.contains(" grows 2.7 MiB/s of device memory outside PyTorch since "));
    assert!(leak.sentence.ends_with(", 99 alive, oldest 4 min 56 s."), "{}", leak.sentence);
    let ended = Job { exits: true, ..job };
    let model = ended.scene().model();
    let leak = leaks(&model)[0];
    assert!(leak.sentence.contains(" grew 2.7 MiB/s of"), "{}", leak.sentence);
    assert!(leak.sentence.contains(" until its end; 100 % allocated at"), "{}", leak.sentence);
    assert_eq!(leak.oldest_ns, Some(at(3.3)), "of blocks that the end freed");
}

#[test]
fn two_places_share_the_growth() {
    let job = Job::training(300, 2).tensors(LEAK, |t| (3 * t, MIB));
    let model = job.tensors("z.py:9 hook", |t| (t, MIB)).scene().model();
    let shares: Vec<i64> = leaks(&model).iter().map(|l| l.share_percent.round() as i64).collect();
    assert_eq!(shares, [75, 25]);
}

#[test]
fn segments_of_growing_tensors_are_not_told_a_second_time_even_without_their_frames() {
    let mut scene = Job::training(200, 3).tensors(LEAK, |t| (4 * t, MIB)).scene();
    assert_eq!(found(&scene.model()), [LEAK]);
    scene.frames.retain(|frame| !frame.function.contains("CUDACachingAllocator"));
    assert_eq!(found(&scene.model()), [LEAK]);
}

#[test]
fn losses_make_a_leak_doubtful_and_it_no_longer_fails_a_check() {
    let mut scene = Job::training(200, 3).tensors(LEAK, |t| (4 * t, MIB)).scene();
    assert!(scene.model().leaks());
    scene.loss(Some(PID), "ring_full", 5);
    let model = scene.model();
    assert_eq!((leaks(&model)[0].confidence, model.findings[0].tag()), (Confidence::Low, "LEAK?"));
    assert!(model.findings[0].sentence().contains("In doubt: calls of the process are missing"));
    assert!(!model.leaks());
}

#[test]
fn what_is_not_known_is_left_out() {
    let mut scene = Job::training(200, 3).tensors(LEAK, |t| (4 * t, MIB)).scene();
    scene.stacks.retain(|stack| stack.site != LEAK);
    scene.site_usage.iter_mut().for_each(|row| row.live_count = None);
    let model = scene.model();
    let sentence = model.findings[0].sentence();
    assert!(
        sentence.contains("allocated at a place whose stack is not in the log, "),
        "{sentence}"
    );
    assert!(!sentence.contains("called from") && !sentence.contains(" alive,"), "{sentence}");
    assert_eq!(model.stacks.missing, 1);
}

#[test]
fn without_stacks_the_process_is_told_and_why() {
    let mut scene = Job::training(400, 3).tensors(LEAK, |t| (20 * t, MIB)).scene();
    scene.site_usage.retain(|row| row.stack_id == 0);
    scene.events.iter_mut().for_each(|row| row.stack_id = 0);
    (scene.stacks, scene.frames) = (Vec::new(), Vec::new());
    let model = scene.model();
    let sentence = model.findings[0].sentence();
    assert!(sentence.contains("No stacks were recorded, so where it was allocated"), "{sentence}");
    assert!(model.leaks());
}

#[test]
fn tensors_that_were_not_recorded_are_named_where_nothing_was_found() {
    let mut scene = Scene::new(60);
    scene.process(7, "python3 train.py").detail = "off".to_owned();
    scene.alloc(7, 0, 0.1, GIB);
    let model = scene.model();
    let sentence = model.findings[0].sentence();
    assert!(sentence.contains("PyTorch's tensors of 1 process were not recorded"), "{sentence}");
}

#[test]
fn stacks_of_one_site_are_one_place() {
    let job = Job::training(200, 4).tensors(LEAK, |t| (4 * t, MIB));
    let mut scene = job.scene();
    let other = scene.stack(&["cuMemAlloc_v2", "zeros", LEAK, "train.py:41 main"]);
    let of_leak = scene.stacks.iter().find(|row| row.site == LEAK).unwrap().stack_id;
    // Every other second under the other stack: neither grows by itself for long.
    let mut rows = Vec::new();
    for row in scene.site_usage.iter_mut().filter(|row| row.stack_id == of_leak) {
        let second = (row.ts_ns - at(0.0)) / S;
        let half = row.live_bytes / MIB / 2 * MIB;
        let mut twin = row.clone();
        twin.stack_id = other;
        (twin.live_bytes, twin.live_count) = (half, Some(half / MIB));
        row.live_bytes -= half;
        row.live_count = Some(row.live_bytes / MIB);
        if second % 2 == 1 {
            std::mem::swap(&mut row.live_bytes, &mut twin.live_bytes);
        }
        rows.push(twin);
    }
    scene.site_usage.extend(rows);
    scene.site_usage.sort_by_key(|row| row.ts_ns);
    let model = scene.model();
    assert_eq!(found(&model), [LEAK]);
    assert!((leaks(&model)[0].bytes_per_second / MIB as f64 - 4.0).abs() < 0.2);
}
