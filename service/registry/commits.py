"""A thread that owns a database and commits what callers ask for in groups."""

import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from service.errors import DiskFull, ServiceError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_GROUP = 512
"""Operations in one transaction: bounds how long the first of them waits for its commit."""


@dataclass(frozen=True)
class Operation(Generic[T]):
    run: Callable[[sqlite3.Connection], T]
    writes: bool
    future: "Future[T]"


class CommitThread:
    """Runs operations in the order they came. Whatever gathers while one commit runs goes into the next transaction together."""

    def __init__(self, database: sqlite3.Connection, *, committed: Callable[[], None], failed: Callable[[], None]) -> None:
        """`committed` and `failed` are called on the thread after each group, before the group's futures are resolved."""
        self._database = database
        self._committed, self._failed = committed, failed
        self._operations: queue.SimpleQueue[Operation[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._given_up = False
        self._closing = threading.Lock()
        self.commits = 0
        """Transactions so far; fewer than changes where they were grouped."""
        self._thread = threading.Thread(target=self._serve, name="registry", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[sqlite3.Connection], T], *, writes: bool = False) -> "Future[T]":
        """Its future is resolved after the commit: with the result, or with what it has raised, which harms no other operation."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                future.set_exception(Unavailable("the registry is closed"))
            else:
                self._operations.put(Operation(run, writes, future))
        return future

    def close(self) -> None:
        """Commits what was asked for and closes the database; whatever is left when a commit fails fails with it. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._operations.put(None)
        self._thread.join()

    def _serve(self) -> None:
        open_to_more = True
        while open_to_more:
            group, open_to_more = self._next_group()
            outcomes = self._outcomes(group)
            for operation, outcome in zip(group, outcomes, strict=True):
                settle(operation.future, outcome)
        self._database.close()

    def _outcomes(self, group: Sequence[Operation[Any]]) -> list[Any]:
        """A transaction may wait for a locked database for seconds: once the thread is to end, the first that fails is the last."""
        return [Unavailable("the registry is closed")] * len(group) if self._given_up else self._transact(group)

    def _next_group(self) -> tuple[list[Operation[Any]], bool]:
        """All operations that have gathered, and whether more can come."""
        group: list[Operation[Any]] = []
        operation = self._operations.get()
        while operation is not None:
            group.append(operation)
            if len(group) == MAX_GROUP or self._operations.empty():
                return group, True
            operation = self._operations.get()
        return group, False

    def _transact(self, group: Sequence[Operation[Any]]) -> list[Any]:
        """Runs a group in one transaction. Outcomes are results or exceptions."""
        database = self._database
        writes = any(operation.writes for operation in group)
        try:
            if writes:
                database.execute("BEGIN IMMEDIATE")
            outcomes = [_attempt(database, operation) for operation in group]
            if writes:
                database.execute("COMMIT")
                self.commits += 1
        except Exception as error:  # Whatever it is, the callers must hear of it and the thread must go on.
            log.exception("the registry could not commit %d operations", len(group))
            with contextlib.suppress(sqlite3.Error):
                if database.in_transaction:
                    database.execute("ROLLBACK")
            self._given_up = self._closed
            self._failed()
            return [error] * len(group)
        self._committed()
        return outcomes


def settle(future: "Future[Any]", outcome: Any) -> None:  # noqa: ANN401 - result or exception
    """Resolves a future, unless it was cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(_as_service_error(outcome))
    else:
        future.set_result(outcome)


def _attempt(database: sqlite3.Connection, operation: Operation[Any]) -> Any:  # noqa: ANN401 - result or exception
    if not operation.writes:
        return _outcome(database, operation)
    database.execute("SAVEPOINT operation")
    outcome = _outcome(database, operation)
    if isinstance(outcome, Exception):
        if not database.in_transaction:
            raise outcome  # A full disk or an I/O error ends the transaction, with the operations before this one.
        database.execute("ROLLBACK TO operation")
    database.execute("RELEASE operation")
    return outcome


def _outcome(database: sqlite3.Connection, operation: Operation[Any]) -> Any:  # noqa: ANN401 - result or exception
    try:
        return operation.run(database)
    except Exception as error:  # For the one who asked.
        return error


def _as_service_error(error: Exception) -> Exception:
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    full = code == sqlite3.SQLITE_FULL
    answer = (
        DiskFull("the disk of the state directory is full")
        if full
        else ServiceError("the registry of saves could not carry out the operation", code="registry_error")
    )
    answer.__cause__ = error
    return answer
