"""Work of a start that takes minutes (fetching, converting and loading a model) and ends at once when the service is told to end."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")

UNWIND_SECONDS = 2.0
"""For what was interrupted to end the processes and remove the files that it has made. What hangs in a single call is left to the end of
the process."""


class StartInterrupted(Exception):
    """The service was told to end before it was ready."""


class Loading:
    """Runs blocking work in threads that are abandoned once it was interrupted. Used on the event loop."""

    def __init__(self) -> None:
        self.interrupted = False
        self._task: asyncio.Task[object] | None = None
        self._idle = threading.Event()
        self._idle.set()

    async def run(self, work: Callable[[], T]) -> T:
        """What the work returns. Raises what it raises, and `StartInterrupted`."""
        self.check()
        self._idle.clear()
        task = asyncio.ensure_future(anyio.to_thread.run_sync(self._noted, work, abandon_on_cancel=True))
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            if self.interrupted:
                raise StartInterrupted from None
            raise

    def interrupt(self) -> None:
        """Ends what runs: nobody waits for it any longer, and its next `check` raises."""
        self.interrupted = True
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def check(self) -> None:
        """Called by the work, from its thread, as often as it can. Raises `StartInterrupted`."""
        if self.interrupted:
            raise StartInterrupted

    async def unwound(self) -> None:
        """Waits for what was interrupted, but not long."""
        await asyncio.to_thread(self._idle.wait, UNWIND_SECONDS)

    def _noted(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            self._idle.set()
