"""A log line for every answer: what was asked, what came of it, how long it took, and for whom."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.auth import key_name
from service.observe.probes import PROBE_PATHS

log = logging.getLogger(__name__)


@dataclass
class _Answer:
    """What has been sent of an answer."""

    status: int | None = None
    bytes: int = 0
    complete: bool = False

    def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)


class AccessLog:
    """Writes the line when the answer has ended. It stands within `RequestId`, which gives the line its ids.

    What probes and scrapes ask again and again is written at level debug. The query is left out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, answer = time.perf_counter(), _Answer()

        async def send_and_note(message: Message) -> None:
            await send(message)
            answer.add(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            level = logging.DEBUG if scope["path"] in PROBE_PATHS else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "answered", extra={"fields": _fields(scope, answer, time.perf_counter() - started)})


def _fields(scope: Scope, answer: _Answer, seconds: float) -> dict[str, Any]:
    fields = {
        "method": scope["method"],
        "path": scope["raw_path"].decode("ascii", "backslashreplace"),  # as it was sent: the decoded one may hold line breaks
        "status": answer.status,
        "duration_seconds": round(seconds, 6),
        "bytes": answer.bytes,
        "client": scope["client"][0] if scope.get("client") else None,
    }
    if (key := key_name(scope["state"].get("owner"))) is not None:
        fields["key"] = key
    if not answer.complete:
        fields["aborted"] = True
    return fields
