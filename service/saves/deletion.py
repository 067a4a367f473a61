"""Ending saves and removing what they have left, at the request of a client."""

import asyncio
from dataclasses import dataclass

from service.errors import ServiceError
from service.registry.records import SaveRecord
from service.saves.files import remove_saved
from service.saves.saver import Saver

ANSWER_SECONDS = 30.0
"""How long an answer waits for a save to end; the rest is done all the same."""


@dataclass(frozen=True)
class Deleter:
    """Used on the event loop."""

    saver: Saver

    async def delete(self, record: SaveRecord) -> None:
        """Cancels a running save, whose record stays and says so; removes an ended one: its file, its lock file and its record.

        A save whose file is published before it can be cancelled is removed. Raises `ServiceError` where the file can't be removed.
        """
        work = self.saver.start(self._delete(record))
        done, _ = await asyncio.wait([work], timeout=ANSWER_SECONDS)
        if done:
            work.result()

    async def _delete(self, record: SaveRecord) -> None:
        if record.ended:
            await self._remove(record)
            return
        too_late = await self.saver.cancel(record.id)
        ended = await asyncio.wrap_future(self.saver.registry.get(record.id))
        if ended is not None and (ended.status == "completed" or too_late):
            await self._remove(ended)

    async def _remove(self, record: SaveRecord) -> None:
        """The file first: if that fails, the record is still there for another attempt."""
        saver = self.saver
        if record.status == "completed":
            try:
                await saver.removals(record).run(record.owner, remove_saved, saver.roots, record, lock_files=saver.lock_files)
            except (OSError, ServiceError) as error:
                raise ServiceError("the server can't remove the file of this save", param="save_id", code="io_error") from error
        await asyncio.wrap_future(saver.registry.delete(record.id))
