//! Texts of `/proc/PID`: maps, cgroup, mountinfo, stat, cmdline, environ.

use agent::{fuzzing::texts, host::text};

use super::Target;
use crate::{input::Input, limits::Cost};

pub(super) const TARGET: Target = Target {
    name: "texts",
    run,
    seeds,
    longest: 1 << 16,
    memory: Cost { base: 256 << 10, per_byte: 200 },
    time_ns: Cost { base: 100_000_000, per_byte: 20_000 },
};

fn run(data: &[u8]) {
    texts(data);
    let mut input = Input(data);
    let limit = usize::from(input.half());
    let shown = text::clean(input.0, limit);
    assert!(shown.chars().count() <= limit && !shown.contains(char::is_control), "{shown:?}");
}

fn seeds() -> Vec<Vec<u8>> {
    let own = ["maps", "cgroup", "mountinfo", "stat", "cmdline"];
    let mut seeds: Vec<Vec<u8>> =
        own.iter().filter_map(|name| std::fs::read(format!("/proc/self/{name}")).ok()).collect();
    let id = "0123456789abcdef".repeat(4);
    let made_up = [
        "55d0-56d0 r-xp 00001000 08:01 7 /usr/lib/libcuda.so.1 (deleted)\n\
         56d0-57d0 rwxp 00000000 00:00 0\n7fff-8fff r-xp 00000000 00:00 0   [vdso]\n"
            .to_owned(),
        format!("0::/kubepods/burstable/pod2c48913c-b29f-11e7-9350-020968147796/{id}\n"),
        format!("4:memory:/system.slice/docker-{id}.scope (deleted)\n1:x:/slurm/job_42/step\n"),
        "9 8 0:1 / /dev/shm rw master:1 - tmpfs shm rw\n".to_owned(),
        "42 (a) R 1 (b\n) S 7 1 1 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 1 0 98765 4096 3 1\n".into(),
        "RANK=1\0CUDA_VISIBLE_DEVICES=0,GPU-1,MIG-2\0SLURM_JOB_ID=7\0WORLD_SIZE=x\0".to_owned(),
        "/usr/bin/python3\0-X\0dev\0-Wd\0-m\0torch.run\0--secret\0".to_owned(),
        "x\0\u{202e}\u{1b}[31m\u{85}".to_owned(),
    ];
    seeds.extend(made_up.map(String::into_bytes));
    seeds
}
