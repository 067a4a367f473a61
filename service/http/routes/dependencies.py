"""What routes are given. All of it is async, because FastAPI sends plain functions to a thread, at every request."""

import asyncio
from typing import Annotated, cast

from fastapi import Depends, Request

from service.errors import NotFound
from service.observe.logs import lines_of_saves
from service.registry.records import SaveRecord
from service.runtime import Runtime
from service.services import Services


async def get_runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


async def get_owner(request: Request) -> str | None:
    owner: str | None = request.state.owner
    return owner


Owner = Annotated[str | None, Depends(get_owner)]
"""Whom the request's API key stands for; None where the service runs without keys."""

RuntimeDependency = Annotated[Runtime, Depends(get_runtime)]


async def services_for_work(runtime: RuntimeDependency) -> Services:
    return runtime.services(for_new_work=True)


async def services_for_reading(runtime: RuntimeDependency) -> Services:
    return runtime.services(for_new_work=False)


WorkServices = Annotated[Services, Depends(services_for_work)]
"""For requests that compute: refused while the service drains."""
ReadServices = Annotated[Services, Depends(services_for_reading)]


async def own_record(services: Services, owner: str | None, save_id: str) -> SaveRecord:
    """The record of a save that this owner may see, which without keys is every save. Raises `NotFound`: others don't exist for it."""
    record = await asyncio.wrap_future(services.registry.get(save_id))
    if record is None or (owner is not None and record.owner != owner):
        raise NotFound("there is no such save", param="save_id")
    lines_of_saves([record.id])
    return record
