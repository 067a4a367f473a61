"""All threads that requests wait for, by purpose and by disk: whatever holds up those of one holds up nothing else.

`asyncio.to_thread` would send everything to one pool, where six huge texts, or one disk that hangs, stop all saves.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from service.errors import Unavailable
from service.shares import Owner, Share, Shares

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 4
TOKEN_THREADS = 2
BODY_THREADS = 2
CLAIM_THREADS = 8
READ_THREADS = 8
REMOVAL_THREADS = 2
MAX_CALLS = 1024
"""Calls to one pool that run or wait; more are refused with 429."""
NO_BOUND = 2**62


@runtime_checkable
class Closing(Protocol):
    """What holds something that must be let go."""

    def close(self) -> None: ...


class Pool:
    """Threads of one purpose. `run` is called on the event loop; a call waits there for its thread, so that it can be given up."""

    def __init__(self, name: str, num_threads: int, calls: Share) -> None:
        """`calls` bounds those that run or wait."""
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._idle = asyncio.Semaphore(num_threads)
        self._calls = calls
        self._closed = False

    async def run(self, owner: Owner, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the function on a thread, in the caller's context. Raises `Busy` where too many wait, or too many of the owner's.

        A caller that is cancelled leaves the queue at once. A call that has begun goes on to its end; what it returns is dropped, and
        closed where it can be.
        """
        self._calls.acquire(owner)
        try:
            await self._idle.acquire()
        except BaseException:
            self._calls.release(owner)
            raise
        if self._closed:
            self._ended(owner)
            raise Unavailable("the service has stopped", code="stopped")
        work = partial(copy_context().run, function, *args, **kwargs)
        call = asyncio.get_running_loop().run_in_executor(self._executor, work)
        call.add_done_callback(lambda _: self._ended(owner))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(_forget)
            raise

    def close(self) -> None:
        """Calls that wait are refused; those that have begun end by themselves. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=False)

    def _ended(self, owner: Owner) -> None:
        self._idle.release()
        self._calls.release(owner)


class DiskPools:
    """Threads for the files of one save root."""

    def __init__(self, shares: Shares) -> None:
        self.claims = Pool("claim", CLAIM_THREADS, shares.share("saves that wait for the disk", MAX_CALLS))
        """What is looked at before a save begins: paths, lock files, free space."""
        self.reads = Pool("read", READ_THREADS, shares.share("downloads that wait for the disk", NO_BOUND))
        """Bounded by `Shares.downloads`: a download that has begun is not refused its next piece."""
        self.removals = Pool("removal", REMOVAL_THREADS, shares.share("files to be removed", NO_BOUND))
        """Bounded by the saves and requests that there are: what must go is not refused."""

    def close(self) -> None:
        for pool in (self.claims, self.reads, self.removals):
            pool.close()


class Threads:
    """The pools of one service."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._disks: dict[str, DiskPools] = {}
        self.texts = Pool("text", TEXT_THREADS, shares.share("texts that wait to be tokenized", MAX_CALLS))
        """Tokenizing and templates of prompts that are to be run."""
        self.tokens = Pool("tokens", TOKEN_THREADS, shares.share("texts that wait to be tokenized", MAX_CALLS))
        """The same for its own sake, of any length, and text out of tokens."""
        self.bodies = Pool("body", BODY_THREADS, shares.share("large bodies that wait to be parsed", MAX_CALLS))

    def disk(self, root: str) -> DiskPools:
        """Those of a save root, by its path. Threads are started as they are needed."""
        if root not in self._disks:
            self._disks[root] = DiskPools(self._shares)
        return self._disks[root]

    def close(self) -> None:
        for pool in (self.texts, self.tokens, self.bodies):
            pool.close()
        for disk in self._disks.values():
            disk.close()


def _forget(call: "asyncio.Future[T]") -> None:
    """Retrieves the exception of a call whose result is no longer needed."""
    if not call.cancelled() and call.exception() is None:
        result = call.result()
        if isinstance(result, Closing):
            result.close()
