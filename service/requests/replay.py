"""A repeated idempotency key: it reads the work of the first request with it, and computes nothing that is there."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from engine.errors import SaveError, SaveErrorCode
from service.errors import Conflict, Gone, SaveFailed
from service.registry.records import SaveRecord, StoredGroup
from service.saves.files import open_saved
from service.saves.groups import SaveGroup
from service.schemas.transfer import PREFIX
from service.services import Services

PARAM = f"{PREFIX}.idempotency_key"


@dataclass(frozen=True)
class Replay:
    """The saves of the first request with the key. Its holder is a reader of the work until it calls `leave`."""

    saves: tuple[SaveRecord, ...]
    """By choice, as they were when they were read."""
    live: SaveGroup | None
    """The group, where some of them had not ended."""

    @property
    def records(self) -> tuple[SaveRecord, ...]:
        """As they are now."""
        return self.saves if self.live is None else tuple(save.record for save in self.live.saves)

    async def wait_until_done(self, *, texts_only: bool) -> None:
        """Waits until all saves have ended, or until all texts are done."""
        if self.live is not None:
            await (self.live.until_texts_done() if texts_only else self.live.until_ended())

    def check_whole(self) -> None:
        """For answers that are all or nothing. Raises `SaveFailed` for a save without a file."""
        cause = None if self.live is None else self.live.first_failed
        records = self.records if cause is None else (cause.record,)
        for record in records:
            if record.status in ("failed", "cancelled"):
                raise failure_of(record)

    def leave(self) -> None:
        if self.live is not None:
            self.live.leave()


def failure_of(record: SaveRecord) -> SaveFailed:
    """What a save without a file is answered with."""
    code = cast(SaveErrorCode, record.error_code or "cancelled")
    return SaveFailed(record.id, SaveError(code, record.error_message or f"the save is {record.status}"))


def check_body(stored: StoredGroup, body_hash: str | None) -> None:
    """Raises `Conflict` where the key was used with another body, whatever has become of that request."""
    if stored.group.body_hash != body_hash:
        raise Conflict("the idempotency key was used with another body", param=PARAM, code="idempotency_key_reused")


def join(live: SaveGroup) -> Replay:
    """Reads work that is under way."""
    live.join()
    return Replay((), live)


async def read(services: Services, stored: StoredGroup) -> Replay | None:
    """Reads what is there of work that has ended; None where nothing is: then the key may be used again.

    Raises `Gone` where a part of it is not there any more and what is left can't be answered with.
    """
    if any(not record.ended for record in stored.saves):
        await services.saver.recover(stored.saves[0].id)
        found = await asyncio.wrap_future(services.registry.get_group(stored.group.id))
        stored = found or StoredGroup(stored.group, ())
    records = await _with_current_status(services, stored.saves)
    if not any(record.status == "completed" for record in records):
        return None
    if not stored.whole:
        raise Gone("a save of the request with this idempotency key was deleted", param=PARAM)
    if stored.group.mode == "all_or_nothing" and any(record.status != "completed" for record in records):
        raise Gone("a file of the request with this idempotency key is not there any more", param=PARAM)
    return Replay(records, None)


async def _with_current_status(services: Services, records: Sequence[SaveRecord]) -> tuple[SaveRecord, ...]:
    """Records that say `completed` only where the file is there. Raises `ServiceError`."""
    looks = (services.disk_of(record).reads.run(record.owner, _current_record, services, record) for record in records)
    return tuple(await asyncio.gather(*looks))


def _current_record(services: Services, record: SaveRecord) -> SaveRecord:
    if record.status != "completed":
        return record
    try:
        os.close(open_saved(services.roots, record))
    except Gone:
        if record.gone is None:
            services.registry.update(record.id, gone=time.time())
        return replace(record, status="expired")
    return record
