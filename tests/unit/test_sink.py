"""Rows on their way to pages: directly, or through staging buffers."""

from __future__ import annotations

import pytest
import torch

from engine.capture.sink import DirectSink, Landing, RowSink, StagedSink
from tests.unit.deferred_stream import DeferredStream

CPU = torch.device("cpu")


def rows(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, 4)


def deferred(store: torch.Tensor, capacity: int) -> tuple[StagedSink, DeferredStream]:
    stream = DeferredStream()
    return StagedSink(store, capacity, CPU, stream=stream), stream


@pytest.mark.parametrize("staged", [False, True])
def test_rows_stand_at_their_slots_once_they_have_landed_and_nothing_else_has_changed(staged: bool) -> None:
    store = torch.full((10, 4), -1.0)
    sink: RowSink = StagedSink(store, 6, CPU) if staged else DirectSink(store)
    for step in range(3):
        sink.put(rows(10 * step, 2), torch.tensor([7, 1]))
        sink.put(rows(100 * step, 3), torch.tensor([2, 9, 4]))
        landing = sink.flush()
        assert landing.landed == (not staged)
        sink.collect()
        assert landing.landed
        expected = {7: 10 * step, 1: 10 * step + 1, 2: 100 * step, 9: 100 * step + 1, 4: 100 * step + 2}
        assert store[:, 0].tolist() == [expected.get(slot, -1) for slot in range(10)]
        assert (store == store[:, :1]).all()
        assert not sink.busy


def test_a_staging_buffer_is_filled_to_its_last_row_and_not_beyond() -> None:
    sink = StagedSink(torch.zeros(10, 4), 3, CPU)
    assert sink.capacity == 3
    sink.put(rows(0, 3), torch.tensor([0, 1, 2]))
    with pytest.raises(AssertionError, match="staging buffer"):
        sink.put(rows(0, 1), torch.tensor([3]))
    sink.flush()
    sink.put(rows(0, 3), torch.tensor([3, 4, 5]))


def test_staged_rows_may_be_overwritten_at_their_source_before_the_flush() -> None:
    store, source = torch.zeros(4, 4), rows(5, 2)
    sink = StagedSink(store, 3, CPU)
    sink.put(source, torch.tensor([1, 2]))
    source.fill_(-7)
    sink.flush()
    sink.collect(wait=True)
    assert store[:, 0].tolist() == [0, 5, 6, 0]


def test_a_flush_without_rows_does_nothing_and_its_landing_has_landed() -> None:
    store = torch.zeros(4, 4)
    for sink in (StagedSink(store, 3, CPU), DirectSink(store)):
        assert sink.flush().landed
        sink.collect(wait=True)
        assert not sink.busy
    assert not store.any()


def test_only_the_staging_buffer_has_a_bound() -> None:
    assert DirectSink(torch.zeros(1, 1)).capacity is None


def test_a_flush_waits_for_nothing_and_its_landing_says_what_stands_in_the_pages() -> None:
    store, landings = torch.full((6, 4), -1.0), list[Landing]()
    sink, stream = deferred(store, 2)
    for step in range(2):
        sink.put(rows(10 * step, 2), torch.tensor([2 * step, 2 * step + 1]))
        landings.append(sink.flush())
    sink.collect()
    assert ([landing.landed for landing in landings], stream.num_waits, sink.busy) == ([False, False], 0, True)
    assert (store == -1).all()
    stream.advance()
    sink.collect()
    assert [landing.landed for landing in landings] == [True, False]
    assert store[:, 0].tolist() == [0, 1, -1, -1, -1, -1]
    stream.advance()
    sink.collect()
    assert [landing.landed for landing in landings] == [True, True]
    assert store[:, 0].tolist() == [0, 1, 10, 11, -1, -1]
    assert (stream.num_waits, sink.busy) == (0, False)


def test_a_buffer_is_filled_again_only_after_its_rows_have_landed() -> None:
    store = torch.full((6, 4), -1.0)
    sink, stream = deferred(store, 2)
    for step in range(3):
        sink.put(rows(10 * step, 2), torch.tensor([2 * step, 2 * step + 1]))
        assert stream.num_waits == (step == 2), "the third step finds both buffers under way"
        sink.flush()
    assert store[:, 0].tolist() == [0, 1, -1, -1, -1, -1]
    sink.collect(wait=True)
    assert store[:, 0].tolist() == [0, 1, 10, 11, -1, -1]
    sink.collect(wait=True)
    assert store[:, 0].tolist() == [0, 1, 10, 11, 20, 21]


def test_rows_of_a_failed_step_are_forgotten_and_those_under_way_are_not() -> None:
    store = torch.full((6, 4), -1.0)
    sink, _ = deferred(store, 2)
    for step in range(4):
        sink.put(rows(10 * step, 1), torch.tensor([step]))
        if step % 2:
            sink.discard()
        else:
            sink.flush()
    while sink.busy:
        sink.collect(wait=True)
    assert store[:, 0].tolist() == [0, -1, 20, -1, -1, -1]


def test_rows_whose_transfer_fails_are_never_said_to_have_landed() -> None:
    store = torch.zeros(4, 4)
    sink, stream = deferred(store, 1)
    sink.put(rows(5, 1), torch.tensor([1]))
    landing = sink.flush()
    stream.pending[0].target = torch.empty(3, 3)  # can't be copied into
    with pytest.raises(RuntimeError):
        sink.collect(wait=True)
    assert (landing.landed, sink.busy) == (False, True)
    assert not store.any()
