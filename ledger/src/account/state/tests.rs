use super::*;

fn row(op: &'static str, alloc_id: i64, addr: i64, delta: i64, ts_ns: i64) -> EventRow {
    EventRow {
        ts_ns,
        proc_id: 1,
        pid: 9,
        op: op.into(),
        api: "cuMemAlloc_v2".into(),
        level: "device".into(),
        addr,
        size_bytes: Some(delta.abs()),
        delta_bytes: delta,
        alloc_id,
        ..EventRow::default()
    }
}

fn state(rows: &[EventRow]) -> State {
    let mut state = State::new();
    for row in rows {
        state.apply(row);
    }
    state
}

fn usage(state: &State) -> Usage {
    state.process(1).unwrap().devices()[0].usage(Level::Device).clone()
}

#[test]
fn totals_peak_and_when() {
    let state = state(&[
        row("alloc", 1, 1, 10, 100),
        row("alloc", 2, 2, 20, 200),
        row("free", 1, 1, -10, 300),
        row("alloc", 3, 3, 5, 400),
        row("free", 0, 77, 0, 500),
    ]);
    let usage = usage(&state);
    assert_eq!((usage.live_bytes, usage.live_count), (25, 2));
    assert_eq!((usage.peak_bytes, usage.peak_ns), (30, 200));
    assert_eq!((usage.allocated_bytes, usage.freed_bytes), (35, 10));
    assert_eq!((usage.allocs, usage.frees, usage.unknown_frees), (3, 1, 1));
    assert_eq!(state.process(1).unwrap().span_ns(), Some((100, 500)));
}

#[test]
fn refused_calls_are_told_by_result() {
    let mut failed = row("fail", 0, 0, 0, 50);
    failed.size_bytes = Some(1 << 40);
    failed.result = 2;
    let other = EventRow { result: 201, ts_ns: 70, size_bytes: None, ..failed.clone() };
    let state = state(&[failed, other]);
    let failures = usage(&state).failures;
    assert_eq!((failures.count, failures.bytes_asked, failures.last_ns), (2, 1 << 40, 70));
    assert_eq!(failures.by_result.into_iter().collect::<Vec<_>>(), [(2, 1), (201, 1)]);
}

#[test]
fn an_older_row_that_comes_later_is_not_live() {
    let mut state = state(&[row("alloc", 2, 1, 20, 200), row("alloc", 1, 1, 10, 100)]);
    assert_eq!(usage(&state).live_bytes, 20);
    state.apply(&row("free", 1, 1, -10, 150));
    assert_eq!((usage(&state).live_bytes, usage(&state).freed_bytes), (20, 10));
    state.apply(&row("free", 2, 1, -20, 250));
    assert_eq!(usage(&state).live_bytes, 0);
}

#[test]
fn groups_tell_blocks_apart_without_stacks() {
    let rows: Vec<EventRow> = (0..64).map(|at| row("alloc", at + 1, at, 4 << 20, at)).collect();
    let mut state = state(&rows);
    let mut ended = row("free", 64, 63, -(4 << 20), 99);
    ended.implicit = true;
    state.apply(&ended);
    let process = state.process(1).unwrap();
    let [live] = &process.live_groups()[..] else { panic!("one group") };
    assert_eq!(
        (live.count, live.size_bytes, live.first_ns, live.last_ns),
        (63, Some(4 << 20), 0, 62)
    );
    assert_eq!(process.unfreed_groups()[0].count, 64);
    assert_eq!(process.unfreed_groups()[0].bytes, 64 * (4 << 20));
}

#[test]
fn devices_are_told_apart_and_learn_their_uuid() {
    let on = |ordinal: i32, uuid: Option<&str>, addr: i64| EventRow {
        cuda_ordinal: Some(ordinal),
        gpu_uuid: uuid.map(str::to_owned),
        ..row("alloc", addr, addr, 1, addr)
    };
    let state = state(&[
        on(0, None, 1),
        on(1, Some("GPU-b"), 2),
        on(0, Some("GPU-a"), 3),
        on(0, None, 4),
        row("alloc", 5, 5, 1, 5),
        on(0, Some("GPU-c"), 6),
    ]);
    let process = state.process(1).unwrap();
    let told: Vec<_> = process
        .devices()
        .iter()
        .map(|device| (device.gpu_uuid.as_deref(), device.usage(Level::Device).live_bytes))
        .collect();
    assert_eq!(told, [(Some("GPU-a"), 3), (Some("GPU-b"), 1), (None, 1), (Some("GPU-c"), 1)]);
}

#[test]
fn functions_are_counted() {
    let state = state(&[row("alloc", 1, 1, 10, 1), row("fail", 0, 0, 0, 2)]);
    let [usage] = state.process(1).unwrap().apis() else { panic!("one function") };
    assert_eq!((usage.api.as_ref(), usage.rows, usage.failed), ("cuMemAlloc_v2", 2, 1));
    assert_eq!((usage.allocated_bytes, usage.freed_bytes), (10, 0));
}

#[test]
fn a_level_of_another_version_is_counted_and_left_out() {
    let mut state = state(&[EventRow { level: "quantum".into(), ..row("alloc", 1, 1, 1, 1) }]);
    assert_eq!((state.unreadable(), state.processes().count()), (1, 0));
    state.start_from(&LiveRow { level: "quantum".to_owned(), ..LiveRow::default() });
    assert_eq!(state.unreadable(), 2);
}

#[test]
fn a_forgotten_process_is_gone() {
    let mut state = state(&[row("alloc", 1, 1, 1, 1)]);
    state.forget(1);
    assert_eq!(state.processes().count(), 0);
}
