"""What a check found: expectations that hold or not, figures, tables."""

import time


class Outcome:
    """Filled in by a check while it runs, so that what was found before a failure is kept."""

    def __init__(self, name, about):
        self.name, self.about = name, about
        self.expectations = []
        self.figures = {}
        self.tables = {}
        self.commands = []
        self.keep = []  # logs and outputs to keep if the check fails
        self.error = None  # what ended the check before its time, in a line
        self.trace = None  # and where
        self.skipped = None  # why it did not run, though it could have
        self.lacks = None  # what the machine lacks for it
        self.seconds = 0.0
        self._began = time.monotonic()

    def expect(self, what, holds, detail=""):
        """Notes whether something holds; `detail` says what was seen instead."""
        holds = bool(holds)
        self.expectations.append(
            {"what": what, "ok": holds, "detail": " ".join(str(detail).split())[:1500]}
        )
        return holds

    def expect_equal(self, what, seen, true):
        """Notes whether two values are equal."""
        return self.expect(what, seen == true, "" if seen == true else f"seen {seen}, true {true}")

    def figure(self, name, value):
        """Notes a figure."""
        self.figures[name] = value

    def table(self, name, rows):
        """Notes a table: a list of dicts with the same keys."""
        self.tables[name] = rows

    def end(self):
        """Stops the clock."""
        self.seconds = round(time.monotonic() - self._began, 1)

    @property
    def status(self):
        """pass, fail, figures (nothing was expected), not run, skipped (the machine's lack)."""
        if self.lacks:
            return "skipped"
        if self.skipped:
            return "not run"
        if self.error or any(not e["ok"] for e in self.expectations):
            return "fail"
        return "pass" if self.expectations else "figures"

    @property
    def failed(self):
        """Counts towards the exit code; what the machine cannot run does not."""
        return self.status in ("fail", "not run")

    def line(self):
        """One line for the terminal."""
        failures = [e for e in self.expectations if not e["ok"]]
        text = f"{self.status:8} {self.name:18} {self.seconds:6.1f} s"
        text += f"  {len(self.expectations) - len(failures)}/{len(self.expectations)} hold"
        for failure in failures[:3]:
            text += f"; NOT: {failure['what']} ({failure['detail'][:200]})"
        ended = self.error or self.skipped or self.lacks
        if ended:
            text += f"; {ended[:400]}"
        return text

    def as_dict(self):
        """For results.json."""
        return {
            "check": self.name,
            "about": self.about,
            "status": self.status,
            "seconds": self.seconds,
            "expectations": self.expectations,
            "figures": self.figures,
            "tables": self.tables,
            "commands": self.commands,
            "error": self.error,
            "trace": self.trace,
            "not_run": self.skipped,
            "skipped": self.lacks,
        }
