//! The resolver's thread: what the kernel half captured, unwound, merged and interned.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender},
    },
    time::{Duration, Instant},
};

use agent_common::{
    life::{KIND_EXIT, KIND_FORK, RawLife},
    stack::{
        FLAG_BACKWARD, FLAG_PYTHON_CUT, FLAG_PYTHON_FAULT, FLAG_VERIFY, KIND_CODE, KIND_STACK,
        LARGE_COPY_BYTES, RawCode, RawPythonFrame, RawStack,
    },
};
use zerocopy::FromBytes as _;

use super::{
    frame::{self, Frame},
    merge::{Activation, Merged, Natives, Style, activations, merge},
    namer::NewStack,
    owner,
};
use crate::{
    attach::examine::ToExaminer,
    clock::{self, Anchor},
    host::Host,
    live::{
        Message,
        reader::{Batch, Resolved},
    },
    native::{AddressSpace, End, Modules, NativeFrame, Place, Registers, Symbolizer, Unwinder},
    python::{self, Code, Interpreter},
};

/// What the resolver is told.
#[derive(Debug)]
pub enum ToResolver {
    /// From the rings; handed on to the books with its stacks resolved.
    Batch(Batch),
    /// A process was looked at.
    Process(Looked),
    /// A process ended. Its last stacks may still be under way.
    Ended(u32),
    /// The reader is done.
    Stop,
}

/// What was found in a process.
#[derive(Debug)]
pub struct Looked {
    /// Process.
    pub tgid: u32,
    /// Its interpreter.
    pub interpreter: Option<Interpreter>,
    /// It has an interpreter whose frames cannot be walked.
    pub refused: bool,
    /// When the look began, `CLOCK_BOOTTIME`.
    pub at_ns: u64,
}

/// Stacks whose frames are kept for backward passes.
const KEPT_STACKS: usize = 1 << 15;

/// A process's mappings are read for its stacks in at most one in so many parts of the time: its
/// frameworks map thousands of files, and while it starts most stacks are new.
const REST: u64 = 20;
/// How often files that nobody maps any more are looked for.
const RELEASE_NS: u64 = 2_000_000_000;

/// How long the stacks of a process that ended may be under way.
const UNDER_WAY: Duration = Duration::from_secs(10);

/// What a process has.
#[derive(Default)]
struct Process {
    space: Option<AddressSpace>,
    interpreter: Option<Interpreter>,
    /// It has an interpreter whose frames cannot be walked.
    refused: bool,
    codes: HashMap<u64, Arc<PythonCode>>,
    /// Stacks by key.
    stacks: HashMap<u64, i64>,
    /// When it was last looked at, `CLOCK_BOOTTIME`.
    looked_ns: u64,
    /// When `space` was read last, and before when it is not read again for a stack alone.
    read_ns: u64,
    rest_ns: u64,
    /// The process ended: dropped with the next batch.
    ended: bool,
    /// It was found to be gone, without a word of its end: it made no call.
    missing: bool,
}

impl Process {
    /// Whether something may have been mapped between the last reading and a stack: a library that
    /// took the place of another would lend it its names.
    fn may_have_changed(&self, stack_ns: u64) -> bool {
        self.space.is_none() || (self.read_ns < stack_ns && self.rest_ns <= clock::boot_ns())
    }

    /// The program that is known here is the one that ended, not the one that was executed then.
    fn is_over(&self, end: &RawLife) -> bool {
        end.kind == KIND_EXIT || self.looked_ns < end.ts_ns
    }
}

/// A code object with its names interned.
struct PythonCode {
    code: Code,
    function: Arc<str>,
    file: Arc<str>,
}

/// Resolves stacks.
#[expect(missing_debug_implementations, reason = "of no use in a message")]
pub struct Resolver {
    host: Host,
    anchor: Anchor,
    modules: Modules,
    unwinder: Unwinder,
    /// Names evaluation loops of CPython 3.8 and 3.9.
    symbolizer: Symbolizer,
    processes: HashMap<u32, Process>,
    /// When files were looked for last that nobody maps any more.
    released_ns: u64,
    /// Processes that ended, with when that was told and when they had been looked at last.
    leaving: VecDeque<(Instant, u32, u64)>,
    /// Frames by stack, for the stacks that call backward passes.
    frames: HashMap<i64, Arc<[Frame]>>,
    /// Stacks that the namer has.
    named: HashSet<i64>,
    native: Vec<NativeFrame>,
    /// Asks the kernel half for a stack again, with the large copy.
    want_large: WantLarge,
    namer: Sender<NewStack>,
    examiner: Sender<ToExaminer>,
}

/// Takes the key of a stack whose copy was too short.
pub type WantLarge = Box<dyn FnMut(u64)>;

impl Resolver {
    /// A resolver that hands new stacks to `namer`.
    pub fn new(
        host: Host,
        anchor: Anchor,
        want_large: WantLarge,
        namer: Sender<NewStack>,
        examiner: Sender<ToExaminer>,
    ) -> Self {
        Self {
            host,
            anchor,
            modules: Modules::default(),
            unwinder: Unwinder::default(),
            symbolizer: Symbolizer::default(),
            processes: HashMap::new(),
            released_ns: 0,
            leaving: VecDeque::new(),
            frames: HashMap::new(),
            named: HashSet::new(),
            native: Vec::new(),
            want_large,
            namer,
            examiner,
        }
    }

    /// Serves until the reader is done.
    pub fn run(mut self, inbox: &Receiver<ToResolver>, out: &SyncSender<Message>) {
        for message in inbox {
            match message {
                ToResolver::Batch(batch) => {
                    let batch = self.batch(batch);
                    if out.send(Message::Batch(batch)).is_err() {
                        return;
                    }
                }
                ToResolver::Process(looked) => self.looked(looked),
                ToResolver::Ended(tgid) => self.ended(tgid),
                ToResolver::Stop => return,
            }
        }
    }

    /// Resolves the stacks of a batch.
    pub(crate) fn batch(&mut self, mut batch: Batch) -> Batch {
        self.processes.retain(|_, process| !process.ended);
        self.release();
        self.forget_ended();
        for begin in &batch.begins {
            self.forked(begin);
        }
        for end in &batch.ends {
            // The batch's stacks are from before: what is mapped by now is another program's.
            if let Some(process) = self.processes.get_mut(&end.tgid)
                && process.is_over(end)
            {
                process.rest_ns = u64::MAX;
            }
        }
        for raw in std::mem::take(&mut batch.stacks) {
            match raw.first() {
                Some(&KIND_CODE) if self.code(&raw).is_some() => {}
                Some(&KIND_STACK) => match self.stack(&raw) {
                    Some(resolved) => batch.resolved.push(resolved),
                    None => batch.undecodable += 1,
                },
                _ => batch.undecodable += 1,
            }
        }
        for end in &batch.ends {
            let Some(process) = self.processes.get_mut(&end.tgid) else { continue };
            if end.kind == KIND_EXIT {
                process.ended = true;
            } else if process.is_over(end) {
                *process = Process::default();
            }
        }
        batch
    }

    /// Lets go the files of processes that ended.
    fn release(&mut self) {
        let now_ns = clock::boot_ns();
        if now_ns.saturating_sub(self.released_ns) < RELEASE_NS {
            return;
        }
        self.released_ns = now_ns;
        let host = &self.host;
        self.processes.retain(|tgid, process| {
            // The word of its end, and stacks, may still be under way: gone twice is gone.
            let gone = !host.has_memory(*tgid);
            let was_missing = std::mem::replace(&mut process.missing, gone);
            !(gone && was_missing)
        });
        let spaces = self.processes.values().filter_map(|process| process.space.as_ref());
        let used = spaces.flat_map(AddressSpace::module_ids).collect();
        self.modules.release(&used, now_ns);
    }

    /// A look at a process can come after its end: then it is here once more, and for good.
    fn ended(&mut self, tgid: u32) {
        if let Some(process) = self.processes.get(&tgid) {
            self.leaving.push_back((Instant::now(), tgid, process.looked_ns));
        }
    }

    /// Drops those whose stacks can't be under way any more, unless another has the pid by now.
    fn forget_ended(&mut self) {
        while let Some((_, tgid, looked_ns)) =
            self.leaving.pop_front_if(|(told, ..)| told.elapsed() > UNDER_WAY)
        {
            if self.processes.get(&tgid).is_some_and(|process| process.looked_ns == looked_ns) {
                self.processes.remove(&tgid);
            }
        }
    }

    /// A child has what its parent has, at the same addresses.
    fn forked(&mut self, begin: &RawLife) {
        if begin.kind != KIND_FORK || self.processes.contains_key(&begin.tgid) {
            return;
        }
        if let Some(parent) = self.processes.get(&begin.parent_tgid) {
            let child = Process {
                space: parent.space.clone(),
                interpreter: parent.interpreter.clone(),
                refused: parent.refused,
                ..Process::default()
            };
            self.processes.insert(begin.tgid, child);
        }
    }

    /// Takes what was found in a process.
    pub(crate) fn looked(&mut self, looked: Looked) {
        let process = self.processes.entry(looked.tgid).or_default();
        if process.ended {
            *process = Process::default();
        }
        process.interpreter = looked.interpreter;
        process.refused = looked.refused;
        process.looked_ns = looked.at_ns;
        self.read_space(looked.tgid);
    }

    /// Reads the process's mappings, and tells the kernel half where it has code.
    fn read_space(&mut self, tgid: u32) {
        let begin_ns = clock::boot_ns();
        let process = self.processes.entry(tgid).or_default();
        let changed = if let Some(space) = &mut process.space {
            space.refresh(&self.host, tgid, &mut self.modules)
        } else {
            process.space = AddressSpace::read(&self.host, tgid, &mut self.modules);
            process.space.is_some()
        };
        process.read_ns = begin_ns;
        let took_ns = clock::boot_ns().saturating_sub(begin_ns);
        process.rest_ns = begin_ns.saturating_add(took_ns.saturating_mul(REST));
        if changed && let Some(space) = &process.space {
            let pages = space.executable_pages();
            // The attaching thread lives as long as the recording.
            self.examiner.send(ToExaminer::Pages(tgid, pages)).unwrap_or_default();
        }
    }

    /// Takes a code object in.
    fn code(&mut self, raw: &[u8]) -> Option<()> {
        let raw = RawCode::read_from_bytes(raw).ok()?;
        let process = self.processes.entry(raw.tgid).or_default();
        let Some(interpreter) = &process.interpreter else { return Some(()) };
        let code = python::decode(&raw, interpreter, python::memory(raw.tgid));
        let (function, file) = (code.function.as_str().into(), code.file.as_str().into());
        process.codes.insert(raw.definition, Arc::new(PythonCode { code, function, file }));
        Some(())
    }

    /// Resolves a stack; `None` where the record makes no sense.
    fn stack(&mut self, raw: &[u8]) -> Option<Resolved> {
        let (raw, copy) = RawStack::read_from_prefix(raw).ok()?;
        let copy = copy.get(..raw.copied as usize)?;
        let (frames, incomplete) = self.merged(&raw, copy);
        let frames: Arc<[Frame]> = frames.into();
        let stack_id = frame::stack_id(&frames, incomplete.is_none());
        let process = self.processes.entry(raw.tgid).or_default();
        let before = process.stacks.get(&raw.key).copied().filter(|before| *before != stack_id);
        let verified = raw.flags & FLAG_VERIFY != 0;
        if verified && let Some(before) = before {
            let known = self.frames.get(&before);
            if known.is_some_and(|known| frame::same_lines(known, &frames)) {
                let (tgid, key) = (raw.tgid, raw.key);
                let (stack_id, library) = (before, None);
                return Some(Resolved { tgid, key, stack_id, library, mismatch: false });
            }
        }
        process.stacks.insert(raw.key, stack_id);
        self.keep(stack_id, &frames);
        let mut library = None;
        if self.named.insert(stack_id) {
            library = owner::library(&frames).map(Arc::from);
            let new = NewStack {
                stack_id,
                frames,
                library: library.clone(),
                backward: raw.flags & FLAG_BACKWARD != 0,
                incomplete,
                first_seen_ns: self.anchor.epoch(raw.ts_ns),
            };
            // The namer lives as long as this.
            self.namer.send(new).unwrap_or_default();
        }
        let mismatch = verified && before.is_some();
        Some(Resolved { tgid: raw.tgid, key: raw.key, stack_id, library, mismatch })
    }

    fn keep(&mut self, stack_id: i64, frames: &Arc<[Frame]>) {
        if self.frames.len() >= KEPT_STACKS {
            self.frames.clear();
        }
        self.frames.entry(stack_id).or_insert_with(|| Arc::clone(frames));
    }

    /// The frames, innermost first, and why they are not all, if they are not.
    fn merged(&mut self, raw: &RawStack, copy: &[u8]) -> (Vec<Frame>, Option<String>) {
        let mut incomplete = self.unwind(raw, copy);
        let python = raw.frames.get(..usize::from(raw.frame_count)).unwrap_or_default();
        let cframes = raw.cframes.get(..usize::from(raw.cframe_count)).unwrap_or_default();
        let process = self.processes.entry(raw.tgid).or_default();
        let found = process.interpreter.as_ref().map_or_else(Vec::new, |interpreter| {
            let style = Style::of_minor(interpreter.version.1, interpreter.config.shim_owner);
            activations(python, cframes, style)
        });
        let natives = self.natives(raw.tgid, &found);
        let order = merge(&self.native, &found, &natives);
        if python.iter().any(|frame| !self.is_defined(raw.tgid, frame)) {
            incomplete = Some("a Python code object was not captured".to_owned());
        }
        let mut frames: Vec<Frame> = order
            .into_iter()
            .filter_map(|merged| match merged {
                Merged::Native(at) => natives.frames.get(at).cloned(),
                Merged::Python(at) => self.python_frame(raw.tgid, python.get(at)?),
            })
            .collect();
        if raw.flags & FLAG_BACKWARD != 0 {
            match self.caller(raw) {
                Some(caller) => frames.extend(caller.iter().cloned()),
                None => incomplete = Some("who called the backward pass is not known".to_owned()),
            }
        }
        if python.is_empty() && natives.runs_python() {
            incomplete = Some(self.why_no_python(raw.tgid).to_owned());
        }
        if raw.flags & FLAG_PYTHON_CUT != 0 {
            incomplete = Some("more Python frames than are taken".to_owned());
        } else if raw.flags & FLAG_PYTHON_FAULT != 0 {
            incomplete = Some("a Python frame could not be read".to_owned());
        }
        (frames, incomplete)
    }

    /// Unwinds into `self.native`; gives why the walk did not reach the thread's start.
    fn unwind(&mut self, raw: &RawStack, copy: &[u8]) -> Option<String> {
        let process = self.processes.get(&raw.tgid);
        if process.is_none_or(|process| process.may_have_changed(raw.ts_ns)) {
            self.read_space(raw.tgid);
        }
        let mut end = self.walk(raw, copy);
        if matches!(end, Some(End::Unmapped { .. })) {
            // A library that was loaded since.
            self.read_space(raw.tgid);
            end = self.walk(raw, copy);
        }
        let Some(end) = end else { return Some("the process's mappings are not known".to_owned()) };
        if end == End::CopyTooShort && copy.len() < LARGE_COPY_BYTES {
            (self.want_large)(raw.key);
        }
        self.why_incomplete(raw.tgid, end)
    }

    fn walk(&mut self, raw: &RawStack, copy: &[u8]) -> Option<End> {
        self.native.clear();
        let space = self.processes.get(&raw.tgid)?.space.as_ref()?;
        let regs = Registers { ip: raw.ip, sp: raw.sp, fp: raw.fp, lr: raw.lr };
        let returns = raw.returns.get(..usize::from(raw.return_count)).unwrap_or_default();
        Some(self.unwinder.unwind(space, regs, copy, returns, &mut self.native))
    }

    fn why_incomplete(&self, tgid: u32, end: End) -> Option<String> {
        let reason = match end {
            End::Root if self.native.iter().any(|frame| frame.by_frame_pointer) => {
                "frames without unwind information, found by their frame pointers".to_owned()
            }
            End::Root => return None,
            End::CopyTooShort => "the stack goes on above the part that was copied".to_owned(),
            End::NoUnwindInfo { pc } => {
                format!("no unwind information in {}", self.place_name(tgid, pc))
            }
            End::Unmapped { .. } => "a return address in no known file".to_owned(),
            End::Limit => "more native frames than are followed".to_owned(),
            End::Corrupt => "the stack makes no sense to the unwinder".to_owned(),
        };
        Some(reason)
    }

    fn place_name(&self, tgid: u32, pc: u64) -> String {
        let space = self.processes.get(&tgid).and_then(|process| process.space.as_ref());
        match space.and_then(|space| space.lookup(pc)) {
            Some(Place::Module { module, .. }) => frame::file_name(&module.path),
            Some(Place::Jit) => "code written at run time".to_owned(),
            Some(Place::Uprobes) => "a probe's trampoline".to_owned(),
            None => "no known file".to_owned(),
        }
    }

    fn why_no_python(&self, tgid: u32) -> &'static str {
        if self.processes.get(&tgid).is_some_and(|process| process.refused) {
            "the interpreter's frames cannot be walked"
        } else {
            "taken before the interpreter's frames could be walked"
        }
    }

    /// The native frames as frames, and what the merge asks of them.
    fn natives(&mut self, tgid: u32, activations: &[Activation]) -> NativeTable {
        let process = self.processes.get(&tgid);
        let space = process.and_then(|process| process.space.as_ref());
        let interpreter = process.and_then(|process| process.interpreter.as_ref());
        let by_code = activations.iter().any(|activation| activation.addr.is_none());
        let mut table = NativeTable::default();
        for native in &self.native {
            let frame = match space.and_then(|space| space.lookup(native.pc)) {
                Some(Place::Module { module, file_offset, .. }) => {
                    Frame::Native { module: Arc::clone(module), file_offset }
                }
                Some(Place::Jit) => Frame::Jit,
                Some(Place::Uprobes) | None => Frame::Unknown,
            };
            let own = match &frame {
                Frame::Native { module, file_offset } => interpreter
                    .filter(|interpreter| interpreter.path == module.path)
                    .map(|_| (module, *file_offset)),
                _ => None,
            };
            table.interpreter.push(own.is_some());
            table.loops.push(
                by_code
                    && own.is_some_and(|(module, offset)| {
                        let symbols = self.symbolizer.symbolize(module, offset);
                        symbols
                            .iter()
                            .any(|symbol| symbol.function.starts_with("_PyEval_EvalFrameDefault"))
                    }),
            );
            table.frames.push(frame);
        }
        table
    }

    /// What the frame runs is known; a shim runs nothing.
    fn is_defined(&self, tgid: u32, frame: &RawPythonFrame) -> bool {
        let process = self.processes.get(&tgid);
        frame.definition == 0
            || process.is_some_and(|process| process.codes.contains_key(&frame.definition))
    }

    /// A Python frame with its names; `None` for one that the interpreter hides. (The clean-up after
    /// an inlined `__init__`, since 3.12, runs a code object whose name and file are one.)
    fn python_frame(&self, tgid: u32, raw: &RawPythonFrame) -> Option<Frame> {
        let codes = self.processes.get(&tgid).map(|process| &process.codes);
        let Some(code) = codes.and_then(|codes| codes.get(&raw.definition)) else {
            return Some(Frame::Python { function: "?".into(), file: "?".into(), line: None });
        };
        (code.function != code.file).then(|| Frame::Python {
            function: Arc::clone(&code.function),
            file: Arc::clone(&code.file),
            line: code.code.line_of(raw),
        })
    }

    /// The frames that called the backward pass.
    fn caller(&self, raw: &RawStack) -> Option<Arc<[Frame]>> {
        let stack_id = self.processes.get(&raw.tgid)?.stacks.get(&raw.caller_key)?;
        self.frames.get(stack_id).map(Arc::clone)
    }
}

/// Native frames with what is known of each.
#[derive(Default)]
struct NativeTable {
    frames: Vec<Frame>,
    loops: Vec<bool>,
    interpreter: Vec<bool>,
}

impl NativeTable {
    /// A frame lies in an interpreter, by the name of its file.
    fn runs_python(&self) -> bool {
        self.frames.iter().any(|frame| match frame {
            Frame::Native { module, .. } => frame::is_interpreter(&frame::file_name(&module.path)),
            _ => false,
        })
    }
}

impl Natives for NativeTable {
    fn is_loop(&self, frame: usize) -> bool {
        self.loops.get(frame).copied().unwrap_or(false)
    }

    fn is_interpreter(&self, frame: usize) -> bool {
        self.interpreter.get(frame).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use agent_common::stack::{COPY_BYTES, STACK_LEN};
    use proptest::prelude::*;

    use super::*;
    use crate::clock::Anchor;

    /// Resolves records of this process as if the kernel half had sent them.
    fn resolve(records: Vec<Vec<u8>>) -> (Batch, Vec<NewStack>) {
        let (namer, stacks) = mpsc::channel();
        let (examiner, _inbox) = mpsc::channel();
        let want_large = Box::new(|_| {});
        let mut resolver =
            Resolver::new(Host::live(), Anchor::of_process(), want_large, namer, examiner);
        let batch = resolver.batch(Batch { stacks: records, ..Batch::default() });
        drop(resolver);
        (batch, stacks.into_iter().collect())
    }

    fn ours(mut record: Vec<u8>, kind: u8) -> Vec<u8> {
        record[0] = kind;
        let tgid_at = if kind == KIND_STACK { 8 } else { 4 };
        record[tgid_at..tgid_at + 4].copy_from_slice(&std::process::id().to_le_bytes());
        record
    }

    #[test]
    fn a_record_that_is_no_record_is_counted() {
        let (batch, named) = resolve(vec![vec![], vec![KIND_STACK; 7], vec![99; 200]]);
        assert_eq!((batch.undecodable, batch.resolved.len(), named.len()), (3, 0, 0));
    }

    #[test]
    fn a_stack_that_says_nothing_is_incomplete() {
        let (batch, named) = resolve(vec![ours(vec![0; STACK_LEN], KIND_STACK)]);
        assert_eq!((batch.undecodable, batch.resolved.len()), (0, 1));
        assert!(named[0].incomplete.is_some());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// What a process lays out for the probe, and a kernel half of another version: bounded, no
        /// panic, and never complete by chance.
        #[test]
        fn made_up_records_are_resolved_or_counted(
            seed in prop::collection::vec(any::<u8>(), 4096),
            copied in 0..=COPY_BYTES as u32,
            code in any::<bool>(),
        ) {
            let mut record: Vec<u8> = seed.iter().copied().cycle().take(STACK_LEN).collect();
            record[72..76].copy_from_slice(&copied.to_le_bytes());
            let kind = if code { KIND_CODE } else { KIND_STACK };
            record.truncate(if code { size_of::<RawCode>() } else { STACK_LEN });
            let (batch, named) = resolve(vec![ours(record, kind)]);
            prop_assert!(batch.undecodable as usize + batch.resolved.len() <= 1);
            prop_assert!(named.iter().all(|stack| stack.incomplete.is_some()));
        }
    }
}
