"""Client disconnects: work for a client that has disconnected is cancelled, and what it holds is released at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; only the logs show it."""


class ClientDisconnected(Exception):
    """The client disconnected before the response."""


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Runs a coroutine. Cancels it and raises `ClientDisconnected` where the client disconnects first. The body must have been read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(client_disconnected(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return await task
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def client_disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
