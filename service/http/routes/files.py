"""`/saves/{id}/file`: the bytes of a saved file."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from service.errors import Busy, Conflict, Gone
from service.http.disconnect import unless_disconnected
from service.http.downloads import SavedContent, answer, content_of
from service.http.routes.dependencies import Owner, ReadServices, own_record
from service.registry.records import SaveRecord
from service.saves.files import open_saved
from service.schemas.answers import ERRORS, ErrorAnswer
from service.services import Services

router = APIRouter(tags=["saves"])

_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": _BYTES, "description": "The whole file."},
    206: {"content": _BYTES, "description": "The range asked for; several ranges are answered with the whole file."},
    304: {"description": "The client has the file already (If-None-Match, If-Modified-Since)."},
    404: {"model": ErrorAnswer, "description": "There is no such save."},
    409: {"model": ErrorAnswer, "description": "The save is not completed."},
    410: {"model": ErrorAnswer, "description": "The file was removed: by its client, by DELETE, or because its time was over."},
    412: {"model": ErrorAnswer, "description": "If-Match or If-Unmodified-Since is not fulfilled."},
    416: {"model": ErrorAnswer, "description": "The range begins behind the end of the file."},
    500: {"model": ErrorAnswer, "description": "The disk fails."},
}


@router.get("/saves/{save_id}/file", response_class=Response, responses=RESPONSES)
async def get_file(save_id: str, request: Request, services: ReadServices, owner: Owner) -> Response:
    """The file of a completed save. Conditions and one byte range are honoured."""
    return await _answer(save_id, request, services, owner, head=False)


@router.head("/saves/{save_id}/file", response_class=Response, responses=RESPONSES)
async def head_file(save_id: str, request: Request, services: ReadServices, owner: Owner) -> Response:
    """What GET would answer, without the bytes."""
    return await _answer(save_id, request, services, owner, head=True)


async def _answer(save_id: str, request: Request, services: Services, owner: str | None, *, head: bool) -> Response:
    record = await own_record(services, owner, save_id)
    content = await unless_disconnected(_open(services, record, owner), request.receive)
    return answer(content, _headers(request), services.disk_of(record).reads, head=head)


def _headers(request: Request) -> dict[str, str]:
    """Lists of ETags may come in several lines."""
    return {name: ", ".join(request.headers.getlist(name)) for name in request.headers}


async def _open(services: Services, record: SaveRecord, owner: str | None) -> SavedContent:
    """Raises `Conflict` for a save that is not completed, `Gone` for a file that has been removed, `Busy`."""
    if record.status == "expired":
        raise Gone("the file of this save has expired and was removed", param="save_id")
    if record.status != "completed":
        raise Conflict(f"the save is {record.status}: it has no file", param="save_id", code="not_completed")
    try:
        content = await _opened(services, record, owner)
    except Gone:
        if record.gone is None:
            services.registry.update(record.id, gone=time.time())
        raise
    if record.gone is not None:  # moved away and back
        services.registry.update(record.id, gone=None)
    return content


async def _opened(services: Services, record: SaveRecord, owner: str | None) -> SavedContent:
    """Takes one of the places for downloads, which the content gives back when it is closed."""
    content = await services.disk_of(record).reads.run(owner, _open_content, services, record)
    downloads = services.shares.downloads
    try:
        downloads.acquire(owner)
    except Busy:
        content.close()
        raise
    return replace(content, on_close=partial(downloads.release, owner))


def _open_content(services: Services, record: SaveRecord) -> SavedContent:
    return content_of(open_saved(services.roots, record), record)
