"""Completions over raw sockets, many at once on one thread: the client must cost as little as it can beside the service it measures."""

import json
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.client import BenchmarkError

Json = dict[str, Any]
HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"
RECEIVE_BYTES = 1 << 16
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Reply:
    """One answer: how long it took from the first byte sent to the last byte read, and its bytes as they came."""

    seconds: float
    content: bytes

    @property
    def events(self) -> int:
        """Server-sent events in it, `[DONE]` included."""
        return self.content.count(b"data: ")


def post(body: Json, path: str = "/v1/completions") -> bytes:
    """An HTTP request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def run_load(port: int, requests: Iterable[bytes], concurrency: int) -> list[Reply]:
    """Sends the requests, `concurrency` at a time on kept-alive connections, and reads all answers. Raises `BenchmarkError`."""
    with ExitStack() as stack:
        load = _Load(iter(requests), stack.enter_context(selectors.DefaultSelector()))
        for _ in range(concurrency):
            load.open(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS)))
        return load.run()


class _Exchange:
    """A connection, and the request that is under way on it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()
        self._started = 0.0
        self._length: int | None = None  # of the whole answer, where its head tells
        self._head_read = False

    def send(self, request: bytes) -> None:
        self._received, self._length, self._head_read = bytearray(), None, False
        self._started = time.perf_counter()
        self.connection.sendall(request)

    def receive(self) -> Reply | None:
        """Reads what has come; the reply once it is complete."""
        piece = self.connection.recv(RECEIVE_BYTES)
        self._received += piece
        if not piece:
            raise BenchmarkError("the service closed a connection before its answer was complete")
        if not self._head_read and HEAD_END in self._received:
            self._read_head()
        complete = self._received.endswith(LAST_CHUNK) if self._length is None else len(self._received) >= self._length
        return Reply(time.perf_counter() - self._started, bytes(self._received)) if self._head_read and complete else None

    def _read_head(self) -> None:
        head, _, _ = bytes(self._received).partition(HEAD_END)
        if not head.startswith(b"HTTP/1.1 200 "):
            raise BenchmarkError(f"an answer was refused: {bytes(self._received[:500]).decode(errors='replace')}")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        self._length = len(head) + len(HEAD_END) + int(lengths[0]) if lengths else None
        self._head_read = True


class _Load:
    def __init__(self, requests: Iterator[bytes], selector: selectors.BaseSelector) -> None:
        self._requests = requests
        self._selector = selector
        self._active = 0
        self._replies: list[Reply] = []

    def open(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchange = _Exchange(connection)
        self._selector.register(connection, selectors.EVENT_READ, exchange)
        self._next(exchange)

    def run(self) -> list[Reply]:
        while self._active:
            ready = self._selector.select(TIMEOUT_SECONDS)
            if not ready:
                raise BenchmarkError(f"no answer came within {TIMEOUT_SECONDS:.0f} s")
            for key, _ in ready:
                self._read(key.data)
        return self._replies

    def _read(self, exchange: _Exchange) -> None:
        reply = exchange.receive()
        if reply is not None:
            self._active -= 1
            self._replies.append(reply)
            self._next(exchange)

    def _next(self, exchange: _Exchange) -> None:
        request = next(self._requests, None)
        if request is None:
            self._selector.unregister(exchange.connection)
            return
        self._active += 1
        exchange.send(request)
