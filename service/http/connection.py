"""Bounds that uvicorn lacks: on the time and size of a request's head, on connections, and on responses that the client doesn't read.

They work below HTTP, on either of uvicorn's protocols: a head that never ends reaches no middleware, and neither does a client that has
stopped reading. uvicorn has no clock for either (`timeout_keep_alive` is for idle connections), bounds heads for h11 alone, and answers
503 to health checks too where `limit_concurrency` is reached. A proxy in front has all of it, but the service must not need one. The
bounds on bodies are in `service/http/middleware.py`.
"""

import asyncio
import logging
import socket
import sys
from functools import partial
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.errors import Busy, HeadTooLarge, MalformedRequest, ServiceError, TooSlow
from service.http.errors import error_response
from service.http.limits import HttpLimits

log = logging.getLogger(__name__)

CHECKS_PER_LIMIT = 4
"""How often a bound on time is looked at within it, so that it is kept to a quarter."""


def bound_unread_answers(transport: asyncio.Transport, seconds: float) -> None:
    """Has the kernel end a connection whose other end takes nothing of what waits for it for so long; on Linux."""
    connection = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


class Guard:
    """Mixed into a protocol of uvicorn's. Uses of it `connections`, `transport`, `loop` and `cycle`, the request that came last: that alone
    tells below HTTP whether a head has ended. `tests/http/test_limits.py` runs on both protocols, and would notice if these changed.
    """

    cycle: Any
    connections: set[Any]
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop

    def __init__(self, *arguments: Any, limits: HttpLimits, **named: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*arguments, **named)
        self._limits = limits
        self._head_bytes = 0
        self._head_since: float | None = None
        self._check_handle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]  # of the protocol this is mixed into
        self._head_since = self.loop.time()
        bound_unread_answers(transport, self._limits.write_seconds)
        if len(self.connections) > self._limits.connections:
            self._refuse(Busy("too many connections are open", code="too_many_connections"))
        self._check_later()

    def connection_lost(self, error: Exception | None) -> None:
        if self._check_handle is not None:
            self._check_handle.cancel()
        if isinstance(error, TimeoutError):
            log.warning("a client has stopped reading its response; its connection is closed")
        super().connection_lost(error)  # type: ignore[misc]  # see above

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        before = self.cycle
        super().data_received(data)  # type: ignore[misc]  # see above
        if self.cycle is not before:
            self._head_since, self._head_bytes = None, 0
        elif self._awaits_head():
            self._head_since = self._head_since or self.loop.time()
            self._head_bytes += len(data)
            if self._head_bytes > self._head_budget():
                self._refuse(HeadTooLarge(f"the headers are larger than {self._limits.head_bytes} bytes"))

    def send_400_response(self, msg: str) -> None:
        """Instead of uvicorn's plain text."""
        self._refuse(MalformedRequest("this is not a valid HTTP/1.1 request"))

    def _awaits_head(self) -> bool:
        """Also true for the rest of a body whose request has been answered: nobody waits for it, but it must end too."""
        return self.cycle is None or self.cycle.response_complete

    def _head_budget(self) -> int:
        """Bytes until the next head must be complete; where an answer came before its body had, the rest of that comes first."""
        early = self.cycle is not None and self.cycle.more_body
        return self._limits.head_bytes + (self._limits.body_bytes if early else 0)

    def _check_later(self) -> None:
        self._check_handle = self.loop.call_later(self._limits.head_seconds / CHECKS_PER_LIMIT, self._check)

    def _check(self) -> None:
        if not self.transport.is_closing() and self._head_is_late(self.loop.time()):
            self._refuse(TooSlow("the headers took too long"))
        self._check_later()

    def _head_is_late(self, now: float) -> bool:
        late = self._head_since is not None and now - self._head_since > self._limits.head_seconds
        return late and self._awaits_head()

    def _refuse(self, error: ServiceError) -> None:
        """Answers without the application and closes; only closes where an answer is under way."""
        if self.transport.is_closing():
            return
        address = self.transport.get_extra_info("peername")
        fields = {"status": error.status, "client": address[0] if isinstance(address, tuple) else None}
        log.info("rejected a malformed request: %s", error.message, extra={"fields": fields})
        if self._awaits_head():
            self.transport.write(raw_response(error))
        self.transport.close()


def guarded_protocol(limits: HttpLimits, protocol: type[asyncio.Protocol] = AutoHTTPProtocol) -> Any:  # noqa: ANN401 - what uvicorn calls
    """One of uvicorn's protocols with the bounds; it is called for every connection."""
    return partial(type("GuardedProtocol", (Guard, protocol), {}), limits=limits)


def raw_response(error: ServiceError) -> bytes:
    response = error_response(error)
    headers = [(b"connection", b"close"), *response.raw_headers]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return b"HTTP/1.1 %d Refused\r\n%s\r\n%s" % (response.status_code, lines, bytes(response.body))
