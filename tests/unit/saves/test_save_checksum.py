"""Checksums are those of the published bytes, and come with the writing: what was written in order isn't read again."""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash

from engine.saves.digest import RunningDigest
from engine.saves.selection import RowSelection
from engine.saves.spec import ClientTensor, SavedFile
from engine.saves.writer import SaveEnd

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench

DIGESTS: dict[str, Callable[[bytes], str]] = {
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh3": lambda data: xxhash.xxh3_64(data).hexdigest(),
}
ROWS = 3000
"""Of two layers of width 128 in float32: 3 MB, many pieces and many times what else is read meanwhile."""
SOME = RowSelection(((5, 1500), (-700, None)))
FORMS: dict[str, dict[str, object]] = {
    "plain": {},
    "float8": {"dtype": "float8_e4m3fn"},
    "some positions": {"rows": SOME},
    "some positions in float8": {"rows": SOME, "dtype": "float8_e4m3fn"},
    "pooled": {"pooling": "mean"},
    "pooled in float8": {"pooling": "mean", "dtype": "float8_e4m3fn"},
    "with tensors": {"tensors": {"mask": ClientTensor("uint8", [1, 0, 1]), "weights": ClientTensor("float32", [0.5])}},
}


class Read:
    """Bytes that the process has asked the kernel to read, as the kernel counts them."""

    def __init__(self) -> None:
        self._before = self._now()

    def __int__(self) -> int:
        return self._now() - self._before

    def _now(self) -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def save(bench: "Bench", known: str, **fields: object) -> tuple[SavedFile, int]:
    """Saves and returns the file and how many bytes were read from the first row on until it was published."""
    spec = bench.spec(bench.target(), **fields)
    ranges = spec.rows.ranges(ROWS)
    end = SaveEnd.of(spec.rows, list(range(ROWS)), ROWS, ROWS)
    chunks = [bench.chunk(bench.rows(min(500, high - at)), at) for low, high in ranges for at in range(low, high, 500)]
    rows = None if known == "nothing" else len(end.token_ids)
    job = bench.begin(spec, num_rows=rows, max_rows=ROWS, end=end if known == "end" else None)
    read = Read()
    for chunk in chunks:
        job.append(chunk)
    assert bench.writer.wait_idle(60)
    job.finish(end)
    event = bench.wait_for_end()
    num_read = int(read)
    assert event.file is not None, event.error
    return event.file, num_read


@pytest.fixture(params=DIGESTS)
def bench(make_bench: "Callable[..., Bench]", request: pytest.FixtureRequest) -> "Iterator[Bench]":
    made = make_bench(page_size=528, width=128, checksum=request.param, retry_seconds=0.2)
    yield made
    made.close()


def assert_checksum(bench: "Bench", file: SavedFile) -> bytes:
    data = (bench.folder / "a.safetensors").read_bytes()
    assert file.checksum is not None
    algorithm, _, digest = file.checksum.partition(":")
    assert digest == DIGESTS[algorithm](data)
    return data


@pytest.mark.parametrize("form", FORMS)
def test_a_file_whose_end_is_known_is_not_read_again(bench: "Bench", form: str) -> None:
    file, num_read = save(bench, "end", **FORMS[form])
    data = assert_checksum(bench, file)
    assert len(data) > 500_000 or "pooling" in FORMS[form]
    assert num_read < 4096


@pytest.mark.parametrize("known", ["nothing", "rows"])
@pytest.mark.parametrize("form", FORMS)
def test_of_a_file_whose_end_is_not_known_only_the_rows_are_read_again(bench: "Bench", form: str, known: str) -> None:
    file, num_read = save(bench, known, **FORMS[form])
    data = assert_checksum(bench, file)
    if "pooling" in FORMS[form]:
        assert num_read < 4096  # its row is written when all is known
    else:
        assert 0.8 * len(data) < num_read < len(data) + 4096


def test_rows_that_were_moved_are_in_the_checksum_where_they_lie_now(make_bench: "Callable[..., Bench]") -> None:
    bench = make_bench(width=5, dtype=torch.bfloat16, checksum="sha256")
    rows = bench.rows(3, layers=1)
    spec = bench.spec(bench.target(), layers=(4,), dtype="bfloat16")
    bench.save_all(rows, bench.begin(spec, num_rows=None, max_rows=100), end_later=True)
    file = bench.wait_for_end().file
    assert file is not None
    assert_checksum(bench, file)
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    bench.close()


@contextmanager
def held_up(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only writer thread is busy with another save until the end of the block."""
    busy, free, real = threading.Event(), threading.Event(), os.pwrite

    def pwrite(*arguments: object) -> int:
        busy.set()
        free.wait()
        return real(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(os, "pwrite", pwrite)
    bench.save_all(bench.rows(1), bench.begin(bench.spec(bench.target("other"), save_id="other"), num_rows=1, max_rows=1))
    busy.wait()
    yield
    free.set()


def test_a_text_that_ends_before_its_first_row_is_written_is_not_read_again(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(page_size=528, width=128, threads=1, checksum="sha256")
    job = bench.begin(bench.spec(bench.target()), num_rows=None, max_rows=ROWS)
    rows = bench.rows(500)
    with held_up(bench, monkeypatch):
        bench.save_all(rows, job, step=500)
        read = Read()
    file = bench.wait_for_end().file
    assert int(read) < 4096
    assert file is not None
    assert_checksum(bench, file)
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    bench.close()


@pytest.mark.parametrize("end", [SaveEnd([7] * 20, None, 20, 20), SaveEnd(list(range(100, 120)), None, 20, 19)])
def test_a_save_that_ends_otherwise_than_was_known_is_not_published(bench: "Bench", end: SaveEnd) -> None:
    target = bench.target()
    bench.save_all(bench.rows(20), bench.begin(bench.spec(target), num_rows=20, max_rows=20, end=end))
    event = bench.wait_for_end()
    assert event.error is not None
    assert event.error.code == "engine_error"
    assert (bench.names(), target.calls) == ([], ["abandoned"])


def test_a_header_that_can_not_be_written_at_first_comes_before_the_rows_all_the_same(
    bench: "Bench", monkeypatch: pytest.MonkeyPatch
) -> None:
    real, offsets, errors = os.pwrite, [], [errno.ENOSPC] * 2

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        offsets.append(offset)
        if errors:
            raise OSError(errors.pop(), "no room")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file, num_read = save(bench, "end")
    assert offsets[:3] == [0, 0, 0]
    assert offsets == sorted(offsets)
    assert num_read < 4096
    assert_checksum(bench, file)


def test_what_can_not_be_read_back_just_now_is_read_later(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    real, errors = os.pread, [errno.EIO, errno.EINTR, 0, errno.EIO]

    def pread(*arguments: int) -> bytes:
        number = errors.pop(0) if errors else 0
        if number:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    file, _ = save(bench, "nothing")
    assert not errors
    assert_checksum(bench, file)


def test_a_digest_waits_for_what_comes_before_and_counts_nothing_twice() -> None:
    digest = RunningDigest("sha256")
    digest.update(b"later", 4)
    assert digest.end == 0
    for data, offset in ((b"head", 0), (b"head", 0), (b"later", 4), (b"later", 4)):
        digest.update(data, offset)
    assert str(digest) == "sha256:" + hashlib.sha256(b"headlater").hexdigest()
    with pytest.raises(AssertionError):
        digest.update(b"over the end", 4)
