"""Clients that leave before their answer: what is done for them ends, and what they hold is free at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""What nginx logs for a client that left; nobody reads it."""


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Runs a coroutine to its end. Raises `ClientGone`, and cancels it, where the client leaves first. The body must have been read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
