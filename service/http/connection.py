"""What uvicorn's connections lack: bounds on the time and size of a request's head, and on how slowly an answer is read.

It works below HTTP, on either of uvicorn's protocols: a head that never ends reaches no middleware, and neither does a client that has
stopped reading. The bounds on bodies, which do, are in `service/http/middleware.py`.
"""

import asyncio
import logging
import socket
import struct
import sys
from functools import partial
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.errors import Busy, HeadTooLarge, MalformedRequest, ServiceError, TooSlow
from service.http.errors import error_response
from service.http.limits import HttpLimits

log = logging.getLogger(__name__)

ACKNOWLEDGED_OFFSET = 120
"""Of `tcpi_bytes_acked`, 64 bits, in the `tcp_info` of linux/tcp.h; since Linux 4.1."""
CHECKS_PER_LIMIT = 4
"""How often a bound on time is looked at within it, so that it is kept to a quarter."""


class WriteWatch:
    """Finds out whether a client still takes what is waiting for it."""

    def __init__(self, transport: asyncio.Transport, limits: HttpLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._since: float | None = None
        self._taken = 0

    def stalled(self, now: float) -> bool:
        """Whether less than the least amount was taken in the last `write_seconds`; to be asked every now and then."""
        taken = bytes_acknowledged(self._transport) if self._transport.get_write_buffer_size() else None
        if taken is None:
            self._since = None  # the kernel had room for everything, or doesn't tell
            return False
        if self._since is None:
            self._since, self._taken = now, taken
        if now - self._since < self._limits.write_seconds:
            return False
        before, self._since, self._taken = self._taken, now, taken
        return taken - before < self._limits.write_seconds * self._limits.write_rate


def bytes_acknowledged(transport: asyncio.Transport) -> int | None:
    """How much the other end has ever taken; None for anything but TCP on Linux."""
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKNOWLEDGED_OFFSET + 8)
    return int.from_bytes(info[ACKNOWLEDGED_OFFSET:], sys.byteorder)


def forget_unsent(transport: asyncio.Transport) -> None:
    """Makes the kernel drop what it holds for the client when the connection is closed; it would keep it for minutes."""
    if (connection := transport.get_extra_info("socket")) is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Guard:
    """Mixed into a protocol of uvicorn's. Uses of it `cycle` (the request being answered), `connections`, `transport` and `loop`."""

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
        self._writes: WriteWatch | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]  # of the protocol this is mixed into
        self._head_since = self.loop.time()
        self._writes = WriteWatch(transport, self._limits)
        if len(self.connections) > self._limits.connections:
            self._refuse(Busy("too many connections are open", code="too_many_connections"))
        self._check_later()

    def connection_lost(self, error: Exception | None) -> None:
        if self._check_handle is not None:
            self._check_handle.cancel()
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
        seconds = min(self._limits.head_seconds, self._limits.write_seconds) / CHECKS_PER_LIMIT
        self._check_handle = self.loop.call_later(seconds, self._check)

    def _check(self) -> None:
        now = self.loop.time()
        if self._writes is not None and self._writes.stalled(now):
            log.warning("a client has stopped reading its answer, its connection is cut")
            forget_unsent(self.transport)
            self.transport.abort()
        elif not self.transport.is_closing() and self._head_is_late(now):
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
        log.info("refused what a client sent: %s", error.message, extra={"fields": fields})
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
