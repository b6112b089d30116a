use proptest::prelude::*;

use super::*;
use crate::{
    account::{
        state::State,
        tests::helpers::{Bench, PROC, alloc, create},
    },
    call::Action,
};

const MIB: i64 = 1 << 20;
fn bytes(rows: &[BreakdownRow], category: &str) -> Option<i64> {
    let found = rows.iter().filter(|row| row.category == category);
    found.map(|row| row.bytes).reduce(|a, b| a + b)
}

fn mib(rows: &[BreakdownRow], category: &str) -> Option<i64> {
    bytes(rows, category).map(|bytes| bytes / MIB)
}

fn sum(rows: &[BreakdownRow]) -> i64 {
    PARTS.iter().filter_map(|part| bytes(rows, part)).sum()
}

/// A moment of a process that holds `segments` MiB of PyTorch's cache and `other` of one library.
fn moment(nvml: i64, segments: i64, other: i64) -> Moment {
    let libraries = [(Some("libnccl".to_owned()), other * MIB)].into();
    let holding = Holding { segments_bytes: segments * MIB, libraries, ..Holding::default() };
    Moment { nvml_used: Some(nvml * MIB), holding, ..Moment::default() }
}

fn rows(of: &mut Breakdown, moment: Moment) -> Vec<BreakdownRow> {
    of.rows(ProcId(1), "GPU-x", moment)
}

fn torch(allocated: i64, reserved: i64) -> Torch {
    Torch { allocated_bytes: allocated * MIB, reserved_bytes: reserved * MIB }
}

#[test]
fn before_attach_shrinks_as_readings_prove_it_gone_and_never_rises() {
    let mut breakdown = Breakdown::new();
    for (nvml, device, before, unexplained) in
        [(500, 0, 500, 0), (700, 200, 500, 0), (600, 300, 300, 0), (900, 300, 300, 300)]
    {
        let moment = Moment { baseline: Some(500 * MIB), ..moment(nvml, 0, device) };
        let rows = rows(&mut breakdown, moment);
        assert_eq!(mib(&rows, "before_attach"), Some(before));
        assert_eq!(mib(&rows, "unexplained"), Some(unexplained));
        assert_eq!(bytes(&rows, "context"), None);
    }
    breakdown.forget(ProcId(1));
    let rows = rows(&mut breakdown, Moment { baseline: Some(500 * MIB), ..moment(900, 0, 300) });
    assert_eq!(mib(&rows, "before_attach"), Some(500));
}

#[test]
fn what_torch_had_before_attach_is_not_told_twice() {
    let mut breakdown = Breakdown::new();
    // 400 MiB of segments from before, 20 since; the context and a library are the other 100.
    let moment =
        Moment { baseline: Some(500 * MIB), torch: Some(torch(250, 420)), ..moment(520, 20, 0) };
    let rows = rows(&mut breakdown, moment);
    assert_eq!(mib(&rows, "tensors"), Some(250));
    assert_eq!(mib(&rows, "cached"), Some(170));
    assert_eq!(mib(&rows, "before_attach"), Some(100));
    assert_eq!(mib(&rows, "unexplained"), Some(0));
    assert_eq!(bytes(&rows, "reusable"), None, "which blocks are alive is not known");
}

#[test]
fn the_cache_is_split_where_its_blocks_are_known() {
    let mut moment = moment(300, 100, 40);
    moment.torch = Some(torch(60, 100));
    moment.holding.split = Some(Split {
        returnable_bytes: 20 * MIB,
        graph_pools_bytes: 5 * MIB,
        pinned_by_blocks: 12,
        pinned_by_stack_id: Some(77),
    });
    let rows = rows(&mut Breakdown::new(), moment);
    let told = ["tensors", "reusable", "returnable", "graph_pools", "library"];
    assert_eq!(told.map(|part| mib(&rows, part)), [60, 15, 20, 5, 40].map(Some));
    assert_eq!(mib(&rows, "context"), Some(160));
    assert_eq!(bytes(&rows, "cached"), None);
    let reusable = rows.iter().find(|row| row.category == "reusable").unwrap();
    assert_eq!((reusable.pinned_by_blocks, reusable.pinned_by_stack_id), (Some(12), Some(77)));
}

#[test]
fn segments_without_a_stack_are_torchs_where_it_says_so() {
    let mut moment = moment(300, 30, 0);
    moment.holding.libraries = [(None, 100 * MIB)].into();
    moment.torch = Some(torch(50, 90));
    let rows = rows(&mut Breakdown::new(), moment);
    assert_eq!(mib(&rows, "tensors"), Some(50));
    assert_eq!(mib(&rows, "cached"), Some(40));
    assert_eq!(mib(&rows, "library"), Some(40));
}

#[test]
fn without_nvml_nothing_is_made_up() {
    let moment = Moment { nvml_used: None, baseline: Some(5), ..moment(0, 0, 7) };
    let rows = rows(&mut Breakdown::new(), moment);
    for category in ["nvml_used", "unexplained", "before_attach", "context", "torch_reserved"] {
        assert_eq!(bytes(&rows, category), None, "{category}");
    }
    assert_eq!(mib(&rows, "library"), Some(7));
}

#[test]
fn more_live_than_nvml_shows_is_negative_as_it_is() {
    assert_eq!(mib(&rows(&mut Breakdown::new(), moment(100, 0, 300)), "unexplained"), Some(-200));
}

#[test]
fn a_missing_block_is_unexplained_to_the_byte() {
    let mut breakdown = Breakdown::new();
    let mut later = moment(500, 0, 0);
    rows(&mut breakdown, later.clone());
    later.ts_ns = 1_000;
    later.nvml_used = Some(500 * MIB + 12_345);
    let rows = rows(&mut breakdown, later);
    assert_eq!((mib(&rows, "context"), bytes(&rows, "unexplained")), (Some(500), Some(12_345)));
}

#[test]
fn what_pools_are_known_to_hold_is_not_unexplained() {
    let mut breakdown = Breakdown::new();
    rows(&mut breakdown, moment(500, 0, 0));
    for (pools_mib, unexplained) in [(1, 31), (32, 0)] {
        let pools = PoolUse { floor_bytes: pools_mib * MIB, ..PoolUse::default() };
        let moment = Moment { pools, ..moment(532, 0, 0) };
        let told = rows(&mut breakdown, moment);
        let figures = ["pools", "context", "unexplained"].map(|part| mib(&told, part));
        assert_eq!(figures, [pools_mib, 500, unexplained].map(Some));
    }
}

#[test]
fn a_snapshot_has_blocks_as_they_are_and_the_rest_as_it_was() {
    let mut breakdown = Breakdown::new();
    let told = |rows: &[BreakdownRow]| {
        ["nvml_used", "library", "context", "unexplained"].map(|part| mib(rows, part))
    };
    assert_eq!(breakdown.snapshot(ProcId(1), "GPU-x", moment(0, 0, 5)), []);
    rows(&mut breakdown, moment(500, 0, 0));
    rows(&mut breakdown, Moment { ts_ns: 9, ..moment(560, 0, 50) });
    let rows = breakdown.snapshot(ProcId(1), "GPU-x", moment(0, 0, 90));
    assert_eq!(told(&rows), [600, 90, 500, 10].map(Some));
    assert_eq!(sum(&rows), 600 * MIB);
    assert!(rows.iter().all(|row| row.estimated || row.category != "nvml_used"));
}

#[test]
fn a_device_is_the_sum_of_its_processes_and_a_rest() {
    let moment = DeviceMoment {
        ts_ns: 5,
        used_bytes: 700,
        listed_bytes: 600,
        unlisted_bytes: 30,
        reserved_bytes: Some(9),
    };
    let rows = moment.rows("GPU-x");
    let told: Vec<_> = rows.iter().map(|row| (row.category.as_str(), row.bytes)).collect();
    let parts = [("processes", 600), ("unlisted", 30), ("unexplained", 70)];
    assert_eq!(told[1..4], parts);
    assert_eq!((told[0], told[4]), (("device_used", 700), ("driver_reserved", 9)));
    assert!(rows.iter().all(|row| row.proc_id == 0));
}

/// What a state holds, with every stack's memory owned by what `library_of` says.
fn holding(state: &State, tensors: Option<&[Tensor]>) -> Holding {
    let process = state.process(PROC.0).unwrap();
    Holding::of(process, &[0], |stack_id| (stack_id != 0).then_some("libnccl"), tensors)
}

#[test]
fn small_blocks_share_pages_and_large_ones_take_whole_ones() {
    let page = 2 << 20;
    let mut bench = Bench::default();
    bench.run(&[
        alloc(100 * page, 512),
        alloc(100 * page + 512, 512),
        alloc(101 * page, 3 << 20),
        alloc(200 * page, page),
    ]);
    let expected = page - 1_024 + (1 << 20);
    assert_eq!(holding(&bench.state, None).rounding_bytes, expected as i64);
}

#[test]
fn a_block_with_tensors_in_it_is_a_segment_whoever_made_it() {
    let mut bench = Bench::default();
    let (segment, handle, addr) = (64 << 20, 7, 128 << 20);
    bench.run(&[
        Action::PrimaryRetain { ctx: 1, ordinal: 0 },
        Action::CtxSet { ctx: 1 },
        alloc(segment, 20 << 20),
        alloc(32 << 20, 2 << 20),
        create(handle, 20 << 20),
        Action::VmmMap { addr, size_bytes: 20 << 20, handle },
    ]);
    let tensor = |addr| Tensor { addr, size_bytes: 1 << 20, stack_id: 0 };
    let tensors = [tensor(segment), tensor(addr + (19 << 20))];
    let told = holding(&bench.state, Some(&tensors));
    assert_eq!((told.segments_bytes, told.libraries[&None]), (40 * MIB, 2 * MIB));
    assert_eq!(told.split.unwrap().pinned_by_blocks, 2);
    let told = holding(&bench.state, None);
    assert_eq!((told.segments_bytes, told.libraries[&None]), (0, 42 * MIB));
    assert_eq!(told.split, None);
}

proptest! {
    #[test]
    fn the_parts_add_up(
        steps in prop::collection::vec(
            (0..1i64 << 20, 0..1i64 << 20, 0..1i64 << 20, 0..1i64 << 20, 0..1i64 << 20), 1..20),
        baseline in prop::option::of(0..1i64 << 40),
        heard in any::<bool>(),
    ) {
        let mut breakdown = Breakdown::new();
        for (nvml, segments, other, allocated, reserved) in steps {
            let moment = Moment {
                baseline,
                torch: heard.then(|| torch(allocated, reserved)),
                ..moment(nvml, segments, other)
            };
            let rows = rows(&mut breakdown, moment);
            prop_assert_eq!(sum(&rows), nvml * MIB);
            for part in ["tensors", "cached", "library", "rounding", "before_attach"] {
                prop_assert!(bytes(&rows, part).unwrap_or(0) >= 0, "{}", part);
            }
        }
    }
}
