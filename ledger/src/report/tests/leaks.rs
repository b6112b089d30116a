//! Leaks of many shapes are found at their sites, healthy jobs of many shapes have none.

use super::{
    jobs::{Job, PID, found, noise},
    scene::{GIB, MIB, Scene},
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
        (
            "no PyTorch",
            Job::new(120).at(Level::Device, LEAK, |t| (t / 3, 8 * MIB)),
            one.clone(),
        ),
        (
            "under its own noise",
            job(300).tensors(LEAK, move |t| (t + noise(seed + 9, t, 60), 2 * MIB)),
            one.clone(),
        ),
        ("begun late", job(200).tensors(LEAK, |t| (10 + (t - 110).max(0), 2 * MIB)), one.clone()),
        ("each evaluation", job(400).tensors(LEAK, |t| ((t + 20) / 40 * 8, 8 * MIB)), one.clone()),
        ("a block that grows", job(120).tensors(LEAK, |t| (1, 64 * MIB + t * MIB)), one.clone()),
        (
            "a few passes a block",
            job(240).tensors(LEAK, |t| (t / 7, 4 * MIB)),
            one.clone(),
        ),
    ];
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
            job(200).tensors(LEAK, move |t| (1 + noise(seed, t, 7), (1 + noise(seed + 1, t, 64)) * MIB)),
        ),
        ("sawtooth", job(200).tensors(LEAK, move |t| ((t + seed * 7) % 45, 8 * MIB))),
        (
            "evaluation",
            job(230).tensors(LEAK, move |t| (((t + seed * 11) % 60 - 40).max(0), 20 * MIB)),
        ),
        (
            "checkpointing",
            job(200).tensors(LEAK, |t| (if t % 50 > 45 { 900 } else { 0 }, 3 * MIB)),
        ),
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
            job(300).tensors(LEAK, |t| ((200.0 * (1.0 - (-t as f64 / 25.0).exp())) as i64, 2 * MIB)),
        ),
        (
            "one place's for another's",
            job(200)
                .tensors(LEAK, |t| (t / 2, 8 * MIB))
                .tensors("old.py:1 fill", |t| (100 - t / 2, 8 * MIB)),
        ),
        (
            "requests",
            job(200).tensors(LEAK, move |t| ((t * 13 + seed) % 97, 4 * MIB)),
        ),
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
                "warm-up" | "saturating" => 90,
                "a cache that turns over" => 75,
                "sawtooth" => 100,
                "evaluation" => 130,
                "steps with noise" => 90,
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
