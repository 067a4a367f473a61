"""Background cleanup: expired files, old records, orphans of crashes, and records of files that clients have removed.

Unreachable files don't count as removed: records of files below a folder that is no save root now, or on a file system that isn't
mounted, stay as they are, and the log says how many there are.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from service.errors import ServiceError, StorageUnavailable
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.files import check_reachable, device_of_saved, open_directory, remove_saved
from service.saves.orphans import MIN_PART_AGE_SECONDS, remove_orphaned_files
from service.saves.paths.roots import SaveRoots
from service.saves.space import Space

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
"""How late a file may expire."""
SWEEP_SECONDS = 600.0
ORPHANS_SECONDS = 3600.0
DAY_SECONDS = 86400.0
"""A temporary file that has been unlocked for so long is an orphan also where locks of other machines aren't seen."""
RETRY_SECONDS = 60.0
"""After a file that has expired could not be removed, or the end of a save not be recorded."""
PAGE = 500
PURGED_AT_ONCE = 10_000
COOLDOWN_FACTOR = 3.0
"""A job, or a sweep that requests ask for, begins so many times the last one's duration after its end: however much there is to look
through and however many ask, a quarter of the time at most goes into it. Requests wait for it."""


async def noop() -> None:
    pass


@dataclass
class _Job:
    work: Callable[[], Awaitable[object]]
    every_seconds: float
    due: float = 0.0


@dataclass
class Reaper:
    """`run` until `close`. All methods are called on the event loop."""

    registry: Registry
    roots: SaveRoots
    space: Space
    lock_files: bool
    now: Callable[[], float] = time.time
    recover: Callable[[], Awaitable[None]] = field(default=noop)
    """Ends records that have not ended and that no live group owns."""
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _sweeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sweeps_started: int = 0
    """Sweeps so far."""
    _last_finished_sweep: int = 0
    """The number of the last one that came to its end."""
    _cooldown_until: float = 0.0
    _retry_at: dict[str, float] = field(default_factory=dict)
    _num_unreachable: int = 0
    """Files that this sweep could not look for."""
    _num_unreachable_before: int = 0
    """In the sweep before."""
    _unreachable_path: str = ""
    """The last one of them."""
    _part_age_seconds: float = MIN_PART_AGE_SECONDS
    """Of temporary files, in the next cleaning. In the first one they are what a crash has left."""
    _running: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Ends after what is under way. Idempotent."""
        self._closing.set()
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        """Does everything at the start and then again and again."""
        jobs = (
            _Job(self.expire, TICK_SECONDS),
            _Job(self.refresh, TICK_SECONDS),
            _Job(self.sweep, SWEEP_SECONDS),
            _Job(self.purge, SWEEP_SECONDS),
            _Job(self.remove_orphans, ORPHANS_SECONDS),
            _Job(self.recover, RETRY_SECONDS),
        )
        while not self._closing.is_set():
            for job in jobs:
                if time.monotonic() >= job.due and not self._closing.is_set():
                    await self._attempt(job)
            await self._pause(TICK_SECONDS)

    async def _attempt(self, job: _Job) -> None:
        started = time.monotonic()
        try:
            await job.work()
        except Exception:  # Whatever it is, the next time may go better, and the other jobs are none the worse for it.
            log.exception("a cleanup job failed and will be retried")
        ended = time.monotonic()
        job.due = ended + max(job.every_seconds, COOLDOWN_FACTOR * (ended - started))

    async def _pause(self, seconds: float) -> None:
        """Ends early where the service does."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)

    async def refresh(self) -> None:
        await asyncio.to_thread(self.space.refresh)

    async def expire(self) -> int:
        """Removes the files whose time is over, lock files too; their records say `expired`. Returns how many."""
        done = skipped = 0
        while not self._closing.is_set():
            records = await asyncio.wrap_future(self.registry.expired(self.now(), skipped, PAGE))
            due = [record for record in records if self._retry_at.get(record.id, 0.0) <= time.monotonic()]
            removed = await asyncio.to_thread(self._remove_all, due)
            await asyncio.gather(*(asyncio.wrap_future(self.registry.update(save_id, status="expired")) for save_id in removed))
            done += len(removed)
            skipped += len(records) - len(removed)
            if len(records) < PAGE:
                break
        return done

    def _remove_all(self, records: Sequence[SaveRecord]) -> list[str]:
        return [record.id for record in records if self._remove(record)]

    def _remove(self, record: SaveRecord) -> bool:
        try:
            remove_saved(self.roots, record, lock_files=self.lock_files)
        except (OSError, ServiceError) as error:
            level = logging.DEBUG if isinstance(error, StorageUnavailable) else logging.WARNING  # The sweep tells of all of those together.
            log.log(level, "the file of a save has expired but can't be removed: %s", error, extra={"fields": record.log_fields})
            self._retry_at[record.id] = time.monotonic() + RETRY_SECONDS
            return False
        self._retry_at.pop(record.id, None)
        return True

    async def recount(self) -> None:
        """Returns after a sweep that began later than the call: all room that clients had made by then has been seen.

        Those who ask at the same time share a sweep.
        """
        asked_after = self._sweeps_started
        await self.expire()
        async with self._sweeping:
            if self._last_finished_sweep <= asked_after:
                await self._pause(self._cooldown_until - time.monotonic())
                await self._sweep()

    async def sweep(self) -> None:
        """Looks at the file of every completed save: those that clients have moved or deleted don't count any more."""
        async with self._sweeping:
            await self._sweep()

    async def _sweep(self) -> None:
        started, after = time.monotonic(), 0
        self._sweeps_started += 1
        self._num_unreachable = 0
        while not self._closing.is_set():
            records, after = await asyncio.wrap_future(self.registry.completed(after, PAGE))
            changes = await asyncio.to_thread(self._check_files, records)
            updates = (self.registry.update(save_id, **fields) for save_id, fields in changes.items())
            await asyncio.gather(*(asyncio.wrap_future(update) for update in updates))
            if len(records) < PAGE:
                self._log_unreachable()
                break
        self._last_finished_sweep = self._sweeps_started
        ended = time.monotonic()
        self._cooldown_until = ended + COOLDOWN_FACTOR * (ended - started)

    def _check_files(self, records: Sequence[SaveRecord]) -> dict[str, dict[str, Any]]:
        """What has changed: when a file was found to be gone, None for one that is there again; and its file system's device number."""
        changes: dict[str, dict[str, Any]] = {}
        with _Directories(self.roots) as directories:
            for record in records:
                try:
                    changed = self._changes(directories.open(record), record)
                except StorageUnavailable:
                    self._num_unreachable += 1
                    self._unreachable_path = record.hidden_states_path
                    continue
                except (OSError, ServiceError) as error:
                    log.debug("the file of a save can't be inspected: %s", error, extra={"fields": record.log_fields})
                    continue
                if changed:
                    changes[record.id] = changed
        return changes

    def _changes(self, directory_fd: int | None, record: SaveRecord) -> dict[str, Any]:
        device = None if directory_fd is None else device_of_saved(self.roots, directory_fd, record)
        if device is None:
            check_reachable(self.roots, record)
            return {"gone": self.now()} if record.gone is None else {}
        return {name: value for name, value in (("gone", None), ("device", device)) if getattr(record, name) != value}

    def _log_unreachable(self) -> None:
        """A line when the number has changed."""
        if self._num_unreachable and self._num_unreachable != self._num_unreachable_before:
            log.warning(
                "%d files can't be inspected, such as %s: they lie in a folder that is no save root now, or on a file system that isn't"
                " mounted. Their records stay, and their bytes count",
                self._num_unreachable,
                self._unreachable_path,
            )
        self._num_unreachable_before = self._num_unreachable

    async def purge(self) -> None:
        """Removes the records that are too old or too many."""
        while await asyncio.wrap_future(self.registry.purge(self.now(), PURGED_AT_ONCE)) == PURGED_AT_ONCE and not self._closing.is_set():
            pass

    async def remove_orphans(self) -> None:
        """Removes temporary files that aren't locked, and our own lock files that aren't held and have no file: a writer of any
        service holds a lock on its own. The first time it takes all that are older than a minute, then those older than a day.
        """
        clean = partial(remove_orphaned_files, self.roots, now=self.now(), min_age_seconds=self._part_age_seconds)
        removed = await asyncio.to_thread(clean, owner=self.registry.service_id, stop=self._closing.is_set)
        self._part_age_seconds = DAY_SECONDS
        if removed:
            log.info("removed %d temporary files and lock files that no save uses", removed)


class _Directories:
    """The directory of the record before stays open: saves that follow each other mostly share one."""

    def __init__(self, roots: SaveRoots) -> None:
        self._roots = roots
        self._path: str | None = None
        self._fd: int | None = None

    def __enter__(self) -> "_Directories":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def open(self, record: SaveRecord) -> int | None:
        """The descriptor of the file's directory; None where that has gone. Raises `ServiceError`."""
        path = record.hidden_states_path.rpartition("/")[0]
        if path != self._path:
            self._close()
            self._fd = open_directory(self._roots, record)
            self._path = path
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._path = None
