//! Arrays, pools, graphs, code, and memory that is shared.

use super::helpers::*;
use crate::call::{Action, ArrayShape, Call, Input, Level, Location, ProcId};

const RETAIN: Action = Action::PrimaryRetain { ctx: 0xa, ordinal: 0 };
const SHAPE: ArrayShape =
    ArrayShape { width: 64, height: 64, depth: 0, format: 0x20, channels: 1, flags: 0, levels: 1 };
const SHAPE_BYTES: i64 = 64 * 64 * 4;

fn array(handle: u64, shape: ArrayShape) -> Action {
    Action::Array { handle, shape: Some(shape) }
}

/// A call of another process.
fn elsewhere(action: Action, ns: i64) -> Input {
    Input::Call(Call { proc_id: ProcId(12), tgid: 200, ..call(action, ns, ns + 1) })
}

#[test]
fn an_array_takes_at_least_its_elements() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, array(0x99, SHAPE)]);
    let row = bench.last();
    assert_eq!((row.size_bytes, row.estimated), (Some(SHAPE_BYTES), Some(true)));
    bench.run(&[alloc(0x99, 5), Action::ArrayDestroy { handle: 0x99 }]);
    assert_eq!(bench.last().delta_bytes, -SHAPE_BYTES, "a handle is no address");
    assert_eq!(bench.live_bytes(Level::Device), 5);
    bench.run(&[free(0x99)]);
    assert_eq!(bench.losses(), []);
}

#[test]
fn an_array_of_a_format_that_is_not_known_has_no_size() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, array(0x99, ArrayShape { format: 0x91, ..SHAPE })]);
    let row = bench.last();
    assert_eq!((row.op.as_ref(), row.size_bytes, row.estimated), ("alloc", None, Some(false)));
}

#[test]
fn sparse_arrays_take_nothing() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, array(0x99, ArrayShape { flags: 0x40, ..SHAPE }), Action::ArrayMap]);
    assert_eq!(bench.words(1)[0], ("reserve", "virtual", SHAPE_BYTES));
    bench.run(&[Action::ArrayDestroy { handle: 0x99 }]);
    assert_eq!((bench.last().op.as_ref(), bench.last().level.as_ref()), ("free", "virtual"));
}

#[test]
fn a_context_takes_its_arrays_along() {
    let mut bench = Bench::default();
    bench.run(&[Action::CtxCreate { ctx: 0xb, ordinal: 0 }, array(0x99, SHAPE)]);
    bench.run(&[Action::CtxDestroy { ctx: 0xb }]);
    assert!(bench.last().implicit);
    assert_eq!(bench.live_bytes(Level::Device), 0);
}

#[test]
fn a_block_lies_where_its_pool_does() {
    let pool = |ordinal| Action::PoolCreate { pool: 0x70, location: Location::Device(ordinal) };
    let from = |pool| Action::PoolAlloc { addr: 0x1000, size_bytes: 8, pool };
    let mut bench = Bench::default();
    bench.run(&[RETAIN, Action::CtxSet { ctx: 0xa }, pool(1), from(0x70)]);
    assert_eq!(bench.last().cuda_ordinal, Some(1), "and not in the current context's device");
    bench.run(&[free(0x1000), Action::PoolDestroy { pool: 0x70 }, from(0x71)]);
    assert_eq!(bench.last().cuda_ordinal, Some(0), "unknown pool, one device");
    bench.run(&[Action::CtxCreate { ctx: 0xb, ordinal: 1 }, free(0x1000), from(0x71)]);
    assert_eq!(bench.last().cuda_ordinal, None, "unknown pool, two devices");
    bench.run(&[
        Action::PoolOf { pool: 0x71, location: Location::Device(1) },
        free(0x1000),
        from(0x71),
    ]);
    assert_eq!(bench.last().cuda_ordinal, Some(1));
}

#[test]
fn pools_are_told_of_without_bytes() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN]);
    bench.run(&[
        Action::PoolCreate { pool: 0x70, location: Location::Device(0) },
        Action::PoolSize { pool: 0x70, size_bytes: 64 },
        Action::PoolTrim { pool: 0x70, keep_bytes: 0 },
        Action::PoolExport { pool: 0x70 },
        Action::PoolImport { pool: 0x72 },
        Action::PoolDestroy { pool: 0x70 },
    ]);
    let ops = bench.words(1);
    let pool = |op| (op, "pool", 0);
    assert_eq!(ops, ["pool", "pool", "pool", "export", "import", "pool"].map(pool));
    let process = bench.state.process(PROC.0).unwrap();
    assert_eq!(process.live().count(), 0, "an imported pool is no allocation");
}

#[test]
fn another_processes_block_has_the_size_that_it_was_exported_with() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, alloc(0x1000, 4096)]);
    // An address inside the block stands for all of it.
    bench.run(&[Action::BlockExport { addr: 0x1800, key: Some(7) }]);
    assert_eq!((bench.last().op.as_ref(), bench.last().size_bytes), ("export", Some(4096)));
    let now = 1 << 20;
    bench.apply(&elsewhere(Action::BlockImport { addr: 0x9000, key: Some(7) }, now));
    assert_eq!(bench.last().delta_bytes, 4096);
    assert_eq!(bench.last().level, "imported");
    bench.apply(&elsewhere(Action::BlockImport { addr: 0xa000, key: Some(8) }, now + 10));
    assert_eq!(bench.last().size_bytes, None, "whose export was not seen");
    assert_eq!(bench.live_bytes(Level::Device), 4096);
}

#[test]
fn a_block_that_is_opened_twice_is_closed_twice() {
    let mut bench = Bench::default();
    let open = Action::BlockImport { addr: 0x9000, key: None };
    let close = Action::BlockClose { addr: 0x9000 };
    bench.run(&[RETAIN, open, open, close]);
    assert_eq!(bench.words(1)[1..], [("retain", "virtual", 0), ("free", "virtual", 0)]);
    let live = |bench: &Bench| bench.state.process(PROC.0).unwrap().live().count();
    assert_eq!(live(&bench), 1);
    bench.run(&[close]);
    assert_eq!((bench.last().op.as_ref(), bench.last().level.as_ref()), ("free", "imported"));
    assert_eq!((live(&bench), bench.losses()), (0, vec![]));
}

#[test]
fn nodes_of_graphs_are_address_space_that_a_free_gives_back() {
    let node = Action::GraphAlloc { addr: 0x1000, size_bytes: 64, location: Location::Device(0) };
    let mut bench = Bench::default();
    bench.run(&[Action::Init, RETAIN, node, Action::Graph { addr: 0x55 }, free(0x1000)]);
    let words = [("reserve", "virtual", 64), ("graph", "virtual", 0), ("free", "virtual", -64)];
    assert_eq!(bench.words(1), words);
    assert_eq!(bench.losses(), []);
}

#[test]
fn memory_of_other_apis_is_imported_and_its_buffers_are_maps() {
    let mut bench = Bench::default();
    bench.run(&[
        Action::Init,
        RETAIN,
        Action::ExternalImport { handle: 0x55, size_bytes: Some(100) },
        Action::ExternalBuffer { addr: 0x1000, size_bytes: Some(60) },
        Action::ExternalArray { handle: 0x66 },
    ]);
    assert_eq!(bench.live_bytes(Level::Imported), 100);
    bench.run(&[
        free(0x1000),
        Action::ArrayDestroy { handle: 0x66 },
        Action::ExternalDestroy { handle: 0x55 },
    ]);
    assert_eq!((bench.live_bytes(Level::Imported), bench.live_bytes(Level::Virtual)), (0, 0));
    assert_eq!(bench.losses(), []);
}

#[test]
fn a_multicast_object_is_address_space_until_its_release() {
    let mut bench = Bench::default();
    bench.run(&[
        Action::Init,
        RETAIN,
        Action::MulticastCreate { handle: 0x77, size_bytes: Some(64) },
        Action::MulticastBind { handle: 0x77, size_bytes: 32 },
        Action::MulticastUnbind { handle: 0x77, size_bytes: 32 },
        Action::VmmRelease { handle: 0x77 },
    ]);
    assert_eq!(
        bench.words(1),
        [
            ("reserve", "virtual", 64),
            ("map", "virtual", 0),
            ("unmap", "virtual", 0),
            ("free", "virtual", -64),
        ]
    );
    assert_eq!(bench.losses(), []);
}

#[test]
fn a_green_contexts_context_is_on_its_device() {
    let mut bench = Bench::default();
    bench.run(&[
        RETAIN,
        Action::GreenCreate { green: 0x11, ordinal: 1 },
        Action::CtxOfGreen { ctx: 0xc, green: 0x11 },
        Action::CtxSet { ctx: 0xc },
        alloc(1, 1),
    ]);
    assert_eq!(bench.last().cuda_ordinal, Some(1));
    bench.run(&[Action::GreenDestroy { green: 0x11 }]);
    assert_eq!((bench.last().op.as_ref(), bench.last().cuda_ordinal), ("ctx", Some(1)));
}

#[test]
fn limits_that_are_sizes_are_told_with_their_size() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, Action::CtxLimit { limit: 2, value: 1 << 20 }]);
    assert_eq!((bench.last().addr, bench.last().size_bytes), (2, Some(1 << 20)));
    bench.run(&[Action::CtxLimit { limit: 3, value: 7 }]);
    assert_eq!((bench.last().addr, bench.last().size_bytes), (3, None));
}
