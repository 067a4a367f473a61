"""Failing disks, cancellations and bad values: nothing is left behind, and the client hears of it exactly once."""

import contextlib
import errno
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, EngineUnavailable, SaveError
from engine.saves import builder
from engine.saves.selection import RowSelection
from engine.saves.spec import ClientTensor, SavedFile, SaveEvent
from engine.saves.writer import RowChunk, SaveEnd, SaveWriter

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench, Target

real_pwrite = os.pwrite


class Gate:
    """Holds the first call of a system call until it is told to go on."""

    def __init__(self, real: Callable[..., int]) -> None:
        self.real = real
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *arguments: object) -> int:
        self.reached.set()
        self.opened.wait()
        return self.real(*arguments)


def failing(*numbers: int, then: Callable[..., int] = real_pwrite) -> Callable[..., int]:
    """Raises these errors, one per call, and then goes on with `then`."""
    left = list(numbers)

    def call(*arguments: object) -> int:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return then(*arguments)

    return call


def always(number: int) -> Callable[..., int]:
    def call(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def expect_nothing_left(bench: "Bench", target: "Target", code: str, status: str = "failed") -> SaveEvent:
    event = bench.wait_for_end()
    assert (event.status, event.error.code if event.error else None) == (status, code)
    assert bench.names() == []
    assert target.calls == ["abandoned"]
    return event


def save(bench: "Bench", target: "Target", count: int = 20, **fields: object) -> torch.Tensor:
    rows = bench.rows(count)
    bench.save_all(rows, bench.begin(bench.spec(target, **fields), num_rows=None, max_rows=count))
    return rows


@pytest.fixture
def target(bench: "Bench") -> "Iterator[Target]":
    return bench.target()


def test_short_writes_go_on_where_they_stopped(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_pwrite(fd, data[:7], offset))
    rows = save(bench, target)
    assert bench.wait_for_end().status == "completed"
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    assert target.calls == ["published"]


@pytest.mark.parametrize("numbers", [(errno.EINTR, errno.EINTR, errno.EAGAIN), (errno.ENOSPC,), (errno.EDQUOT, errno.EIO)])
def test_errors_that_pass_are_survived(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]) -> None:
    monkeypatch.setattr(os, "pwrite", failing(*numbers))
    rows = save(bench, target)
    assert bench.wait_for_end().status == "completed"
    assert torch.equal(bench.read().tensors["hidden_states"], rows)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "no_space"), (errno.EDQUOT, "no_space"), (errno.EIO, "io_error"), (errno.EROFS, "io_error"), (errno.EINTR, "io_error")],
)
def test_errors_that_stay_fail_the_save(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch, number: int, code: str) -> None:
    monkeypatch.setattr(os, "pwrite", always(number))
    save(bench, target)
    event = expect_nothing_left(bench, target, code)
    assert str(event.error) == f"writing the file failed: {os.strerror(number)}", "clients may know the file by another path"


def test_a_full_disk_at_the_end_fails_the_save(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch) -> None:
    def full_at_the_header(fd: int, data: memoryview, offset: int) -> int:
        return real_pwrite(fd, data, offset) if offset else always(errno.ENOSPC)()

    monkeypatch.setattr(os, "pwrite", full_at_the_header)
    save(bench, target)
    expect_nothing_left(bench, target, "no_space")


def test_a_file_that_can_not_be_created_fails_the_save(bench: "Bench", target: "Target") -> None:
    (bench.folder / ".id.part").touch()
    save(bench, target)
    assert bench.wait_for_end().status == "failed"
    assert target.calls == ["abandoned"]
    assert bench.names() == [".id.part"]


def test_a_write_that_writes_nothing_is_not_repeated_for_ever(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_arguments: 0)
    save(bench, target)
    expect_nothing_left(bench, target, "io_error")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_fsync_is_not_tried_again(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "fsync", failing(number, then=lambda _fd: 0))
    save(bench, target)
    expect_nothing_left(bench, target, "no_space" if number == errno.ENOSPC else "io_error")


def test_a_directory_that_can_not_be_synced_takes_the_file_back(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(durability="full")
    target, synced = bench.target(), []

    def fail_for_the_directory(fd: int) -> None:
        synced.append(fd)
        if fd == bench.directory_fd:
            assert bench.names() == ["a.safetensors"]
            always(errno.EIO)()

    monkeypatch.setattr(os, "fsync", fail_for_the_directory)
    save(bench, target)
    expect_nothing_left(bench, target, "io_error")
    assert len(synced) == 2
    bench.close()


@pytest.mark.parametrize(("durability", "count"), [("none", 0), ("file", 1), ("full", 2)])
def test_durability_says_what_is_synced(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch, durability: str, count: int
) -> None:
    bench = make_bench(durability=durability)
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _fd: synced.append(bench.names()))
    save(bench, bench.target())
    assert bench.wait_for_end().status == "completed"
    assert synced == [[".id.part"], ["a.safetensors"]][:count]
    bench.close()


def test_rows_that_were_not_finite_are_named(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target, layers=(2, "norm")), num_rows=30, max_rows=30)
    rows = bench.rows(30)
    rows[17, 1, 3] = float("nan")
    rows[18, 0, 0] = float("inf")
    bench.save_all(rows, job, step=10)
    event = expect_nothing_left(bench, target, "non_finite")
    assert str(event.error) == "the hidden state of layer norm, position 17 holds nan"
    assert job.failed


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", [None, "mean"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_value_anywhere_is_found_in_every_dtype(
    make_bench: "Callable[..., Bench]", dtype: str, compute: torch.dtype, pooling: str | None, value: float
) -> None:
    bench = make_bench(dtype=compute, width=37, durability="none")
    for number, place in enumerate([(0, 0, 0), (6, 1, 36), (3, 1, 17), (5, 0, 31)]):
        rows = bench.rows(7)
        rows[place] = value
        target = bench.target()
        spec = bench.spec(target, save_id=str(number), dtype=dtype, pooling=pooling)
        bench.save_all(rows, bench.begin(spec, num_rows=None, max_rows=7), step=4)
        event = bench.wait_for_end(str(number))
        layer = (2, "norm")[place[1]]
        assert event.error is not None
        assert str(event.error) == f"the hidden state of layer {layer}, position {place[0]} holds {value}"
        assert event.error.code == "non_finite"
    assert bench.names() == []
    bench.close()


def test_values_beyond_float16_fail_with_advice(bench: "Bench", target: "Target") -> None:
    rows = bench.rows(12)
    rows[9, 0, 4] = -70000.0
    bench.save_all(rows, bench.begin(bench.spec(target, dtype="float16"), num_rows=12, max_rows=12))
    event = expect_nothing_left(bench, target, "out_of_range")
    expected = "the hidden state of layer 2, position 9 holds -70000, beyond 65504, the largest float16; ask for bfloat16 or float32"
    assert str(event.error) == expected


def test_values_that_round_beyond_bfloat16_fail_with_advice(bench: "Bench", target: "Target") -> None:
    rows = bench.rows(2)
    rows[1, 1, 0] = 3.4e38
    bench.save_all(rows, bench.begin(bench.spec(target, dtype="bfloat16"), num_rows=2, max_rows=2))
    assert str(expect_nothing_left(bench, target, "out_of_range").error).endswith("ask for float32")


def test_a_mean_beyond_float16_fails(bench: "Bench", target: "Target") -> None:
    rows = torch.full((4, 2, 8), 1e5)
    bench.save_all(rows, bench.begin(bench.spec(target, dtype="float16", pooling="mean"), num_rows=4, max_rows=4))
    assert "layer 2, mean over the positions" in str(expect_nothing_left(bench, target, "out_of_range").error)


def test_a_sum_beyond_float32_fails(bench: "Bench", target: "Target") -> None:
    rows = torch.full((4, 2, 8), 3e38)
    bench.save_all(rows, bench.begin(bench.spec(target, pooling="mean"), num_rows=4, max_rows=4))
    expect_nothing_left(bench, target, "out_of_range")


def test_there_is_no_mean_of_no_rows(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target, rows=RowSelection(((50, None),)), pooling="mean"), num_rows=None, max_rows=9)
    job.finish(SaveEnd([], [], 9, 9))
    expect_nothing_left(bench, target, "out_of_range")


@pytest.mark.parametrize(("dtype", "value"), [("int64", 2**63), ("uint8", 256), ("float32", 1e39), ("float32", float("nan"))])
def test_client_values_that_do_not_fit_fail_the_save(bench: "Bench", target: "Target", dtype: str, value: float) -> None:
    save(bench, target, tensors={"mask": ClientTensor(dtype, [value])})
    assert "tensors.mask" in str(expect_nothing_left(bench, target, "out_of_range").error)


@pytest.mark.parametrize(("positions", "num_tokens"), [(None, 9), (None, 11), (list(range(1, 11)), 20), (list(range(9)), 20)])
def test_rows_that_are_not_those_of_the_tokens_are_never_published(
    bench: "Bench", target: "Target", positions: list[int] | None, num_tokens: int
) -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    job.append(bench.chunk(bench.rows(10), 0))
    job.finish(SaveEnd([5] * (num_tokens if positions is None else len(positions)), positions, num_tokens, 1))
    expect_nothing_left(bench, target, "engine_error")


def test_rows_that_come_twice_are_never_published(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    job.append(bench.chunk(bench.rows(4), 0))
    job.append(bench.chunk(bench.rows(4), 2))
    expect_nothing_left(bench, target, "engine_error")


@pytest.mark.parametrize("ranges", [[(4, 6), (2, 4)], [(0, 3), (2, 5)], [(3, 3)], []])
def test_ranges_out_of_order_are_never_published(bench: "Bench", target: "Target", ranges: list[tuple[int, int]]) -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    chunk = bench.chunk(bench.rows(8), 0)
    job.append(replace(chunk, ranges=ranges))
    expect_nothing_left(bench, target, "engine_error")


def test_rows_without_their_pages_are_never_published(bench: "Bench", target: "Target") -> None:
    """Positions 0 to 3 and 8 to 11 have pages; those between would else be read from a neighbour's."""
    for number, ranges in enumerate([[(0, 5)], [(7, 12)], [(12, 13)]]):
        job = bench.begin(bench.spec(target, save_id=f"{number}"), num_rows=None, max_rows=20)
        job.append(replace(bench.chunk_of(bench.rows(8), [(0, 4), (8, 12)]), ranges=ranges))
        event = bench.wait_for_end(f"{number}")
        assert (event.status, event.error and event.error.code) == ("failed", "engine_error")
        assert "came without their pages" in str(event.error)
    assert bench.names() == []


def test_rows_with_the_pages_of_too_few_layers_are_never_published(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target, layers=(1, 2, 3)), num_rows=None, max_rows=20)
    job.append(bench.chunk(bench.rows(4, layers=2), 0))
    expect_nothing_left(bench, target, "engine_error")


def test_a_bad_value_in_one_of_many_ranges_is_named_by_its_position(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target, layers=(2, "norm")), num_rows=None, max_rows=40)
    rows = bench.rows(6)
    rows[4, 1, 3] = float("nan")
    job.append(bench.chunk_of(rows, [(3, 5), (9, 10), (20, 21), (31, 33)]))
    event = expect_nothing_left(bench, target, "non_finite")
    assert str(event.error) == "the hidden state of layer norm, position 31 holds nan"


def test_metadata_that_is_no_text_fails_only_its_save(bench: "Bench", target: "Target") -> None:
    save(bench, target, metadata={"user.note": "\ud800"})
    expect_nothing_left(bench, target, "engine_error")
    other = bench.target("b.safetensors")
    save(bench, other, save_id="other")
    assert bench.wait_for_end("other").status == "completed"


def test_a_save_cancelled_before_its_first_row_leaves_nothing(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    job.cancel(SaveError("cancelled", "the client went away"))
    event = expect_nothing_left(bench, target, "cancelled", "cancelled")
    assert bench.statuses() == ["running", "cancelled"]
    assert event.seconds == 0.0


def test_a_save_cancelled_between_rows_leaves_nothing(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    job.append(bench.chunk(bench.rows(4), 0))
    assert bench.writer.wait_idle(60)
    assert bench.names() == [".id.part"]
    assert job.bytes_written == 4 * 2 * 8 * 4
    job.cancel(SaveError("engine_error", "a step failed"))
    expect_nothing_left(bench, target, "engine_error")


def test_a_save_cancelled_while_rows_are_written_leaves_nothing(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(real_pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    for start in range(0, 20, 4):
        job.append(bench.chunk(bench.rows(4), start))
    gate.reached.wait()
    assert bench.writer.queue_depth == 5
    job.cancel(SaveError("cancelled", "the client went away"))
    job.cancel(SaveError("engine_error", "too late to be heard"))
    gate.opened.set()
    expect_nothing_left(bench, target, "cancelled", "cancelled")
    assert job.bytes_written == 4 * 2 * 8 * 4
    job.append(bench.chunk(bench.rows(4), 20))
    job.finish(SaveEnd([], None, 0, 0))
    assert bench.writer.wait_idle(60)
    assert bench.statuses() == ["running", "cancelled"]


def test_a_save_cancelled_while_it_is_synced_leaves_nothing(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(lambda _fd: 0)
    monkeypatch.setattr(os, "fsync", gate)
    job = bench.begin(bench.spec(target), num_rows=20, max_rows=20)
    bench.save_all(bench.rows(20), job)
    gate.reached.wait()
    job.cancel(SaveError("cancelled", "the client went away"))
    gate.opened.set()
    event = expect_nothing_left(bench, target, "cancelled", "cancelled")
    assert bench.statuses() == ["running", "writing", "cancelled"]
    assert event.seconds > 0


def test_a_published_save_can_not_be_cancelled(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target), num_rows=20, max_rows=20)
    bench.save_all(bench.rows(20), job)
    assert bench.wait_for_end().status == "completed"
    job.cancel(SaveError("cancelled", "the client went away"))
    assert bench.writer.wait_idle(60)
    assert bench.statuses() == ["running", "writing", "completed"]
    assert target.calls == ["published"]
    assert not job.failed


def test_a_cancelled_save_does_not_wait_for_a_full_disk(make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(retry_seconds=10**6)
    target, tried = bench.target(), threading.Event()

    def full(*_arguments: object) -> int:
        tried.set()
        return always(errno.ENOSPC)()

    monkeypatch.setattr(os, "pwrite", full)
    job = bench.begin(bench.spec(target), num_rows=4, max_rows=4)
    job.append(bench.chunk(bench.rows(4), 0))
    tried.wait()
    job.cancel(SaveError("cancelled", "the client went away"))
    expect_nothing_left(bench, target, "cancelled", "cancelled")
    bench.close()


def test_callbacks_that_raise_do_not_end_a_writer_thread(bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    target.published = broken
    for number in range(4):
        save(bench, target if number < 3 else bench.target("last.safetensors"), save_id=str(number))
        bench.wait_for_end(str(number))
    assert [bench.wait_for_end(str(number)).status for number in range(4)] == ["completed", "failed", "failed", "completed"]


def test_an_event_handler_that_raises_does_not_end_a_writer_thread(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_event: SaveEvent) -> None:
        raise RuntimeError("broken")

    writer = SaveWriter(bench.pages, broken, threads=1)
    targets = [bench.target(name) for name in ("a", "b")]
    for target in targets:
        job = writer.begin(bench.spec(target, save_id=target.name), num_rows=1, max_rows=1)
        bench.save_all(bench.rows(1), job)
    writer.close()
    assert [target.calls for target in targets] == [["published"], ["published"]]
    assert bench.names() == ["a", "b"]


def test_closing_finishes_what_was_queued_and_fails_the_rest(make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(threads=1)
    gate = Gate(real_pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    first, second = bench.target("a.safetensors"), bench.target("b.safetensors")
    unfinished = bench.begin(bench.spec(second, save_id="unfinished"), num_rows=None, max_rows=20)
    save(bench, first)
    unfinished.append(bench.chunk(bench.rows(4), 0))
    gate.reached.wait()
    threading.Timer(0.05, gate.opened.set).start()
    bench.close()
    assert bench.statuses("id") == ["running", "writing", "completed"]
    assert bench.statuses("unfinished") == ["running", "failed"]
    error = bench.last_events("unfinished")[0].error
    assert error is not None
    assert error.code == "interrupted"
    assert (first.calls, second.calls, bench.names()) == (["published"], ["abandoned"], ["a.safetensors"])
    with pytest.raises(EngineUnavailable):
        bench.begin(bench.spec(bench.target("c")), num_rows=None, max_rows=1)


def test_rows_that_come_after_the_writer_was_closed_are_let_go_at_once(bench: "Bench", target: "Target") -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    bench.writer.close()
    released: list[bool] = []
    job.append(RowChunk([(0, 1)], np.array([0]), np.zeros((1, 2), np.int64), lambda: released.append(True)))
    assert released == [True]
    assert bench.writer.queue_depth == 0


def test_one_long_save_does_not_hold_up_a_short_one(make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(threads=1)
    gate = Gate(real_pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    long = bench.begin(bench.spec(bench.target("long"), save_id="long"), num_rows=None, max_rows=400)
    bench.save_all(bench.rows(200), long, step=1)
    save(bench, bench.target("short"), count=3, save_id="short")
    gate.opened.set()
    bench.wait_for_end("long")
    assert [event.save_id for event in bench.events if event.status == "completed"] == ["short", "long"]
    bench.close()


def test_the_writer_forgets_saves_that_have_ended(make_bench: "Callable[..., Bench]") -> None:
    bench = make_bench(threads=1)
    known = []
    for name in ("first", "second"):
        job = bench.begin(bench.spec(bench.target(name), save_id=name), num_rows=None, max_rows=5)
        bench.save_all(bench.rows(5), job)
        bench.wait_for_end(name)
        known.append(weakref.ref(job))
    del job
    gc.collect()
    assert known[0]() is None
    bench.close()


def test_rows_that_are_larger_than_a_piece_are_written_one_by_one(
    bench: "Bench", target: "Target", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "PIECE_BYTES", 1)
    rows = save(bench, target)
    assert bench.wait_for_end().status == "completed"
    assert torch.equal(bench.read().tensors["hidden_states"], rows)


def open_files(bench: "Bench") -> list[str]:
    """Files in the folder that this process has open."""
    paths = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(str(descriptor.readlink()))
    return [path for path in paths if path.startswith(f"{bench.folder}/")]


@pytest.mark.parametrize("ending", ["completed", "failed", "cancelled"])
def test_no_file_is_left_open_when_a_save_has_ended(bench: "Bench", target: "Target", ending: str) -> None:
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=5)
    job.append(bench.chunk(bench.rows(5), 0))
    assert bench.writer.wait_idle(60)
    assert len(open_files(bench)) == 1
    if ending == "completed":
        job.finish(bench.end_of(5))
    else:
        job.cancel(SaveError("cancelled" if ending == "cancelled" else "io_error", "for a reason"))
    assert bench.wait_for_end().status == ending
    assert open_files(bench) == []


def test_totals_count_every_byte_written(bench: "Bench", target: "Target") -> None:
    assert (bench.writer.bytes_written_total, bench.writer.write_seconds_total) == (0, 0.0)
    job = bench.begin(bench.spec(target), num_rows=None, max_rows=20)
    assert (job.bytes_written, job.builder.write_seconds) == (0, 0.0)
    bench.save_all(bench.rows(20), job)
    file = bench.wait_for_end().file
    assert isinstance(file, SavedFile)
    assert job.bytes_written == file.bytes
    assert bench.writer.bytes_written_total == file.bytes
    assert bench.writer.write_seconds_total > 0
    assert bench.writer.queue_depth == 0


def test_a_checksum_without_its_package_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match="xxhash"):
        SaveWriter(torch.zeros(2, 4, 8), print, checksum="xxh3")


def test_a_save_that_waits_is_not_said_to_run(bench: "Bench", target: "Target") -> None:
    job = bench.writer.begin(bench.spec(target), num_rows=None, max_rows=5)
    assert bench.statuses() == []
    job.cancel(SaveError("cancelled", "the client went away"))
    expect_nothing_left(bench, target, "cancelled", "cancelled")
    job.start()
    assert bench.statuses() == ["cancelled"]
