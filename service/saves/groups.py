"""The saves of one request, which owns their state machines.

All or nothing, the saves complete together, in one commit, once every file is published and every text is done; if one has no file, none
has. Independent saves each complete and fail alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine.errors import SaveError
from engine.saves.spec import SaveEvent
from service.registry.records import GroupRecord, SaveRecord
from service.saves.life import PROGRESS, Ending, LiveSave, SaveState, Signal

log = logging.getLogger(__name__)

SIGNALS: Mapping[str, Signal] = {
    "running": Signal.STARTED,
    "writing": Signal.COMPUTED,
    "completed": Signal.PUBLISHED,
    "failed": Signal.STOPPED,
    "cancelled": Signal.STOPPED,
}
"""The signal of each of the engine's events."""
SIBLING_FAILED = Ending("failed", SaveError("cancelled", "another choice of the same request has no file"))
NOT_RECORDED = Ending("failed", SaveError("io_error", "the registry of saves could not be written"))


def _noop() -> None:
    pass


class GroupOwner(Protocol):
    """What a group works with: the registry, the disk and the engine."""

    def record_progress(self, save: LiveSave, **changes: Any) -> None:  # noqa: ANN401 - fields of SaveRecord
        """Brings a record up to date on the way; nothing depends on that."""

    async def commit(self, changes: Mapping[str, Mapping[str, Any]]) -> Sequence[SaveRecord] | None:
        """Commits the ends of saves, all or none, in bounded time; None where the registry didn't take them."""

    async def remove_file(self, save: LiveSave) -> None:
        """Removes a published file, where that is possible."""

    def abort(self, save: LiveSave) -> None:
        """Has the engine end a save; may be repeated."""

    def start(self, work: Coroutine[Any, Any, None]) -> object:
        """Runs work of the group."""

    def save_ended(self, save: LiveSave) -> None:
        """A save has come to its end."""


class SaveGroup:
    """Used on the event loop. Requests that wait for the saves are readers; the one that made them is the first."""

    def __init__(self, record: GroupRecord, saves: Sequence[LiveSave], owner: GroupOwner) -> None:
        self.record = record
        self.saves = tuple(saves)
        self.first_failed: LiveSave | None = None
        """The save that was the first to fail or to be aborted: why the others have no files, all or nothing."""
        self.on_abandoned: Callable[[], None] = _noop
        """Called when the last reader has left."""
        self._owner = owner
        self._by_id = {save.id: save for save in self.saves}
        self._readers = 1
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def all_or_nothing(self) -> bool:
        return self.record.mode == "all_or_nothing"

    @property
    def ended(self) -> bool:
        return all(save.ended for save in self.saves)

    @property
    def aborted(self) -> bool:
        """None of its saves will have a file."""
        return all(save.ending is not None for save in self.saves)

    def join(self) -> None:
        """Adds a reader."""
        self._readers += 1

    def leave(self) -> bool:
        """Removes a reader; True where others remain."""
        self._readers -= 1
        if not self._readers:
            self.on_abandoned()
        return self._readers > 0

    async def until_changed(self) -> None:
        """Returns when one of the saves has moved."""
        await self._changed.wait()

    async def until_ended(self) -> None:
        while not self.ended:
            await self.until_changed()

    async def until_texts_done(self) -> None:
        """Returns when every save has its text or has ended without."""
        while any(save.awaits_text and not save.ended for save in self.saves):
            await self.until_changed()

    def submitted(self, save: LiveSave, engine_id: str) -> None:
        """The engine has taken the save over. It may have been aborted just before."""
        save.engine_id = engine_id
        if save.state is SaveState.ABORTING:
            self._owner.abort(save)

    def on_save_event(self, event: SaveEvent) -> None:
        """Applies an event of the engine to one of the saves."""
        save = self._by_id[event.save_id]
        signal = SIGNALS[event.status]
        if not save.can(signal):
            return
        save.times_ns[event.status] = event.time_ns
        save.seconds = event.seconds or save.seconds
        if signal is Signal.PUBLISHED:
            save.file = event.file
        if signal is Signal.STOPPED and (save.ending is None or event.status == "failed"):
            save.ending = Ending(
                "failed" if event.status == "failed" else "cancelled", event.error or SaveError("engine_error", "no reason is known")
            )
        self._transition(save, signal)

    def text_done(self, save: LiveSave, **kept: Any) -> None:  # noqa: ANN401 - fields of SaveRecord
        """The text that belongs to a file is done; `kept` is what the record keeps of it, `output` and `cached_tokens`."""
        save.awaits_text = False
        if kept and not save.ended:
            save.record = replace(save.record, **kept)
            self._owner.record_progress(save, **kept)
        self._complete_if_ready(save)
        self._notify(save)

    def abort(self, save: LiveSave, ending: Ending) -> None:
        """Aborts a save: it ends without a file, unless it is just being completed. All or nothing, so do the others."""
        self._abort((save,), ending)

    def abort_all(self, ending: Ending) -> None:
        """Aborts all saves, for the same reason."""
        self._abort(self.saves, ending)

    def _abort(self, saves: Sequence[LiveSave], ending: Ending) -> None:
        to_abort = [save for save in saves if save.ending is None and save.can(Signal.ABORT)]
        for save in to_abort:
            save.ending = ending
        for save in to_abort:
            self._transition(save, Signal.ABORT)

    def withdraw(self) -> None:
        """The request was refused after its records were made. To be called before anything else happens on the loop."""
        for save in self.saves:
            save.apply(Signal.WITHDRAWN)
            self._notify(save)

    def _transition(self, save: LiveSave, signal: Signal) -> None:
        if not save.apply(signal):
            return
        if save.state in PROGRESS:
            self._owner.record_progress(save, status=save.status)
        elif save.state is SaveState.PUBLISHED:
            self._complete_if_ready(save)
        elif save.state is SaveState.REMOVING:
            self._owner.start(self._remove(save))
        elif save.state is SaveState.ENDING:
            self._owner.start(self._end(save))
        elif save.state is SaveState.ABORTING:
            self._owner.abort(save)
        elif save.ended:
            self._owner.save_ended(save)
            save.on_end()
        if save.ending is not None and self.first_failed is None:
            self.first_failed = save
            if self.all_or_nothing:
                self.abort_all(SIBLING_FAILED)
        self._notify(save)

    def _complete_if_ready(self, save: LiveSave) -> None:
        unit = self.saves if self.all_or_nothing else (save,)
        if all(other.can(Signal.COMPLETE) and not other.awaits_text for other in unit):
            for other in unit:
                self._transition(other, Signal.COMPLETE)
            self._owner.start(self._complete(unit))

    async def _complete(self, unit: Sequence[LiveSave]) -> None:
        now = time.time()
        records = await self._owner.commit({save.id: save.completion(now) for save in unit})
        if records is None:
            for save in unit:
                save.ending = NOT_RECORDED
                self._transition(save, Signal.NOT_COMMITTED)
            return
        for save, record in zip(unit, records, strict=True):
            save.record = record
        for save in unit:
            self._transition(save, Signal.COMMITTED)

    async def _remove(self, save: LiveSave) -> None:
        await self._owner.remove_file(save)
        self._transition(save, Signal.REMOVED)

    async def _end(self, save: LiveSave) -> None:
        changes = save.discarding(time.time())
        records = await self._owner.commit({save.id: changes})
        save.record = replace(save.record, **changes) if records is None else records[0]
        self._transition(save, Signal.NOT_COMMITTED if records is None else Signal.COMMITTED)

    def _notify(self, save: LiveSave) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        save.on_change()
