"""How a save bears with a disk that is full or fails for a moment, without keeping a writer thread from other saves."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = (errno.EINTR, errno.EAGAIN)
_MAY_PASS = (*DISK_FULL, errno.EIO, *_INTERRUPTED)

AT_ONCE = 16
"""How often an interrupted call is repeated before it, too, is given a pause."""
FIRST_DELAY_SECONDS = 0.01
LONGEST_DELAY_SECONDS = 0.5


class TryLater(Exception):
    """What was asked for can't be done just now: the same call again, after a pause, goes on where this one stopped."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"try again in {seconds} s")
        self.seconds = seconds


@dataclass
class Patience:
    """One save's: pauses that double, and an end to them `seconds` after the first failure."""

    seconds: float
    _deadline: float | None = None
    _delay: float = FIRST_DELAY_SECONDS

    def run(self, call: Callable[[], Result]) -> Result:
        """Raises `TryLater` for what may pass; the `OSError` itself when the time is up, and any that time doesn't heal."""
        for attempts_left in range(AT_ONCE, -1, -1):
            try:
                return call()
            except OSError as error:
                if error.errno in _INTERRUPTED and attempts_left:
                    continue
                raise self._verdict(error) from error
        raise AssertionError("the last attempt either returns or raises")

    def progressed(self) -> None:
        """Something new was written: the next failure has all the time again."""
        self._deadline, self._delay = None, FIRST_DELAY_SECONDS

    def _verdict(self, error: OSError) -> Exception:
        now = time.monotonic()
        self._deadline = now + self.seconds if self._deadline is None else self._deadline
        if error.errno not in _MAY_PASS or now >= self._deadline:
            return error
        delay = min(self._delay, self._deadline - now)
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
        return TryLater(delay)
