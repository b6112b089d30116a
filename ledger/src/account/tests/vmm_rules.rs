use super::helpers::*;
use crate::call::{Action, Level, Location};

const MIB: u64 = 1 << 20;

fn map(addr: u64, handle: u64) -> Action {
    Action::VmmMap { addr, size_bytes: MIB, handle }
}

fn unmap(addr: u64, count: u64) -> Action {
    Action::VmmUnmap { addr, size_bytes: count * MIB }
}

fn retain(handle: u64) -> Action {
    Action::VmmRetain { handle, addr: 0 }
}

fn release(handle: u64) -> Action {
    Action::VmmRelease { handle }
}

const FULL: i64 = MIB as i64;

#[test]
fn memory_goes_with_the_last_reference_or_map_whichever_is_last() {
    let cases: [(&str, Vec<Action>); 5] = [
        ("never mapped", vec![release(9)]),
        ("release after unmap", vec![map(MIB, 9), unmap(MIB, 1), release(9)]),
        ("release right after map", vec![map(MIB, 9), release(9), unmap(MIB, 1)]),
        ("nccl", vec![map(MIB, 9), retain(9), release(9), unmap(MIB, 1), release(9)]),
        (
            "two maps",
            vec![map(MIB, 9), map(4 * MIB, 9), release(9), unmap(MIB, 1), unmap(4 * MIB, 1)],
        ),
    ];
    for (name, tail) in cases {
        let mut bench = Bench::default();
        bench.run(&[create(9, MIB)]);
        let (last, before) = tail.split_last().unwrap();
        bench.run(before);
        assert_eq!(bench.live_bytes(Level::Device), FULL, "{name}: not yet");
        bench.run(&[*last]);
        assert_eq!(bench.live_bytes(Level::Device), 0, "{name}: now");
        assert_eq!(bench.words(bench.rows.len() - 1), [("free", "device", -FULL)], "{name}");
        assert_eq!((bench.last().addr, bench.last().alloc_id), (9, bench.rows[0].alloc_id));
        assert!(!bench.last().implicit);
        assert_eq!(bench.sum(Level::Virtual), 0);
        assert_eq!(bench.ledger.unknown_frees(PROC), 0);
    }
}

#[test]
fn rows_of_ncclss_teardown() {
    let mut bench = Bench::default();
    bench.run(&[create(9, MIB), map(MIB, 9), retain(9), release(9), unmap(MIB, 1), release(9)]);
    let expected = [
        ("alloc", "device", FULL),
        ("map", "virtual", 0),
        ("retain", "virtual", 0),
        ("free", "virtual", 0),
        ("unmap", "virtual", 0),
        ("free", "device", -FULL),
    ];
    assert_eq!(bench.words(0), expected);
    assert!(bench.rows.iter().all(|row| row.alloc_id == bench.rows[0].alloc_id));
    assert!(bench.rows.iter().all(|row| row.cuda_ordinal == Some(0)));
}

#[test]
fn where_the_memory_lies_decides_its_level() {
    for (location, level, ordinal) in [
        (Location::Device(3), "device", Some(3)),
        (Location::Host, "host", None),
        (Location::Unknown, "device", None),
    ] {
        let mut bench = Bench::default();
        bench.run(&[Action::VmmCreate { handle: 9, size_bytes: MIB, location }]);
        assert_eq!((bench.last().level.as_ref(), bench.last().cuda_ordinal), (level, ordinal));
    }
}

#[test]
fn one_unmap_covers_many_maps_and_only_whole_ones() {
    let mut bench = Bench::default();
    bench.run(&[create(9, MIB), map(MIB, 9), map(2 * MIB, 9), map(3 * MIB, 9), release(9)]);
    bench.run(&[Action::VmmUnmap { addr: MIB, size_bytes: 2 * MIB + MIB / 2 }]);
    assert_eq!(bench.words(5), [("unmap", "virtual", 0), ("unmap", "virtual", 0)]);
    assert_eq!(bench.losses(), [("partial_unmap", 1, None)]);
    bench.run(&[Action::VmmUnmap { addr: 3 * MIB + 1, size_bytes: 9 * MIB }]);
    assert_eq!(bench.losses(), [("partial_unmap", 1, None)]);
    assert_eq!(bench.live_bytes(Level::Device), FULL);
    bench.run(&[unmap(0, 100)]);
    assert_eq!(bench.live_bytes(Level::Device), 0);
}

#[test]
fn imported_memory_has_a_size_from_its_first_map_on() {
    let mut bench = Bench::default();
    bench.run(&[Action::VmmImport { handle: 9 }]);
    assert_eq!((bench.last().size_bytes, bench.last().delta_bytes), (None, 0));
    bench.run(&[map(MIB, 9), map(8 * MIB, 9), release(9), unmap(MIB, 1), unmap(8 * MIB, 1)]);
    let expected = [
        ("import", "imported", 0),
        ("map", "imported", FULL),
        ("map", "virtual", 0),
        ("free", "virtual", 0),
        ("unmap", "virtual", 0),
        ("unmap", "virtual", 0),
        ("free", "imported", -FULL),
    ];
    assert_eq!(bench.words(0), expected);
    let device = &bench.state.process(PROC.0).unwrap().devices()[0];
    assert_eq!(device.usage(Level::Imported).peak_bytes, FULL);
}

#[test]
fn imported_and_never_mapped_closes_without_a_size() {
    let mut bench = Bench::default();
    bench.run(&[Action::VmmImport { handle: 9 }, retain(9), release(9), release(9)]);
    assert_eq!(bench.words(3), [("free", "imported", 0)]);
    assert_eq!(bench.state.process(PROC.0).unwrap().live().count(), 0);
}

#[test]
fn an_export_is_noted() {
    let mut bench = Bench::default();
    bench.run(&[create(9, MIB), Action::VmmExport { handle: 9 }]);
    assert_eq!(bench.words(1), [("export", "device", 0)]);
    assert!(bench.state.process(PROC.0).unwrap().live().all(|(_, live)| live.exported));
}

#[test]
fn handles_and_maps_from_before_attach_change_nothing() {
    let mut bench = Bench::default();
    bench.run(&[retain(9), map(MIB, 9), unmap(MIB, 1), release(9), unmap(7 * MIB, 1)]);
    bench.run(&[Action::VmmExport { handle: 9 }]);
    assert!(bench.rows.iter().all(|row| row.alloc_id == 0 && row.delta_bytes == 0));
    assert_eq!(bench.ledger.unknown_frees(PROC), 1, "the release");
}

#[test]
fn a_late_release_is_not_taken_for_one_of_the_handles_next_life() {
    let mut bench = Bench::default();
    bench.apply(&at(create(9, MIB), 1, 2)).apply(&at(create(9, 2 * MIB), 11, 12));
    bench.apply(&at(release(9), 20, 21));
    assert_eq!(bench.last().delta_bytes, -2 * FULL);
    bench.apply(&at(release(9), 10, 30));
    assert_eq!((bench.last().delta_bytes, bench.last().ts_ns), (-FULL, 10));
    assert_eq!(bench.losses(), []);
}

#[test]
fn a_handle_that_comes_back_while_its_memory_is_mapped_is_no_loss() {
    let mut bench = Bench::default();
    bench.run(&[create(9, MIB), map(MIB, 9), release(9), create(9, 2 * MIB)]);
    assert_eq!(bench.live_bytes(Level::Device), 3 * FULL);
    bench.run(&[unmap(MIB, 1)]);
    assert_eq!(bench.live_bytes(Level::Device), 2 * FULL);
    bench.run(&[release(9)]);
    assert_eq!((bench.live_bytes(Level::Device), bench.losses()), (0, vec![]));
}

#[test]
fn a_lost_release_and_a_lost_unmap_are_closed_and_counted() {
    let mut bench = Bench::default();
    bench.apply(&at(create(9, MIB), 1, 2)).apply(&at(create(9, MIB), 11, 12));
    bench.apply(&at(map(MIB, 9), 13, 14)).apply(&at(release(9), 15, 16));
    bench.apply(&at(create(8, MIB), 17, 18)).apply(&at(map(MIB, 8), 19, 20));
    let first = bench.rows.len();
    bench.apply(&at(Action::CtxPop, 1 << 50, 1 << 50));
    assert_eq!(bench.words(first), [("free", "device", -FULL), ("free", "device", -FULL)]);
    assert!(bench.rows.iter().skip(first).all(|row| row.implicit && row.api == "reused"));
    assert_eq!(bench.rows[first + 1].ts_ns, 20, "gone when its addresses were mapped again");
    assert_eq!(bench.losses(), [("free_not_seen", 2, Some(FULL))]);
    assert_eq!(bench.live_bytes(Level::Device), FULL);
}

#[test]
fn memory_is_not_free_before_its_last_reference_went() {
    let mut bench = Bench::default();
    bench.apply(&at(create(9, MIB), 1, 2)).apply(&at(map(MIB, 9), 3, 4));
    bench.apply(&at(release(9), 20, 21));
    bench.apply(&at(unmap(MIB, 1), 10, 30));
    let [.., unmapped, freed] = bench.rows.as_slice() else { panic!("rows") };
    assert_eq!((unmapped.ts_ns, freed.ts_ns), (10, 20));
}
