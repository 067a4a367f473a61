"""Work of a start that is given up: whoever waits hears of it at once, and what the work had begun is undone."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service import loading as loading_module
from service.loading import Loading, StartInterrupted


def test_work_returns_what_it_returns_and_raises_what_it_raises() -> None:
    async def run() -> None:
        loading = Loading()
        assert await loading.run(lambda: 5) == 5
        with pytest.raises(ValueError, match="broken"):
            await loading.run(lambda: int("broken"))
        await loading.unwound()
        assert loading.interrupted is False

    asyncio.run(run())


def test_work_runs_on_a_thread_of_its_own() -> None:
    async def run() -> int:
        return await Loading().run(threading.get_ident)

    assert asyncio.run(run()) != threading.get_ident()


async def interrupted(loading: Loading, work: Callable[[], None], started: threading.Event) -> Loading:
    waiting = asyncio.ensure_future(loading.run(work))
    await asyncio.to_thread(started.wait)
    loading.interrupt()
    with pytest.raises(StartInterrupted):
        await waiting
    assert loading.interrupted
    return loading


def test_whoever_waits_for_interrupted_work_hears_of_it_although_the_work_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "UNWIND_SECONDS", 0.0)
    started, never = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        never.wait()

    async def run() -> None:
        await (await interrupted(Loading(), hang, started)).unwound()
        never.set()

    asyncio.run(run())


def test_interrupted_work_is_unwound(tmp_path: Path) -> None:
    loading, started, made = Loading(), threading.Event(), tmp_path / "partial"

    def work() -> None:
        made.touch()
        try:
            started.set()
            while True:
                time.sleep(0.01)
                loading.check()
        finally:
            made.unlink()

    async def run() -> None:
        await (await interrupted(loading, work, started)).unwound()
        assert not made.exists()

    asyncio.run(run())


def test_nothing_begins_after_an_interruption() -> None:
    async def run() -> None:
        loading, ran = Loading(), threading.Event()
        loading.interrupt()
        with pytest.raises(StartInterrupted):
            await loading.run(ran.set)
        await loading.unwound()
        assert not ran.is_set()

    asyncio.run(run())


def test_an_interruption_after_the_work_harms_nobody() -> None:
    async def run() -> None:
        loading = Loading()
        assert await loading.run(lambda: 5) == 5
        loading.interrupt()
        await loading.unwound()

    asyncio.run(run())


def test_a_waiter_that_is_cancelled_by_others_is_not_told_of_an_interruption() -> None:
    started, end = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        end.wait()

    async def run() -> None:
        waiting = asyncio.ensure_future(Loading().run(work))
        await asyncio.to_thread(started.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        end.set()

    asyncio.run(run())
