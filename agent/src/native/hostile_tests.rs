//! Files and stacks that somebody made up: no panic, no endless walk, no trace left for others.

use std::{fs, ops::Range};

use object::{Object as _, ObjectSection as _};
use proptest::{prelude::*, sample::Index};

use super::{
    AddressSpace, End, Module, Modules, NativeFrame, Registers, Symbolizer, Unwinder,
    testing::{Agent, Capture, Program, Workshop},
    unwind::FRAME_LIMIT,
};
use crate::host::testing::Tree;

/// A stack of a program that ended, its file and its maps.
struct Scene {
    file: Vec<u8>,
    maps: String,
    path: String,
    capture: Capture,
    /// Where the file keeps what unwinding and symbolizing read.
    interesting: Vec<Range<u64>>,
}

impl Scene {
    fn new(workshop: &Workshop, mode: &str) -> Self {
        let path = workshop.compile("chain", mode, "-O2 -g");
        let mut program = Program::start(&path, &[mode]);
        let capture = program.capture();
        let maps = fs::read_to_string(format!("/proc/{}/maps", program.pid())).unwrap();
        let file = fs::read(&path).unwrap();
        let interesting = interesting(&file);
        Self { file, maps, path: path.display().to_string(), capture, interesting }
    }

    /// The address space of a process with these maps and this content of the executable.
    fn space(&self, tree: &Tree, file: &[u8]) -> AddressSpace {
        tree.write("proc/7/maps", &self.maps);
        tree.write("changed", file);
        for line in self.maps.lines() {
            let Some((range, path)) = line.split_once(' ').zip(line.find('/')) else { continue };
            let link = format!("proc/7/map_files/{}", range.0);
            let path = &line[path..];
            let changed = tree.root().join("changed");
            let target = if path == self.path { changed } else { path.into() };
            tree.link(target, &link);
        }
        AddressSpace::read(&tree.host(), 7, &mut Modules::default()).unwrap()
    }
}

fn interesting(file: &[u8]) -> Vec<Range<u64>> {
    let names = [
        ".eh_frame",
        ".eh_frame_hdr",
        ".symtab",
        ".strtab",
        ".debug_info",
        ".debug_abbrev",
        ".debug_line",
        ".debug_str",
        ".debug_aranges",
        ".debug_rnglists",
    ];
    let elf = object::File::parse(file).unwrap();
    let range = |name| elf.section_by_name(name)?.file_range();
    let sections = names.iter().filter_map(|name| range(name)).map(|(at, n)| at..at + n);
    // The program and the section headers too.
    let headers = [0..900, file.len() as u64 - 2600..file.len() as u64];
    sections.chain(headers).collect()
}

fn assert_sane(frames: &[NativeFrame]) {
    assert!(frames.len() <= FRAME_LIMIT);
    for pair in frames.windows(2) {
        assert!(pair[0].cfa == pair[1].sp && pair[0].sp < pair[1].sp, "{pair:x?}");
    }
}

/// Walks without the net that [`Unwinder::unwind`] spans.
fn walk(unwinder: &mut Unwinder, space: &AddressSpace, capture: &Capture) -> Vec<NativeFrame> {
    let mut frames = Vec::new();
    unwinder.walk_copy(space, capture.regs, &capture.copy, &[], &mut frames);
    assert_sane(&frames);
    frames
}

#[test]
fn the_scene_is_right_as_long_as_nothing_is_changed() {
    let Some(workshop) = Workshop::open() else { return };
    for mode in ["chain", "realigned"] {
        let (scene, tree, mut agent) = (Scene::new(&workshop, mode), Tree::new(), Agent::new());
        let space = scene.space(&tree, &scene.file);
        let (frames, end) = agent.unwind(&space, &scene.capture);
        assert_eq!(end, End::Root);
        assert_eq!(agent.names(&space, &frames)[0], "traced");
    }
}

#[test]
fn changed_files_neither_panic_nor_loop() {
    let Some(workshop) = Workshop::open() else { return };
    let scenes = ["chain", "realigned"].map(|mode| Scene::new(&workshop, mode));
    let change = (any::<Index>(), any::<Index>(), any::<u8>());
    let changes = proptest::collection::vec(change, 1..40);
    proptest!(|(which in 0..2_usize, changes in changes)| {
        let scene = &scenes[which];
        let mut file = scene.file.clone();
        for (section, byte, value) in changes {
            let range = &scene.interesting[section.index(scene.interesting.len())];
            let at = range.start as usize + byte.index((range.end - range.start) as usize);
            file[at] = value;
        }
        let tree = Tree::new();
        let space = scene.space(&tree, &file);
        let frames = walk(&mut Unwinder::default(), &space, &scene.capture);
        let mut agent = Agent::new();
        agent.names(&space, &frames);
    });
}

#[test]
fn made_up_stacks_neither_panic_nor_loop_nor_spoil_later_ones() {
    let Some(workshop) = Workshop::open() else { return };
    let (scene, tree) = (Scene::new(&workshop, "realigned"), Tree::new());
    let space = scene.space(&tree, &scene.file);
    let mut unwinder = Unwinder::default();
    let right = walk(&mut unwinder, &space, &scene.capture);
    let returns: Vec<u64> = right.iter().skip(1).map(|frame| frame.pc + 1).collect();
    let sp = scene.capture.regs.sp;
    let word = || {
        prop_oneof![
            4 => proptest::sample::select(returns.clone()),
            3 => (0..600_u64).prop_map(move |at| sp + at * 8),
            1 => Just(0),
            1 => any::<u64>(),
            1 => Just(u64::MAX - 7),
        ]
    };
    let stack = proptest::collection::vec(word(), 0..600);
    let unwinder = std::cell::RefCell::new(unwinder);
    proptest!(ProptestConfig::with_cases(2000), |(
        words in stack, fp in word(), sp in prop_oneof![9 => Just(sp), 1 => any::<u64>()]
    )| {
        let copy = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let regs = Registers { sp, fp, ..scene.capture.regs };
        walk(&mut unwinder.borrow_mut(), &space, &Capture { regs, copy });
        prop_assert_eq!(&walk(&mut unwinder.borrow_mut(), &space, &scene.capture), &right);
    });
}

#[test]
fn made_up_files_have_no_names_and_do_not_panic() {
    let header = [0x7f, b'E', b'L', b'F', 2, 1, 1];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("elf");
    proptest!(|(rest in proptest::collection::vec(any::<u8>(), 0..400), offset in any::<u64>())| {
        fs::write(&path, [&header[..], &rest].concat()).unwrap();
        let module = Module::open(&path, fs::File::open(&path).unwrap());
        module.svma(offset);
        prop_assert!(Symbolizer::default().symbolize(&module, offset).is_empty());
    });
}

#[test]
fn what_a_file_is_too_short_for_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("short");
    fs::write(&path, [7; 100]).unwrap();
    let module = Module::open(&path, fs::File::open(&path).unwrap());
    assert_eq!(module.read(90, 10), Some(vec![7; 10]));
    // More than any machine has: asking for it would end the test.
    for (offset, bytes) in [(91, 10), (0, 1 << 50), (u64::MAX, 1)] {
        assert_eq!(module.read(offset, bytes), None);
    }
}
