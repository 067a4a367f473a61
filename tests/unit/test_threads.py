"""Pools of threads: bounded, of one purpose each, and left at once by whoever gives up waiting."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from service.errors import Busy, Unavailable
from service.shares import Share, Shares
from service.threads import Pool, Threads


def never() -> bool:
    return False


def pool(num_threads: int = 1, most: int = 8) -> Pool:
    return Pool("test", num_threads, Share("calls", most, never))


def test_a_call_runs_on_a_thread_in_its_callers_context_and_its_failure_is_the_callers() -> None:
    said: ContextVar[str] = ContextVar("said")

    def fail() -> None:
        raise ValueError(said.get())

    async def run() -> None:
        said.set("mine")
        made = pool()
        assert await made.run(None, threading.get_ident) != threading.get_ident()
        with pytest.raises(ValueError, match="mine"):
            await made.run(None, fail)
        made.close()

    asyncio.run(run())


def test_more_calls_than_may_wait_are_refused_and_places_come_back() -> None:
    async def run() -> None:
        gate, made = threading.Event(), pool(most=3)
        calls = [asyncio.ensure_future(made.run(None, gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="3 of 3"):
            await made.run(None, gate.wait)
        gate.set()
        assert await asyncio.gather(*calls) == [True] * 3
        assert await made.run(None, gate.wait)
        made.close()

    asyncio.run(run())


def test_whoever_gives_up_waiting_leaves_the_queue_and_its_call_never_runs() -> None:
    async def run() -> None:
        gate, made, ran = threading.Event(), pool(most=2), []
        held = asyncio.ensure_future(made.run(None, gate.wait))
        waiting = asyncio.ensure_future(made.run(None, ran.append, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        other = asyncio.ensure_future(made.run(None, ran.append, 2))  # in the place of the one that left
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, other)
        assert ran == [2]
        made.close()

    asyncio.run(run())


def test_a_call_that_was_given_up_while_it_ran_keeps_its_thread_until_its_end() -> None:
    async def run() -> None:
        gate, begun, made = threading.Event(), threading.Event(), pool(most=1)

        def work() -> None:
            begun.set()
            gate.wait()

        held = asyncio.ensure_future(made.run(None, work))
        while not begun.is_set():
            await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        with pytest.raises(Busy):
            await made.run(None, gate.wait)
        gate.set()
        while True:
            try:
                assert await made.run(None, gate.wait)
                break
            except Busy:
                await asyncio.sleep(0)
        made.close()

    asyncio.run(run())


def test_pools_don_t_wait_for_each_other() -> None:
    async def run() -> None:
        gate, threads = threading.Event(), Threads(Shares(1))
        held = [asyncio.ensure_future(threads.disk("/a").claims.run(None, gate.wait)) for _ in range(100)]
        for other in (threads.texts, threads.bodies, threads.disk("/a").reads, threads.disk("/a").removals, threads.disk("/b").claims):
            assert await other.run(None, threading.get_ident)
        gate.set()
        await asyncio.gather(*held)
        threads.close()

    asyncio.run(run())


def test_a_closed_pool_refuses_whoever_waits() -> None:
    async def run() -> None:
        gate, made = threading.Event(), pool()
        held, waiting = (asyncio.ensure_future(made.run(None, gate.wait)) for _ in range(2))
        await asyncio.sleep(0)
        made.close()
        gate.set()
        assert await held
        with pytest.raises(Unavailable):
            await waiting

    asyncio.run(run())


def test_what_a_call_has_opened_for_nobody_is_closed() -> None:
    class Opened:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def run() -> None:
        gate, begun, made, opened = threading.Event(), threading.Event(), pool(), Opened()

        def work() -> Opened:
            begun.set()
            gate.wait()
            return opened

        call = asyncio.ensure_future(made.run(None, work))
        while not begun.is_set():
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.set()
        while not opened.closed:
            await asyncio.sleep(0)
        made.close()

    asyncio.run(run())
