"""The life of a save outside the engine: claim, record, commit.

The order for one request is: target files are claimed (their locks are held), records are inserted and committed as `queued`, the engine
takes the request over, its events move the records on, and the answer is sent once `completed` is committed. A crash after the claim
and before the commit leaves at most a lock file that nobody holds, which the next start knows by its mark and removes; temporary files are
made only by the engine, when the record stands.

A save is *held* where its completion must wait for something else: the other choices of an all-or-nothing request, or the output that
its record is to carry. Its file may be published then, but the record says `writing` until `release`, and `revoke` can still take it back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.errors import SaveError
from engine.saves.spec import SavedFile, SaveEvent, SaveSpec
from service.errors import ServiceError
from service.observe.failures import Ended, logs_failure
from service.observe.metrics import Metrics
from service.registry.records import SaveRecord, SaveStatus
from service.registry.registry import Registry
from service.saves.files import remove_saved
from service.saves.paths.roots import SaveRoots
from service.saves.space import Space
from service.threads import Threads

log = logging.getLogger(__name__)


def _nobody() -> None:
    pass


@dataclass
class LiveSave:
    """A save as the request that asked for it sees it. Used on the event loop."""

    record: SaveRecord
    spec: SaveSpec
    client_path: str
    """The path as the client knows it."""
    held: bool
    engine_id: str = ""
    """The request that the engine knows it by, once that has been submitted."""
    status: SaveStatus = "queued"
    file: SavedFile | None = None
    error: SaveError | None = None
    seconds: float = 0.0
    """From the last computed token to the end of the save in the engine."""
    ended: bool = False
    """Its last status is committed."""
    unwanted: bool = False
    """It was given up while it was held: when it has been published, it is taken back."""
    taken_back_as: Literal["failed", "cancelled"] = "failed"
    on_change: Callable[[], None] = field(default=_nobody)
    """Called when the file has been published and when the save has ended."""
    on_end: Callable[[], None] = field(default=_nobody)
    """Called once, when the save has ended."""
    times_ns: dict[SaveStatus, int] = field(default_factory=dict)
    """When the engine brought it to which status, in nanoseconds since 1970."""

    @property
    def published(self) -> bool:
        return self.file is not None

    @property
    def id(self) -> str:
        return self.record.id

    def transfer(self, status: SaveStatus | None = None) -> dict[str, Any]:
        """The answer's `kv_transfer_params` object, with what is known so far."""
        known: dict[str, Any] = {
            "hidden_states_path": self.client_path,
            "save_id": self.id,
            "status": status or self.status,
            "layers": list(self.spec.layers),
            "dtype": self.spec.dtype,
        }
        if self.file is not None and known["status"] == "completed":
            known |= {"num_tokens": self.file.num_tokens, "shape": list(self.file.shape), "bytes": self.file.bytes}
            known["url"] = file_url(self.id)
        return known


class Saver:
    """All running saves of the service. Methods are called on the event loop, `on_event` from the engine's threads."""

    def __init__(
        self,
        registry: Registry,
        roots: SaveRoots,
        space: Space,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        *,
        threads: Threads,
        lock_files: bool,
    ) -> None:
        self._threads = threads
        self._registry = registry
        self._roots = roots
        self._metrics = metrics
        self._space = space
        self._lock_files = lock_files
        self._loop = loop
        self._live: dict[str, LiveSave] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def insert(self, saves: list[LiveSave]) -> None:
        """Commits the records of one request, all or none; their events are heard from now on."""
        await asyncio.wrap_future(self._registry.insert(*(save.record for save in saves)))
        self._live.update((save.id, save) for save in saves)

    async def withdraw(self, saves: list[LiveSave]) -> None:
        """Forgets saves of a request that was refused, records included. Targets are the caller's."""
        for save in saves:
            self._live.pop(save.id, None)
            self._space.release(save.id)
        await asyncio.gather(*(asyncio.wrap_future(self._registry.delete(save.id)) for save in saves))

    def on_event(self, event: SaveEvent) -> None:
        """Moves the record on. Events of one save arrive in order and so are its changes."""
        save = self._live.get(event.save_id)
        if save is None:
            return
        if event.status in ("running", "writing"):
            self._registry.update(event.save_id, status=event.status).add_done_callback(_logs_failure(save))
            self._to_loop(self._progressed, save, event)
        elif event.status == "completed" and save.held:
            self._to_loop(self._published, save, event)
        else:
            future = self._registry.update(event.save_id, **_final_changes(event))
            future.add_done_callback(lambda done: self._to_loop(self._ended, save, event, done.exception()))

    def keep_output(self, save: LiveSave, output: dict[str, Any]) -> None:
        """Keeps the text in the record of a save that is held or still being written."""
        self._registry.update(save.id, output=output).add_done_callback(_logs_failure(save))

    def release(self, save: LiveSave) -> None:
        """The save need not be held any longer: it is completed, now or when its file is published."""
        if save.held:
            save.held = False
            if save.published:
                self._start(self._complete(save))

    def revoke(self, save: LiveSave) -> None:
        """Takes a held save back: its file goes, now or when it has been published, and its record says `failed`."""
        if save.held and not save.ended and not save.unwanted:
            save.unwanted = True
            if save.published:
                self._start(self._take_back(save))

    def cancel(self, save_id: str, abort: Callable[[str], None]) -> None:
        """Has a running save end as `cancelled`, unless it is just being published. `abort` is the engine's. May be repeated."""
        save = self._live.get(save_id)
        if save is None:
            return
        save.taken_back_as = "cancelled"
        self.revoke(save)
        abort(save.engine_id)

    def fail_all(self, message: str) -> None:
        """The engine has gone: whoever still waits for a save is told so."""
        for save in list(self._live.values()):
            if not save.published:
                self.on_event(SaveEvent(save.id, "failed", error=SaveError("engine_error", message)))

    async def settle(self) -> None:
        """Waits for file removals and commits that are under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _progressed(self, save: LiveSave, event: SaveEvent) -> None:
        save.times_ns[event.status] = event.time_ns
        if not save.ended:
            save.status = event.status

    def _published(self, save: LiveSave, event: SaveEvent) -> None:
        save.times_ns[event.status] = event.time_ns
        save.file, save.seconds = event.file, event.seconds
        if save.unwanted:
            self._start(self._take_back(save))
        elif not save.held:  # released while the event was on its way
            self._start(self._complete(save))
        save.on_change()

    def _ended(self, save: LiveSave, event: SaveEvent, failure: BaseException | None) -> None:
        save.times_ns[event.status] = event.time_ns
        save.file, save.error, save.seconds = event.file, event.error, event.seconds
        self._end(save, event.status, failure)

    def _end(self, save: LiveSave, status: SaveStatus, failure: BaseException | None) -> None:
        save.status, save.ended = status, True
        if failure is not None:
            log.error("the record of a save could not be written", exc_info=failure, extra={"fields": save.record.log_fields})
            save.status = "failed"
            save.error = save.error or SaveError("io_error", "the registry of saves could not be written")
        self._live.pop(save.id, None)
        self._space.release(save.id)
        self._metrics.save_ended(save.status, save.seconds, save.error.code if save.error is not None else None)
        if save.status == "failed" and save.error is not None and save.error.code != "cancelled":
            log.warning("a save failed: %s", save.error, extra={"fields": save.record.log_fields})
        save.on_end()
        save.on_change()

    async def _complete(self, save: LiveSave) -> None:
        await self._commit(save, _final_changes(SaveEvent(save.id, "completed", save.file)))

    async def _take_back(self, save: LiveSave) -> None:
        assert save.file is not None
        file = save.file
        published = replace(save.record, bytes=file.bytes, device=file.device, inode=file.inode)
        try:
            removals = self._threads.disk(self._roots.root_of(published.hidden_states_path)).removals
            await removals.run(published.owner, remove_saved, self._roots, published, lock_files=self._lock_files)
        except (OSError, ServiceError):  # Whoever waits must be told all the same.
            log.exception("the file of a save can't be taken back", extra={"fields": save.record.log_fields})
        save.error = SaveError("cancelled", "the request that this save belonged to failed or was given up")
        await self._commit(save, _final_changes(SaveEvent(save.id, save.taken_back_as, error=save.error)))

    async def _commit(self, save: LiveSave, changes: dict[str, Any]) -> None:
        try:
            await asyncio.wrap_future(self._registry.update(save.id, **changes))
        except ServiceError as error:
            self._end(save, changes["status"], error)
        else:
            self._end(save, changes["status"], None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a save could not be taken back", exc_info=task.exception())

    def _to_loop(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _final_changes(event: SaveEvent) -> dict[str, Any]:
    changes: dict[str, Any] = {"status": event.status, "finished": time.time()}
    if event.file is not None:
        file = event.file
        changes |= {"shape": list(file.shape), "num_tokens": file.num_tokens, "bytes": file.bytes, "checksum": file.checksum}
        changes |= {"device": file.device, "inode": file.inode}
    if event.error is not None:
        changes |= {"error_code": event.error.code, "error_message": str(event.error)}
    return changes


def _logs_failure(save: LiveSave) -> Callable[[Ended], None]:
    return logs_failure(log, "a record could not be updated", save.record.log_fields)


def file_url(save_id: str) -> str:
    """Where the file can be downloaded, below the address of the service."""
    return f"/saves/{save_id}/file"
