"""Saves that wait for a disk: nobody waits with them, they go on where they stopped, and they stop waiting when they are told to."""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import SaveError
from engine.saves import file as part_file
from engine.saves import libc, lock, retry
from engine.saves.inspect import inspect_file
from engine.saves.retry import INITIAL_DELAY_SECONDS, MAX_DELAY_SECONDS, MAX_IMMEDIATE_RETRIES, RetryLater, RetryPolicy

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench

real_pwrite, real_close = os.pwrite, os.close
CANCELLED = SaveError("cancelled", "the client went away")


class Call:
    """Answers with these errors, one per call (0: none), and then with none; counts."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self, *arguments: object) -> int:
        self.count += 1
        number = self.errors.pop(0) if self.errors else 0
        if number:
            raise OSError(number, os.strerror(number))
        return self.count


class Clock:
    """Time that stands still unless it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(retry, "time", self)

    def monotonic(self) -> float:
        return self.now


def pauses(patient: RetryPolicy, call: Call, clock: Clock, count: int) -> list[float]:
    found = []
    for _ in range(count):
        with pytest.raises(RetryLater) as later:
            patient.run(call)
        found.append(later.value.seconds)
        clock.now += later.value.seconds
    return found


def test_pauses_double_up_to_a_bound_and_end_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patient, call = Clock(monkeypatch), RetryPolicy(2.0), Call(*[errno.ENOSPC] * 100)
    found = pauses(patient, call, clock, 9)
    assert found[:3] == [INITIAL_DELAY_SECONDS, 2 * INITIAL_DELAY_SECONDS, 4 * INITIAL_DELAY_SECONDS]
    assert max(found) == MAX_DELAY_SECONDS
    assert sum(found) == pytest.approx(2.0)
    with pytest.raises(OSError, match="No space left"):
        patient.run(call)


def test_progress_gives_all_the_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patient, call = Clock(monkeypatch), RetryPolicy(0.05), Call(*[errno.EIO] * 100)
    pauses(patient, call, clock, 2)
    patient.reset()
    assert pauses(patient, call, clock, 1) == [INITIAL_DELAY_SECONDS]


def test_an_interrupted_call_is_repeated_at_once_but_not_for_ever() -> None:
    call = Call(*[errno.EINTR] * MAX_IMMEDIATE_RETRIES)
    assert RetryPolicy(0.0).run(call) == MAX_IMMEDIATE_RETRIES + 1
    with pytest.raises(RetryLater):
        RetryPolicy(1.0).run(Call(*[errno.EAGAIN] * (MAX_IMMEDIATE_RETRIES + 1)))
    with pytest.raises(InterruptedError):
        RetryPolicy(0.0).run(Call(*[errno.EINTR] * (MAX_IMMEDIATE_RETRIES + 1)))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EBADF, errno.ENXIO, errno.EFBIG, errno.ESTALE])
def test_what_time_does_not_heal_is_raised_at_once(number: int) -> None:
    call = Call(number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        RetryPolicy(1000.0).run(call)
    assert call.count == 1


class FullFor:
    """A disk that is full for one save only; tells when it has been tried."""

    def __init__(self, save_id: str) -> None:
        self.name = f".{save_id}.part"
        self.tried = threading.Event()

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        if name_of(fd) == self.name:
            self.tried.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_pwrite(fd, data, offset)


def name_of(fd: int) -> str:
    return Path(f"/proc/self/fd/{fd}").readlink().name


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_save_that_waits_for_its_disk_takes_no_thread_from_others(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(threads=1, retry_seconds=10**6)
    stuck, healthy = bench.target("stuck"), bench.target("healthy")
    full = FullFor("stuck")
    monkeypatch.setattr(os, "pwrite", full)
    waiting = bench.begin(bench.spec(stuck, save_id="stuck"), num_rows=None, max_rows=20)
    waiting.append(bench.chunk(bench.rows(4), 0))
    full.tried.wait()
    rows = bench.rows(20)
    bench.save_all(rows, bench.begin(bench.spec(healthy, save_id="healthy"), num_rows=20, max_rows=20))
    with bench.ended:
        bench.ended.wait_for(lambda: bench.last_events("healthy"))
    assert torch.equal(bench.read("healthy").tensors["hidden_states"], rows)
    assert bench.statuses("stuck") == ["running"]
    assert bench.writer.queue_depth == 1
    waiting.cancel(CANCELLED)
    assert bench.wait_for_end("stuck").status == "cancelled"
    assert bench.names() == ["healthy"]
    bench.close()


def test_a_save_that_waits_when_the_writer_is_closed_is_finished_first(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(threads=2, retry_seconds=10**6)
    call = Call(*[errno.ENOSPC] * 5)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        call()
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    rows = bench.rows(20)
    bench.save_all(rows, bench.begin(bench.spec(bench.target()), num_rows=20, max_rows=20))
    bench.close()
    assert bench.statuses() == ["running", "writing", "completed"]
    assert torch.equal(bench.read().tensors["hidden_states"], rows)


outcomes = st.one_of(st.just(0), st.integers(1, 40).map(lambda size: -size), st.sampled_from([errno.ENOSPC, errno.EIO, errno.EINTR]))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fate=st.lists(outcomes, max_size=10),
    kind=st.sampled_from(["plain", "odd", "float8", "mean"]),
    known=st.booleans(),
    durability=st.sampled_from(["none", "full"]),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_a_file_is_the_same_however_often_its_writing_was_interrupted(
    make_bench: "Callable[..., Bench]", fate: list[int], kind: str, known: bool, durability: str, counts: list[int]
) -> None:
    """Each write fails, or takes only so many bytes, or goes well; also where rows move, are scaled or averaged. So does its checksum."""
    bench = make_bench(retry_seconds=10**6, durability=durability, checksum="sha256", width=5, dtype=torch.bfloat16)
    dtype = "float8_e4m3fn" if kind == "float8" else "float32" if kind == "mean" else "bfloat16"
    layers = (4,) if kind == "odd" else (2, 4)
    left = list(fate)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        what = left.pop(0) if left else 0
        if what > 0:
            raise OSError(what, os.strerror(what))
        return real_pwrite(fd, data[:-what] if what else data, offset)

    rows = [bench.rows(count, layers=len(layers)) for count in counts]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("faulty", "smooth"):
            patch.setattr(os, "pwrite", pwrite if name == "faulty" else real_pwrite)
            spec = bench.spec(bench.target(name), layers, save_id=name, dtype=dtype, pooling="mean" if kind == "mean" else None)
            end = bench.end_of(sum(counts)) if known else None
            bench.save_all(torch.cat(rows), bench.begin(spec, num_rows=None, max_rows=99, end=end), step=2)
            event = bench.wait_for_end(name)
            assert event.file is not None
            assert event.file.checksum == "sha256:" + hashlib.sha256((bench.folder / name).read_bytes()).hexdigest()
    faulty, smooth = bench.read("faulty"), bench.read("smooth")
    assert faulty.tensors.keys() == smooth.tensors.keys()
    for name, values in smooth.tensors.items():
        assert torch.equal(faulty.tensors[name].view(torch.uint8), values.view(torch.uint8))
    assert inspect_file(bench.folder / "faulty").ok
    bench.close()


def test_a_name_that_can_not_be_given_just_now_is_given_later(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    real = libc.renameat2
    assert real is not None
    call = Call(errno.ENOSPC, errno.EIO, errno.EINTR)

    def renameat2(*arguments: object) -> int:
        call()
        return real(*arguments)

    monkeypatch.setattr(libc, "renameat2", renameat2)
    target, rows = bench.target(), bench.rows(5)
    bench.save_all(rows, bench.begin(bench.spec(target), num_rows=5, max_rows=5))
    assert bench.wait_for_end().status == "completed"
    assert call.count == 4
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    assert target.calls == ["published"]


def test_a_save_whose_name_can_not_be_given_can_be_cancelled(make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(retry_seconds=10**6)
    tried = threading.Event()

    def renameat2(*_arguments: object) -> int:
        tried.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(libc, "renameat2", renameat2)
    target = bench.target()
    job = bench.begin(bench.spec(target), num_rows=5, max_rows=5)
    bench.save_all(bench.rows(5), job)
    tried.wait()
    while not job.ended:
        job.cancel(CANCELLED)  # Not heard while the call itself runs: the name might be given at that very moment.
    assert bench.wait_for_end().status == "cancelled"
    assert bench.names() == []
    assert target.calls == ["abandoned"]
    bench.close()


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("way", ["renameat2", "link"])
def test_a_name_that_was_given_although_the_call_failed_counts(
    bench: "Bench", monkeypatch: pytest.MonkeyPatch, replace: bool, way: str
) -> None:
    """As on a network file system that loses the answer, and where the second attempt then finds the name taken by the first."""
    owner, name = (os, "rename") if replace else (libc, "renameat2") if way == "renameat2" else (os, "link")
    if way == "link":
        monkeypatch.setattr(libc, "renameat2", None)
    real = getattr(owner, name)

    def carried_out(*arguments: object, **options: object) -> None:
        real(*arguments, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(owner, name, carried_out)
    target, rows = bench.target(replace=replace), bench.rows(5)
    bench.save_all(rows, bench.begin(bench.spec(target), num_rows=5, max_rows=5))
    assert bench.wait_for_end().status == "completed"
    assert bench.names() == ["a.safetensors"]
    assert torch.equal(bench.read().tensors["hidden_states"], rows)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
def test_an_unsynced_file_whose_descriptor_does_not_close_well_is_not_published(
    make_bench: "Callable[..., Bench]", monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    bench = make_bench(durability="none")

    def close(fd: int) -> None:
        name = name_of(fd)
        real_close(fd)
        if name == ".id.part":
            raise OSError(number, os.strerror(number))

    target = bench.target()
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        bench.save_all(bench.rows(5), bench.begin(bench.spec(target), num_rows=5, max_rows=5))
        event = bench.wait_for_end()
    assert event.error is not None
    assert event.error.code == ("no_space" if number == errno.EDQUOT else "io_error")
    assert bench.names() == []
    bench.close()


@pytest.mark.parametrize("step", ["mode", "lock", "name"])
def test_a_temporary_file_that_can_not_be_made_right_is_removed_and_closed(
    bench: "Bench", monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    target, before = bench.target(), num_descriptors()
    failing = Call(*[errno.EROFS] * 100)
    if step == "mode":
        monkeypatch.setattr(os, "fchmod", failing)
    else:
        monkeypatch.setattr(part_file, "_lock" if step == "lock" else "names_file", failing)
    bench.save_all(bench.rows(5), bench.begin(bench.spec(target), num_rows=5, max_rows=5))
    event = bench.wait_for_end()
    assert event.error is not None
    assert event.error.code == "io_error"
    assert bench.names() == []
    assert num_descriptors() == before


@pytest.mark.parametrize("step", ["mode", "lock", "name"])
def test_a_lock_file_that_can_not_be_made_right_is_removed_and_closed(bench: "Bench", monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    before = num_descriptors()
    failing = Call(errno.EIO)
    if step == "name":
        monkeypatch.setattr(lock, "names_file", failing)
    else:
        monkeypatch.setattr(lock.os if step == "mode" else lock.fcntl, "fchmod" if step == "mode" else "flock", failing)
    with pytest.raises(OSError, match="Input/output error"):
        lock.LockFile.acquire(bench.directory_fd, "a", 0o022)
    assert bench.names() == []
    assert num_descriptors() == before


def test_a_lock_file_of_somebody_else_stays_where_it_can_not_be_locked(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.folder / "a.lock").touch()
    monkeypatch.setattr(lock.fcntl, "flock", Call(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        lock.LockFile.acquire(bench.directory_fd, "a", 0o022)
    assert bench.names() == ["a.lock"]
