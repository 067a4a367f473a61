"""A file on its way to a client: in pieces, as the client takes them, and never more than there is."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.http.downloads import PIECE_BYTES, SavedContent, SavedFileResponse
from service.http.ranges import Span, Validators
from service.shares import Shares
from service.threads import Pool

Message = Any
SIZE = 40 * PIECE_BYTES + 7


@pytest.fixture
def readers() -> Iterator[Pool]:
    pool = Pool("read", 2, Shares(1).downloads)
    yield pool
    pool.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Mostly a hole, so that it costs nothing."""
    file = tmp_path / "large"
    with file.open("wb") as made:
        made.truncate(SIZE)
    return file


def run(path: Path, readers: Pool, take: Callable[[Message], Awaitable[None]], gone: asyncio.Event | None = None) -> int:
    """Sends the file to `take`, and returns the descriptor, which must be closed by then."""
    fd = os.open(path, os.O_RDONLY)
    content = SavedContent(fd, SIZE, Validators('"tag"', 0), "x")

    async def receive() -> Message:
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    asyncio.run(SavedFileResponse(content, Span(5, SIZE), readers, head=False)({"type": "http"}, receive, take))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    return fd


def test_no_piece_is_read_before_the_one_before_it_was_taken(path: Path, readers: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        read += 1
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    taken: list[int] = []

    async def take(message: Message) -> None:
        if message["type"] == "http.response.body":
            taken.append(len(message["body"]))
            await asyncio.sleep(0.001)
            assert read == len(taken)

    run(path, readers, take)
    assert sum(taken) == SIZE - 5
    assert max(taken) == PIECE_BYTES


def test_reading_ends_when_the_client_has_gone(path: Path, readers: Pool) -> None:
    gone = asyncio.Event()
    taken: list[Message] = []

    async def take(message: Message) -> None:
        taken.append(message)
        if len(taken) == 4:
            gone.set()
            await asyncio.sleep(0.01)

    run(path, readers, take, gone)
    assert len(taken) == 4


def test_a_file_that_gets_shorter_ends_without_a_last_piece(path: Path, readers: Pool) -> None:
    """The server then cuts the connection, and the client knows that something is missing."""
    taken: list[Message] = []

    async def take(message: Message) -> None:
        taken.append(message)
        os.truncate(path, 3 * PIECE_BYTES)

    run(path, readers, take)
    assert sum(len(message.get("body", b"")) for message in taken) == 3 * PIECE_BYTES - 5
    assert all(message["more_body"] for message in taken[1:])


def test_a_client_that_fails_while_it_takes_leaves_no_descriptor(path: Path, readers: Pool) -> None:
    async def take(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise ConnectionError

    before = list(Path("/proc/self/fd").iterdir())
    with pytest.raises(ConnectionError):
        run(path, readers, take)
    assert len(list(Path("/proc/self/fd").iterdir())) <= len(before) + 1
