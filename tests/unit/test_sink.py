"""Rows on their way to pages: directly, or through a staging buffer."""

from __future__ import annotations

import pytest
import torch

from engine.cache.sink import DirectSink, RowSink, StagedSink

CPU = torch.device("cpu")


def rows(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, 4)


@pytest.mark.parametrize("staged", [False, True])
def test_rows_stand_at_their_slots_after_the_flush_and_nothing_else_has_changed(staged: bool) -> None:
    store = torch.full((10, 4), -1.0)
    sink: RowSink = StagedSink(store, 6, CPU) if staged else DirectSink(store)
    for step in range(3):
        sink.put(rows(10 * step, 2), torch.tensor([7, 1]))
        sink.put(rows(100 * step, 3), torch.tensor([2, 9, 4]))
        sink.flush()
        expected = {7: 10 * step, 1: 10 * step + 1, 2: 100 * step, 9: 100 * step + 1, 4: 100 * step + 2}
        assert store[:, 0].tolist() == [expected.get(slot, -1) for slot in range(10)]
        assert (store == store[:, :1]).all()


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
    assert store[:, 0].tolist() == [0, 5, 6, 0]


def test_a_flush_without_rows_does_nothing() -> None:
    store = torch.zeros(4, 4)
    for sink in (StagedSink(store, 3, CPU), DirectSink(store)):
        sink.flush()
    assert not store.any()


def test_only_the_staging_buffer_has_a_bound() -> None:
    assert DirectSink(torch.zeros(1, 1)).capacity is None
