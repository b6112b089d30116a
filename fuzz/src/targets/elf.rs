//! Files that a process maps: symbols, build id, `.eh_frame` and debug information.

use std::{
    env, fs, io,
    os::unix::fs::FileExt as _,
    process::{Command, Stdio},
    sync::OnceLock,
};

use agent::{
    fuzzing::{FRAME_LIMIT, file},
    native::Registers,
};

use super::Target;
use crate::{input::Input, limits::Cost, scratch};

pub(super) const TARGET: Target = Target {
    name: "elf",
    run,
    seeds,
    longest: 96 << 10,
    // Windows of executable pages are 48 KiB, the records of a function up to 1 MiB each.
    memory: Cost { base: 8 << 20, per_byte: 400 },
    time_ns: Cost { base: 2_000_000_000, per_byte: 200_000 },
};

/// Where the file is mapped.
const START: u64 = 0x7000_0000_0000;
/// The stack that leads through it.
const STACK: u64 = 0x7fff_0000_0000;
/// Words of it at most.
const WORDS: usize = 64;
/// Characters of a name at most.
const NAME: usize = 1024;

/// The file, which has no name; each input is written over the one before.
fn memory() -> &'static fs::File {
    static FILE: OnceLock<fs::File> = OnceLock::new();
    FILE.get_or_init(|| {
        let memory = rustix::fs::memfd_create("elf", rustix::fs::MemfdFlags::CLOEXEC);
        memory.expect("a file in memory").into()
    })
}

fn run(data: &[u8]) {
    let mut input = Input(data);
    let words = usize::from(input.byte()) % WORDS;
    let ip = START + u64::from(input.half());
    let copy: Vec<u8> = (0..words).flat_map(|_| word(&mut input).to_le_bytes()).collect();
    let content = memory();
    let written = content.set_len(0).and_then(|()| content.write_all_at(input.0, 0));
    written.expect("room for a file");
    let entry = Registers { ip, sp: STACK, fp: STACK + 16, lr: 0 };
    let facts = file(content, START, entry, &copy);
    assert!(facts.build_id <= 128, "{}", facts.build_id);
    assert!(facts.frames.len() <= FRAME_LIMIT && facts.frames.len() <= words + 2);
    for pair in facts.frames.windows(2) {
        let [inner, outer] = pair else { continue };
        assert!(inner.cfa == outer.sp && inner.sp < outer.sp, "{pair:x?}");
    }
    assert!(facts.names.1 <= NAME, "{:?}", facts.names);
}

/// A place in the file (three in four), in the stack, or anything.
fn word(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        0..192 => START + u64::from(input.half()),
        192..240 => STACK + 8 * u64::from(input.byte()),
        _ => input.word(),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut files: Vec<Vec<u8>> = vdso().into_iter().collect();
    for options in [&["-g", "-O2"][..], &["-O1", "-mrealign-stack"], &["-s", "-O2"]] {
        match compiled(options) {
            Ok(file) => files.push(file),
            Err(_) => break,
        }
    }
    files.retain(|file| file.len() < TARGET.longest);
    let offsets = [0x500_u16, 0x700, 0x900, 0xb00, 0x1000, 0x1040, 0x1100, 0x1130];
    let head: Vec<u8> =
        offsets.iter().flat_map(|at| [&[0][..], &at.to_le_bytes()].concat()).collect();
    let seed = |file: &Vec<u8>| {
        [&[offsets.len() as u8][..], &0x1100_u16.to_le_bytes(), &head, file].concat()
    };
    files.iter().map(seed).collect()
}

/// The kernel's own library, which every process has: small, with symbols and unwind information.
fn vdso() -> Option<Vec<u8>> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]"))?;
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    let mut content = vec![0; usize::try_from(end.checked_sub(start)?).ok()?];
    fs::File::open("/proc/self/mem").ok()?.read_exact_at(&mut content, start).ok()?;
    Some(content)
}

/// A small library, where there is a C compiler.
fn compiled(options: &[&str]) -> io::Result<Vec<u8>> {
    let source = "int _PyRuntime[900], PyCode_Type, cuMemAlloc_v2(int *a);\n\
                  static inline int g(int *a) { return cuMemAlloc_v2(a + 1); }\n\
                  int f(int n) { int a[n + 1]; a[n] = n; return g(a) + a[0]; }\n\
                  int cuInit(int n) { volatile int b[99]; b[n] = f(n); return b[n] + g(0); }\n";
    let folder = scratch::folder();
    fs::create_dir_all(&folder)?;
    let (input, output) = (folder.join("seed.c"), folder.join("seed.so"));
    fs::write(&input, source)?;
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command
        .args(["-shared", "-fPIC", "-Wl,--build-id", "-o"])
        .args([&output, &input])
        .args(options);
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if status.success() { fs::read(output) } else { Err(io::ErrorKind::Other.into()) }
}
