"""Retries of a save's disk operations with exponential backoff. A writer thread serves other saves between the attempts."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_INTERRUPTED = (errno.EINTR, errno.EAGAIN)
_TRANSIENT = (*DISK_FULL, errno.EIO, *_INTERRUPTED)

MAX_IMMEDIATE_RETRIES = 16
"""Retries of an interrupted call without a delay; further ones are delayed like those of other errors."""
INITIAL_DELAY_SECONDS = 0.01
MAX_DELAY_SECONDS = 0.5


class RetryLater(Exception):
    """The operation failed for now. The same call, repeated after `seconds`, continues where this one stopped."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"try again in {seconds} s")
        self.seconds = seconds


@dataclass
class RetryPolicy:
    """The retries of one save: the delay doubles, and they end `seconds` after the first failure."""

    seconds: float
    _deadline: float | None = None
    _delay: float = INITIAL_DELAY_SECONDS

    def run(self, call: Callable[[], Result]) -> Result:
        """Raises `RetryLater` for a transient error; the `OSError` itself after the deadline, or where it isn't transient."""
        for attempts_left in range(MAX_IMMEDIATE_RETRIES, -1, -1):
            try:
                return call()
            except OSError as error:
                if error.errno in _INTERRUPTED and attempts_left:
                    continue
                raise self._error_to_raise(error) from error
        raise AssertionError("the last attempt either returns or raises")

    def reset(self) -> None:
        """Something new was written: the next failure starts a new deadline."""
        self._deadline, self._delay = None, INITIAL_DELAY_SECONDS

    def _error_to_raise(self, error: OSError) -> Exception:
        now = time.monotonic()
        self._deadline = now + self.seconds if self._deadline is None else self._deadline
        if error.errno not in _TRANSIENT or now >= self._deadline:
            return error
        delay = min(self._delay, self._deadline - now)
        self._delay = min(2 * self._delay, MAX_DELAY_SECONDS)
        return RetryLater(delay)
