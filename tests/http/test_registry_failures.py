"""A registry that can't be written for a while, or for good, while saves end."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

import service.runtime
from service.registry.commits import CommitThread
from service.registry.database import DATABASE
from service.registry.registry import Registry
from service.saves import reaper, saver
from tests.http.gate import PublishingGate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from service.registry.commits import Operation
    from tests.http.conftest import Service, Services


class Transactions:
    """Counts the transactions that have failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed = 0
        self._transact = CommitThread._transact
        transactions = self

        def counted(thread: CommitThread, group: Sequence[Operation[object]]) -> list[object]:
            outcomes = transactions._transact(thread, group)
            transactions.failed += any(isinstance(outcome, sqlite3.OperationalError) for outcome in outcomes)
            return outcomes

        monkeypatch.setattr(CommitThread, "_transact", counted)

    def until_failed(self, times: int) -> None:
        while self.failed < times:
            pass


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> Transactions:
    monkeypatch.setattr(service.runtime, "Registry", partial(Registry, busy_seconds=0.02))
    return Transactions(monkeypatch)


@contextmanager
def locked(tmp_path: Path) -> Iterator[None]:
    """Another process writes to the registry."""
    blocker = sqlite3.connect(tmp_path / "state" / DATABASE, isolation_level=None, timeout=60)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        blocker.execute("ROLLBACK")
        blocker.close()


def names(running: Service) -> list[str]:
    return sorted(path.name for path in running.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("n", [1, 2])
def test_a_commit_that_fails_for_a_while_only_delays_the_answer(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: Transactions, n: int
) -> None:
    with services.run() as running, ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        answer = pool.submit(running.completed, n=n, kv_transfer_params={})
        gate.reached.wait()
        with locked(tmp_path):
            gate.open.set()
            transactions.until_failed(3)
        transfers = [choice["kv_transfer_params"] for choice in answer.result()["choices"]]
        assert [transfer["status"] for transfer in transfers] == ["completed"] * n
        assert [running.record(transfer["save_id"])["status"] for transfer in transfers] == ["completed"] * n
        assert running.client.delete(f"/saves/{transfers[0]['save_id']}").status_code == 204
        assert len([name for name in names(running) if name.endswith(".safetensors")]) == n - 1


@pytest.mark.parametrize("n", [1, 2])
def test_where_the_registry_stays_locked_the_file_is_taken_back_and_the_record_ends(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: Transactions, n: int
) -> None:
    monkeypatch.setattr(saver, "COMMIT_TIMEOUT_SECONDS", 0.1)
    with services.run() as running, ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        answer = pool.submit(running.refused, 500, n=n, kv_transfer_params={"idempotency_key": "locked"})
        gate.reached.wait()
        with locked(tmp_path):
            gate.open.set()
            error = answer.result()
            assert names(running) == []
            assert running.client.delete(f"/saves/{error['save_id']}").status_code == 500
        assert running.client.delete(f"/saves/{error['save_id']}").status_code == 204
        assert running.record(error["save_id"], wait=0)["status"] == "failed"
        assert running.client.delete(f"/saves/{error['save_id']}").status_code == 204
        assert running.client.get(f"/saves/{error['save_id']}").status_code == 404


def test_the_key_of_a_save_whose_end_could_not_be_recorded_can_be_used_again(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: Transactions
) -> None:
    monkeypatch.setattr(saver, "COMMIT_TIMEOUT_SECONDS", 0.1)
    body = {"kv_transfer_params": {"idempotency_key": "locked", "hidden_states_path": "x.safetensors"}}
    with services.run() as running, ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        answer = pool.submit(running.refused, 500, **body)
        gate.reached.wait()
        with locked(tmp_path):
            gate.open.set()
            answer.result()
        assert running.completed(**body)["kv_transfer_params"]["status"] == "completed"


def test_a_record_whose_end_could_not_be_recorded_ends_by_itself(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: Transactions
) -> None:
    monkeypatch.setattr(saver, "COMMIT_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(reaper, "RETRY_SECONDS", 0.01)
    with services.run() as running, ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        answer = pool.submit(running.refused, 500, kv_transfer_params={})
        gate.reached.wait()
        with locked(tmp_path):
            gate.open.set()
            save_id = answer.result()["save_id"]
            assert running.record(save_id, wait=0)["status"] not in ("completed", "failed")
        assert running.record(save_id)["status"] == "failed"


@pytest.mark.parametrize("deleting", [False, True])
def test_the_service_ends_while_the_registry_is_locked(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: Transactions, deleting: bool
) -> None:
    with locked_after_the_end(tmp_path) as lock, ThreadPoolExecutor(1) as pool, services.run() as running:
        with PublishingGate(monkeypatch) as gate:
            transfer = running.completed(kv_transfer_params={"wait": False, "hidden_states_path": "x.safetensors"})["kv_transfer_params"]
            gate.reached.wait()
            lock.begin()
        transactions.until_failed(2)
        if deleting:
            pool.submit(running.client.delete, f"/saves/{transfer['save_id']}")
    with services.run() as running:
        record = running.record(transfer["save_id"])
        assert record["status"] in ("completed", "failed", "cancelled")
        assert ("x.safetensors" in names(running)) is (record["status"] == "completed")


class LateLock:
    def __init__(self, tmp_path: Path) -> None:
        self._path = tmp_path / "state" / DATABASE
        self._blocker: sqlite3.Connection | None = None

    def begin(self) -> None:
        self._blocker = sqlite3.connect(self._path, isolation_level=None, timeout=60, check_same_thread=False)
        self._blocker.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        if self._blocker is not None:
            self._blocker.close()


@contextmanager
def locked_after_the_end(tmp_path: Path) -> Iterator[LateLock]:
    """A lock that is held until the service has ended."""
    lock = LateLock(tmp_path)
    try:
        yield lock
    finally:
        lock.end()
