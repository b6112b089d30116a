use super::helpers::*;
use crate::{
    account::DeviceId,
    call::{Action, Call, Input, Level},
};

const GRACE_NS: i64 = 60_000_000_000;

#[test]
fn an_allocation_and_its_free_close() {
    let mut bench = Bench::default();
    let mut given = call(alloc(0x1000, 64), 10, 20);
    given.stack_id = 77;
    bench.apply(&Input::Call(given)).apply(&at(free(0x1000), 30, 90));
    let [alloc, free] = bench.rows.as_slice() else { panic!("two rows") };
    assert_eq!((alloc.ts_ns, alloc.delta_bytes, alloc.duration_ns), (20, 64, 10));
    assert_eq!((free.ts_ns, free.delta_bytes, free.duration_ns), (30, -64, 60));
    assert_eq!((free.alloc_id, free.stack_id), (alloc.alloc_id, 77));
    assert!(alloc.alloc_id > 0 && !free.implicit);
    assert_eq!(free.api, "cuMemFree_v2");
}

#[test]
fn a_failed_call_is_an_event_and_never_live() {
    let mut bench = Bench::default();
    for (action, size) in [
        (alloc(0, 1 << 40), Some(1 << 40)),
        (create(0, 512), Some(512)),
        (free(0x99), None),
        (Action::VmmRelease { handle: 5 }, None),
    ] {
        let failed = Call { result: 2, ..call(action, 1, 2) };
        bench.apply(&Input::Call(failed));
        let row = bench.last();
        assert_eq!((row.op.as_ref(), row.size_bytes, row.delta_bytes), ("fail", size, 0));
        assert_eq!((row.result, row.alloc_id), (2, 0));
    }
    let process = bench.state.process(PROC.0).unwrap();
    let failures: u64 =
        process.devices().iter().map(|device| device.usage(Level::Device).failures.count).sum();
    assert_eq!(failures, 4);
}

#[test]
fn a_free_of_address_zero_is_nothing() {
    let mut bench = Bench::default();
    bench.apply(&at(free(0), 1, 2));
    bench.apply(&Input::Call(Call { result: 201, ..call(free(0), 3, 4) }));
    assert!(bench.rows.is_empty());
    assert_eq!(bench.ledger.unknown_frees(PROC), 0);
}

#[test]
fn a_free_of_something_unknown_changes_nothing() {
    let mut bench = Bench::default();
    bench.run(&[free(0x1000), free_host(0x1000)]);
    assert_eq!(bench.words(0), [("free", "device", 0), ("free", "host", 0)]);
    assert_eq!((bench.last().alloc_id, bench.ledger.unknown_frees(PROC)), (0, 2));
    assert_eq!(bench.losses(), [], "it may be from before attach");
}

#[test]
fn seen_from_the_start_an_unknown_free_is_a_loss() {
    let mut bench = Bench::default();
    bench.run(&[Action::Init, free(0x1000)]);
    assert!(bench.ledger.from_start(PROC));
    assert_eq!(bench.losses(), [("alloc_not_seen", 1, None)]);
    assert_eq!(bench.losses(), [], "taken once");
}

#[test]
fn init_says_seen_from_the_start_only_as_the_first() {
    let mut bench = Bench::default();
    bench.run(&[alloc(1, 1), Action::Init]);
    assert!(!bench.ledger.from_start(PROC));

    let mut bench = Bench::default();
    bench.ledger.set_attached_late(PROC);
    assert!(!bench.run(&[Action::Init]).ledger.from_start(PROC));

    let mut bench = Bench::default();
    let failed = Call { result: 100, ..call(Action::Init, 1, 2) };
    bench.ledger.set_device(PROC, 0, None);
    bench.apply(&Input::Call(failed));
    assert!(!bench.ledger.from_start(PROC));
    assert!(bench.run(&[Action::Init, Action::Init]).ledger.from_start(PROC));
}

#[test]
fn what_is_no_call_of_the_driver_has_no_row_and_touches_nothing() {
    let mut bench = Bench::default();
    let ordinal = 0;
    let refused =
        Action::TorchOom { size_bytes: 9, allocated_bytes: 5, reserved_bytes: 7, ordinal };
    bench.run(&[Action::CommInit { rank: 0, size: 2, key: Some(1) }, Action::Init, refused]);
    assert!(bench.rows.is_empty() && bench.ledger.from_start(PROC));
    bench.ledger.finish();
    assert_eq!(bench.losses(), []);
}

#[test]
fn one_free_fits_all_device_levels_and_host_stays_apart() {
    for level in [Level::Device, Level::Pool, Level::Managed, Level::Imported] {
        let mut bench = Bench::default();
        bench.run(&[alloc_of(level, 0x10, 8), alloc_of(Level::Host, 0x10, 9), free(0x10)]);
        assert_eq!(bench.words(2), [("free", level.as_str(), -8)]);
        assert_eq!(bench.live_bytes(Level::Host), 9);
    }
}

#[test]
fn registered_host_memory_and_reservations_close() {
    let mut bench = Bench::default();
    bench.run(&[
        Action::HostRegister { addr: 0x10, size_bytes: 4 },
        Action::Reserve { addr: 0x10, size_bytes: 1 << 30 },
        Action::HostUnregister { addr: 0x10 },
        Action::Unreserve { addr: 0x10, size_bytes: 1 << 30 },
    ]);
    let (host, reserved) = (("alloc", "host", 4), ("reserve", "virtual", 1 << 30));
    let frees = [("free", "host", -4), ("free", "virtual", -(1 << 30))];
    assert_eq!(bench.words(0), [&[host, reserved][..], &frees].concat());
}

#[test]
fn a_size_that_could_not_be_read_is_null_and_still_closes() {
    let mut bench = Bench::default();
    bench.run(&[Action::Alloc { level: Level::Device, addr: 7, size_bytes: None }]);
    assert_eq!((bench.last().size_bytes, bench.last().delta_bytes), (None, 0));
    assert_eq!(bench.ledger.live(1).next().unwrap().size_bytes, None);
    bench.run(&[free(7)]);
    assert_eq!(bench.state.process(PROC.0).unwrap().live().count(), 0);
}

#[test]
fn a_slow_free_that_comes_late_closes_the_block_it_meant() {
    let mut bench = Bench::default();
    bench.apply(&at(alloc(0x10, 1), 1, 10));
    bench.apply(&at(alloc(0x10, 2), 21, 30));
    assert_eq!(bench.live_bytes(Level::Device), 2, "the older one was free by then");
    assert_eq!(bench.ledger.live(0).count(), 2, "its free row is still to come");
    bench.apply(&at(free(0x10), 40, 41));
    assert_eq!(bench.last().delta_bytes, -2);
    bench.apply(&at(free(0x10), 20, 50));
    assert_eq!((bench.last().ts_ns, bench.last().delta_bytes), (20, -1));
    assert_eq!(bench.last().alloc_id, bench.rows[0].alloc_id);
    assert_eq!((bench.sum(Level::Device), bench.live_bytes(Level::Device)), (0, 0));
    assert_eq!(bench.losses(), []);
}

#[test]
fn three_owners_of_an_address_are_told_apart_in_any_order() {
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]] {
        let mut bench = Bench::default();
        for (size, from) in [(1, 10), (2, 20), (4, 30)] {
            bench.apply(&at(alloc(0x10, size), from, from + 1));
        }
        for which in order {
            let enter = [15, 25, 35][which];
            bench.apply(&at(free(0x10), enter, 99));
            assert_eq!(bench.last().delta_bytes, [-1, -2, -4][which]);
        }
        assert_eq!(bench.live_bytes(Level::Device), 0);
    }
}

#[test]
fn a_free_that_never_comes_is_made_up_once_and_counted() {
    let mut bench = Bench::default();
    bench.apply(&at(alloc(0x10, 1), 1, 10));
    bench.apply(&at(alloc(0x10, 2), 21, 30));
    bench.apply(&at(alloc(0x20, 4), 40, 31 + GRACE_NS));
    let row = &bench.rows[3];
    assert_eq!((row.api.as_ref(), row.implicit, row.ts_ns), ("reused", true, 30));
    assert_eq!((row.delta_bytes, row.alloc_id), (-1, bench.rows[0].alloc_id));
    assert_eq!(bench.sum(Level::Device), 6);
    assert_eq!(bench.losses(), [("free_not_seen", 1, Some(1))]);
    bench.apply(&at(free(0x10), 20, 32 + GRACE_NS));
    assert_eq!((bench.last().delta_bytes, bench.last().alloc_id), (0, 0));
    assert_eq!(bench.sum(Level::Device), 6);
}

#[test]
fn the_end_of_a_process_frees_the_rest_and_drops_it() {
    let mut bench = Bench::default();
    bench.run(&[alloc(1, 1), alloc_of(Level::Host, 2, 2), alloc_of(Level::Pool, 3, 4)]);
    bench.run(&[create(9, 8), Action::Reserve { addr: 5, size_bytes: 16 }]);
    bench.apply(&exit(1 << 40));
    let ends: Vec<_> = bench.rows.iter().skip(5).collect();
    assert_eq!(ends.len(), 5);
    assert!(ends.iter().all(|row| row.implicit && row.api == "exit" && row.ts_ns == 1 << 40));
    assert!(Level::ALL.into_iter().all(|level| bench.sum(level) == 0));
    assert_eq!(bench.ledger.live(0).count(), 0);
    let groups = bench.state.process(PROC.0).unwrap().unfreed_groups();
    assert_eq!(groups.iter().map(|group| group.bytes).collect::<Vec<_>>(), [16, 8, 4, 2, 1]);
}

#[test]
fn a_record_after_the_end_brings_nothing_back() {
    let mut bench = Bench::default();
    bench.run(&[Action::Init, alloc(1, 1)]).apply(&exit(1 << 40)).run(&[alloc(1, 1), free(1)]);
    bench.ledger.set_device(PROC, 0, None);
    assert_eq!(bench.rows.len(), 2);
    assert_eq!(bench.losses(), [("after_end", 2, None)]);
}

#[test]
fn exec_drops_the_state_and_the_process_lives_on() {
    let mut bench = Bench::default();
    bench.run(&[Action::Init, alloc(1, 1)]);
    bench.apply(&Input::Exec { proc_id: PROC, tgid: TGID, ts_ns: 100_000 });
    assert_eq!((bench.last().api.as_ref(), bench.last().delta_bytes), ("exec", -1));
    assert!(!bench.ledger.from_start(PROC));
    bench.apply(&at(alloc(1, 5), 99_000, 99_001));
    assert_eq!(bench.rows.len(), 2, "a call of the program before");
    bench.apply(&at(Action::Init, 100_001, 100_002));
    bench.apply(&at(alloc(1, 2), 100_003, 100_004));
    assert!(bench.ledger.from_start(PROC));
    assert_eq!(bench.live_bytes(Level::Device), 2);
    assert_eq!(bench.losses(), [("after_end", 1, None)]);
}

#[test]
fn a_start_that_was_missed_is_a_loss() {
    let exit = Input::Exit { proc_id: PROC, tgid: TGID, ts_ns: 100_000, exit_code: 0 };
    let missed = [("start_not_seen", 1, None)];

    let mut bench = Bench::default();
    bench.run(&[alloc(1, 1)]).apply(&exit);
    assert_eq!(bench.losses(), missed);

    let mut bench = Bench::default();
    bench.run(&[alloc(1, 1), Action::Init]).ledger.finish();
    assert_eq!(bench.losses(), missed, "of one that goes on");

    let mut bench = Bench::default();
    bench.run(&[Action::Init, alloc(1, 1)]).apply(&exit);
    assert_eq!(bench.losses(), [], "seen from the start");

    let mut bench = Bench::default();
    bench.ledger.set_attached_late(PROC);
    bench.run(&[alloc(1, 1)]).apply(&exit);
    assert_eq!(bench.losses(), [], "a late attach says so itself");

    let mut bench = Bench::default();
    bench.apply(&Input::Call(Call { result: 3, ..call(alloc(1, 1), 1, 2) })).apply(&exit);
    assert_eq!(bench.losses(), [], "refused: it never got into CUDA");
}

#[test]
fn an_exec_of_a_process_without_cuda_leaves_no_trace() {
    let mut bench = Bench::default();
    bench.apply(&Input::Exec { proc_id: PROC, tgid: TGID, ts_ns: 1 });
    assert!(bench.rows.is_empty());
    assert!(bench.run(&[Action::Init]).ledger.from_start(PROC));
}

#[test]
fn rows_carry_the_device_once_it_is_known() {
    let mut bench = Bench::default();
    bench.run(&[Action::PrimaryRetain { ctx: 0xc, ordinal: 1 }, Action::CtxSet { ctx: 0xc }]);
    bench.run(&[alloc(1, 8)]);
    assert_eq!((bench.last().cuda_ordinal, bench.last().gpu_uuid.clone()), (Some(1), None));
    let device = DeviceId { nvml_index: 4, gpu_uuid: "GPU-x".to_owned() };
    bench.ledger.set_device(PROC, 1, Some(device));
    bench.run(&[alloc(2, 8), free(1)]);
    assert_eq!(bench.last().nvml_index, Some(4));
    assert_eq!(bench.last().gpu_uuid.as_deref(), Some("GPU-x"));
    let process = bench.state.process(PROC.0).unwrap();
    let [device] = process.devices() else { panic!("one device") };
    assert_eq!(device.gpu_uuid.as_deref(), Some("GPU-x"));
    assert_eq!(bench.ledger.live(5).next().unwrap().nvml_index, Some(4));
    bench.ledger.set_device(PROC, 1, None);
    assert_eq!(bench.run(&[free(2)]).last().gpu_uuid, None);
}
