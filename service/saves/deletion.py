"""Ending saves and removing what they have left, at the request of a client."""

import asyncio

from service.errors import ServiceError
from service.registry.records import SaveRecord
from service.saves.files import remove_saved
from service.services import Services

ABORT_AGAIN_SECONDS = 0.5
"""A save that was not handed to the engine yet can't be aborted there."""
ANSWER_SECONDS = 30.0
"""How long an answer waits for a save to end; the rest is done all the same."""


async def delete_save(services: Services, record: SaveRecord) -> None:
    """Cancels a running save, whose record stays and says so; removes an ended one: its file, its lock file and its record.

    A save that completes before it can be cancelled is removed. Raises `ServiceError` where the file can't be removed.
    """
    work = asyncio.get_running_loop().create_task(_delete(services, record))
    services.keep(work)
    done, _ = await asyncio.wait([work], timeout=ANSWER_SECONDS)
    if done:
        work.result()


async def _delete(services: Services, record: SaveRecord) -> None:
    if record.ended:
        await _remove(services, record)
        return
    ended = await _cancel(services, record)
    if ended is not None and ended.status == "completed":
        await _remove(services, ended)


async def _cancel(services: Services, record: SaveRecord) -> SaveRecord | None:
    """The record once the save has ended; None where it has gone meanwhile."""
    ended = asyncio.wrap_future(services.registry.ended(record.id))
    while not ended.done():
        services.saver.cancel(record.id, services.engine.abort)
        await asyncio.wait([ended], timeout=ABORT_AGAIN_SECONDS)
    return ended.result()


async def _remove(services: Services, record: SaveRecord) -> None:
    """The file first: if that fails, the record is still there for another attempt."""
    if record.status == "completed":
        try:
            removals = services.disk_of(record).removals
            await removals.run(record.owner, remove_saved, services.roots, record, lock_files=services.settings.lock_files)
        except (OSError, ServiceError) as error:
            raise ServiceError("the server can't remove the file of this save", param="save_id", code="io_error") from error
    await asyncio.wrap_future(services.registry.delete(record.id))
