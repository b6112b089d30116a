//! Stacks of real programs.

use std::fs;

use agent_common::stack::RawReturn;

use super::{
    AddressSpace, End, Modules, NativeFrame, Place,
    testing::{Agent, Program, Workshop, strip},
    unwind::FRAME_LIMIT,
};

const CHAIN: [&str; 5] = ["traced", "inner", "middle", "outer", "main"];

/// Addresses as the files state them.
fn svmas(space: &AddressSpace, frames: &[NativeFrame]) -> Vec<u64> {
    let svma = |frame: &NativeFrame| match space.lookup(frame.pc) {
        Some(Place::Module { svma: Some(svma), .. }) => svma,
        other => panic!("{other:?}"),
    };
    frames.iter().map(svma).collect()
}

/// Frames that lie on the stack one above the other, found by unwind information alone.
fn assert_contiguous(frames: &[NativeFrame]) {
    for pair in frames.windows(2) {
        assert_eq!(pair[0].cfa, pair[1].sp, "{pair:x?}");
        assert!(pair[0].sp < pair[0].cfa && !pair[1].by_frame_pointer, "{pair:x?}");
    }
}

#[test]
fn known_chains_are_found_whatever_the_build() {
    let Some(workshop) = Workshop::open() else { return };
    let builds = [
        "-O2 -fomit-frame-pointer",
        "-O2 -fno-omit-frame-pointer",
        "-O0",
        "-O2 -no-pie -static",
        "-O2 -static-pie",
        "-O2 -Wl,--no-eh-frame-hdr",
        "-O2 -Wl,--hash-style=gnu -Wl,-z,noseparate-code",
    ];
    for (at, flags) in builds.into_iter().enumerate() {
        let path = workshop.compile("chain", &format!("chain{at}"), flags);
        let mut program = Program::start(&path, &["chain"]);
        let (mut agent, capture) = (Agent::new(), program.capture());
        let space = agent.space(&program);
        let (frames, end) = agent.unwind(&space, &capture);
        let mut names = agent.names(&space, &frames);
        names.retain(|name| name != "folded");
        assert_eq!(&names[..5], CHAIN, "{flags}");
        assert_eq!(end, End::Root, "{flags} {names:?}");
        assert_contiguous(&frames);
        if !flags.contains("no-eh-frame-hdr") {
            let stripped = strip(&path);
            let mut program = Program::start(&stripped, &["chain"]);
            let (mut agent, capture) = (Agent::new(), program.capture());
            let own_space = agent.space(&program);
            let (without_names, end) = agent.unwind(&own_space, &capture);
            assert_eq!(end, End::Root, "stripped {flags}");
            assert_eq!(svmas(&own_space, &without_names), svmas(&space, &frames), "{flags}");
        }
    }
}

#[test]
fn realigned_stacks_keep_their_callers() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2 -fomit-frame-pointer");
    let mut program = Program::start(&path, &["realigned"]);
    let (mut agent, capture) = (Agent::new(), program.capture());
    let space = agent.space(&program);
    let (frames, end) = agent.unwind(&space, &capture);
    let names = agent.names(&space, &frames);
    let expected = ["traced", "inner", "realigned", "above_realigned", "main"];
    assert_eq!(names.get(..5), Some(&expected.map(String::from)[..]), "{names:?} {end:?}");
    assert_eq!(end, End::Root);
    assert_contiguous(&frames);
}

#[test]
fn lines_and_inlined_functions_are_told() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2 -g");
    let mut program = Program::start(&path, &["chain"]);
    let (mut agent, capture) = (Agent::new(), program.capture());
    let space = agent.space(&program);
    let (frames, _) = agent.unwind(&space, &capture);
    let Some(Place::Module { module, file_offset, .. }) = space.lookup(frames[1].pc) else {
        panic!("no module")
    };
    let symbols = agent.symbolizer.symbolize(module, file_offset);
    let source = include_str!("programs/chain.c");
    let line = |text| source.lines().position(|line| line.contains(text)).map(|at| at as u32 + 1);
    let found: Vec<_> = symbols.iter().map(|s| (s.function.as_str(), s.line, s.inlined)).collect();
    let expected = [
        ("folded", line("line of the call"), true),
        ("inner", line("return folded(value)"), false),
    ];
    assert_eq!(found, expected);
    assert!(symbols.iter().all(|s| s.file.as_ref().unwrap().ends_with("programs/chain.c")));
}

#[test]
fn short_copies_say_so_and_keep_what_they_have() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let mut program = Program::start(&path, &["recurse", "300"]);
    let (mut agent, mut capture) = (Agent::new(), program.capture());
    let space = agent.space(&program);
    let (whole, end) = agent.unwind(&space, &capture);
    assert_eq!(end, End::Root);
    assert!(whole.len() > 300);
    for bytes in [0, 7, 8, 100, 1024, 4096] {
        let mut short = capture.clone();
        short.copy.truncate(bytes);
        let (frames, end) = agent.unwind(&space, &short);
        assert_eq!(end, End::CopyTooShort, "{bytes}");
        assert!(!frames.is_empty() && frames.len() < whole.len());
        let pcs = |frames: &[NativeFrame]| frames.iter().map(|f| f.pc).collect::<Vec<_>>();
        assert_eq!(pcs(&frames), pcs(&whole[..frames.len()]), "{bytes}");
    }
    assert_eq!(agent.unwind(&space, &capture), (whole, End::Root), "short ones left no trace");

    let mut program = Program::start(&path, &["recurse", "5000"]);
    capture = program.capture();
    let space = agent.space(&program);
    let (frames, end) = agent.unwind(&space, &capture);
    assert_eq!((frames.len(), end), (FRAME_LIMIT, End::Limit));
}

#[test]
fn hijacked_return_slots_are_repaired() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let mut program = Program::start(&path, &["chain"]);
    let (mut agent, mut capture) = (Agent::new(), program.capture());
    let space = agent.space(&program);
    let (whole, _) = agent.unwind(&space, &capture);
    // The slots of `inner` and `outer`: just below their callers' frames.
    let mut returns = Vec::new();
    for frame in [1, 3] {
        let slot = whole[frame].cfa - 8;
        returns.push(RawReturn { slot, address: whole[frame + 1].pc + 1 });
        capture.poke(slot, 0x7fff_ffff_e000);
    }
    let (broken, end) = agent.unwind(&space, &capture);
    assert_eq!((broken.len(), end), (2, End::Unmapped { pc: 0x7fff_ffff_dfff }));
    let mut frames = Vec::new();
    let end = agent.unwinder.unwind(&space, capture.regs, &capture.copy, &returns, &mut frames);
    assert_eq!((frames, end), (whole, End::Root));
}

#[test]
fn libraries_that_come_and_go_are_told_apart() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let library = |name: &str, room: u32| {
        let flags = format!("-O2 -shared -fPIC -DNAME={name} -DROOM={room}");
        workshop.compile("library", &format!("{name}.so"), &flags).display().to_string()
    };
    let (first, second) = (library("first", 100), library("second", 2000));
    let mut program = Program::start(&path, &["libraries", &first, &second]);
    let mut agent = Agent::new();
    let mut seen = Vec::new();
    let mut space = None;
    for expected in ["first", "second", "first"] {
        let capture = program.capture();
        let (host, modules) = (&agent.host, &mut agent.modules);
        match &mut space {
            None => space = AddressSpace::read(host, program.pid(), modules),
            Some(space) => assert!(space.refresh(host, program.pid(), modules)),
        }
        let space = space.as_mut().unwrap();
        assert!(!space.refresh(&agent.host, program.pid(), &mut agent.modules));
        let (frames, end) = agent.unwind(space, &capture);
        let names = agent.names(space, &frames);
        assert_eq!(names.get(1).map(String::as_str), Some(expected), "{names:?}");
        assert_eq!(end, End::Root);
        seen.push(frames[1].pc);
        program.go_on();
    }
    assert_eq!(seen[0] & !0xfff, seen[1] & !0xfff, "the second one took the place of the first");
}

#[test]
fn stacks_outlive_the_file_and_the_process() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let mut program = Program::start(&path, &["chain"]);
    fs::remove_file(&path).unwrap();
    let (mut agent, capture) = (Agent::new(), program.capture());
    let space = agent.space(&program);
    drop(program);
    let (frames, end) = agent.unwind(&space, &capture);
    assert_eq!(end, End::Root);
    let names = agent.names(&space, &frames);
    assert_eq!(&names[..5], CHAIN);
    let build_id = space.modules().next().unwrap().build_id.clone();
    assert_eq!(build_id.map(|id| id.len()), Some(40));
}

#[test]
fn truncated_files_cost_names_not_the_agent() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let mut program = Program::start(&path, &["chain"]);
    let capture = program.capture();
    let mut agent = Agent::new();
    let space = agent.space(&program);
    let pid = program.pid();
    drop(program);
    assert!(!std::path::Path::new(&format!("/proc/{pid}/maps")).exists());
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
    let (frames, end) = agent.unwind(&space, &capture);
    assert!(matches!(end, End::NoUnwindInfo { .. }), "{end:?}");
    assert_eq!(agent.names(&space, &frames)[0], "?");
}

#[test]
fn a_file_is_opened_once_for_all_processes() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let mut programs = [(); 3].map(|()| Program::start(&path, &["chain"]));
    let (host, mut modules) = (crate::host::Host::live(), Modules::default());
    let mut ids = Vec::new();
    let mut spaces = Vec::new();
    for program in &mut programs {
        program.capture();
        let space = AddressSpace::read(&host, program.pid(), &mut modules).unwrap();
        ids.push(space.modules().map(|module| module.id).collect::<Vec<_>>());
        spaces.push(space);
    }
    assert!(ids.iter().all(|each| *each == ids[0]), "{ids:?}");
    // The executable, the loader, libc and perhaps a library of the loader's.
    assert!((3..=6).contains(&modules.len()), "{}", modules.len());
}

#[test]
fn a_file_that_was_written_in_place_is_opened_anew() {
    let Some(workshop) = Workshop::open() else { return };
    let path = workshop.compile("chain", "chain", "-O2");
    let (host, mut modules) = (crate::host::Host::live(), Modules::default());
    let mut program = Program::start(&path, &["chain"]);
    program.capture();
    let id = |modules: &mut Modules, pid| {
        let space = AddressSpace::read(&host, pid, modules).unwrap();
        space.modules().next().unwrap().id
    };
    let before = id(&mut modules, program.pid());
    assert_eq!(id(&mut modules, program.pid()), before);
    drop(program);
    let other = workshop.compile("chain", "other", "-O0");
    fs::write(&path, fs::read(other).unwrap()).unwrap();
    let mut program = Program::start(&path, &["chain"]);
    program.capture();
    assert_ne!(id(&mut modules, program.pid()), before);
}

#[test]
fn stacks_of_python_reach_the_bottom() {
    let Some(workshop) = Workshop::open() else { return };
    let library = workshop.compile("chain", "chain.so", "-O2 -shared -fPIC").display().to_string();
    let script = "import ctypes, sys\nctypes.CDLL(sys.argv[1]).outer(1)";
    let Some(mut program) = Program::python(&["-c", script, &library]) else { return };
    let (mut agent, capture) = (Agent::new(), program.capture());
    let space = agent.space(&program);
    let (frames, end) = agent.unwind(&space, &capture);
    let names = agent.names(&space, &frames);
    assert_eq!(end, End::Root, "{names:?}");
    assert_eq!(&names[..4], &CHAIN[..4]);
    assert_contiguous(&frames);
    assert!(names.iter().any(|name| name.contains("ffi_call")), "{names:?}");
    assert!(frames.len() > 15, "{names:?}");
    // libffi's rule is one that framehop evaluates anew each time, and replaces where that fails.
    for frame in &frames[..10] {
        for missing in [8, 16, 24, 32] {
            let mut short = capture.clone();
            short.copy.truncate((frame.cfa - capture.regs.sp).saturating_sub(missing) as usize);
            assert_eq!(agent.unwind(&space, &short).1, End::CopyTooShort);
            assert_eq!(agent.unwind(&space, &capture).0, frames, "{frame:x?} less {missing}");
        }
    }
}
