//! Interpreters and libraries of the processes that use CUDA, for their stacks.
//!
//! A thread of its own: to find an interpreter takes milliseconds, in which the attaching thread
//! would let a process's first calls go by.

use std::{
    collections::{HashMap, HashSet},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender},
    time::{Duration, Instant},
};

use agent_common::stack::ExecutablePages;
use tracing::warn;

use super::Notice;
use crate::{
    clock,
    host::{Host, maps::Mapping},
    kernel::Guides,
    python::{self, Found, Interpreter},
    stacks::resolver::{Looked, ToResolver},
};

/// How long further mappings are waited for before a process is looked at again: a program that
/// imports a framework maps hundreds of libraries in a second.
const SETTLE: Duration = Duration::from_millis(200);

/// What the examining thread is told.
#[derive(Debug)]
pub enum ToExaminer {
    /// A process uses CUDA.
    Uses {
        /// Process.
        tgid: u32,
        /// What it has mapped.
        mappings: Vec<Mapping>,
        /// When that was read, `CLOCK_BOOTTIME`.
        at_ns: u64,
    },
    /// A process mapped something executable.
    Mapped(u32),
    /// Where a process has executable code, for the kernel half.
    Pages(u32, Box<ExecutablePages>),
    /// A process executes another program.
    Executed(u32),
    /// A process ended.
    Ended(u32),
}

/// Finds the interpreters of processes and tells the kernel half and the resolver.
#[expect(missing_debug_implementations, reason = "aya's maps have none")]
pub struct Examiner {
    host: Host,
    guides: Guides,
    looks: SyncSender<ToResolver>,
    notices: Sender<Notice>,
    /// Processes that use CUDA, with their interpreters.
    known: HashMap<u32, Option<Interpreter>>,
    /// Those of them that mapped something since, and when they are looked at again.
    due: HashMap<u32, Instant>,
    /// Those whose Python was said to be unsupported.
    told: HashSet<u32>,
}

impl Examiner {
    /// Tells what it finds to the resolver, and what it can't to the notices.
    pub fn new(
        host: Host,
        guides: Guides,
        looks: SyncSender<ToResolver>,
        notices: Sender<Notice>,
    ) -> Self {
        let (known, due, told) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { host, guides, looks, notices, known, due, told }
    }

    /// Works until nobody sends any more.
    pub fn run(mut self, inbox: &Receiver<ToExaminer>) {
        loop {
            let told = match self.due.values().min() {
                Some(next) => inbox.recv_timeout(next.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(RecvTimeoutError::from),
            };
            match told {
                Ok(told) => self.serve(told),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.examine_due();
        }
    }

    fn serve(&mut self, told: ToExaminer) {
        match told {
            ToExaminer::Uses { tgid, mappings, at_ns } => self.examine(tgid, &mappings, at_ns),
            ToExaminer::Mapped(tgid) => {
                if self.known.contains_key(&tgid) {
                    self.due.entry(tgid).or_insert_with(|| Instant::now() + SETTLE);
                }
            }
            ToExaminer::Pages(tgid, pages) => self.set_pages(tgid, &pages),
            ToExaminer::Executed(tgid) => self.forget(tgid),
            ToExaminer::Ended(tgid) => {
                self.forget(tgid);
                // What was said of it before is on this way too, and may have come after its end.
                self.looks.send(ToResolver::Ended(tgid)).unwrap_or_default();
            }
        }
    }

    /// The kernel half forgets by itself, but what is said to it may come too late.
    fn forget(&mut self, tgid: u32) {
        self.due.remove(&tgid);
        self.told.remove(&tgid);
        if self.known.remove(&tgid).is_some() {
            self.guides.forget(tgid);
        }
    }

    /// Looks at the processes whose time has come.
    fn examine_due(&mut self) {
        let now = Instant::now();
        let due: Vec<u32> = self.due.extract_if(|_, at| *at <= now).map(|(tgid, _)| tgid).collect();
        for tgid in due {
            let at_ns = clock::boot_ns();
            if let Some(mappings) = self.host.mappings(tgid) {
                self.examine(tgid, &mappings, at_ns);
            }
        }
    }

    /// Finds the process's interpreter, and has its libraries looked at.
    fn examine(&mut self, tgid: u32, mappings: &[Mapping], at_ns: u64) {
        let before = self.known.get(&tgid).cloned().flatten();
        let interpreter = match before {
            Some(known) if known.checked => Some(known),
            before => self.interpreter(tgid, mappings).or(before),
        };
        let config = interpreter.as_ref().map(|interpreter| interpreter.config);
        let changed = self.known.insert(tgid, interpreter.clone()).flatten() != interpreter;
        // The resolver first: it must know the interpreter before a stack with Python frames comes.
        let refused = interpreter.is_none() && self.told.contains(&tgid);
        let looked = Looked { tgid, interpreter, refused, at_ns };
        self.looks.send(ToResolver::Process(looked)).unwrap_or_default();
        if changed
            && let Some(config) = config
            && let Err(error) = self.guides.set_python(tgid, &config)
        {
            warn!(tgid, error = super::chain(&error), "no Python stacks of this process");
        }
    }

    fn interpreter(&mut self, tgid: u32, mappings: &[Mapping]) -> Option<Interpreter> {
        match python::find(&self.host, tgid, mappings) {
            Found::Interpreter(found) => Some(found),
            Found::None => None,
            Found::Unsupported(reason) => {
                // Of a process that ended meanwhile nothing can be read, and one that executed
                // another program meanwhile is looked at again.
                let is_same = self.host.mappings(tgid).is_some_and(|now| now == mappings);
                if is_same && self.told.insert(tgid) {
                    // The receiver is gone only when the recording ends.
                    self.notices.send(Notice::NoPython { tgid, reason }).unwrap_or_default();
                }
                None
            }
        }
    }

    /// Tells the kernel half where a process has executable code.
    fn set_pages(&mut self, tgid: u32, pages: &ExecutablePages) {
        // The process may have ended meanwhile: its entry would stay.
        if !self.known.contains_key(&tgid) {
            return;
        }
        if let Err(error) = self.guides.set_pages(tgid, pages) {
            warn!(tgid, error = super::chain(&error), "its stacks are told apart less well");
        }
    }
}
