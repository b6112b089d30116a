//! What of a command line may be shown: program and script, never another argument.

use super::text;

/// Longest shown command, characters.
const SHOWN: usize = 4096;
/// Longest program or script name in it.
const WORD: usize = 1024;

/// The arguments of a `/proc/PID/cmdline`.
fn arguments(cmdline: &[u8]) -> Vec<&[u8]> {
    let whole = cmdline.strip_suffix(b"\0").unwrap_or(cmdline);
    if whole.is_empty() { Vec::new() } else { whole.split(|byte| *byte == 0).collect() }
}

/// All arguments, separated by spaces. They may hold secrets.
pub(super) fn whole(cmdline: &[u8]) -> Option<String> {
    let arguments = arguments(cmdline);
    (!arguments.is_empty()).then(|| text::clean(&arguments.join(&b' '), SHOWN))
}

/// Program, then script path or `-m module` of a Python or shell command; no other argument.
///
/// A program may have written a title over its arguments (`setproctitle`), with arguments in it:
/// a first argument with blanks that is not the executable's path is cut at the first blank.
pub(super) fn redacted(cmdline: &[u8], exe: Option<&[u8]>) -> Option<String> {
    let arguments = arguments(cmdline);
    let (first, rest) = arguments.split_first()?;
    let program =
        if Some(*first) == exe { *first } else { first.split(u8::is_ascii_whitespace).next()? };
    let mut shown = text::clean(program, WORD);
    let what = interpreter(program).map(|kind| what_runs(kind, rest)).unwrap_or_default();
    for word in what {
        shown.push(' ');
        shown.push_str(&text::clean(word, WORD));
    }
    Some(shown)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Interpreter {
    Python,
    Shell,
}

impl Interpreter {
    /// Whether a short option takes the next word as its value.
    fn takes_value(self, letter: u8) -> bool {
        match self {
            Self::Python => b"WXQ".contains(&letter),
            Self::Shell => b"oO".contains(&letter),
        }
    }
}

fn interpreter(program: &[u8]) -> Option<Interpreter> {
    let name = program.rsplit(|byte| *byte == b'/').next()?;
    // A login shell's name starts with a dash.
    let name = name.strip_prefix(b"-").unwrap_or(name);
    if name.starts_with(b"python") || name.starts_with(b"pypy") {
        return Some(Interpreter::Python);
    }
    let shells: [&[u8]; 5] = [b"sh", b"bash", b"dash", b"zsh", b"ksh"];
    shells.contains(&name).then_some(Interpreter::Shell)
}

/// The words that name what an interpreter runs: the script, `-m module`, or `-c` without the
/// code.
fn what_runs<'a>(kind: Interpreter, arguments: &[&'a [u8]]) -> Vec<&'a [u8]> {
    let mut words = arguments.iter().copied();
    while let Some(word) = words.next() {
        if word == b"--" {
            return words.next().into_iter().collect();
        }
        // Of Python's long options this one takes a value.
        if word == b"--check-hash-based-pycs" {
            words.next();
        } else if !word.starts_with(b"--") {
            let Some(letters) = word.strip_prefix(b"-").filter(|letters| !letters.is_empty())
            else {
                return vec![word];
            };
            match short_options(kind, letters) {
                Short::Code => return vec![b"-c"],
                Short::Module(joined) => {
                    let module = joined.or_else(|| words.next());
                    return std::iter::once(&b"-m"[..]).chain(module).collect();
                }
                Short::ValueFollows => drop(words.next()),
                Short::Flags => {}
            }
        }
    }
    Vec::new()
}

/// What a group of short options, `-um` for example, says about the words after it.
enum Short<'a> {
    /// `-c`: code follows.
    Code,
    /// `-m`: the module's name, or `None` where it is the next word.
    Module(Option<&'a [u8]>),
    /// The last option's value is the next word.
    ValueFollows,
    Flags,
}

fn short_options(kind: Interpreter, letters: &[u8]) -> Short<'_> {
    for (at, letter) in letters.iter().enumerate() {
        let joined = letters.get(at + 1..).filter(|rest| !rest.is_empty());
        match letter {
            b'c' => return Short::Code,
            b'm' if kind == Interpreter::Python => return Short::Module(joined),
            letter if kind.takes_value(*letter) => {
                return if joined.is_some() { Short::Flags } else { Short::ValueFollows };
            }
            _ => {}
        }
    }
    Short::Flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cmdline(words: &[&str]) -> Vec<u8> {
        words.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect()
    }

    #[test]
    fn nothing_but_program_and_script_is_shown() {
        let cases: &[(&[&str], &str)] = &[
            (&["python3", "train.py", "--token", "S"], "python3 train.py"),
            (
                &["/opt/c/bin/python3.11", "-u", "/w/train.py", "S"],
                "/opt/c/bin/python3.11 /w/train.py",
            ),
            (&["python", "-m", "torch.distributed.run", "S"], "python -m torch.distributed.run"),
            (&["python", "-um", "pkg.mod", "S"], "python -m pkg.mod"),
            (&["python", "-mpkg", "S"], "python -m pkg"),
            (&["python", "-m"], "python -m"),
            (&["python", "-c", "key='S'"], "python -c"),
            (&["python", "-uc", "key='S'"], "python -c"),
            (&["python", "-W", "ignore:S", "a.py", "S"], "python a.py"),
            (&["python", "-Wignore:S", "-X", "S=1", "a.py"], "python a.py"),
            (&["python", "--check-hash-based-pycs", "S", "a.py"], "python a.py"),
            (&["python", "--", "-odd.py", "S"], "python -odd.py"),
            (&["python", "-", "S"], "python -"),
            (&["python"], "python"),
            (&["bash", "-lc", "curl -H S"], "bash -c"),
            (&["-bash"], "-bash"),
            (&["sh", "-x", "run.sh", "S"], "sh run.sh"),
            (&["bash", "-o", "pipefail", "run.sh", "S"], "bash run.sh"),
            (&["./trainer", "--password=S", "S"], "./trainer"),
            (&["python train.py --token S"], "python"),
            (&["ray::Worker.step(S)"], "ray::Worker.step(S)"),
            (&["evil\n\x1b[2J", "S"], "evil"),
        ];
        for (words, expected) in cases {
            assert_eq!(redacted(&cmdline(words), None).as_deref(), Some(*expected), "{words:?}");
        }
    }

    #[test]
    fn a_program_path_with_blanks_is_whole_when_it_is_the_executable() {
        let line = cmdline(&["/opt/my app/run", "S"]);
        assert_eq!(redacted(&line, Some(b"/opt/my app/run")).as_deref(), Some("/opt/my app/run"));
    }

    #[test]
    fn no_arguments_is_none_and_huge_ones_are_bounded() {
        assert_eq!(redacted(b"", None), None);
        assert_eq!(whole(b""), None);
        let huge = vec![b'x'; 1 << 20];
        assert!(redacted(&huge, None).is_some_and(|shown| shown.chars().count() <= WORD));
        assert!(whole(&huge).is_some_and(|shown| shown.chars().count() <= SHOWN));
        assert_eq!(whole(b"a\0b\nc\0\xff\0").as_deref(), Some("a b\\nc \u{fffd}"));
    }
}
