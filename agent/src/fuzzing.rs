//! Seams for the fuzz targets (`fuzz/`): what is made of bytes that others wrote, without a kernel
//! half and without the threads in between. No interface for anybody else.

use std::{
    fs::File,
    sync::{Arc, mpsc},
};

use crate::{
    attach::elf,
    clock::Anchor,
    host::{self, Host},
    live::reader::Batch,
    native::{AddressSpace, Module, NativeFrame, Registers, Symbolizer, Unwinder},
    probes::Library,
    python::{self, Interpreter, LineFormat},
    stacks::{
        Frame, namer,
        resolver::{Looked, Resolver},
        site::Rule,
    },
};

/// Most native frames of a stack.
pub use crate::native::unwind::FRAME_LIMIT;

/// An interpreter of CPython 3.`minor` without a process, from 3.13 on by what it publishes.
pub fn interpreter(minor: u8, published: &[u8]) -> Option<Interpreter> {
    Interpreter::of_layout(minor, published)
}

/// The interpreter whose runtime lies at an address of a process, else why it cannot be walked.
pub fn runtime(host: &Host, tgid: u32, runtime: u64, minor: u8) -> Result<Interpreter, String> {
    Interpreter::at(host, tgid, runtime, minor)
}

/// The line by the beginning of a table; see [`python::line_at`].
pub fn line_in_part(format: LineFormat, part: &[u8], first: i32, offset: u32) -> Option<i32> {
    python::line_in_part(format, part, first, offset)
}

/// Parses bytes as each text of `/proc/PID`.
pub fn texts(content: &[u8]) -> usize {
    host::parse_as_every_text(content)
}

/// What the resolver made of records.
#[derive(Debug, Default)]
pub struct Resolution {
    /// Stacks that were resolved.
    pub resolved: usize,
    /// Records that made no sense.
    pub undecodable: u64,
    /// Stacks that were new: native frames, Python frames, and whether they are complete.
    pub stacks: Vec<(usize, usize, bool)>,
    /// Stacks that were asked for again.
    pub wanted: usize,
}

/// Resolves records of a process in batches, as if the kernel half had sent them; `named`: the new
/// stacks are named too.
pub fn resolve(
    host: &Host,
    tgid: u32,
    interpreter: Option<Interpreter>,
    batches: Vec<Vec<Vec<u8>>>,
    named: bool,
) -> Resolution {
    let (to_namer, new) = mpsc::channel();
    let (attach, _commands) = mpsc::channel();
    let (wants, wanted) = mpsc::channel();
    let want_large = Box::new(move |key| wants.send(key).unwrap_or_default());
    let mut resolver =
        Resolver::new(host.clone(), Anchor::of_process(), want_large, to_namer, attach);
    let mut resolution = Resolution::default();
    resolver.looked(Looked { tgid, interpreter, refused: false, at_ns: 0 });
    for stacks in batches {
        let batch = resolver.batch(Batch { stacks, ..Batch::default() });
        resolution.resolved += batch.resolved.len();
        resolution.undecodable += batch.undecodable;
    }
    drop(resolver);
    resolution.wanted = wanted.into_iter().count();
    let (again, inbox) = mpsc::channel();
    for stack in new {
        let is_python = |frame: &&Frame| matches!(frame, Frame::Python { .. });
        let python = stack.frames.iter().filter(is_python).count();
        let native = stack.frames.len() - python;
        resolution.stacks.push((native, python, stack.incomplete.is_none()));
        again.send(stack).unwrap_or_default();
    }
    drop(again);
    if named {
        let (out, rows) = mpsc::sync_channel(resolution.stacks.len());
        namer::run(Rule::default(), &inbox, &out);
        drop(rows);
    }
    resolution
}

/// What came of a file.
#[derive(Debug, Default)]
pub struct FileFacts {
    /// Functions of the probe table in it.
    pub sites: usize,
    /// Characters of its build id.
    pub build_id: usize,
    /// Frames of a stack through it.
    pub frames: Vec<NativeFrame>,
    /// Names of functions, and the characters of the longest one.
    pub names: (usize, usize),
}

/// Looks into a file that a process maps at `start`, as the agent does: for functions to probe, for
/// an interpreter, for the callers of a function on a stack, and for their names.
pub fn file(file: &File, start: u64, entry: Registers, copy: &[u8]) -> FileFacts {
    let mut facts = FileFacts::default();
    let again = || file.try_clone().ok();
    for library in [Library::Cuda, Library::C10, Library::TorchCpu, Library::Nccl] {
        facts.sites +=
            again().and_then(|file| elf::sites(file, library).ok()).map_or(0, |s| s.len());
    }
    again().and_then(python::Image::read);
    let (Some(own), Ok(metadata)) = (again(), file.metadata()) else { return facts };
    let module = Arc::new(Module::open("/usr/lib/made-up.so", own));
    facts.build_id = module.build_id.as_ref().map_or(0, String::len);
    let space = AddressSpace::of_module(start, metadata.len(), Arc::clone(&module));
    space.executable_pages();
    Unwinder::default().unwind(&space, entry, copy, &[], &mut facts.frames);
    let mut symbolizer = Symbolizer::default();
    for frame in &facts.frames {
        for symbol in symbolizer.symbolize(&module, frame.pc.wrapping_sub(start)) {
            let longest = facts.names.1.max(symbol.function.chars().count());
            facts.names = (facts.names.0 + 1, longest);
        }
    }
    facts
}
