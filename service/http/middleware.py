"""Plain ASGI middleware: request ids, who may ask, and bounds on what a request may send and take."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Busy, HeadTooLarge, Unauthorized, as_service_error
from service.http.auth import ApiKeys
from service.http.disconnect import CLIENT_CLOSED_REQUEST
from service.http.errors import RETRY_AFTER_SECONDS, error_response, http_response
from service.http.limits import HttpLimits
from service.http.reference import is_reference
from service.observe.logs import lines_of_request
from service.observe.metrics import Metrics
from service.observe.probes import PROBE_PATHS
from service.schemas.generation import REQUEST_ID_PATTERN
from service.shares import Owner, Share

COMPUTING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
HEADER = b"x-request-id"
_VALID_ID = re.compile(REQUEST_ID_PATTERN.encode())


class UnexpectedErrors:
    """Answers 500 where a route raised an unexpected exception: the log has the details, the connection stays usable."""

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


class ResponseMetrics:
    """Counts answers by status, refusals by whatever stands behind it included. Probes and scrapes are not counted.

    Of requests to compute something it counts those that ended before they were admitted: whatever was admitted is counted when it ends.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return

        status = 0

        async def send_and_count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.answered(status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_count)
        finally:
            if scope["method"] == "POST" and scope["path"] in COMPUTING_PATHS and not scope["state"].get("admitted"):
                self._metrics.request_ended("aborted" if status == CLIENT_CLOSED_REQUEST else "rejected")


class RequestId:
    """Puts `request_id` into the request's state, answers it as X-Request-Id, and has the request's log lines carry it.

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

        with lines_of_request(state):
            await self._app(scope, receive, send_with_id)


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]


def _sent_id(scope: Scope) -> str | None:
    values = _values(scope, HEADER)
    return values[0].decode() if values and _VALID_ID.fullmatch(values[0]) else None


class HeadLimit:
    """Answers 431 for too many or too large headers; the connection has made sure that they were read in bounded memory."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        await (error_response(HeadTooLarge(problem)) if problem else self._app)(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        count, limits = len(scope["headers"]), self._limits
        if count > limits.head_count:
            return f"the request has {count} headers, at most {limits.head_count} are allowed"
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        return f"the headers are larger than {limits.head_bytes} bytes" if size > limits.head_bytes else None


class Authentication:
    """Puts the `owner` of the request's key into its state, or answers 401. None without a keys file: then no key is needed."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner = None
        if self._keys is not None and scope["path"] not in PROBE_PATHS and not is_reference(scope["path"]):
            sent = _values(scope, b"authorization")
            owner = self._keys.owner(sent[0]) if len(sent) == 1 else None
            if owner is None:
                reason = "the API key is not valid" if sent else "an API key is needed: Authorization: Bearer KEY"
                await error_response(Unauthorized(reason))(scope, receive, send)
                return
        scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, receive, send)


class RequestLimit:
    """Answers 429 where too many requests are being answered. What waits for the engine has a bound of its own, `--max-queued`."""

    def __init__(self, app: ASGIApp, answers: Share) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        owner = scope["state"]["owner"]
        try:
            self._answers.acquire(owner)
        except Busy as busy:
            await error_response(busy)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._answers.release(owner)


class BodyLimit:
    """Bounds the size of a body, of all bodies together, and how long a body may take: 413, 429 and 408."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, most: Callable[[], int], all_bodies: Share) -> None:
        """`most` is the bound on one body, just now; `all_bodies` are the bytes of all that are held."""
        self._app = app
        self._limits = limits
        self._most = most
        self._all_bodies = all_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._most()
        if _announced(scope) > most:
            await http_response(_too_large(most))(scope, receive, send)
            return
        reader = _BodyReader(receive, self._limits, most)
        owner = scope["state"]["owner"]
        held = 0

        async def receive_bounded() -> Message:
            nonlocal held
            message = await reader.receive()
            if reader.taken > held:
                self._take(owner, reader.taken - held)
                held = reader.taken
            return message

        try:
            await self._app(scope, receive_bounded, send)
        finally:
            self._all_bodies.release(owner, held)

    def _take(self, owner: Owner, size: int) -> None:
        try:
            self._all_bodies.acquire(owner, size)
        except Busy as busy:
            raise _too_much(busy) from None


class _BodyReader:
    """The messages of one request, as long as its body comes fast enough and ends soon enough."""

    def __init__(self, receive: Receive, limits: HttpLimits, most: int) -> None:
        self.taken = 0
        self._receive = receive
        self._limits = limits
        self._most = most
        self._started = time.monotonic()
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # waits for the client to leave, however long
        try:
            async with asyncio.timeout(self._seconds_left()):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow() from None
        body = message.get("body", b"")
        self._complete = not message.get("more_body", False)
        if self.taken + len(body) > self._most:
            raise _too_large(self._most)
        self.taken += len(body)
        return message

    def _seconds_left(self) -> float:
        """Seconds until the next byte must have come: not too long after the last one, and not too late for the whole."""
        limits = self._limits
        whole = limits.body_grace_seconds + self.taken / limits.body_rate - (time.monotonic() - self._started)
        return max(min(limits.body_pause_seconds, whole), 0.0)


def _announced(scope: Scope) -> int:
    values = _values(scope, b"content-length")
    return int(values[0]) if values and values[0].isdigit() and len(values[0]) < 20 else 0


# Of this class, because FastAPI takes any other one from reading a body for a body that can't be parsed. The connection of a body that is
# too large stays open for the rest of it (`service/http/connection.py` says for how long): closing would take the answer away from the
# client.
def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes")


def _too_much(busy: Busy) -> HTTPException:
    return HTTPException(429, busy.message, {"Retry-After": str(RETRY_AFTER_SECONDS)})


def _too_slow() -> HTTPException:
    return HTTPException(408, "the body took too long", {"Connection": "close"})
