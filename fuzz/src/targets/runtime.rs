//! The memory of a process that says it is a CPython.

use std::{fs, os::unix::fs::FileExt as _, sync::OnceLock};

use agent::{fuzzing::runtime, host::Host};

use super::Target;
use crate::{input::Input, limits::Cost, scratch};

pub(super) const TARGET: Target = Target {
    name: "runtime",
    run,
    seeds,
    longest: 1 << 16,
    memory: Cost { base: 64 << 10, per_byte: 4 },
    // A look reads some thousand words at most, each a call of the kernel.
    time_ns: Cost { base: 2_000_000_000, per_byte: 0 },
};

/// Above what the kernel gives to a process: nothing here is read of a real one.
const TGID: u32 = (1 << 22) + 1;

struct Scene {
    host: Host,
    memory: fs::File,
}

/// A process whose memory is a file.
fn scene() -> Option<&'static Scene> {
    static SCENE: OnceLock<Option<Scene>> = OnceLock::new();
    let make = || {
        let root = scratch::folder().join("runtime");
        let folder = root.join(format!("proc/{TGID}"));
        fs::create_dir_all(&folder).ok()?;
        let memory = fs::File::create(folder.join("mem")).ok()?;
        Some(Scene { host: Host::at(root), memory })
    };
    SCENE.get_or_init(make).as_ref()
}

fn run(data: &[u8]) {
    let scene = scene().expect("a folder for made-up processes");
    let mut input = Input(data);
    let (minor, at) = (input.byte(), u64::from(input.half()));
    scene.memory.set_len(0).and_then(|()| scene.memory.write_all_at(input.0, 0)).expect("a file");
    match runtime(&scene.host, TGID, at, minor) {
        Ok(found) => {
            let config = found.config;
            assert!(found.version.0 == 3 && config.runtime == at, "{found:?}");
            assert!(config.frame_bytes <= 128 && config.code_bytes <= 256, "{config:?}");
        }
        Err(reason) => assert!(reason.chars().count() < 400, "{reason}"),
    }
}

/// Where the made-up structures of a seed are.
const INTERPRETER: usize = 1024;
const THREAD: usize = 2048;
const FRAME: usize = 3072;
const CODE: usize = 4096;

fn seeds() -> Vec<Vec<u8>> {
    let seed = |minor: u8, words: &[(usize, u64)]| {
        let mut memory = vec![0; CODE + 64];
        for (at, word) in words {
            memory[*at..*at + 8].copy_from_slice(&word.to_le_bytes());
        }
        [&[minor, 0, 0][..], &memory].concat()
    };
    // The head of interpreters, its threads, their interpreter and frame, its code, that one's type.
    let by_table = [
        (32, INTERPRETER as u64),
        (INTERPRETER + 8, THREAD as u64),
        (THREAD + 16, INTERPRETER as u64),
        (THREAD + 24, FRAME as u64),
        (FRAME + 32, CODE as u64),
    ];
    let cookie = u64::from_le_bytes(*b"xdebugpy");
    let published = [(0, cookie), (8, 0x030e_0af0), (40, 808), (808, INTERPRETER as u64)];
    let free_threaded = [(0, cookie), (8, 0x030d_00f0), (16, 1)];
    vec![seed(9, &by_table), seed(14, &published), seed(13, &free_threaded), seed(11, &[])]
}
