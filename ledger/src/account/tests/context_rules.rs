use super::helpers::*;
use crate::call::{Action, Call, Input, Level};

const RETAIN: Action = Action::PrimaryRetain { ctx: 0xa, ordinal: 0 };

fn on_thread(tid: u32, action: Action, ns: i64) -> Input {
    Input::Call(Call { tid, ..call(action, ns, ns + 1) })
}

#[test]
fn an_allocation_is_on_the_device_of_its_threads_context() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, Action::CtxCreate { ctx: 0xb, ordinal: 1 }, alloc(1, 1)]);
    assert_eq!(bench.last().cuda_ordinal, Some(1), "a created context is current");
    bench.run(&[Action::CtxPush { ctx: 0xa }, alloc(2, 1)]);
    assert_eq!(bench.last().cuda_ordinal, Some(0));
    bench.run(&[Action::CtxPop, alloc(3, 1)]);
    assert_eq!(bench.last().cuda_ordinal, Some(1));
    bench.apply(&on_thread(2, alloc(4, 1), 1 << 30));
    assert_eq!(bench.last().cuda_ordinal, None, "unknown, not a guess");
    bench.run(&[free(2)]);
    assert_eq!(bench.last().cuda_ordinal, Some(0), "a free is on its block's device");
}

#[test]
fn with_one_context_ever_and_seen_whole_threads_need_no_call_of_their_own() {
    let mut bench = Bench::default();
    bench.run(&[Action::Init, RETAIN]);
    bench.apply(&on_thread(7, alloc(1, 1), 1 << 20));
    assert_eq!(bench.last().cuda_ordinal, Some(0));
}

#[test]
fn contexts_from_before_attach_are_on_the_device_that_all_of_them_are_on() {
    let mut bench = Bench::default();
    bench.run(&[free(9)]).ledger.set_device_before_attach(PROC, 3);
    bench.run(&[alloc(1, 1)]);
    assert_eq!(bench.last().cuda_ordinal, Some(3), "no context was ever seen");
    bench.run(&[Action::CtxSet { ctx: 0xf }, alloc(2, 1)]);
    assert_eq!(bench.last().cuda_ordinal, Some(3), "a context that nobody was seen to make");
    bench.run(&[RETAIN, Action::CtxSet { ctx: 0xa }, alloc(3, 1)]);
    assert_eq!(bench.last().cuda_ordinal, Some(0), "a new one says itself where it is");
}

#[test]
fn a_failed_allocation_names_its_device() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, Action::CtxSet { ctx: 0xa }]);
    bench.apply(&Input::Call(Call { result: 2, ..call(alloc(0, 9), 1, 2) }));
    assert_eq!((bench.last().op.as_ref(), bench.last().cuda_ordinal), ("fail", Some(0)));
}

#[test]
fn a_destroyed_context_frees_what_was_made_in_it_and_nothing_else() {
    for end in [
        Action::CtxDestroy { ctx: 0xa },
        Action::PrimaryRelease { ordinal: 0 },
        Action::PrimaryReset { ordinal: 0 },
    ] {
        let mut bench = Bench::default();
        bench.run(&[RETAIN, Action::CtxSet { ctx: 0xa }]);
        bench.run(&[
            alloc(1, 1),
            alloc_of(Level::Managed, 2, 2),
            alloc_of(Level::Host, 3, 4),
            alloc_of(Level::Pool, 4, 8),
            create(5, 16),
            Action::Reserve { addr: 6, size_bytes: 32 },
            Action::CtxCreate { ctx: 0xb, ordinal: 1 },
            alloc(7, 64),
        ]);
        let first = bench.rows.len();
        bench.run(&[end]);
        assert_eq!(
            bench.words(first),
            [
                ("ctx", "device", 0),
                ("free", "device", -1),
                ("free", "managed", -2),
                ("free", "host", -4),
            ],
            "{end:?}"
        );
        assert!(!bench.rows[first].implicit && bench.rows[first].addr == 0xa);
        let freed = &bench.rows[first + 1];
        assert!(freed.implicit && freed.api == bench.rows[first].api);
        assert_eq!(freed.ts_ns, bench.rows[first].ts_ns);
        assert_eq!(bench.live_bytes(Level::Device), 64 + 16);
    }
}

#[test]
fn a_primary_context_lives_until_its_last_release() {
    let mut bench = Bench::default();
    bench.run(&[RETAIN, RETAIN, Action::CtxSet { ctx: 0xa }, alloc(1, 1)]);
    bench.run(&[Action::PrimaryRelease { ordinal: 0 }]);
    assert_eq!((bench.last().op.as_ref(), bench.live_bytes(Level::Device)), ("ctx", 1));
    bench.run(&[Action::PrimaryRelease { ordinal: 0 }]);
    assert_eq!(bench.live_bytes(Level::Device), 0);
    bench.run(&[RETAIN, alloc(2, 2)]);
    assert_eq!(bench.last().cuda_ordinal, Some(0), "the same handle, made anew");
}

#[test]
fn a_late_destroy_does_not_hit_the_next_owner_of_the_handle() {
    let mut bench = Bench::default();
    let made = Action::CtxCreate { ctx: 0xa, ordinal: 0 };
    bench.apply(&at(made, 1, 2)).apply(&at(alloc(1, 1), 3, 4));
    bench.apply(&on_thread(2, made, 20)).apply(&on_thread(2, alloc(2, 2), 30));
    assert_eq!(bench.live_bytes(Level::Device), 2, "the handle came back: its first life is over");
    bench.apply(&at(Action::CtxDestroy { ctx: 0xa }, 10, 40));
    assert_eq!(bench.live_bytes(Level::Device), 2);
    bench.apply(&on_thread(2, Action::CtxDestroy { ctx: 0xa }, 50));
    assert_eq!(bench.live_bytes(Level::Device), 0);
}

#[test]
fn the_hot_context_calls_make_no_rows() {
    let mut bench = Bench::default();
    bench.run(&[Action::CtxSet { ctx: 1 }, Action::CtxPush { ctx: 1 }, Action::CtxPop]);
    bench.run(&[Action::Init, Action::DeviceUuid { ordinal: 0, uuid: [0; 16] }]);
    assert!(bench.rows.is_empty());
}
