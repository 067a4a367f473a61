"""Runs the service as a process of its own: for the demonstration, the benchmark and end-to-end tests."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

READY = re.compile(r"Strata is ready at (http://\S+)")
KEPT_LINES = 40
GRACE_SECONDS = 10.0


class LaunchError(Exception):
    """The service didn't start or didn't stop as it should; the message ends with the last lines it printed."""


def _ignore(line: str) -> None:
    pass


class ServiceProcess:
    """`strata serve` as a child process. `with` starts it, waits until it is ready and never leaves it behind.

    The child has a session of its own, so Ctrl-C in a terminal reaches only the parent, which then stops the child.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        on_line: Callable[[str], None] = _ignore,
        ready_timeout_seconds: float = 900.0,
        cwd: Path | None = None,
    ) -> None:
        self.url = ""
        self._arguments = list(arguments)
        self._on_line = on_line
        self._ready_timeout_seconds = ready_timeout_seconds
        self._cwd = cwd
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._ready_or_ended = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the service and waits until it says it is ready; `with` does this. Raises `LaunchError`."""
        assert self._process is None, "a ServiceProcess starts once"
        command = [sys.executable, "-m", "service", "serve", *self._arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=self._cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, name="service-output", daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout_seconds: float = 60.0) -> None:
        """Asks the service to drain and end, and checks that it ended with 0. Raises `LaunchError`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise LaunchError(self._with_tail(f"the service was still running {timeout_seconds:.0f} s after SIGTERM")) from None
        self._join_reader()
        if code != 0:
            raise LaunchError(self._with_tail(f"the service ended with {code}"))

    def kill(self) -> None:
        """Ends the service if it still runs: asks first, so that it cleans up, and insists after some seconds."""
        if self._process is not None and self._process.poll() is None:
            try:
                self._process.terminate()
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                self._process.kill()
                self._process.wait()
        self._join_reader()

    def tail(self) -> str:
        """The last lines that the service printed."""
        return "\n".join(self._lines)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._take_line(line.rstrip())
        self._ready_or_ended.set()

    def _take_line(self, line: str) -> None:
        self._lines.append(line)
        self._on_line(line)
        found = READY.search(line)
        if found and not self.url:
            self.url = found.group(1).rstrip("/")
            self._ready_or_ended.set()

    def _wait_until_ready(self) -> None:
        if not self._ready_or_ended.wait(self._ready_timeout_seconds):
            raise LaunchError(self._with_tail(f"the service wasn't ready after {self._ready_timeout_seconds:.0f} s"))
        if not self.url:
            raise LaunchError(self._with_tail("the service ended before it was ready"))

    def _join_reader(self) -> None:
        if self._reader is not None:
            self._reader.join(timeout=5.0)

    def _with_tail(self, message: str) -> str:
        return f"{message}; its last lines were:\n{self.tail()}" if self._lines else message
