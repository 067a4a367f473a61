"""The records of all saves, in SQLite.

One thread owns the connection. Callers hand it operations and get futures, which are resolved after the commit: what has been
acknowledged is kept. A burst of saves costs a few commits, since they are grouped (`service/registry/commits.py`).

How far "kept" goes follows `durability`. Every commit survives the end of the process, also by SIGKILL, since it is in the operating
system's hands by then. A power cut is another matter: only `full` promises that a published file is still there afterwards, and then the
record must be too, so commits are synced (`synchronous = FULL`). For `none` and `file` a sync per commit would guard records of files
whose names may be lost anyway, so `NORMAL` is used: after a power cut the registry is sound, but may lack the last commits.
"""

import asyncio
import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from engine.config import Durability
from service.errors import Unavailable
from service.registry import queries
from service.registry.commits import CommitThread, settle
from service.registry.database import StateDirectory, open_database
from service.registry.records import GroupRecord, SaveRecord, SaveStatus, StoredGroup

Records = list[SaveRecord]
Ids = list[str]


class Registry:
    """Records of saves. Methods may be called from any thread and return at once; use `asyncio.wrap_future` in coroutines."""

    def __init__(
        self,
        state_directory: Path,
        *,
        durability: Durability = "file",
        keep_seconds: float = 7 * 86400,
        keep_count: int = 1_000_000,
        busy_seconds: float = 5.0,
    ) -> None:
        """Takes the state directory and opens the registry in it. Raises `ConfigError` where either can't be had.

        `busy_seconds` is how long another process (a backup, a look with the sqlite3 shell) may hold the database.
        """
        self._keep_seconds, self._keep_count = keep_seconds, keep_count
        # These two are touched by the registry's thread only.
        self._waiting: dict[str, set[Future[SaveRecord | None]]] = {}
        self._ended_now: dict[str, SaveRecord | None] = {}
        self._state = StateDirectory(state_directory)
        try:
            database = open_database(state_directory, sync_commits=durability == "full", busy_seconds=busy_seconds)
        except BaseException:
            self._state.close()
            raise
        self.service_id: str = database.execute("SELECT id FROM service").fetchone()[0]
        """The same after every start on this state directory, and no other's."""
        self._thread = CommitThread(database, committed=self._notify_waiters, failed=self._ended_now.clear)

    @property
    def commits(self) -> int:
        """Transactions so far; fewer than changes where they were grouped."""
        return self._thread.commits

    def insert(self, *records: SaveRecord, group: GroupRecord | None = None) -> "Future[None]":
        """Adds the records of one request, all or none. `IdempotencyKeyTaken` where the group's key is in use.

        Without a group each record is one of its own.
        """

        def run(database: sqlite3.Connection) -> None:
            if group is not None:
                queries.insert(database, group, records)
            for record in records if group is None else ():
                queries.insert(database, GroupRecord(record.id, size=1, owner=record.owner), [record])

        return self._thread.submit(run, writes=True)

    def update(self, save_id: str, **changes: Any) -> "Future[SaveRecord | None]":  # noqa: ANN401 - fields of SaveRecord
        """Changes fields of a record and returns it as it is then.

        None, and nothing is changed, where there is no such record or its status can't become the new one any more: statuses only go
        forward, late events are ignored.
        """
        names = frozenset(changes)
        assert names <= queries.CHANGEABLE, f"no such fields: {sorted(names - queries.CHANGEABLE)}"

        def run(database: sqlite3.Connection) -> SaveRecord | None:
            record = queries.update(database, save_id, changes)
            if record is not None and record.ended:
                self._ended_now[save_id] = record
            return record

        return self._thread.submit(run, writes=True)

    def end(self, changes: Mapping[str, Mapping[str, Any]]) -> "Future[Records | None]":
        """Ends records, in one transaction; `changes` are fields by the save's id, the status among them. Returns the records.

        None, and nothing is changed, where one of them is missing or has ended with another status.
        """

        def run(database: sqlite3.Connection) -> Records | None:
            records = queries.end(database, changes)
            self._ended_now.update((record.id, record) for record in records or ())
            return records

        return self._thread.submit(run, writes=True)

    def delete(self, save_id: str) -> "Future[bool]":
        """Removes a record; False where there is none. Waiters for the save get the error that it was deleted."""

        def run(database: sqlite3.Connection) -> bool:
            existed = queries.delete(database, save_id)
            self._ended_now[save_id] = None
            return existed

        return self._thread.submit(run, writes=True)

    def purge(self, now: float, limit: int = 10_000) -> "Future[int]":
        """Removes up to `limit` ended records that are too old or too many, and returns how many. Files that will expire keep theirs."""
        ended_before = now - self._keep_seconds
        return self._thread.submit(lambda database: queries.purge(database, ended_before, self._keep_count, limit), writes=True)

    def get(self, save_id: str) -> "Future[SaveRecord | None]":
        return self._thread.submit(lambda database: queries.get(database, save_id))

    def list(
        self,
        *,
        status: SaveStatus | None = None,
        request_id: str | None = None,
        prefix: str | None = None,
        owner: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> "Future[Records]":
        """Newest first. `prefix` is of the server's path; `after` is the id that the page before ended with (`NotFound` if never seen)."""
        page = queries.Page(status=status, request_id=request_id, prefix=prefix, owner=owner, after=after, limit=limit)
        return self._thread.submit(lambda database: queries.select(database, page))

    def find_group(self, owner: str | None, key: str) -> "Future[StoredGroup | None]":
        """The group that an owner's idempotency key stands for."""
        return self._thread.submit(lambda database: queries.find_group(database, owner, key))

    def group_of(self, save_id: str) -> "Future[StoredGroup | None]":
        """The group that a save belongs to."""
        return self._thread.submit(lambda database: queries.group_of(database, save_id))

    def get_group(self, group_id: str) -> "Future[StoredGroup | None]":
        return self._thread.submit(lambda database: queries.get_group(database, group_id))

    def release_key(self, group_id: str) -> "Future[None]":
        """Another request may use the group's idempotency key; the records stay."""
        return self._thread.submit(lambda database: queries.release_key(database, group_id), writes=True)

    def unfinished_groups(self) -> "Future[Ids]":
        """The ids of groups with records that have not ended, oldest first: without an owner, a crash has interrupted them."""
        return self._thread.submit(queries.unfinished_groups)

    def unfinished(self) -> "Future[Records]":
        """Records that have not ended, oldest first."""
        return self._thread.submit(queries.unfinished)

    def used_bytes(self) -> "Future[int]":
        """Bytes of all files of completed saves, without those that are known to be gone, and of the outputs that records keep."""
        return self._thread.submit(queries.used_bytes)

    def expired(self, now: float, skip: int, limit: int) -> "Future[Records]":
        """Completed saves whose time is over, without the first `skip` of them."""
        return self._thread.submit(lambda database: queries.expired(database, now, skip, limit))

    def completed(self, after: int, limit: int) -> "Future[tuple[Records, int]]":
        """Completed saves, oldest first, and what to give as `after` (0 at first) for the next ones."""
        return self._thread.submit(lambda database: queries.completed(database, after, limit))

    def ended(self, save_id: str) -> "Future[SaveRecord | None]":
        """Resolved with the record when the save has ended and that is committed; None where there is no such record (any more)."""
        future: Future[SaveRecord | None] = Future()

        def watch(database: sqlite3.Connection) -> None:
            record = queries.get(database, save_id)
            waiting = {other for other in self._waiting.get(save_id, ()) if not other.done()}  # Without those given up.
            self._waiting[save_id] = waiting | {future}
            if record is None or record.ended:
                self._ended_now[save_id] = record  # Resolved after the group's commit, which may still fail.

        self._thread.submit(watch).add_done_callback(lambda done: _pass_failure(done, future))
        return future

    async def wait(self, save_id: str, timeout_seconds: float) -> SaveRecord | None:
        """The record once the save has ended, or as it is when the time is up."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.ended(save_id)), timeout_seconds)
        except TimeoutError:
            return await asyncio.wrap_future(self.get(save_id))

    def close(self) -> None:
        """Commits what was asked for, ends the thread and lets go of the state directory. Idempotent."""
        self._thread.close()
        self._state.close()
        for futures in self._waiting.values():
            for future in futures:
                settle(future, Unavailable("the registry was closed before the save ended"))
        self._waiting.clear()

    def _notify_waiters(self) -> None:
        for save_id, record in self._ended_now.items():
            for future in self._waiting.pop(save_id, ()):
                settle(future, record)
        self._ended_now.clear()


def _pass_failure(done: "Future[None]", future: "Future[SaveRecord | None]") -> None:
    error = done.exception()
    if error is not None:
        settle(future, error)
