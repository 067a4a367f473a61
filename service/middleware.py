"""Plain ASGI middleware: a request id for every answer, and a bound on bodies."""

import re
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import as_service_error, error_response, http_response
from service.schemas.completions import REQUEST_ID_PATTERN

MAX_BODY_BYTES = 64 * 2**20
HEADER = b"x-request-id"
_VALID_ID = re.compile(REQUEST_ID_PATTERN.encode())


class UnexpectedErrors:
    """Answers 500 where a route raised what nobody expected: the log has the details, the connection stays usable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(as_service_error(error))(scope, receive, send)


class RequestId:
    """Puts `request_id` into the request's state and answers it as X-Request-Id.

    An id that the client sent is kept if it is printable ASCII of at most 128 characters; else one is made. A route may replace it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = _sent_id(scope) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, state["request_id"].encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _sent_id(scope: Scope) -> str | None:
    values = [value for name, value in scope["headers"] if name == HEADER]
    return values[0].decode() if values and _VALID_ID.fullmatch(values[0]) else None


class BodyLimit:
    """Answers 413 for a body above `MAX_BODY_BYTES`, before it has been read into memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = 0

        async def receive_bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise _too_large()
            return message

        if _announced(scope) > MAX_BODY_BYTES:
            await http_response(_too_large())(scope, receive, send)
            return
        await self._app(scope, receive_bounded, send)


def _announced(scope: Scope) -> int:
    values = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(values[0]) if values and values[0].isdigit() else 0


def _too_large() -> HTTPException:
    # Of this class, because FastAPI takes any other one from reading a body for a body that can't be parsed.
    return HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
