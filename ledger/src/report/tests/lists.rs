//! Lists of stacks and of what is alive of a site.

use std::{io::Write as _, process::Command};

use super::scene::{MIB, S, START, Scene, at, uuid};
use crate::{
    call::Level,
    report::{StackChoice, StackOrder, who},
    rows::LiveRow,
};

const ALL: StackChoice = StackChoice { top: 10, level: None, by: StackOrder::Live, pid: None };

fn scene() -> Scene {
    let mut scene = Scene::new(60);
    scene.process(7, "python3 train.py");
    let (big, churn) = (
        scene.stack(&["cuMemAlloc_v2", "ext.py:5 keep", "train.py:41 main"]),
        scene.stack(&["cuMemAlloc_v2", "ext.py:50 work"]),
    );
    for step in 0..3 {
        scene.alloc(7, 0, f64::from(step), 8 * MIB);
        scene.events.last_mut().unwrap().stack_id = big;
        let alloc_id = scene.alloc(7, 0, f64::from(step) + 0.1, 100 * MIB);
        scene.events.last_mut().unwrap().stack_id = churn;
        scene.free(alloc_id, f64::from(step) + 0.2);
    }
    let last = scene.stacks.last_mut().unwrap();
    (last.complete, last.incomplete_reason) = (false, Some("no unwind table".to_owned()));
    scene
}

#[test]
fn stacks_are_listed_whole_and_by_what_was_asked_for() {
    let pass = scene().pass();
    let text = ALL.text(&pass);
    assert_eq!(
        text.split_once("\n\n").unwrap(),
        (
            "2 stacks, 1 of them complete (50.0 %); not complete: 1 x no unwind table.",
            text.split_once("\n\n").unwrap().1
        )
    );
    let first = text.split("\n\n").nth(1).unwrap();
    let lines: Vec<&str> = first.lines().collect();
    assert_eq!(
        lines[0],
        "24.0 MiB device alive in 3 blocks, 24.0 MiB allocated in 3 calls: ext.py:5 keep"
    );
    assert_eq!(
        lines[2..],
        [
            "    native  cuMemAlloc_v2  [libx.so+0x1234]",
            "    python  keep  /data/u/ext.py:5",
            "    python  main  /data/u/train.py:41",
        ]
    );
    assert!(
        text.contains("0 B device alive in 0 blocks, 300.0 MiB allocated in 3 calls: ext.py:50")
    );
    assert!(text.contains(", incomplete: no unwind table\n"), "{text}");
    let text = StackChoice { by: StackOrder::Allocated, top: 1, ..ALL }.text(&pass);
    assert!(text.contains("\n\n0 B device alive"), "{text}");
    assert!(text.ends_with("\nand 1 more stack (--top)\n"), "{text}");
    for nothing in
        [StackChoice { level: Some(Level::Host), ..ALL }, StackChoice { pid: Some(8), ..ALL }]
    {
        assert!(nothing.text(&pass).ends_with("No stack allocated what was asked for.\n"));
    }
    assert_eq!(ALL.text(&Scene::new(5).pass()), "No stacks were recorded.\n");
}

#[test]
fn what_is_alive_of_a_site_is_listed_with_address_size_and_age() {
    let text = who::text(&scene().pass(), "ext.py:5", &[]);
    assert!(text.starts_with("pid 7, ext.py:5 keep (device): 24.0 MiB in 3 blocks\n"), "{text}");
    assert!(text.contains("  0x0000000040000000     8.0 MiB  60.0 s ago, at 14:03:20\n"), "{text}");
    assert!(text.contains("vramscope_who({0x40000000, 0xc0000000, 0x140000000})"), "{text}");
    assert!(!text.contains("ext.py:50"), "a line number is a whole number");
}

#[test]
fn sites_without_live_blocks_and_unknown_ones_are_told_apart() {
    let pass = scene().pass();
    assert!(who::text(&pass, "work", &[]).starts_with("ext.py:50 work: nothing of it is alive"));
    let text = who::text(&pass, "nowhere", &[]);
    assert_eq!(
        text,
        "No site contains \"nowhere\". These hold most:\n  ext.py:5 keep\n  ext.py:50 work\n"
    );
    assert!(who::text(&Scene::new(5).pass(), "x", &[]).starts_with("No stacks were recorded"));
}

#[test]
fn tensors_are_those_of_the_last_checkpoint() {
    let mut scene = scene();
    let stack_id = scene.stack(&["forward", "model.py:87 forward"]);
    let row = LiveRow {
        ts_ns: START + 50 * S,
        proc_id: 7,
        alloc_id: 99,
        level: "tensor".to_owned(),
        gpu_uuid: Some(uuid(0)),
        addr: 0x7f00,
        size_bytes: Some(2 * MIB),
        stack_id,
        alloc_ts_ns: at(40.0),
        ..LiveRow::default()
    };
    let text = who::text(&scene.pass(), "model.py:87", &[row]);
    let first = "pid 7, model.py:87 forward (tensor): 2.0 MiB in 1 block as of 14:04:10\n";
    assert!(text.starts_with(first), "{text}");
    assert!(text.contains("10.0 s ago, at 14:04:00\n"), "{text}");
}

/// Something that looks like `torch`, and objects that keep its tensors.
const FAKE: &str = r#"
import sys, types
torch = types.ModuleType("torch")
class Storage:
    def __init__(self, addr): self.addr = addr
    def data_ptr(self): return self.addr
class Tensor:
    def __init__(self, addr): self.addr, self.shape, self.dtype = addr, (2, 3), "float32"
    def untyped_storage(self): return Storage(self.addr)
class Broken(Tensor):
    def untyped_storage(self): raise RuntimeError("no storage")
torch.Tensor = Tensor
sys.modules["torch"] = torch
class Trainer: pass
trainer = Trainer()
trainer.losses = [Tensor(0x40000000), Broken(1), Tensor(5)]
cache = {"key": Tensor(0xc0000000)}

"#;

#[test]
fn the_lines_of_python_find_who_refers_to_the_blocks() {
    let text = who::text(&scene().pass(), "ext.py:5", &[]);
    let snippet = &text[text.find("def vramscope_who").unwrap()..];
    let python = Command::new("python3")
        .args(["-i", "-q"])
        .env_remove("PYTHONSTARTUP")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn();
    let Ok(mut python) = python else {
        println!("not tested: there is no python3 here");
        return;
    };
    // As pasted into an interactive prompt, where an empty line ends a block.
    let fake = format!("exec({FAKE:?})\n");
    let input = format!("{fake}{snippet}\n");
    python.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!errors.contains("Error"), "{errors}");
    for part in [
        "0x40000000 Tensor (2, 3) float32\n\
         \x20   held by list of length 3\n\
         \x20       held by Trainer under losses\n\
         \x20           held by global trainer of module __main__\n",
        "0xc0000000 Tensor (2, 3) float32\n\
         \x20   held by dict of length 1 under key\n\
         \x20       held by global cache of module __main__\n",
        "\n1 addresses without a Python tensor: freed since, or held by C++ code,\n",
    ] {
        assert!(said.contains(part), "{said}{errors}");
    }
    assert_eq!(said.lines().count(), 9, "{said}");
}
