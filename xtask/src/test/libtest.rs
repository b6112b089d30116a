//! Reading what Rust's test harness prints.

use crate::tally::Tally;

/// The marker with which a test says that it can't run here: `SKIP reason` on a line of its own.
/// The harness itself counts such a test as passed.
const SKIP: &str = "SKIP ";

/// Counts tests line by line.
#[derive(Default)]
pub(super) struct Output {
    tally: Tally,
    /// Inside the output of tests that passed, which is shown only where it says why one skipped.
    in_successes: bool,
    /// Tests of the present binary that said they skipped.
    skipping: u64,
    /// Whether the present test has said so already.
    skip_seen: bool,
}

impl Output {
    /// Takes the next line; true where it is worth showing.
    pub(super) fn take(&mut self, line: &str) -> bool {
        if let Some(counts) = result_line(line) {
            self.in_successes = false;
            let skipping = std::mem::take(&mut self.skipping).min(counts.passed);
            self.tally += Tally {
                passed: counts.passed - skipping,
                skipped: counts.skipped + skipping,
                ..counts
            };
            return true;
        }
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if !self.in_successes {
            return true;
        }
        if line.starts_with("---- ") {
            self.skip_seen = false;
        }
        let skip = line.starts_with(SKIP);
        if skip && !self.skip_seen {
            self.skip_seen = true;
            self.skipping += 1;
        }
        skip
    }

    /// The counts. A command that failed without a failed test (a build error, a signal) counts as
    /// one failure.
    pub(super) fn finish(self, success: bool) -> Tally {
        let mut tally = self.tally;
        if !success && tally.failed == 0 {
            tally.failed = 1;
        }
        tally
    }
}

/// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …`
fn result_line(line: &str) -> Option<Tally> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let part = counts.split("; ").find(|part| part.ends_with(word))?;
        part.split(' ').next()?.parse().ok()
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, success: bool) -> (Tally, Vec<&str>) {
        let mut output = Output::default();
        let shown = text.lines().filter(|line| output.take(line)).collect();
        (output.finish(success), shown)
    }

    const TAIL: &str = "0 measured; 0 filtered out; finished in 0.00s";

    #[test]
    fn counts_of_several_binaries_add_up() {
        let text = format!(
            "test a ... ok\ntest result: ok. 5 passed; 0 failed; 1 ignored; {TAIL}\n\
             test result: FAILED. 2 passed; 3 failed; 0 ignored; {TAIL}\n"
        );
        let (tally, shown) = read(&text, false);
        assert_eq!(tally, Tally { passed: 7, failed: 3, skipped: 1 });
        assert_eq!(shown.len(), 3);
    }

    #[test]
    fn a_build_error_is_one_failure() {
        assert_eq!(read("", false).0, Tally::FAILED);
    }

    #[test]
    fn a_test_that_says_it_skipped_is_not_a_passed_one() {
        let text = format!(
            "test a ... ok\n\nsuccesses:\n\n---- a stdout ----\nnoise\nSKIP no gcc\nSKIP again\n\n\
             successes:\n    a\n    b\n\ntest result: ok. 2 passed; 0 failed; 0 ignored; {TAIL}\n"
        );
        let (tally, shown) = read(&text, true);
        assert_eq!(tally, Tally { passed: 1, failed: 0, skipped: 1 });
        assert!(shown.contains(&"SKIP no gcc") && !shown.contains(&"noise"), "{shown:?}");
    }
}
