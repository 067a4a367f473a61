"""All live groups of saves, and what they work with.

The order for one request is: target files are claimed (their locks are held), records are inserted and committed as `queued`, the engine
takes the request over, its events move the saves on, and the answer is sent once `completed` is committed. A crash after the claim
and before the commit leaves at most a lock file that nobody holds, which the next start knows by its mark and removes; temporary files are
made only by the engine, when the record stands.

A record that has not ended belongs to a group of this process, or to nobody: then it is recovered as after a crash, at the start, and
whenever it is met later, since a registry that can't be written for long may have kept the end of a save from being recorded.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from engine.errors import SaveError
from engine.saves.spec import SaveEvent
from service.errors import ServiceError
from service.observe.failures import logs_failure
from service.observe.metrics import Metrics
from service.registry.records import GroupRecord, SaveRecord
from service.registry.registry import Registry
from service.saves.files import remove_saved
from service.saves.groups import SaveGroup
from service.saves.life import Ending, LiveSave
from service.saves.paths.roots import SaveRoots
from service.saves.recovery import recover_group
from service.saves.space import Space
from service.threads import Pool, Threads

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_SECONDS = 15.0
"""How long the commit of an end is tried again. Each attempt may wait for a locked database for some seconds more."""
FIRST_RETRY_SECONDS = 0.1
"""Between two attempts; it doubles."""
SHUTDOWN_TIMEOUT_SECONDS = 30.0
"""How long the end of the service waits for file removals and commits that are under way."""


class Aborter(Protocol):
    """The engine, as far as the end of saves needs it."""

    def abort(self, request_id: str) -> None: ...


@dataclass
class Saver:
    """The owner of all groups. Methods are called on the event loop, `on_event` from the engine's threads."""

    registry: Registry
    roots: SaveRoots
    space: Space
    metrics: Metrics
    loop: asyncio.AbstractEventLoop
    _: KW_ONLY
    threads: Threads
    lock_files: bool
    engine: Aborter | None = None
    """Set once there is one."""
    _groups: dict[str, SaveGroup] = field(default_factory=dict)
    _by_save: dict[str, SaveGroup] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    # For those who make requests.

    async def insert(self, record: GroupRecord, saves: Sequence[LiveSave]) -> SaveGroup:
        """Makes a group and commits its records, all or none; their events are heard from now on."""
        group = SaveGroup(record, saves, self)
        self._groups[group.id] = group  # First: a record without its group belongs to nobody.
        self._by_save.update((save.id, group) for save in saves)
        try:
            await asyncio.wrap_future(self.registry.insert(*(save.record for save in saves), group=record))
        except BaseException:
            self._forget(group)
            raise
        return group

    async def withdraw(self, group: SaveGroup) -> None:
        """Forgets the group of a request that was refused, records included. Targets are the caller's."""
        group.withdraw()
        deletions = (asyncio.wrap_future(self.registry.delete(save.id)) for save in group.saves)
        outcomes = await asyncio.gather(*deletions, return_exceptions=True)
        for error in {str(outcome): outcome for outcome in outcomes if isinstance(outcome, BaseException)}.values():
            log.error("records of a rejected request could not be deleted", exc_info=error)
        self._forget(group)

    def find(self, group_id: str) -> SaveGroup | None:
        """A group whose saves have not all ended."""
        return self._groups.get(group_id)

    # For those who end saves.

    async def cancel(self, save_id: str) -> bool:
        """Has a save end as `cancelled`, unless it is just being completed, and returns when it has ended.

        True where the file came all the same, and was removed.
        """
        group = self._by_save.get(save_id)
        if group is None:
            await self.recover(save_id)
            return False
        save = next(save for save in group.saves if save.id == save_id)
        had_file = save.file is not None
        group.abort(save, Ending("cancelled", SaveError("cancelled", "the save was deleted before its file was there")))
        while not save.ended:
            await group.until_changed()
        return save.file is not None and not had_file

    async def recover(self, save_id: str) -> None:
        """Ends the records of the save's group, where they have not ended and no live group owns them. Raises `ServiceError`."""
        stored = await asyncio.wrap_future(self.registry.group_of(save_id))
        if stored is not None and stored.group.id not in self._groups:
            record = stored.saves[0]
            await self.removals(record).run(record.owner, recover_group, self.registry, self.roots, stored.group.id)

    async def recover_all(self) -> None:
        """Ends all records that have not ended and that no live group owns. Raises `ServiceError`."""
        for group_id in await asyncio.wrap_future(self.registry.unfinished_groups()):
            if group_id not in self._groups:
                await asyncio.to_thread(recover_group, self.registry, self.roots, group_id)

    def removals(self, record: SaveRecord) -> Pool:
        """The threads that remove files below the save root of a record's file."""
        return self.threads.disk(self.roots.root_of(record.hidden_states_path)).removals

    def fail_all(self, message: str) -> None:
        """The engine has died: fails every save that has not ended."""
        for group in list(self._groups.values()):
            for save in group.saves:
                group.on_save_event(SaveEvent(save.id, "failed", error=SaveError("engine_error", message)))

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs work that the end of the service waits for."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def stop_retrying(self) -> None:
        """The service shuts down: commits are attempted once."""
        self._closing.set()

    async def wait_idle(self) -> None:
        """Waits for tasks that are running, up to a timeout; the next start recovers what a disk or the registry holds up longer."""
        deadline = self.loop.time() + SHUTDOWN_TIMEOUT_SECONDS
        while self._tasks and self.loop.time() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - self.loop.time())
        if self._tasks:
            log.warning("%d saves could not be ended in time and are left to the next start", len(self._tasks))

    # For the engine.

    def on_event(self, event: SaveEvent) -> None:
        """Events of one save arrive in order, and its group gets them in that order."""
        group = self._by_save.get(event.save_id)
        if group is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(group.on_save_event, event)

    # For groups.

    def record_progress(self, save: LiveSave, **changes: Any) -> None:  # noqa: ANN401 - fields of SaveRecord
        failed = logs_failure(log, "a record could not be updated", save.record.log_fields)
        self.registry.update(save.id, **changes).add_done_callback(failed)

    async def commit(self, changes: Mapping[str, Mapping[str, Any]]) -> Sequence[SaveRecord] | None:
        deadline, pause = self.loop.time() + COMMIT_TIMEOUT_SECONDS, FIRST_RETRY_SECONDS
        while True:
            try:
                return await asyncio.wrap_future(self.registry.end(changes))
            except Exception as error:
                if not isinstance(error, ServiceError) or self._closing.is_set() or self.loop.time() + pause > deadline:
                    log.error("the final status of saves could not be committed: %s", ", ".join(changes), exc_info=error)
                    return None
            await self._pause(pause)
            pause *= 2

    async def remove_file(self, save: LiveSave) -> None:
        assert save.file is not None
        published = replace(save.record, bytes=save.file.bytes, device=save.file.device, inode=save.file.inode)
        try:
            await self.removals(published).run(published.owner, remove_saved, self.roots, published, lock_files=self.lock_files)
        except Exception:  # The waiting requests must be answered nevertheless.
            log.exception("the published file of a save that failed can't be removed", extra={"fields": save.record.log_fields})

    def abort(self, save: LiveSave) -> None:
        if self.engine is not None and save.engine_id:
            self.engine.abort(save.engine_id)

    def save_ended(self, save: LiveSave) -> None:
        self.space.release(save.id)
        group = self._by_save.pop(save.id)
        if group.ended:
            self._groups.pop(group.id, None)
        self.metrics.save_ended(save.status, save.seconds, save.error.code if save.error is not None else None)
        if save.status == "failed" and save.error is not None and save.error.code != "cancelled":
            log.warning("a save failed: %s", save.error, extra={"fields": save.record.log_fields})

    def _forget(self, group: SaveGroup) -> None:
        self._groups.pop(group.id, None)
        for save in group.saves:
            self._by_save.pop(save.id, None)
            self.space.release(save.id)

    async def _pause(self, seconds: float) -> None:
        """Ends early where the service does."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    def _finished(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of a save failed", exc_info=task.exception())
