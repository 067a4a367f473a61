"""Clients that don't take what they asked for, on each event loop and each of uvicorn's protocols, below any application of ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.http.connection import guarded_protocol
from service.http.limits import DEFAULT_LIMITS
from service.http.server import Server, server_config

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

LIMITS = replace(DEFAULT_LIMITS, write_seconds=0.5, head_seconds=0.5)
PIECES, PIECE = 2000, b"x" * 10_000  # more than any kernel takes for a connection
PROTOCOLS = [AutoHTTPProtocol] if AutoHTTPProtocol is H11Protocol else [AutoHTTPProtocol, H11Protocol]
Loop = Callable[[], asyncio.AbstractEventLoop]


def event_loops() -> list[Loop]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.new_event_loop]
    return [asyncio.new_event_loop, uvloop.new_event_loop]


class Endless:
    """An application whose answer is large; it notes how far it came before it heard that the client is gone."""

    def __init__(self) -> None:
        self.sent = 0
        self.told = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (PIECES * len(PIECE)))]})
        while self.sent < PIECES and not gone.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": self.sent + 1 < PIECES})
            self.sent += 1
        assert (await gone)["type"] == "http.disconnect"
        self.told.set()


@pytest.fixture(params=event_loops(), ids=lambda loop: loop.__module__)
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


@pytest.fixture(params=PROTOCOLS, ids=lambda protocol: protocol.__name__)
def protocol(request: pytest.FixtureRequest) -> type[asyncio.Protocol]:
    chosen: type[asyncio.Protocol] = request.param
    return chosen


class Running:
    """A server on a socket of its own."""

    def __init__(self, protocol: type[asyncio.Protocol]) -> None:
        self.app = Endless()
        self._server = Server(server_config(self.app, LIMITS, http=guarded_protocol(LIMITS, protocol), lifespan="off"))
        self._listening = socket.create_server(("127.0.0.1", 0))

    async def __aenter__(self) -> Running:
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving
        self._listening.close()

    def ask(self) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(self._listening.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        client.setblocking(False)
        return client

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)


async def received_until_cut(client: socket.socket) -> int:
    """Bytes that a client still gets, once it reads again, before it hears that its connection has gone."""
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 2**20):
            received += len(data)
    return received


def test_an_answer_that_nobody_reads_is_cut_and_the_application_hears_it(runner: asyncio.Runner, protocol: type[asyncio.Protocol]) -> None:
    async def run() -> None:
        async with Running(protocol) as server:
            with server.ask() as client:
                await server.app.told.wait()
                sent = server.app.sent
                assert sent < PIECES
                while server.num_connections:
                    await asyncio.sleep(0.01)
                assert await received_until_cut(client) < sent * len(PIECE), "nothing is left in the server's kernel either"

    with runner:
        runner.run(run())


def test_an_answer_that_is_read_slowly_arrives_whole(runner: asyncio.Runner, protocol: type[asyncio.Protocol]) -> None:
    async def run() -> None:
        async with Running(protocol) as server:
            with server.ask() as client:
                loop, received, pauses = asyncio.get_running_loop(), 0, 0
                while data := await loop.sock_recv(client, 2**20):
                    received += len(data)
                    if received > pauses * 2**22:  # takes longer than the bound in all, but never stops for so long
                        pauses += 1
                        await asyncio.sleep(LIMITS.write_seconds / 2)
                assert received > PIECES * len(PIECE)
                await server.app.told.wait()
                assert server.app.sent == PIECES

    with runner:
        runner.run(run())
