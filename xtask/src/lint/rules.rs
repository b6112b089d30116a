//! House rules that no other tool checks, over the files that git tracks or would track.

use super::Outcome;
use crate::{paths, sh};
use anyhow::{Context as _, Result, bail};
use std::{fs, path::Path};

const MAX_FILE_LINES: usize = 700;
const MAX_FUNCTION_LINES: usize = 100;

/// Written in pieces, so that this file keeps its own rules.
const UNFINISHED: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];
const MACHINE_PATHS: [&str; 3] =
    [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/")];
const OUTSIDE: &str = concat!("../sh", "ared");
const PANICS: [&str; 3] = [".unwrap()", ".expect(\"", "panic!("];

/// Code whose panic would take the agent down, or that can't panic at all.
const NEVER_PANICS: [&str; 4] =
    ["agent/src/", "agent-common/src/", "agent-ebpf/src/", "ledger/src/"];

pub(super) fn check() -> Result<Outcome> {
    let root = sh::root()?;
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let files = sh::output(sh::command("git")?.args(list))?;
    let mut findings = Vec::new();
    for name in files.split('\0').filter(|name| root.join(name).is_file()) {
        let path = root.join(name);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        findings.extend(file_findings(name, &bytes));
    }
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => Ok(Outcome::Passed),
        count => bail!("{count} findings"),
    }
}

/// What is wrong with one file, each as `file:line: what`.
fn file_findings(name: &str, bytes: &[u8]) -> Vec<String> {
    let mut findings = machine_paths(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        findings.extend(unfinished(text));
        findings.extend(too_long(name, text));
        if has_extension(name, &["rs"]) {
            findings.extend(long_functions(text));
            if NEVER_PANICS.iter().any(|folder| name.starts_with(folder)) && !is_test_file(name) {
                findings.extend(panics(text));
            }
        }
    }
    findings.into_iter().map(|(line, what)| format!("{name}:{line}: {what}")).collect()
}

type Findings = Vec<(usize, String)>;

/// Also in binary files: objects and sample logs must not name the machine that made them.
fn machine_paths(bytes: &[u8]) -> Findings {
    let mut found = Vec::new();
    for prefix in MACHINE_PATHS {
        for at in paths::occurrences(bytes, prefix) {
            found.push((line_of(bytes, at), format!("a path of one machine: {prefix}")));
        }
    }
    let outside = bytes.windows(OUTSIDE.len()).position(|window| window == OUTSIDE.as_bytes());
    if let Some(at) = outside {
        found.push((line_of(bytes, at), format!("a path outside the repository: {OUTSIDE}")));
    }
    found
}

fn line_of(bytes: &[u8], at: usize) -> usize {
    bytes[..at].split(|byte| *byte == b'\n').count()
}

fn unfinished(text: &str) -> Findings {
    let mark = |line: &str| UNFINISHED.iter().find(|mark| line.contains(**mark));
    numbered(text)
        .filter_map(|(at, line)| Some((at, format!("unfinished: {}", mark(line)?))))
        .collect()
}

fn too_long(name: &str, text: &str) -> Findings {
    let lines = text.lines().count();
    if !has_extension(name, &["rs", "py", "c", "h", "cu", "sh"]) || lines <= MAX_FILE_LINES {
        return Vec::new();
    }
    vec![(lines, format!("{lines} lines, at most {MAX_FILE_LINES}: split the file"))]
}

/// Relies on rustfmt: a function's closing brace stands alone below its `fn`'s first column.
fn long_functions(text: &str) -> Findings {
    let lines: Vec<_> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate().filter(|(_, line)| begins_function(line)) {
        let indent = &line[..line.len() - line.trim_start().len()];
        let closes = |line: &&str| line.strip_prefix(indent).is_some_and(|rest| rest == "}");
        let declared_only = |line: &&str| {
            line.ends_with(';')
                && line.strip_prefix(indent).is_some_and(|rest| !rest.starts_with(' '))
        };
        let end = lines[start..].iter().position(|line| closes(line) || declared_only(line));
        let length = end.map_or(0, |end| end + 1);
        if length > MAX_FUNCTION_LINES {
            found.push((
                start + 1,
                format!("{length} lines, at most {MAX_FUNCTION_LINES}: split the function"),
            ));
        }
    }
    found
}

fn begins_function(line: &str) -> bool {
    let modifier = |word: &str| {
        matches!(word, "const" | "async" | "unsafe" | "extern" | "\"C\"") || word.starts_with("pub")
    };
    let open = !line.ends_with('}');
    open && line.split_whitespace().find(|word| !modifier(word)) == Some("fn")
}

/// Lines of code (no comments, no test modules) that could panic.
fn panics(text: &str) -> Findings {
    let mut found = Vec::new();
    let mut test_module: Option<String> = None;
    let mut lines = numbered(text).peekable();
    while let Some((at, line)) = lines.next() {
        let code = line.trim_start();
        if let Some(end) = &test_module {
            if line == end {
                test_module = None;
            }
        } else if code.starts_with("#[cfg(test)]") {
            let opens = lines.peek().is_some_and(|(_, next)| next.ends_with('{'));
            let indent = &line[..line.len() - code.len()];
            test_module = opens.then(|| format!("{indent}}}"));
        } else if !code.starts_with("//")
            && let Some(call) = PANICS.iter().find(|call| code.contains(**call))
        {
            found.push((at, format!("`{call}` outside tests: return an error or count it")));
        }
    }
    found
}

fn is_test_file(name: &str) -> bool {
    name.contains("/tests/") || name.ends_with("tests.rs") || name.ends_with("testing.rs")
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(at, line)| (at + 1, line))
}

fn has_extension(name: &str, extensions: &[&str]) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| extensions.contains(&extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(findings: &Findings) -> Vec<usize> {
        findings.iter().map(|(line, _)| *line).collect()
    }

    #[test]
    fn panics_in_test_modules_and_comments_are_allowed() {
        let text = "fn a() { b.unwrap() }\n// c.unwrap()\n#[cfg(test)]\nmod tests {\n    fn d() {\n        \
                    e.unwrap();\n    }\n}\nfn f() { g.expect(\"h\") }\n";
        assert_eq!(lines(&panics(text)), [1, 9]);
        let text = "#[cfg(test)]\nmod tests;\nfn i() { panic!(\"j\") }\n";
        assert_eq!(lines(&panics(text)), [3]);
    }

    #[test]
    fn a_function_over_the_limit_is_found_and_a_declaration_is_none() {
        let body = "        x();\n".repeat(MAX_FUNCTION_LINES - 2);
        let fits = format!("impl A {{\n    pub(crate) async fn a(\n    ) {{\n{body}}}\n");
        let short = format!("    fn a() {{\n{body}    }}\n");
        let long = format!(
            "    fn b(\n        c: u8,\n    );\n    pub const unsafe fn d() {{\n{body}        x();\n    }}\n"
        );
        assert!(long_functions(&fits).is_empty());
        assert!(long_functions(&short).is_empty());
        assert_eq!(lines(&long_functions(&long)), [4]);
    }

    #[test]
    fn machine_paths_and_marks_are_found_with_their_line() {
        let text = format!("fine\nsee {}x\n{} later\n{}", MACHINE_PATHS[0], UNFINISHED[0], OUTSIDE);
        let findings = file_findings("docs/a.md", text.as_bytes());
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert!(findings.iter().any(|finding| finding.starts_with("docs/a.md:2:")), "{findings:?}");
        assert!(file_findings("docs/a.md", b"/proc/1/root/usr").is_empty());
    }

    #[test]
    fn only_code_files_have_a_length_limit() {
        let text = "a\n".repeat(MAX_FILE_LINES + 1);
        assert_eq!(lines(&too_long("a/b.rs", &text)), [MAX_FILE_LINES + 1]);
        assert!(too_long("Cargo.lock", &text).is_empty());
    }
}
