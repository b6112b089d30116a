//! `fuzz-guided`: one target under libFuzzer, guided by coverage. `cargo xtask fuzz` builds and runs
//! it; `VRAMSCOPE_FUZZ_TARGET` names the target.
#![no_main]
#![allow(
    clippy::print_stderr,
    clippy::expect_used,
    reason = "libFuzzer itself reports there, and a target that does not exist ends it"
)]

use std::sync::OnceLock;

use fuzz::{Target, limits, targets};

/// The target that was asked for.
fn target() -> &'static Target {
    static TARGET: OnceLock<&Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let name = std::env::var("VRAMSCOPE_FUZZ_TARGET").unwrap_or_default();
        targets::target(&name).expect("VRAMSCOPE_FUZZ_TARGET names a target")
    })
}

libfuzzer_sys::fuzz_target!(init: limits::note_panics(), |data: &[u8]| {
    if let Err(fault) = limits::run(target(), data) {
        eprintln!("{}: {fault}", target().name);
        // libFuzzer writes the input down.
        std::process::abort();
    }
});
