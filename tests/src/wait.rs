//! Waiting for what takes its time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Waits until the condition holds.
///
/// # Panics
/// After a minute, with `what` it waited for.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_mins(1), "not in a minute: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}
