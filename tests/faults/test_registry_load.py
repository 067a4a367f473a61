"""The registry under many saves at once. `STRATA_TEST_REGISTRY_SAVES=20000` is the full run; `-s` shows the rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from engine.config import Durability
from service.registry.records import SaveRecord, SaveStatus
from service.registry.registry import Registry
from tests.faults.children import number_from_environment

SAVES = number_from_environment("STRATA_TEST_REGISTRY_SAVES", 2000)
LIVES: tuple[SaveStatus, ...] = ("running", "writing", "completed")


def record(number: int) -> SaveRecord:
    return SaveRecord(f"{number:032x}", f"/saves/{number}.safetensors", "request", "tiny", (2, 4, 6), "float32", created=float(number))


def live(registry: Registry, numbers: range) -> list[Future[Any]]:
    """Lets saves through all their stages: an insert and three updates each."""
    done: list[Future[Any]] = []
    for number in numbers:
        saved = record(number)
        done.append(registry.insert(saved))
        done += [registry.update(saved.id, status=status) for status in LIVES]
    return done


@pytest.mark.parametrize("durability", ["file", "full"])
def test_saves_at_once_share_their_commits(tmp_path: Path, durability: Durability, record_property: Callable[[str, Any], None]) -> None:
    registry, gathered = Registry(tmp_path, durability=durability), threading.Event()
    registry._thread.submit(lambda database: gathered.wait())  # however busy the machine is, they are all there before the first commit
    futures = live(registry, range(SAVES))
    started, before = time.perf_counter(), registry.commits
    gathered.set()
    wait(futures)
    seconds, commits = time.perf_counter() - started, registry.commits - before
    assert [future.exception() for future in futures if future.exception() is not None] == []
    assert registry.unfinished().result() == []
    assert registry.get(record(SAVES - 1).id).result() is not None
    registry.close()
    rate = f"{durability}: {SAVES / seconds:.0f} saves/s, {len(futures) / seconds:.0f} changes/s, {commits} commits"
    record_property("rate", rate)
    print(rate)
    assert commits <= len(futures) / 10


def test_many_threads_that_wait_for_each_commit_still_share_them(tmp_path: Path) -> None:
    registry, per_thread, num_threads = Registry(tmp_path, durability="full"), 40, 16
    before = registry.commits

    def work(first: int) -> None:
        for number in range(first, first + per_thread):
            for future in live(registry, range(number, number + 1)):
                future.result()

    threads = [threading.Thread(target=work, args=[per_thread * thread]) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    commits = registry.commits - before
    assert len(registry.list(status="completed", limit=10_000).result()) == per_thread * num_threads
    registry.close()
    # One commit per change would be four times as many as there are saves.
    assert commits < per_thread * num_threads
