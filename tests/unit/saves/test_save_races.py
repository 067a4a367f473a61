"""Saves that are cancelled at any moment, beside others that are not: pages, files, locks and events always add up."""

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import SaveError
from engine.saves.writer import SaveEnd

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench

CANCELLED = SaveError("cancelled", "the client went away")
CHUNKS = 4
ROWS_PER_CHUNK = 5

cancel_steps = st.lists(st.one_of(st.none(), st.integers(0, CHUNKS + 2)), min_size=2, max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cancel_at=cancel_steps)
def test_saves_cancelled_at_any_step_leave_nothing_and_the_others_are_whole(
    make_bench: "Callable[..., Bench]", cancel_at: list[int | None]
) -> None:
    """Save i is cancelled just before its step `cancel_at[i]`: steps are its chunks, its end, and a moment after that."""
    bench = make_bench(threads=3, durability="none")
    rows = [bench.rows(CHUNKS * ROWS_PER_CHUNK) for _ in cancel_at]
    targets = [bench.target(f"{number}.safetensors") for number in range(len(cancel_at))]
    specs = [bench.spec(target, save_id=f"{number}") for number, target in enumerate(targets)]
    jobs = [bench.begin(spec, num_rows=len(some), max_rows=len(some)) for spec, some in zip(specs, rows, strict=True)]
    for step in range(CHUNKS + 3):
        for job, some, when in zip(jobs, rows, cancel_at, strict=True):
            if when == step:
                job.cancel(CANCELLED)
            start = step * ROWS_PER_CHUNK
            if step < CHUNKS and not job.failed:
                job.append(bench.chunk(some[start : start + ROWS_PER_CHUNK], start))
            elif step == CHUNKS:
                job.finish(SaveEnd(list(range(len(some))), None, len(some), 1))
    ends = [bench.wait_for_end(f"{number}") for number in range(len(cancel_at))]
    for some, target, when, end in zip(rows, targets, cancel_at, ends, strict=True):
        assert end.status == "completed" if when is None else end.status in ("completed", "cancelled")
        # Handing in the end is the last step that a cancellation surely comes before.
        assert when is None or when > CHUNKS or end.status == "cancelled"
        if end.status == "completed":
            assert torch.equal(bench.read(target.name).tensors["hidden_states"], some)
        assert target.calls == ["published" if end.status == "completed" else "abandoned"]
    assert bench.names() == sorted(target.name for target, end in zip(targets, ends, strict=True) if end.status == "completed")
    bench.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(failures=st.sets(st.integers(0, 40), max_size=8), retry_seconds=st.sampled_from([0.0, 5.0]))
def test_a_disk_that_fails_now_and_then_never_spoils_a_file(
    make_bench: "Callable[..., Bench]", failures: set[int], retry_seconds: float
) -> None:
    """The n-th write fails for every n in `failures`, with or without time to try it again."""
    bench = make_bench(threads=2, retry_seconds=retry_seconds, durability="none")
    calls = iter(range(10**6))
    real_pwrite = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if next(calls) in failures:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_pwrite(fd, data, offset)

    rows = [bench.rows(20) for _ in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        for number, some in enumerate(rows):
            spec = bench.spec(bench.target(f"{number}"), save_id=f"{number}")
            bench.save_all(some, bench.begin(spec, num_rows=None, max_rows=20))
        ends = [bench.wait_for_end(f"{number}") for number in range(5)]
    whole = [number for number, end in enumerate(ends) if end.status == "completed"]
    assert len(whole) == 5 or retry_seconds == 0.0
    assert all(end.error is None or end.error.code == "no_space" for end in ends)
    assert bench.names() == [f"{number}" for number in whole]
    for number in whole:
        assert torch.equal(bench.read(f"{number}").tensors["hidden_states"], rows[number])
    bench.close()
