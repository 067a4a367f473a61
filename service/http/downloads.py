"""The bytes of a saved file as an HTTP answer, whole or one range, in pieces of bounded size."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import PreconditionFailed, RangeNotSatisfiable
from service.http.disconnect import client_disconnected
from service.http.errors import error_response
from service.http.ranges import Span, Unsatisfiable, Validators, failed_precondition, requested_span
from service.registry.records import SaveRecord
from service.threads import Pool

log = logging.getLogger(__name__)

PIECE_BYTES = 2**18


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class SavedContent:
    """An open file and what HTTP says of it. Its owner must close it."""

    fd: int
    size: int
    validators: Validators
    name: str
    on_close: Callable[[], None] = _nothing

    def close(self) -> None:
        os.close(self.fd)
        self.on_close()

    def headers(self) -> dict[str, str]:
        return {
            "Accept-Ranges": "bytes",
            "Content-Disposition": f"attachment; filename*=utf-8''{quote(self.name, safe='')}",
            "ETag": self.validators.etag,
            "Last-Modified": self.validators.last_modified,
        }


def content_of(fd: int, record: SaveRecord) -> SavedContent:
    """`fd` is the record's file. The ETag changes with every change of the file, one that a client makes in place too."""
    status = os.fstat(fd)
    what = record.checksum or f"{record.id}-{status.st_ino:x}-{status.st_size:x}"
    etag = f'"{what}-{status.st_mtime_ns:x}"'
    name = record.hidden_states_path.rpartition("/")[2]
    return SavedContent(fd, status.st_size, Validators(etag, int(status.st_mtime)), name)


def answer(content: SavedContent, headers: Mapping[str, str], readers: Pool, *, head: bool) -> Response:
    """The answer to GET or HEAD; it takes the content over. Ranges are for GET only, as RFC 9110 has it."""
    refusal = failed_precondition(headers, content.validators)
    if refusal is not None:
        content.close()
        return _without_content(refusal, content)
    try:
        span = None if head else requested_span(headers, content.size, content.validators)
    except Unsatisfiable:
        content.close()
        response = error_response(RangeNotSatisfiable(f"the file has {content.size} bytes", param="Range"))
        response.headers["Content-Range"] = f"bytes */{content.size}"
        return response
    return SavedFileResponse(content, span, readers, head=head)


def _without_content(status: int, content: SavedContent) -> Response:
    if status == 412:
        response: Response = error_response(PreconditionFailed("the file is not in the state that the request asks for"))
        response.headers["ETag"] = content.validators.etag
        return response
    return Response(status_code=status, headers=content.headers())


class SavedFileResponse(Response):
    """Reads a piece when the one before has been taken, so memory is bounded however slow the client is."""

    def __init__(self, content: SavedContent, span: Span | None, readers: Pool, *, head: bool) -> None:
        super().__init__(None, 200 if span is None else 206, content.headers(), media_type="application/octet-stream")
        self._content = content
        self._span = span or Span(0, content.size)
        self._readers = readers
        self._head = head
        self.headers["Content-Length"] = str(self._span.end - self._span.start)
        if span is not None:
            self.headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{content.size}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(client_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._head:
                await send({"type": "http.response.body", "body": b""})
            else:
                await self._send_span(send, leaving)
        finally:
            leaving.cancel()
            self._content.close()

    async def _send_span(self, send: Send, leaving: "asyncio.Future[None]") -> None:
        at = self._span.start
        while at < self._span.end and not leaving.done():
            piece = await self._read(at)
            if not piece:  # Without the rest the server cuts the connection, which tells the client.
                log.warning("a download was cut at byte %d of %d: the file could not be read on", at, self._content.size)
                return
            at += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": at < self._span.end})

    async def _read(self, at: int) -> bytes:
        """Empty where the file has become shorter or its disk fails."""
        size = min(PIECE_BYTES, self._span.end - at)
        try:
            return await self._readers.run(None, os.pread, self._content.fd, size, at)
        except OSError as error:
            log.warning("a file can't be read: %s", error.strerror)
            return b""
