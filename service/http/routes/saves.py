"""`/saves`: the records of saves."""

import asyncio
import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from service.errors import NotFound
from service.http.disconnect import unless_disconnected
from service.http.responses.bodies import encoded
from service.http.routes.dependencies import Owner, ReadServices, own_record
from service.registry.records import SaveRecord, SaveStatus
from service.saves.paths.names import ClientPathMap
from service.schemas.answers import ERRORS, ErrorAnswer, SaveAnswer, SaveList
from service.services import Services
from service.wire import rfc3339

router = APIRouter(tags=["saves"])

MAX_WAIT_SECONDS = 60
MAX_PAGE = 500
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ErrorAnswer, "description": "There is no such save."}}
CANNOT_REMOVE: dict[int | str, dict[str, Any]] = {
    500: {"model": ErrorAnswer, "description": "The file can't be removed; nothing has changed."}
}


@router.get("/saves/{save_id}", response_model=SaveAnswer, response_model_exclude_unset=True, responses={**ERRORS, **NOT_FOUND})
async def get_save(
    save_id: str,
    request: Request,
    services: ReadServices,
    owner: Owner,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False, description="Hold the answer until the save ends.")] = 0,
) -> Response:
    """The record of a save."""
    record: SaveRecord | None = await own_record(services, owner, save_id)
    if wait:
        with services.shares.polls.acquired(owner):
            record = await unless_disconnected(services.registry.wait(save_id, wait), request.receive)
    if record is None:  # deleted meanwhile
        raise NotFound("there is no such save", param="save_id")
    return Response(encoded(save_view(services, record)), media_type="application/json")


@router.delete("/saves/{save_id}", status_code=204, response_class=Response, responses={**ERRORS, **CANNOT_REMOVE})
async def remove_save(save_id: str, request: Request, services: ReadServices, owner: Owner) -> Response:
    """Cancels a running save, or removes file, lock file and record of one that has ended. A save that isn't there is removed already."""
    with contextlib.suppress(NotFound):
        record = await own_record(services, owner, save_id)
        await unless_disconnected(services.deleter.delete(record), request.receive)
    return Response(status_code=204)


@router.get("/saves", response_model=SaveList, response_model_exclude_unset=True, responses={**ERRORS, **NOT_FOUND})
async def list_saves(
    services: ReadServices,
    owner: Owner,
    status: Annotated[SaveStatus | None, Query()] = None,
    request_id: Annotated[str | None, Query()] = None,
    prefix: Annotated[str | None, Query(description="Start of the path; a relative one is below the default root.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[str | None, Query(description="The id that the page before ended with.")] = None,
) -> dict[str, Any]:
    """Records, newest first."""
    server_prefix = _server_prefix(services, prefix)
    records = await asyncio.wrap_future(
        services.registry.list(status=status, request_id=request_id, prefix=server_prefix, owner=owner, after=after, limit=limit + 1)
    )
    page = [save_view(services, record) for record in records[:limit]]
    return {"object": "list", "data": page, "has_more": len(records) > limit}


def save_view(services: Services, record: SaveRecord) -> dict[str, Any]:
    """A record as clients see it."""
    view: dict[str, Any] = {
        "id": record.id,
        "object": "save",
        "status": record.status,
        "hidden_states_path": services.roots.to_client(record.hidden_states_path),
        "request_id": record.request_id,
        "model": record.model,
        "layers": list(record.layers),
        "dtype": record.dtype,
        "shape": None if record.shape is None else list(record.shape),
        "num_tokens": record.num_tokens,
        "bytes": record.bytes,
        "bytes_written": _bytes_written(services, record),
        "created": rfc3339(record.created),
        "finished": None if record.finished is None else rfc3339(record.finished),
        "expires": None if record.expires is None else rfc3339(record.expires),
    }
    if record.checksum is not None:
        algorithm, _, digest = record.checksum.partition(":")
        view[algorithm] = digest
    if record.error_code is not None:
        view["error"] = {"code": record.error_code, "message": record.error_message}
    if record.output:
        view["output"] = dict(record.output)
    return view


def _bytes_written(services: Services, record: SaveRecord) -> int:
    if record.ended:
        return record.bytes or 0
    return services.engine.save_bytes_written(record.id)


def _server_prefix(services: Services, prefix: str | None) -> str | None:
    if prefix is None:
        return None
    if not prefix.startswith("/"):
        return f"{services.roots.roots[0].path}/{prefix}"
    client_map = ClientPathMap(services.settings.client_path_map)
    return "/" + "/".join(client_map.to_server(tuple(prefix.split("/")[1:])))
