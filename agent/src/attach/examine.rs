//! Interpreters and libraries of the processes that use CUDA, for their stacks.

use std::{
    collections::{HashMap, HashSet},
    sync::mpsc::SyncSender,
    time::{Duration, Instant},
};

use agent_common::stack::ExecutablePages;
use tracing::warn;

use super::{Attacher, Notice};
use crate::{
    clock,
    host::maps::Mapping,
    python::{self, Found, Interpreter},
    stacks::resolver::{Looked, ToResolver},
};

/// How long further mappings are waited for before a process is looked at again: a program that
/// imports a framework maps hundreds of libraries in a second.
const SETTLE: Duration = Duration::from_millis(200);

/// What is known of processes.
#[derive(Debug)]
pub(super) struct Examined {
    looks: SyncSender<ToResolver>,
    /// Processes that use CUDA, with their interpreters.
    known: HashMap<u32, Option<Interpreter>>,
    /// Those of them that mapped something since, and when they are looked at again.
    due: HashMap<u32, Instant>,
    /// Those whose Python was said to be unsupported.
    told: HashSet<u32>,
}

impl Examined {
    /// Tells what it finds to the resolver.
    pub(super) fn new(looks: SyncSender<ToResolver>) -> Self {
        Self { looks, known: HashMap::new(), due: HashMap::new(), told: HashSet::new() }
    }

    /// A process mapped a file executable.
    pub(super) fn note_mapping(&mut self, tgid: u32) {
        if self.known.contains_key(&tgid) {
            self.due.entry(tgid).or_insert_with(|| Instant::now() + SETTLE);
        }
    }

    /// The process ended, or its program did.
    pub(super) fn forget(&mut self, tgid: u32) {
        self.known.remove(&tgid);
        self.due.remove(&tgid);
        self.told.remove(&tgid);
    }
}

impl Attacher {
    /// When the next process is to be looked at again.
    pub fn due(&self) -> Option<Duration> {
        let next = self.examined.due.values().min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Looks at the processes whose time has come.
    pub fn examine_due(&mut self) {
        let now = Instant::now();
        let due: Vec<u32> =
            self.examined.due.extract_if(|_, at| *at <= now).map(|(tgid, _)| tgid).collect();
        for tgid in due {
            let at_ns = clock::boot_ns();
            if let Some(mappings) = self.host.mappings(tgid) {
                self.examine(tgid, &mappings, at_ns);
            }
        }
    }

    /// Finds the process's interpreter, and has its libraries looked at.
    pub(super) fn examine(&mut self, tgid: u32, mappings: &[Mapping], at_ns: u64) {
        let before = self.examined.known.get(&tgid).cloned().flatten();
        let interpreter = match before {
            Some(known) if known.checked => Some(known),
            before => self.interpreter(tgid, mappings).or(before),
        };
        let config = interpreter.as_ref().map(|interpreter| interpreter.config);
        let changed =
            self.examined.known.insert(tgid, interpreter.clone()).flatten() != interpreter;
        // The resolver first: it must know the interpreter before a stack with Python frames comes.
        let looked = Looked { tgid, interpreter, at_ns };
        self.examined.looks.send(ToResolver::Process(looked)).unwrap_or_default();
        if changed
            && let Some(config) = config
            && let Err(error) = self.kernel.set_python(tgid, &config)
        {
            warn!(tgid, error = super::chain(&error), "no Python stacks of this process");
        }
    }

    fn interpreter(&mut self, tgid: u32, mappings: &[Mapping]) -> Option<Interpreter> {
        match python::find(&self.host, tgid, mappings) {
            Found::Interpreter(found) => Some(found),
            Found::None => None,
            Found::Unsupported(reason) => {
                // Of a process that ended meanwhile nothing can be read.
                let alive = self.host.mappings(tgid).is_some_and(|found| !found.is_empty());
                if alive && self.examined.told.insert(tgid) {
                    self.tell(Notice::NoPython { tgid, reason });
                }
                None
            }
        }
    }

    /// Tells the kernel half where a process has executable code.
    pub fn set_pages(&mut self, tgid: u32, pages: &ExecutablePages) {
        // The process may have ended meanwhile: its entry would stay.
        if !self.examined.known.contains_key(&tgid) {
            return;
        }
        if let Err(error) = self.kernel.set_pages(tgid, pages) {
            warn!(tgid, error = super::chain(&error), "its stacks are told apart less well");
        }
    }
}
