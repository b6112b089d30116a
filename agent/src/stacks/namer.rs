//! The namer's thread: symbols, sites and rows of stacks that are new.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender},
    },
};

use ledger::rows::{FrameRow, StackRow};

use super::{
    frame::{Frame, file_name, inlined_id},
    site::{self, Named, Rule},
};
use crate::{
    live::sink::{AnyRow, ToLog},
    native::Symbolizer,
};

/// A stack that was met for the first time.
#[derive(Clone, Debug)]
pub struct NewStack {
    /// Its id.
    pub stack_id: i64,
    /// Its frames, innermost first.
    pub frames: Arc<[Frame]>,
    /// Whose what it allocates is.
    pub library: Option<Arc<str>>,
    /// It was taken on one of autograd's threads.
    pub backward: bool,
    /// Why it is not complete, if it is not.
    pub incomplete: Option<String>,
    /// When it was met, epoch nanoseconds.
    pub first_seen_ns: i64,
}

/// Frames whose names are kept.
const FRAME_LIMIT: usize = 1 << 16;

/// One function at a frame: its id and its names.
type Part = (i64, Named);

/// Names stacks.
#[derive(Debug, Default)]
struct Namer {
    rule: Rule,
    symbolizer: Symbolizer,
    /// What each frame is, innermost inlined function first.
    parts: HashMap<i64, Arc<[Part]>>,
    /// Frames whose rows are written.
    written: HashSet<i64>,
}

/// Names stacks until nobody sends any more.
pub fn run(rule: Rule, stacks: &Receiver<NewStack>, out: &SyncSender<ToLog>) {
    let mut namer = Namer { rule, ..Namer::default() };
    for stack in stacks {
        let rows = namer.rows(&stack);
        // The log's thread outlives this one; if it died, its panic is the news.
        out.send(ToLog::Rows(rows)).unwrap_or_default();
    }
}

impl Namer {
    fn rows(&mut self, stack: &NewStack) -> Vec<AnyRow> {
        let mut rows = Vec::new();
        let (mut frame_ids, mut names) = (Vec::new(), Vec::new());
        for frame in stack.frames.iter() {
            for (id, named) in self.parts_of(frame, &mut rows).iter() {
                frame_ids.push(*id);
                names.push(named.clone());
            }
        }
        let mut site = self.rule.site(&names).unwrap_or_else(|| "?".to_owned());
        if stack.backward
            && let Some(operator) = names.iter().find_map(backward_operator)
        {
            site = format!("{site} · {operator}");
        }
        let folded: Vec<String> = names.iter().rev().map(folded).collect();
        rows.push(AnyRow::from(StackRow {
            stack_id: stack.stack_id,
            site,
            folded: folded.join(";"),
            frame_ids,
            complete: stack.incomplete.is_none(),
            incomplete_reason: stack.incomplete.clone(),
            first_seen_ns: stack.first_seen_ns,
            library: stack.library.as_deref().map(str::to_owned),
        }));
        rows
    }

    fn parts_of(&mut self, frame: &Frame, rows: &mut Vec<AnyRow>) -> Arc<[Part]> {
        let id = frame.id();
        if let Some(parts) = self.parts.get(&id) {
            return Arc::clone(parts);
        }
        let named = self.name(frame);
        let last = named.len().saturating_sub(1);
        let parts: Arc<[Part]> = named
            .into_iter()
            .enumerate()
            .map(|(at, named)| (if at == last { id } else { inlined_id(id, last - at) }, named))
            .collect();
        for (at, (part, named)) in parts.iter().enumerate() {
            if self.written.insert(*part) {
                rows.push(frame_row(*part, named, frame, at < last).into());
            }
        }
        if self.parts.len() >= FRAME_LIMIT {
            self.parts.clear();
        }
        self.parts.insert(id, Arc::clone(&parts));
        parts
    }

    /// The functions at a frame, the innermost inlined one first; never none.
    fn name(&mut self, frame: &Frame) -> Vec<Named> {
        let unnamed = |function: String, module: Option<String>| {
            vec![Named { python: false, function, file: None, line: None, module }]
        };
        match frame {
            Frame::Python { function, file, line } => vec![Named {
                python: true,
                function: function.to_string(),
                file: Some(file.to_string()),
                line: *line,
                module: None,
            }],
            Frame::Jit => unnamed("[jit]".to_owned(), None),
            Frame::Unknown => unnamed("[unknown]".to_owned(), None),
            Frame::Native { module, file_offset } => {
                let name = file_name(&module.path);
                let symbols = self.symbolizer.symbolize(module, *file_offset);
                if symbols.is_empty() {
                    return unnamed(format!("+{file_offset:#x}"), Some(name));
                }
                let named = symbols.into_iter().map(|symbol| Named {
                    python: false,
                    function: symbol.function,
                    file: symbol.file,
                    line: symbol.line.and_then(|line| i32::try_from(line).ok()),
                    module: Some(name.clone()),
                });
                named.collect()
            }
        }
    }
}

fn frame_row(frame_id: i64, named: &Named, frame: &Frame, inlined: bool) -> FrameRow {
    let (module, offset, build_id, kind) = match frame {
        Frame::Python { .. } => (None, None, None, "python"),
        Frame::Native { module, file_offset } => (
            Some(module.path.display().to_string()),
            Some(*file_offset as i64),
            module.build_id.clone(),
            "native",
        ),
        Frame::Jit => (None, None, None, "jit"),
        Frame::Unknown => (None, None, None, "native"),
    };
    FrameRow {
        frame_id,
        function: named.function.clone(),
        file: named.file.clone(),
        line: named.line,
        module,
        offset,
        build_id,
        kind: kind.to_owned(),
        inlined,
    }
}

/// A frame in a folded stack; `;` separates frames there.
fn folded(named: &Named) -> String {
    let text = match (&named.file, named.line) {
        (Some(file), Some(line)) if named.python => {
            format!("{} ({}:{line})", named.function, file_name(file.as_ref()))
        }
        _ => match &named.module {
            Some(module) if named.function.starts_with('+') => {
                format!("{module}{}", named.function)
            }
            _ => site::function_or_unknown(named).to_owned(),
        },
    };
    text.replace(';', ",")
}

/// `MulBackward0`, out of `torch::autograd::generated::MulBackward0::apply(…)`.
fn backward_operator(named: &Named) -> Option<String> {
    let name = named.function.split('(').next()?;
    let part = name.split("::").find(|part| {
        part.split_once("Backward")
            .is_some_and(|(_, rest)| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    })?;
    (!named.python).then(|| part.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn python(file: &str, line: i32, function: &str) -> Frame {
        Frame::Python { function: function.into(), file: file.into(), line: Some(line) }
    }

    #[test]
    fn a_stack_and_its_frames_are_written_once() {
        let mut namer = Namer::default();
        let frames: Arc<[Frame]> =
            [python("/data/a/model.py", 7, "f;g"), python("/data/a/train.py", 3, "<module>")]
                .into();
        let stack = NewStack {
            stack_id: 5,
            frames,
            library: None,
            backward: false,
            incomplete: Some("why".to_owned()),
            first_seen_ns: 9,
        };
        let rows = namer.rows(&stack);
        assert_eq!(rows.len(), 3);
        let Some(AnyRow::StackRow(row)) = rows.last() else { panic!("the stack") };
        assert_eq!(row.site, "model.py:7 f;g");
        assert_eq!(row.folded, "<module> (train.py:3);f,g (model.py:7)");
        assert_eq!((row.frame_ids.len(), row.complete), (2, false));
        assert_eq!(namer.rows(&stack).len(), 1, "the frames are known");
    }

    #[test]
    fn operators_of_backward_passes() {
        let named = |function: &str| Named {
            python: false,
            function: function.to_owned(),
            file: None,
            line: None,
            module: Some("libtorch_cpu.so".to_owned()),
        };
        let name = "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)";
        assert_eq!(backward_operator(&named(name)).unwrap(), "MulBackward0");
        assert_eq!(backward_operator(&named("at::native::convolution_backward(x)")), None);
        assert_eq!(backward_operator(&named("torch::autograd::Backward::go(x)")), None);
    }
}
