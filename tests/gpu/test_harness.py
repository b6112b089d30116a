"""Tests of the GPU checks that need no GPU: python3 -m unittest tests/gpu/test_harness.py

Each comparison is shown a log that agrees with the program, and logs that do not.
"""

import os
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import checks  # noqa: E402,F401
from checks import burst, late, rows, segments, steps, vmm, w1  # noqa: E402
from harness import synthetic  # noqa: E402
from harness.context import shown  # noqa: E402
from harness.elf import Entries, dynamic_symbols, executable_maps  # noqa: E402
from harness.log import (  # noqa: E402
    Log,
    blocks,
    breakdown_sums,
    live,
    maps,
    merged,
    references,
    seq_gaps,
)
from harness.outcome import Outcome  # noqa: E402
from harness.programs import Program, proc_cpu_seconds, proc_memory  # noqa: E402
from harness.registry import CHECKS  # noqa: E402
from harness.report import keep_logs, write_json, write_markdown  # noqa: E402
from harness.windows import summary, within  # noqa: E402
from run import OutOfTime, chosen, on_alarm, run_check  # noqa: E402

PID, MIB = 4321, 1 << 20
PROCESS = {
    "ts_ns": 1,
    "proc_id": synthetic.PROC_ID,
    "pid": PID,
    "ns_pid": None,
    "exit_code": 0,
    "from_start": True,
}


class Folder(unittest.TestCase):
    """A test with a folder for logs."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name)

    def log(self, events=(), **tables):
        """Writes a log and opens it."""
        tables.setdefault("processes", [PROCESS])
        synthetic.write(self.path, {"events": list(events), **tables})
        return Log(self.path)


def failures(outcome):
    """What did not hold."""
    return [expectation["what"] for expectation in outcome.expectations if not expectation["ok"]]


class W1(Folder):
    """The comparison of w1 against its log."""

    def story(self):
        """What w1 prints, and the events of it."""
        events, lines = synthetic.Events(PID), [f"PID {PID}"]
        for api, free in (
            ("cuMemAlloc_v2", "cuMemFree_v2"),
            ("cuMemAllocAsync_ptsz", "cuMemFreeAsync_ptsz"),
        ):
            level = "pool" if "Async" in api else "device"
            for _ in range(3):
                events.free(free, events.alloc(api, level, 0x1000, MIB))
        for i in range(10):
            addr = 0x10000000 + i * 4 * MIB
            events.alloc("cuMemAlloc_v2", "device", addr, 4 * MIB)
            lines.append(f"LEAK plain {addr:#x} {4 * MIB} tid={PID}")
        events.alloc("cuMemAddressReserve", "virtual", 0x700000000, 40 * MIB, op="reserve")
        for i in range(10):
            addr = 0x700000000 + i * 4 * MIB
            alloc_id = events.alloc("cuMemCreate", "device", 0x55 + i, 4 * MIB)
            events.row(
                "map", "cuMemMap", "virtual", addr=addr, size_bytes=4 * MIB, alloc_id=alloc_id
            )
            lines.append(f"LEAK vmm {addr:#x} {4 * MIB} tid={PID}")
        for _ in range(5):
            events.row("fail", "cuMemAlloc_v2", "device", size_bytes=1 << 50, result=2)
        given = []
        for i in range(4):
            tid, keep, give = PID + 1 + i, 0x20000000 + i * 8 * MIB, 0x20400000 + i * 8 * MIB
            events.alloc("cuMemAlloc_v2", "device", keep, 3 * MIB, tid)
            given.append(events.alloc("cuMemAlloc_v2", "device", give, 3 * MIB, tid))
            lines.append(f"LEAK thread {keep:#x} {3 * MIB} tid={tid}")
            lines.append(f"FREED thread {give:#x} {3 * MIB} tid={tid}")
        for alloc_id in given:
            events.free("cuMemFree_v2", alloc_id)
        events.exit()
        lines.append(
            f"TRUE plain_bytes={40 * MIB} vmm_bytes={40 * MIB} thread_bytes={12 * MIB} "
            "failed_calls=5"
        )
        lines.append(
            "COUNTS cudaMalloc=21 cudaMalloc_failed=5 cudaFree=8 cudaMallocAsync=3 "
            "cudaFreeAsync=3 cuMemCreate=10"
        )
        return "\n".join(lines), events.rows

    def compare(self, rows, **tables):
        """What does not hold of a log with these rows."""
        output, _ = self.story()
        tables.setdefault("oom", [{"ts_ns": 1, "proc_id": synthetic.PROC_ID}] * 5)
        log = self.log(rows, **tables)
        outcome, true = Outcome("w1", ""), w1.truth(output)
        events = log.of(PID)
        held, sizes = w1.compare_leaks(outcome, true, events)
        w1.compare_sums(outcome, true, held, sizes)
        w1.compare_freed(outcome, true, events)
        w1.compare_counts(outcome, true, events, log)
        w1.compare_identity(outcome, true, log, events)
        return failures(outcome)

    def test_a_true_log_passes(self):
        self.assertEqual(self.compare(self.story()[1]), [])

    def test_a_leak_of_another_size_is_noticed(self):
        rows = self.story()[1]
        row = next(r for r in rows if r["addr"] == 0x10000000)
        row["size_bytes"] -= 1
        found = self.compare(rows)
        self.assertIn("every plain and thread leak is live: address, size, thread", found)
        self.assertIn("nothing else of cuMemAlloc_v2 is live", found)

    def test_a_leak_that_the_log_thinks_freed_is_noticed(self):
        rows = self.story()[1]
        row = next(r for r in rows if r["implicit"] and r["addr"] == 0x10000000)
        row.update(implicit=False, api="cuMemFree_v2")
        self.assertIn("bytes of plain leaks", self.compare(rows))

    def test_a_handle_that_the_log_thinks_released_is_noticed(self):
        rows = self.story()[1]
        row = next(r for r in rows if r["implicit"] and r["addr"] == 0x55)
        row.update(implicit=False, api="cuMemRelease")
        self.assertIn("every vmm leak is mapped and its handle never released", self.compare(rows))

    def test_a_free_that_was_not_seen_is_noticed(self):
        rows = self.story()[1]
        freed = [r for r in rows if r["op"] == "free" and r["addr"] == 0x20400000]
        freed[0].update(implicit=True, api="exit")
        found = self.compare(rows)
        self.assertIn("every freed block is closed by cuMemFree_v2", found)
        self.assertIn("nothing else of cuMemAlloc_v2 is live", found)

    def test_a_tid_for_a_pid_a_gap_and_a_loss_are_noticed(self):
        rows = self.story()[1]
        rows[40]["pid"] = PID + 1
        del rows[3]
        losses = [{"ts_ns": 1, "pid": PID, "reason": "ring_full", "count": 2}]
        found = self.compare(rows, losses=losses)
        for what in ("pid of every event", "gaps in seq", "losses"):
            self.assertIn(what, found)

    def test_calls_that_are_missing_are_noticed(self):
        rows = [r for r in self.story()[1] if r["op"] != "fail"]
        self.assertIn("failed calls", self.compare(rows))


class Reading(Folder):
    """The reader of logs."""

    def test_references_that_remain_do_not_close(self):
        events = synthetic.Events(PID)
        handle = events.alloc("cuMemCreate", "device", 0x55, 2 * MIB)
        events.row("map", "cuMemMap", "virtual", addr=0x1000, size_bytes=2 * MIB, alloc_id=handle)
        events.row("retain", "cuMemRetainAllocationHandle", "virtual", addr=0x55, alloc_id=handle)
        events.free("cuMemRelease", handle, level="virtual")
        log = self.log(events.rows)
        self.assertEqual(len(live(blocks(log.events))), 1)
        events.row(
            "unmap", "cuMemUnmap", "virtual", addr=0x1000, size_bytes=2 * MIB, alloc_id=handle
        )
        events.free("cuMemRelease", handle)
        log = self.log(events.rows)
        self.assertTrue(live(blocks(log.events)).empty)
        self.assertEqual(len(live(blocks(log.events), at_ns=4000)), 1)
        self.assertEqual(maps(log.events), {})
        self.assertEqual(maps(log.events, at_ns=4500), {0x1000: (2 * MIB, handle)})
        counts = references(log.events)
        self.assertEqual((counts["created"], counts["retained"], counts["released"]), (1, 1, 2))

    def test_a_journal_is_read_as_far_as_it_is_whole(self):
        events = synthetic.Events(PID)
        for i in range(6):
            events.alloc("cuMemAlloc_v2", "device", 0x1000 + i, 1)
        self.log(events.rows[:3])
        synthetic.write_journal(self.path, "events", events.rows[3:], torn_bytes=40)
        seen = Log(self.path).events
        self.assertIn(len(seen), (5, 6))
        self.assertEqual(seq_gaps(seen), 0)
        empty = self.path / "journal" / "events-0123abcd-000009.arrows"
        empty.write_bytes(b"")
        self.assertEqual(len(Log(self.path).events), len(seen))

    def test_a_journal_that_is_sealed_meanwhile_counts_once(self):
        events = synthetic.Events(PID)
        events.alloc("cuMemAlloc_v2", "device", 0x1000, 1)
        self.log(events.rows)
        synthetic.write_journal(self.path, "events", events.rows, number=1)
        self.assertEqual(len(Log(self.path).events), 1)

    def test_large_integers_beside_nulls_stay_exact(self):
        events = synthetic.Events(PID)
        events.alloc("cuMemAlloc_v2", "device", (1 << 56) + 1, (1 << 53) + 1)
        events.row("ctx", "cuInit", "device")
        row = self.log(events.rows).events.iloc[0]
        self.assertEqual(int(row.size_bytes), (1 << 53) + 1)
        self.assertEqual(int(row.proc_id), synthetic.PROC_ID)

    def test_processes_are_found_by_either_pid(self):
        inside = {**PROCESS, "ts_ns": 2, "ns_pid": 17}
        log = self.log(processes=[PROCESS, inside])
        self.assertEqual(int(log.process(PID).ns_pid), 17)
        self.assertEqual(int(log.process(17).pid), PID)
        with self.assertRaises(LookupError):
            log.process(18)

    def test_gaps_and_doubles(self):
        events = synthetic.Events(PID)
        for _ in range(4):
            events.row("ctx", "cuInit", "device")
        rows = events.rows
        self.assertEqual(seq_gaps(self.log(rows).events), 0)
        self.assertEqual(seq_gaps(self.log(rows[:1] + rows[2:]).events), 1)
        self.assertEqual(seq_gaps(self.log(rows + rows[:1]).events), 1)

    def test_ranges(self):
        self.assertEqual(merged([(10, 5), (0, 10), (20, 1)]), [(0, 15), (20, 21)])

    def test_breakdown(self):
        def sample(ts_ns, **parts):
            return [
                {"ts_ns": ts_ns, "proc_id": 1, "gpu_uuid": "GPU-x", "category": k, "bytes": v}
                for k, v in parts.items()
            ]

        rows = sample(1, nvml_used=10, library=4, pools=1, unexplained=5, live_device=4)
        rows += sample(2, nvml_used=10, tensors=4, rounding=0, before_attach=3, unexplained=2)
        rows += sample(3, live_device=4, live_pool=0)
        sums = breakdown_sums(self.log(breakdown=rows).table("breakdown"))
        self.assertEqual([int(d) for d in sums.difference], [0, 1])

    def test_losses_by_reason(self):
        rows = [
            {"ts_ns": 1, "pid": PID, "reason": "ring_full", "count": 2},
            {"ts_ns": 2, "pid": PID, "reason": "ring_full", "count": 3},
            {"ts_ns": 2, "pid": PID, "reason": "free_not_seen", "count": 1},
        ]
        log = self.log(losses=rows)
        self.assertEqual(log.losses(), {"ring_full": 5, "free_not_seen": 1})
        self.assertEqual(log.lost_calls(), 5)


class Torch(Folder):
    """Comparisons against what PyTorch says."""

    def test_segments_and_maps(self):
        events = synthetic.Events(PID)
        events.alloc("cuMemAlloc_v2", "device", 0x1000000, 20 * MIB)
        for i in range(2):
            handle = events.alloc("cuMemCreate", "device", 0x55 + i, 20 * MIB)
            events.row(
                "map",
                "cuMemMap",
                "virtual",
                addr=0x7000000 + i * 20 * MIB,
                size_bytes=20 * MIB,
                alloc_id=handle,
            )
        found = self.log(events.rows).events
        for compare, segment, reserved in (
            (segments.compare_segments, (0x1000000, 20 * MIB), 20 * MIB),
            (segments.compare_maps, (0x7000000, 40 * MIB), 40 * MIB),
        ):
            good, bad = Outcome("good", ""), Outcome("bad", "")
            compare(good, found, 10**9, [segment], reserved)
            self.assertEqual(failures(good), [])
            compare(bad, found, 10**9, [(segment[0], segment[1] + 1)], reserved)
            self.assertNotEqual(failures(bad), [])

    def test_totals(self):
        usage = [
            {"ts_ns": t, "proc_id": 1, "level": "tensor", "stack_id": 0, "live_bytes": b}
            for t, b in ((1, 10), (5, 30), (9, 0))
        ]
        samples = [
            {"ts_ns": 5, "proc_id": 1, "torch_allocated_bytes": 30, "torch_reserved_bytes": 64}
        ]
        log = self.log(site_usage=usage, process_samples=samples)
        for at_ns, allocated, count in ((6, 30, 0), (10, 30, 1), (6, 31, 2)):
            outcome = Outcome("", "")
            segments.compare_totals(outcome, log, 1, at_ns, allocated, 64)
            self.assertEqual(len(failures(outcome)), count)

    def test_steps(self):
        events = synthetic.Events(PID)
        second = 10**9
        events.alloc("cuMemAlloc_v2", "device", 0x99, 7)  # a library's
        first = events.alloc("cuMemAlloc_v2", "device", 0x1000, 64)
        events.free("cuMemFree_v2", first)
        events.alloc("cuMemAlloc_v2", "device", 0x2000, 32)
        for row, ts_ns in zip(events.rows, (0, second, 3 * second, 3 * second + 1)):
            row["ts_ns"] = ts_ns
        said = [
            {
                "step": 0,
                "ns": second + 10,
                "allocated": 60,
                "reserved": 64,
                "max_allocated": 60,
                "max_reserved": 64,
                "segments": [[0x1000, 64]],
            },
            {
                "step": 1,
                "ns": 3 * second + 10,
                "allocated": 30,
                "reserved": 32,
                "max_allocated": 61,
                "max_reserved": 64,
                "segments": [[0x2000, 32]],
            },
        ]
        usage, samples = [], []
        for step in said:
            row = {"ts_ns": step["ns"] - 5, "proc_id": synthetic.PROC_ID}
            usage.append({**row, "level": "tensor", "stack_id": 0, "live_bytes": step["allocated"]})
            samples.append({**row, **{c: step[k] for k, c in steps.TOTALS.items()}})
        log = self.log(events.rows, site_usage=usage, process_samples=samples)
        good = Outcome("", "")
        steps.compare_totals(good, log, synthetic.PROC_ID, said)
        steps.compare_segments(good, log.of(PID), said)
        self.assertEqual(failures(good), [])
        said[1].update(max_allocated=62, segments=[[0x1000, 64]])
        bad = Outcome("", "")
        steps.compare_totals(bad, log, synthetic.PROC_ID, said)
        steps.compare_segments(bad, log.of(PID), said)
        self.assertEqual(
            failures(bad),
            [
                "torch_peak_allocated_bytes equals PyTorch's at every step",
                "every segment is a live block at every step",
            ],
        )

    def test_held_after_a_refused_request(self):
        events = synthetic.Events(PID)
        handle = events.alloc("cuMemCreate", "device", 0x55, 20 * MIB)
        events.row(
            "map", "cuMemMap", "virtual", addr=0x7000000, size_bytes=20 * MIB, alloc_id=handle
        )
        events.free("cuMemRelease", events.alloc("cuMemCreate", "device", 0x56, 20 * MIB))
        true = {
            "when": "after",
            "ns": 10**9,
            "reserved": 20 * MIB,
            "segments": [[0x7000000, 20 * MIB]],
        }
        good = Outcome("", "")
        vmm.compare_held(good, self.log(events.rows).events, true)
        self.assertEqual(failures(good), [])
        events.alloc("cuMemCreate", "device", 0x57, 20 * MIB)
        bad = Outcome("", "")
        vmm.compare_held(bad, self.log(events.rows).events, true)
        self.assertEqual(
            failures(bad), ["after: live handles add up", "after: handles behind maps"]
        )


class Others(Folder):
    """Burst, late attach, shared memory."""

    def test_burst_holds(self):
        events = synthetic.Events(PID)
        lines = []
        for i in range(burst.THREADS):
            events.alloc("cuMemAllocAsync", "pool", 0x1000 * (i + 1), MIB)
            lines.append(f"LEAK held {0x1000 * (i + 1):#x} {MIB} tid=1")
        found = self.log(events.rows).events
        for output, count in (("\n".join(lines), 0), ("\n".join(lines[1:]), 2)):
            outcome = Outcome("", "")
            burst.compare_held(outcome, output, found, "pool")
            self.assertEqual(len(failures(outcome)), count)

    def test_burst_line(self):
        line = (
            "BURST mode=sync threads=8 pairs=20000 allocs=160008 frees=160000 held_bytes=8 "
            "wall_ms=12.5 ns_per_pair_per_thread=625"
        )
        self.assertEqual(burst.said(line)["wall_ms"], 12.5)
        self.assertEqual(burst.said(line)["allocs"], 160008)

    def test_late_attach(self):
        late_process = {**PROCESS, "from_start": False}
        note = [{"ts_ns": 1, "proc_id": synthetic.PROC_ID, "kind": "late_attach", "text": ""}]

        def log(before, unexplained):
            parts = {
                "nvml_used": 100,
                "live_device": 0,
                "live_pool": 0,
                "before_attach": before,
                "unexplained": unexplained,
            }
            rows = [
                {
                    "ts_ns": 1,
                    "proc_id": synthetic.PROC_ID,
                    "gpu_uuid": "G",
                    "category": k,
                    "bytes": v,
                }
                for k, v in parts.items()
            ]
            self.log(processes=[late_process], annotations=note, breakdown=rows)
            outcome = Outcome("", "")
            late.compare(outcome, self.path, PID, 100)
            return failures(outcome)

        self.assertEqual(log(100, 0), [])
        self.assertEqual(log(90, 10), ["before_attach", "unexplained"])

    def test_shared_memory(self):
        events = synthetic.Events(PID)
        own = events.alloc("cuMemCreate", "device", 0x55, 64)
        theirs = events.alloc("cuMemImportFromShareableHandle", "imported", 0x77, None, op="import")
        events.row(
            "map",
            "cuMemMap",
            "imported",
            addr=0x1000,
            size_bytes=64,
            delta_bytes=64,
            alloc_id=theirs,
        )
        events.free("cuMemRelease", own)
        events.blocks[theirs] = ("imported", 0x77, 64)
        events.free("cuMemRelease", theirs)
        output = "SHARED created pid=1 0x55 64\nSHARED imported pid=2 0x77 64"
        outcome = Outcome("", "")
        vmm.compare_shared(outcome, output, self.log(events.rows))
        self.assertEqual(failures(outcome), [])


class EveryRow(Folder):
    """The comparison of every_row's calls with their rows."""

    def story(self):
        """What the program prints, and the events of it."""
        events = synthetic.Events(PID)
        block = events.alloc("cuMemAlloc_v2", "device", 0x7F0000000000, 3 * MIB)
        events.free("cuMemFree_v2", block)
        events.row("fail", "cuMemCreate", "device", size_bytes=1 << 50, result=2)
        events.row("pool", "cuMemPoolCreate", "pool", addr=-4096)
        events.free("exit", events.alloc("cuMemCreate", "device", 0x55, MIB), implicit=True)
        lines = [
            "CALL cuInit rc=0 op=- level=- addr=0x0 size=- delta=0",
            f"CALL cuMemAlloc_v2 rc=0 op=alloc level=device addr=0x7f0000000000 size={3 * MIB}"
            f" delta={3 * MIB}",
            f"CALL cuMemFree_v2 rc=0 op=free level=device addr=0x7f0000000000 size={3 * MIB}"
            f" delta=-{3 * MIB}",
            "CALL cuMemCreate rc=2 op=fail level=device addr=0x0 size=- delta=0",
            "CALL cuMemPoolCreate rc=0 op=pool level=pool addr=0xfffffffffffff000 size=- delta=0",
            f"CALL cuMemCreate rc=0 op=alloc level=device addr=0x55 size={MIB} delta={MIB}",
        ]
        lines = [f"{line} pid={PID} tid={PID}" for line in lines]
        lines.append("CALL-SKIPPED api=cuGraphAddNode_v3 why=this driver does not export it")
        return lines, events.rows

    def differences(self, lines, events):
        """What the comparison finds."""
        log = self.log(events)
        return rows.differences(rows.told("\n".join(lines)), rows.logged(log.events))

    def test_rows_that_are_as_told(self):
        self.assertEqual(self.differences(*self.story()), [])

    def test_a_missing_row_is_named_alone(self):
        lines, events = self.story()
        found = self.differences(lines, [row for row in events if row["op"] != "free"])
        self.assertEqual(len(found), 1)
        self.assertRegex(found[0], "told, not in the log: .*cuMemFree_v2")

    def test_a_row_that_was_not_told(self):
        lines, events = self.story()
        found = self.differences([line for line in lines if "PoolCreate" not in line], events)
        self.assertEqual(len(found), 1)
        self.assertRegex(found[0], "in the log, not told: .*cuMemPoolCreate")

    def test_every_word_of_a_row_counts(self):
        for word, value in (
            ("op", "free"),
            ("level", "pool"),
            ("addr", 1),
            ("size_bytes", None),
            ("delta_bytes", 0),
            ("pid", 1),
            ("api", "cuMemAlloc"),
        ):
            lines, events = self.story()
            events[0][word] = value
            self.assertEqual(len(self.differences(lines, events)), 2, word)

    def test_a_refusal_has_its_result(self):
        lines, events = self.story()
        next(row for row in events if row["op"] == "fail")["result"] = 1
        self.assertEqual(len(self.differences(lines, events)), 2)

    def test_figures_say_what_was_refused_or_left_out(self):
        lines, _ = self.story()
        lines.append(lines[3].replace("cuMemCreate rc=2", "cuArrayCreate rc=801"))
        outcome = Outcome("every-row", "")
        rows.figures(outcome, "\n".join(lines))
        self.assertEqual(outcome.figures["functions that worked"], 5)
        self.assertEqual(outcome.figures["refused by this driver (result)"], "cuArrayCreate (801)")
        self.assertEqual(
            outcome.figures["not called"], "cuGraphAddNode_v3: this driver does not export it"
        )


class Elf(unittest.TestCase):
    """Finding functions in memory."""

    def test_a_library_in_memory_equals_its_file(self):
        library = next(
            (m for m in executable_maps(os.getpid(), r"/libc\.so|/libm\.so|/libc-")), None
        )
        if library is None:
            self.skipTest("python maps no libc")
        symbols = dynamic_symbols(Path(library[3]).read_bytes())
        names = sorted(symbols)[:50]
        entries = Entries(os.getpid(), library[3], names)
        self.assertGreater(len(entries.places), 10)
        self.assertEqual(entries.changed(), [])
        name, (address, expected) = next(iter(entries.places.items()))
        entries.places[name] = (address, bytes([expected[0] ^ 0xFF]) + expected[1:])
        self.assertEqual(entries.changed(), [name])


class Running(Folder):
    """Programs and the runner."""

    def test_lines_come_with_times_and_usage(self):
        code = "import sys; print('READY 7', flush=True); input(); print('end'); sys.exit(3)"
        program = Program([sys.executable, "-u", "-c", code], stdin=True)
        self.assertEqual(program.wait_line(r"^READY (\d)", 10)[1], "7")
        self.assertEqual(program.next_line(5), "READY 7")
        self.assertGreater(proc_cpu_seconds(program.pid), -1)
        self.assertIn("VmHWM", proc_memory(program.pid))
        program.say()
        self.assertEqual(program.next_line(5), "end")
        self.assertIsNone(program.next_line(5))
        self.assertEqual(program.wait(5), 3)
        self.assertIsNotNone(program.usage)
        self.assertGreater(program.line_time_ns("end"), 0)

    def test_a_program_that_hangs_is_stopped(self):
        program = Program([sys.executable, "-c", "import time; time.sleep(60)"])
        with self.assertRaises(TimeoutError):
            program.wait(0.2)
        self.assertEqual(program.poll(), -signal.SIGTERM)

    def test_a_program_that_ends_too_soon_says_why(self):
        program = Program([sys.executable, "-c", "raise SystemExit('no GPU')"])
        with self.assertRaisesRegex(RuntimeError, "no GPU"):
            program.wait_line("READY", 10)

    def test_a_check_that_fails_hangs_or_breaks_ends_alone(self):
        class Nothing:
            def stop_all(self):
                pass

        def hang(_context, _outcome):
            time.sleep(30)

        def broken(_context, outcome):
            outcome.expect("first", True)
            raise KeyError("gone")

        check = next(iter(CHECKS.values()))
        old = signal.signal(signal.SIGALRM, on_alarm)
        self.addCleanup(signal.signal, signal.SIGALRM, old)
        for run, word in ((hang, "longer than"), (broken, "gone")):
            outcome = run_check(type(check)("x", "", 1, (), run), Nothing(), 0.3)
            self.assertEqual(outcome.status, "fail")
            self.assertIn(word, outcome.error)
        self.assertFalse(issubclass(OutOfTime, Exception))

    def test_names(self):
        self.assertEqual([c.name for c in chosen("w1-*")], ["w1-shared", "w1-static"])
        self.assertEqual([c.name for c in chosen("kill,nccl")], ["kill", "nccl"])
        self.assertEqual(len(chosen(None)), len(CHECKS))
        with self.assertRaises(SystemExit):
            chosen("no-such")

    def test_commands_are_shown_without_paths(self):
        command = ["/a/b/vramscope", "run", "-o", "/tmp/x/log", "--", "/usr/bin/python3", "w2.py"]
        self.assertEqual(shown(command, {"A": "1"}), "A=1 vramscope run -o log -- python3 w2.py")

    def test_results_are_written(self):
        good, bad = Outcome("good", "all is well"), Outcome("bad", "nothing is")
        good.expect_equal("one", 1, 1)
        good.figure("bytes", 3 * MIB)
        good.table("rows", [{"a": 1, "b": None}, {"a": 2, "c": "x|y"}])
        bad.expect_equal("two", {1}, {2})
        (self.path / "log").mkdir()
        (self.path / "log" / "file").write_text("x")
        bad.keep.append(self.path / "log")
        good.end()
        bad.end()
        write_json(self.path / "r.json", {"gpu": "none"}, [good, bad])
        write_markdown(self.path / "r.md", {"gpu": "none"}, [good, bad])
        text = (self.path / "r.md").read_text()
        self.assertIn("| bad | FAILED | 0/1 |", text)
        self.assertIn("3145728 (3.000 MiB)", text)
        self.assertEqual(keep_logs(self.path / "f.tar.gz", [good, bad]), [])
        self.assertTrue((self.path / "f.tar.gz").exists())
        self.assertTrue(bad.failed and not good.failed)

    def test_windows(self):
        found = [("sync", 0, 10, 1), ("sync", 10, 30, 2), ("async", 12, 15, 3), ("sync", 40, 60, 1)]
        inside = within(found, [(5, 35)])
        self.assertEqual(inside, found[1:3])
        self.assertEqual(
            summary(inside, "sync"), {"windows": 1, "median_ns": 10, "p10_ns": 10.0, "p90_ns": 10.0}
        )
        self.assertEqual(summary([], "sync")["windows"], 0)


if __name__ == "__main__":
    unittest.main()
