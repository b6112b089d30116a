//! The stacks of a log, as findings and lists need them.

use std::collections::{BTreeMap, HashMap};

use super::names::printable;
use crate::rows::{FrameRow, StackRow};

/// Folders of Python's own library and of installed packages.
const NOT_USERS: [&str; 5] =
    ["/site-packages/", "/dist-packages/", "/lib/python", "/lib64/python", "<frozen"];
/// Libraries, by the begin of their file's name, that are nobody's own code.
const LIBRARIES: [&str; 18] = [
    "libcuda",
    "libcudart",
    "libcu",
    "libnccl",
    "libnv",
    "libtorch",
    "libc10",
    "libpython",
    "python",
    "libc.",
    "libc-",
    "libm.",
    "libpthread",
    "libstdc++",
    "libgcc",
    "libdl",
    "ld-",
    "[",
];
/// What marks frames of PyTorch's own allocator.
const TORCH_ALLOCATOR: [&str; 3] =
    ["CUDACachingAllocator", "c10::cuda", "c10::CachingHostAllocator"];

/// A stack, its site by number.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    pub(super) site: usize,
    pub(super) frame_ids: Vec<i64>,
    pub(super) complete: bool,
    pub(super) incomplete_reason: Option<String>,
}

/// Stacks, frames and sites. Memory is bounded by the number of distinct stacks.
#[derive(Debug, Default)]
pub(super) struct Stacks {
    by_id: HashMap<i64, Stack>,
    frames: HashMap<i64, FrameRow>,
    sites: Vec<String>,
    by_site: HashMap<String, usize>,
}

impl Stacks {
    pub(super) fn stack(&mut self, row: StackRow) {
        let known = self.by_site.get(&row.site).copied();
        let site = known.unwrap_or_else(|| {
            self.sites.push(row.site.clone());
            self.by_site.insert(row.site, self.sites.len() - 1);
            self.sites.len() - 1
        });
        self.by_id.insert(
            row.stack_id,
            Stack {
                site,
                frame_ids: row.frame_ids,
                complete: row.complete,
                incomplete_reason: row.incomplete_reason,
            },
        );
    }

    pub(super) fn frame(&mut self, row: FrameRow) {
        self.frames.insert(row.frame_id, row);
    }

    pub(super) fn get(&self, stack_id: i64) -> Option<&Stack> {
        self.by_id.get(&stack_id)
    }

    /// The site of a stack, where the stack was written.
    pub(super) fn site(&self, stack_id: i64) -> Option<&str> {
        self.by_id.get(&stack_id).map(|stack| self.site_name(stack.site))
    }

    pub(super) fn site_name(&self, site: usize) -> &str {
        self.sites.get(site).map_or("", String::as_str)
    }

    /// Distinct stacks, and of these the complete ones.
    pub(super) fn counts(&self) -> (u64, u64) {
        let complete = self.by_id.values().filter(|stack| stack.complete).count();
        (self.by_id.len() as u64, complete as u64)
    }

    /// Distinct incomplete stacks by reason.
    pub(super) fn reasons(&self) -> BTreeMap<String, u64> {
        let mut reasons = BTreeMap::new();
        for stack in self.by_id.values().filter(|stack| !stack.complete) {
            let reason = stack.incomplete_reason.clone().unwrap_or_else(|| "not said".to_owned());
            *reasons.entry(reason).or_insert(0) += 1;
        }
        reasons
    }

    /// The frames of a stack, leaf first; `None` for frames that were not written.
    pub(super) fn frames<'a>(
        &'a self,
        stack: &'a Stack,
    ) -> impl Iterator<Item = Option<&'a FrameRow>> {
        stack.frame_ids.iter().map(|id| self.frames.get(id))
    }

    /// The stack runs through PyTorch's allocator: what it asks of the driver it hands out itself.
    pub(super) fn is_torch_allocator(&self, stack_id: i64) -> bool {
        self.get(stack_id).is_some_and(|stack| {
            self.frames(stack).flatten().any(|frame| {
                TORCH_ALLOCATOR.iter().any(|mark| frame.function.contains(mark))
                    || frame
                        .module
                        .as_deref()
                        .is_some_and(|m| base_name(m).starts_with("libc10_cuda"))
            })
        })
    }

    /// The nearest caller of the site in the user's own code, at another line: `file:line function`.
    pub(super) fn called_from(&self, stack_id: i64) -> Option<String> {
        let stack = self.get(stack_id)?;
        let site = self.site_name(stack.site);
        let whole = site.starts_with('/');
        let mut callers = self
            .frames(stack)
            .skip_while(|frame| !frame.is_some_and(|frame| is_site(frame, site)))
            .map_while(|frame| frame);
        let (first_file, first_line) = callers.next().map(|frame| (&frame.file, frame.line))?;
        let caller = callers.find(|frame| {
            is_users(frame) && (&frame.file, frame.line) != (first_file, first_line)
        })?;
        place(caller, whole)
    }
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// `file:line function`; nothing where the line is not known.
fn place(frame: &FrameRow, whole: bool) -> Option<String> {
    let file = frame.file.as_deref()?;
    let file = if whole { file } else { base_name(file) };
    Some(format!("{file}:{} {}", frame.line?, frame.function))
}

/// The site names this frame, with its whole path or without.
fn is_site(frame: &FrameRow, site: &str) -> bool {
    [true, false].into_iter().any(|whole| place(frame, whole).is_some_and(|place| place == site))
        || frame.line.is_some_and(|line| {
            let end = format!(":{line} {}", frame.function);
            let file = site.strip_suffix(end.as_str());
            file.zip(frame.file.as_deref()).is_some_and(|(file, path)| path.ends_with(file))
        })
}

/// The frame is of the user's own code, as far as its path tells.
fn is_users(frame: &FrameRow) -> bool {
    let path = frame.file.as_deref().unwrap_or_default();
    if frame.kind == "python" {
        return !path.is_empty() && !NOT_USERS.iter().any(|part| path.contains(part));
    }
    let module = frame.module.as_deref().map(base_name).unwrap_or_default();
    frame.line.is_some()
        && !path.starts_with("/usr/")
        && !LIBRARIES.iter().any(|library| module.starts_with(library))
}

/// A frame in a list: function, place, module, and whether it is Python.
pub(super) fn described(frame: Option<&FrameRow>) -> String {
    let Some(frame) = frame else { return "?       a frame that was not written".to_owned() };
    let place = match (&frame.file, frame.line) {
        (Some(file), Some(line)) => format!("  {file}:{line}"),
        (Some(file), None) => format!("  {file}"),
        (None, _) => String::new(),
    };
    let module = match (&frame.module, frame.offset) {
        (Some(module), Some(offset)) => format!("  [{}+{offset:#x}]", base_name(module)),
        (Some(module), None) => format!("  [{}]", base_name(module)),
        (None, _) => String::new(),
    };
    let inlined = if frame.inlined { "  (inlined)" } else { "" };
    printable(&format!("{:<6}  {}{place}{module}{inlined}", frame.kind, frame.function))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(frame_id: i64, kind: &str, function: &str, file: Option<(&str, i32)>) -> FrameRow {
        FrameRow {
            frame_id,
            function: function.to_owned(),
            file: file.map(|(file, _)| file.to_owned()),
            line: file.map(|(_, line)| line),
            kind: kind.to_owned(),
            ..FrameRow::default()
        }
    }

    fn stacks(site: &str) -> Stacks {
        let mut stacks = Stacks::default();
        let mut native = frame(1, "native", "c10::cuda::CUDACachingAllocator::malloc", None);
        native.module = Some("/opt/torch/lib/libc10_cuda.so".to_owned());
        stacks.frame(native);
        stacks.frame(frame(2, "python", "forward", Some(("/data/u/model.py", 87))));
        let module = "/usr/lib/python3.11/site-packages/torch/nn/module.py";
        stacks.frame(frame(3, "python", "__call__", Some((module, 1))));
        stacks.frame(frame(4, "python", "main", Some(("/data/u/train.py", 41))));
        stacks.stack(StackRow {
            stack_id: 9,
            site: site.to_owned(),
            frame_ids: vec![1, 2, 2, 3, 4],
            complete: true,
            ..StackRow::default()
        });
        stacks
    }

    #[test]
    fn the_caller_is_the_nearest_other_line_of_the_users_code() {
        for (site, caller) in [
            ("model.py:87 forward", Some("train.py:41 main")),
            ("/data/u/model.py:87 forward", Some("/data/u/train.py:41 main")),
            ("u/model.py:87 forward", Some("train.py:41 main")),
            ("train.py:41 main", None),
            ("libnccl.so.2", None),
        ] {
            assert_eq!(stacks(site).called_from(9).as_deref(), caller, "{site}");
        }
        assert_eq!(stacks("x").called_from(1), None);
    }

    #[test]
    fn a_caller_behind_a_frame_that_was_not_written_is_not_told() {
        let mut stacks = stacks("model.py:87 forward");
        stacks.frames.remove(&3);
        assert_eq!(stacks.called_from(9), None);
    }

    #[test]
    fn pytorchs_allocator_is_told_by_its_frames() {
        let mut stacks = stacks("x");
        assert!(stacks.is_torch_allocator(9));
        stacks.frames.remove(&1);
        assert!(!stacks.is_torch_allocator(9));
    }
}
