//! `cargo test -p ledger --release -- --ignored --nocapture calls_a_second`

use std::time::Instant;

use super::helpers::*;
use crate::{
    account::{DeviceId, Ledger, order::Order, state::State},
    call::Action,
};

#[test]
#[ignore = "a measurement, for release builds"]
fn calls_a_second() {
    const CALLS: u64 = 2_000_000;
    const LIVE: u64 = 20_000;
    let (mut ledger, mut state, mut order) = (Ledger::new(), State::new(), Order::new(1 << 16));
    let device = DeviceId { nvml_index: 0, gpu_uuid: format!("GPU-{}", "0".repeat(36)) };
    ledger.set_device(PROC, 0, Some(device));
    let setup = [Action::PrimaryRetain { ctx: 1, ordinal: 0 }, Action::CtxSet { ctx: 1 }];
    let calls = (0..CALLS).map(|index| {
        let addr = 0x7f00_0000_0000 + (index / 2 % LIVE) * 0x1000;
        let old = 0x7f00_0000_0000 + ((index / 2 + LIVE / 2) % LIVE) * 0x1000;
        if index.is_multiple_of(2) { alloc(addr, 512 * (index % 7 + 1)) } else { free(old) }
    });
    let mut rows = Vec::new();
    let mut written = 0;
    let started = Instant::now();
    for (index, action) in setup.into_iter().chain(calls).enumerate() {
        let now = index as i64 * 1_000;
        order.push(at(action, now, now + 500));
        for input in order.drain_until(now - 100_000) {
            ledger.apply(&input, &mut rows);
            for row in &rows {
                state.apply(row);
            }
            written += rows.len();
            rows.clear();
        }
    }
    let rate = CALLS as f64 / started.elapsed().as_secs_f64();
    println!("{rate:.0} calls a second, {written} rows");
    assert!(rate > 1e6, "{rate:.0} calls a second");
}
