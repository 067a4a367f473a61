"""Runs the application on a socket: says when it is ready, drains on a signal, and says how it ended."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.errors import ConfigError
from service.config.settings import Settings
from service.http.app import create_app
from service.http.connection import guarded_protocol
from service.http.hosts import is_local
from service.http.limits import DEFAULT_LIMITS, HttpLimits
from service.runtime import Runtime

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 5e-5
"""How long the engine thread waits for Python's lock while the event loop has it, after every operation of a step that gave it up: of
Python's own 5 ms, a loop that is busy with a token for each of many streams would make whole steps."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2
EXIT_INTERRUPTED = 130
BACKLOG = 2048
FILES = 65536
"""Descriptors that are asked for."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections, so that it is them who close."""
LAST_RESPONSES_SECONDS = 10
"""How long connections may take to read their answers once everything has been computed."""


class Server(uvicorn.Server):
    """uvicorn, but signals are ours: it would close the socket at once, and new requests are to hear a 503 while we drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `::` takes IPv4 as well. Raises `ConfigError` where the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"can't listen on {host} port {port}: {reason}") from error


def server_config(app: FastAPI, limits: HttpLimits = DEFAULT_LIMITS, **changes: Any) -> uvicorn.Config:  # noqa: ANN401 - uvicorn's options
    known: dict[str, Any] = {
        "http": guarded_protocol(limits),
        "h11_max_incomplete_event_size": limits.head_bytes,
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "ws": "none",
        "lifespan": "on",  # else a failure in there would leave a server that answers 500 for ever
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": LAST_RESPONSES_SECONDS,
    }
    return uvicorn.Config(app, **known | changes)


def limits_of(settings: Settings) -> HttpLimits:
    """Bounds that let in what the engine may hold, and leave at least half of the descriptors to saves.

    Raises the soft limit on descriptors, which is often 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = FILES if soft == resource.RLIM_INFINITY else soft
    requests = max(DEFAULT_LIMITS.requests, 2 * (settings.max_running + settings.max_queued))
    return replace(DEFAULT_LIMITS, requests=requests, connections=min(max(DEFAULT_LIMITS.connections, 2 * requests), files // 2))


def serve(settings: Settings, runtime: Runtime | None = None) -> int:
    """Runs until a signal, a failed start or a dead engine, and returns the exit status."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Each text on the thread that asks for its tokens, and not all of them on threads that the library shares between them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    limits = limits_of(settings)
    runtime = runtime or Runtime(settings)
    app = create_app(settings, runtime, limits)
    listening = listen(settings.host, settings.port)
    config = server_config(app, limits)
    _warn_if_open(settings, listening)
    with listening, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        status = runner.run(_serve(app, runtime, Server(config), listening))
    if runtime.start_was_interrupted:
        # Python would wait for threads that still load a model, and for those of the hub's client.
        logging.shutdown()
        os._exit(status)
    return status


def _warn_if_open(settings: Settings, listening: socket.socket) -> None:
    address = listening.getsockname()[0]
    if settings.api_keys_file is None and not is_local(address):
        log.warning(
            "listening on %s without --api-keys-file: every client that reaches the port may use the model, and read and delete every save",
            address,
        )


async def _serve(app: FastAPI, runtime: Runtime, server: Server, listening: socket.socket) -> int:
    runtime.on_fatal = lambda: _schedule_exit(server)
    _handle_signals(runtime, server)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _no_keys if app.state.keys is None else app.state.keys.reload)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    status = await _until_ready(app, runtime, server, serving, listening)
    await serving
    return EXIT_FAILED if runtime.failed else status


async def _until_ready(app: FastAPI, runtime: Runtime, server: Server, serving: "asyncio.Future[None]", listening: socket.socket) -> int:
    """Prints the line that says where the service is; returns the status to exit with, should nothing else happen."""
    while not hasattr(app.state, "start") and not serving.done():
        await asyncio.sleep(0)
    try:
        await asyncio.shield(app.state.start)
    except ConfigError:
        _schedule_exit(server)
        return EXIT_BAD_SETTINGS
    except Exception:
        _schedule_exit(server)
        return EXIT_FAILED
    if runtime.state == "ok":
        # What there is by now stays to the end, so it needn't be looked through again and again while requests are served.
        gc.collect()
        gc.freeze()
        print(f"Strata is ready at {_url(listening)}", flush=True)
    return EXIT_OK


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _no_keys() -> None:
    """SIGHUP asks a daemon to read its files again and never ends one, whether or not there are files; a lost terminal doesn't, either."""
    log.info("SIGHUP: there is no --api-keys-file to read again")


def _schedule_exit(server: Server) -> None:
    server.should_exit = True


def _handle_signals(runtime: Runtime, server: Server) -> None:
    """The first signal drains, the second ends the process at once."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if draining:
            os._exit(EXIT_INTERRUPTED)
        draining.append(loop.create_task(_drain(runtime, server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _drain(runtime: Runtime, server: Server) -> None:
    try:
        await runtime.drain()
    finally:
        _schedule_exit(server)
