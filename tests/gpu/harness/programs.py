"""Programs that run while a check looks at them: output line by line with times, exit, usage."""

import os
import re
import signal
import subprocess
import threading
import time


class Program:
    """A running program in a process group of its own."""

    def __init__(self, command, env=None, stdin=False):
        self.command = [str(part) for part in command]
        self.lines = []  # (monotonic ns, epoch ns, text) of stdout
        self.errors = []  # lines of stderr
        self.usage = None  # resource usage, once it has ended
        self.code = None
        self._taken = 0
        self._news = threading.Condition()
        self._started = time.monotonic()
        self.seconds = None
        self.process = subprocess.Popen(
            self.command,
            env=env,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, True), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, False), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self):
        """Its process id."""
        return self.process.pid

    @property
    def output(self):
        """All of stdout so far."""
        return "\n".join(text for _, _, text in list(self.lines))

    @property
    def error(self):
        """All of stderr so far."""
        return "\n".join(list(self.errors))

    def _read(self, stream, is_stdout):
        with stream:
            for raw in stream:
                text = raw.decode(errors="replace").rstrip("\n")
                with self._news:
                    if is_stdout:
                        self.lines.append((time.monotonic_ns(), time.time_ns(), text))
                    else:
                        self.errors.append(text)
                    self._news.notify_all()

    def find(self, pattern, stderr=False):
        """First line that `pattern` fits, as a match object, or None."""
        texts = list(self.errors) if stderr else [text for _, _, text in list(self.lines)]
        return next((m for m in (re.search(pattern, text) for text in texts) if m), None)

    def match(self, pattern):
        """First place in its output that `pattern` fits; if none, an error with its last words."""
        found = re.search(pattern, self.output, re.MULTILINE)
        if not found:
            raise RuntimeError(
                f"{self.name} (exit code {self.code}) did not say {pattern!r}: {self.error[-600:]}"
            )
        return found

    def wait_line(self, pattern, timeout, stderr=False):
        """Waits for a line that `pattern` fits."""
        end = time.monotonic() + timeout
        while True:
            found = self.find(pattern, stderr)
            if found:
                return found
            if self.poll() is not None:
                self._join()
                found = self.find(pattern, stderr)
                if found:
                    return found
                raise RuntimeError(
                    f"{self.name} ended with {self.code} before it said {pattern!r}: "
                    f"{self.error[-600:]}"
                )
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} did not say {pattern!r} in {timeout} s")
            with self._news:
                self._news.wait(0.05)

    def next_line(self, timeout):
        """The next line of stdout that was not taken yet; None at the end of the output."""
        end = time.monotonic() + timeout
        while True:
            if self._taken < len(self.lines):
                self._taken += 1
                return self.lines[self._taken - 1][2]
            if self.poll() is not None:
                self._join()
                if self._taken == len(self.lines):
                    return None
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} said nothing for {timeout} s")
            with self._news:
                self._news.wait(0.02)

    @property
    def name(self):
        """Short name for messages."""
        return " ".join(os.path.basename(part) for part in self.command[:6])

    def line_time_ns(self, pattern):
        """Epoch time at which the first line that `pattern` fits was read."""
        for _, epoch_ns, text in list(self.lines):
            if re.search(pattern, text):
                return epoch_ns
        raise RuntimeError(f"{self.name} never said {pattern!r}")

    def say(self, text=""):
        """Writes a line to its stdin."""
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def poll(self):
        """Its exit code (negative: the signal), or None while it runs."""
        if self.code is None:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status, usage = self.pid, 0, None
            if pid == self.pid:
                self.usage = usage
                self.seconds = time.monotonic() - self._started
                self.code = os.waitstatus_to_exitcode(status)
                self.process.returncode = self.code
        return self.code

    def wait(self, timeout):
        """Waits for its end; one that takes longer is stopped and is an error."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.stop()
                raise TimeoutError(f"{self.name} was stopped after {timeout} s")
            time.sleep(0.005)
        self._join()
        return self.code

    def _join(self):
        for reader in self._readers:
            reader.join(2)
        if self.process.stdin and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass

    def signal(self, number):
        """Sends a signal to the program alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def stop(self):
        """Ends it and what it started: SIGTERM, then SIGKILL, to its process group."""
        for number, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 3)):
            running = self.poll() is None
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                return
            if not running:
                continue
            end = time.monotonic() + patience
            while self.poll() is None and time.monotonic() < end:
                time.sleep(0.01)


def proc_cpu_seconds(pid):
    """CPU time of a running process so far."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proc_memory(pid):
    """Peak resident and present anonymous memory of a running process, bytes."""
    found = {}
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key in ("VmHWM", "RssAnon"):
                found[key] = int(value.split()[0]) * 1024
    return found
