"""Tests of the checks of ranks and sites; no GPU: python3 -m unittest tests/gpu/test_sites.py

Each comparison is shown what agrees with the program, and what does not.
"""

import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import checks  # noqa: E402,F401
from checks import ddp, frameworks  # noqa: E402
from harness import synthetic  # noqa: E402
from harness.context import Recording  # noqa: E402
from harness.log import Log  # noqa: E402
from harness.outcome import Outcome  # noqa: E402
from harness.registry import CHECKS, Check, lacking  # noqa: E402
from harness.stacks import by_site, goes_through, longest, placed, whole  # noqa: E402
from marks import marked  # noqa: E402
from run import run_all  # noqa: E402

MIB = 1 << 20
PIDS = (41, 42)
STACKS = [
    {"stack_id": 7, "site": "train.py:5 f", "frame_ids": [1, 2, 3], "complete": True},
    {"stack_id": 8, "site": "libnccl.so.2", "frame_ids": [1, 4], "complete": True},
    {"stack_id": 9, "site": "train.py:6 g", "frame_ids": [1, 4, 2, 3], "complete": False},
]
FRAMES = [
    {"frame_id": 1, "function": "cuMemCreate", "module": "/usr/lib/libcuda.so.1", "kind": "native"},
    {"frame_id": 2, "function": "f", "file": "/a/train.py", "line": 5, "kind": "python"},
    {"frame_id": 3, "function": "main", "file": "/a/train.py", "line": 9, "kind": "python"},
    {"frame_id": 4, "function": "+0x1", "module": "/a/libnccl.so.2", "kind": "native"},
]


def failures(outcome):
    """What did not hold."""
    return [expectation["what"] for expectation in outcome.expectations if not expectation["ok"]]


class Folder(unittest.TestCase):
    """A test with a folder for logs."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name)

    def log(self, events, **tables):
        """Writes a log with stacks and opens it."""
        tables = {"stacks": STACKS, "frames": FRAMES, **tables}
        synthetic.write(self.path, {"events": events, **tables})
        return Log(self.path)


class Stacks(Folder):
    """Sites of events, and whole stacks."""

    def rows(self):
        events = synthetic.Events(PIDS[0])
        for number, stack in enumerate((7, 8, 9, 0)):
            events.alloc("cuMemCreate", "device", number, (number + 1) * MIB)
            events.rows[-1]["stack_id"] = stack
        return self.log(events.rows)

    def test_events_get_their_site_and_libraries(self):
        log = self.rows()
        rows = placed(log, log.events)
        self.assertEqual(rows.site.fillna("-").tolist()[::3], ["train.py:5 f", "-"])
        self.assertEqual(goes_through(rows, "libnccl").tolist(), [False, True, True, False])
        self.assertEqual(by_site(rows)[0]["bytes"], 4 * MIB)
        self.assertEqual(len(by_site(rows)), 4)

    def test_whole_stacks(self):
        log = self.rows()
        self.assertEqual(longest(log, [7, 8, 9]), 7)
        self.assertIsNone(longest(log, [9, 0]))
        lines = whole(log, 7)
        self.assertEqual([line["line"] for line in lines], [None, "train.py:5", "train.py:9"])
        self.assertEqual(lines[0]["library"], "libcuda.so.1")


class Ranks(Folder):
    """Two ranks of a job."""

    def events(self):
        """A rank that creates, exports, imports and gives everything back."""
        events = synthetic.Events(PIDS[0])
        made = events.alloc("cuMemCreate", "device", 0x10, 2 * MIB)
        events.row("export", "cuMemExportToShareableHandle", "device", alloc_id=made)
        got = events.alloc("cuMemImportFromShareableHandle", "imported", 0x20, None, op="import")
        for number, alloc_id in enumerate((made, got)):
            spot = {"addr": 0x1000 + number, "size_bytes": MIB, "alloc_id": alloc_id}
            events.row("map", "cuMemMap", "virtual", **spot)
            events.row("unmap", "cuMemUnmap", "virtual", **spot)
            events.free("cuMemRelease", alloc_id)
        events.alloc("cuMemAlloc_v2", "device", 0x30, MIB)
        return events

    def compare(self, rows):
        outcome, log = Outcome("x", ""), self.log(rows)
        ddp.compare_references(outcome, "rank 0", log.events)
        ddp.compare_end(outcome, "rank 0", log.events, len(rows) * 1000)
        return failures(outcome)

    def test_references_that_close(self):
        events = self.events()
        events.exit()
        self.assertEqual(self.compare(events.rows), [])

    def test_a_handle_that_only_the_end_frees_is_noticed(self):
        events = self.events()
        events.alloc("cuMemCreate", "device", 0x40, MIB)
        events.exit()
        found = self.compare(events.rows)
        self.assertIn("rank 0: created + retained + imported = released", found)
        self.assertIn("rank 0: every handle is freed by a call", found)
        self.assertIn("rank 0: no handle is live after destroy", found)

    def test_a_map_that_stays_and_bytes_that_stay_are_noticed(self):
        events = self.events()
        events.row("map", "cuMemMap", "virtual", addr=5, size_bytes=MIB, alloc_id=1)
        found = self.compare(events.rows)
        self.assertIn("rank 0: mapped = unmapped", found)
        self.assertIn("rank 0: maps at the end", found)
        self.assertIn("rank 0: sum(delta_bytes) by level", found)

    def processes(self):
        return [
            {"ts_ns": 1, "proc_id": synthetic.PROC_ID + n, "pid": pid, "rank": n, "local_rank": n}
            | {"world_size": 2, "from_start": True}
            for n, pid in enumerate(PIDS)
        ]

    def test_identity(self):
        events = self.events()
        log = self.log(events.rows, processes=self.processes())
        true = {"rank": 0, "local_rank": 0, "world_size": 2, "pid": PIDS[0], "uuid": "GPU-x"}
        for change, wrong in (({}, 0), ({"rank": 1}, 1), ({"uuid": "GPU-y"}, 1)):
            outcome = Outcome("x", "")
            ddp.compare_identity(outcome, log, true | change)
            self.assertEqual(len(failures(outcome)), wrong, change)

    def test_a_stray_context(self):
        devices = [{"gpu_uuid": f"GPU-{n}", "nvml_index": n} for n in range(2)]
        log = self.log([], processes=self.processes(), devices=devices)
        ranks = [{"rank": n, "pid": pid, "uuid": f"GPU-{n}"} for n, pid in enumerate(PIDS)]
        finding = {
            "kind": "context",
            "rank": 1,
            "pid": PIDS[1],
            "gpu_uuid": "GPU-0",
            "main_gpu_uuid": "GPU-1",
            "site": "ddp_train.py:9 restore",
            "bytes": 518 * MIB,
            "sentence": "rank 1 (pid 42) held a context on GPU 0 (518.0 MiB), created at …",
        }
        cases = (
            ([finding], []),
            ([], ["findings of contexts"]),
            ([finding | {"site": "ddp_train.py:8 restore"}], ["site"]),
            ([finding | {"gpu_uuid": "GPU-1"}], ["gpu_uuid"]),
            ([finding, finding], ["findings of contexts"]),
        )
        for findings, wrong in cases:
            outcome = Outcome("x", "")
            true = {"site": "ddp_train.py:9 restore"}
            ddp.compare_stray(outcome, findings, log, ranks, true)
            self.assertEqual(failures(outcome), wrong)

    def test_a_leak_of_one_rank(self):
        leak = {"kind": "leak", "rank": 1, "pid": 42, "site": "a.py:3 f", "sentence": "grew"}
        for findings, wrong in (
            ([leak], 0),
            ([leak | {"site": "a.py:31 f"}], 1),
            ([leak | {"rank": 0, "pid": 41}], 2),
            ([leak, leak | {"kind": "growth", "rank": 0}], 2),
            ([], 2),
        ):
            outcome = Outcome("x", "")
            ddp.compare_leak(outcome, findings, 42, "a.py:3")
            self.assertEqual(len(failures(outcome)), wrong, findings)

    def test_a_leak_of_short_runs(self):
        leak = {"kind": "leak", "rank": 1, "pid": 42, "site": "a.py:3 f", "sentence": "grew"}
        nothing = {"kind": "nothing", "sentence": "no process grew", "not_judged": 0}
        for findings, wrong in (
            ([leak], 0),
            ([leak | {"site": "a.py:4 f"}], 1),
            ([nothing | {"not_judged": 1}], 0),
            ([nothing | {"unclear": 1}], 0),
            ([nothing], 1),
        ):
            outcome = Outcome("x", "")
            ddp.compare_short_leak(outcome, findings, 42, "a.py:3")
            self.assertEqual(len(failures(outcome)), wrong, findings)


class Sites(Folder):
    """Bytes at lines."""

    def compare(self, true):
        events = synthetic.Events(PIDS[0])
        events.alloc("cuMemAlloc_v2", "device", 1, 8 * MIB)
        events.rows[-1]["stack_id"] = 7
        log = self.log(events.rows)
        outcome, rows = Outcome("x", ""), placed(log, log.events)
        fits = frameworks.exactly(true["site"])
        frameworks.compare_exact(outcome, "x", rows, true, fits, true["site"])
        return failures(outcome)

    def test_the_line_its_bytes_and_its_level(self):
        true = {"site": "train.py:5 f", "bytes": 8 * MIB, "level": "device"}
        self.assertEqual(self.compare(true), [])
        for change in ({"bytes": MIB}, {"level": "pool"}, {"site": "train.py:6 f"}):
            self.assertEqual(len(self.compare(true | change)), 1, change)

    def test_sites_of_native_code(self):
        true = {"line": 12, "function": "grow", "outer": "grow_outer"}
        fits = frameworks.cpp_site("sites-shared", true)
        self.assertTrue(fits("sites.cu:12 grow(unsigned long)"))
        self.assertFalse(fits("sites.cu:12 grow_outer(unsigned long)"))
        self.assertFalse(fits("sites.cu:13 grow(unsigned long)"))
        fits = frameworks.cpp_site("sites-nodebug", true)
        self.assertTrue(fits("grow_outer(unsigned long) (sites-nodebug)"))
        self.assertFalse(fits("grow(unsigned long) (sites-nodebug)"))
        self.assertFalse(fits("cudaMalloc (sites-nodebug)"))

    def test_jax_regions(self):
        events = synthetic.Events(PIDS[0])
        events.alloc("cuMemAlloc_v2", "device", 1, 96 * MIB)
        events.rows[-1]["stack_id"] = 7
        log = self.log(events.rows)
        rows = placed(log, log.events)
        for size, wrong in ((96, 0), (64, 0), (100, 1), (47, 1)):
            outcome = Outcome("x", "")
            true = [{"site": "train.py:5 f", "bytes": size * MIB}]
            frameworks.compare_each(outcome, "x", rows, true)
            self.assertEqual(len(failures(outcome)), wrong, size)

    def test_what_a_program_says(self):
        class Said:
            output = 'RANK {"rank": 1}\nRANKS\nnoise\nRANK {"rank": 0}'

        recording = Recording(Said(), self.path, [])
        self.assertEqual([one["rank"] for one in recording.said("RANK")], [1, 0])
        self.assertEqual(recording.said("RANK", rank=0), [{"rank": 0}])

    def test_marks(self):
        def twice():
            return 1  # here and # here are on one line

        line = int(marked(twice).split(":")[1])
        self.assertIn("return 1", Path(__file__).read_text().splitlines()[line - 1])
        with self.assertRaises(AssertionError):
            marked(failures)


class Skipped(Folder):
    """What a machine lacks is no failure, and is said."""

    def test_a_machine_of_one_gpu(self):
        ran = []

        class Context:
            gpus = 1

            def stop_all(self):
                pass

        def run(_context, outcome):
            ran.append(outcome.expect("it ran", True))

        two = Check("two", "x", 1, (), run, 2)
        odd = Check("odd", "x", 1, (), run, 1, ("no_such_package",))
        one = Check("one", "x", 1, (), run)
        outcomes = run_all([two, odd, one], Context(), self.path, {}, 60)
        self.assertEqual([o.status for o in outcomes], ["skipped", "skipped", "pass"])
        self.assertEqual([o.failed for o in outcomes], [False] * 3)
        self.assertIn("needs two GPUs", outcomes[0].line())
        text = (self.path / "results.md").read_text()
        self.assertIn("needs two GPUs, has one", text)
        self.assertIn("no_such_package", text)
        self.assertEqual(len(ran), 1)

    def test_two_gpus_are_enough(self):
        self.assertIsNone(lacking(CHECKS["ddp"], 2))
        self.assertIsNone(lacking(CHECKS["ddp"], 8))


if __name__ == "__main__":
    unittest.main()
