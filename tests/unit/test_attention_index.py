"""The arrays of a step against the same written out position by position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.facade import StepRows
from engine.attention.index import GroupIndex, buckets_by_length, pad_rows, plan_group
from tests.unit.attention_simulation import ints, rows_of


def index_of(sequences: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, num_padding: int = 0) -> GroupIndex:
    rows = rows_of(*sequences)
    group = plan_group(rows, [ints(*table) for table in tables], block_size)
    return GroupIndex(pad_rows(rows, num_padding), group, block_size, num_padding)


@dataclass(frozen=True)
class Case:
    """Sequences that have their blocks, some behind a window, and then perhaps some that have none or too few."""

    block_size: int
    sequences: list[tuple[int, int]]
    tables: list[list[int]]
    num_ready: int

    @property
    def skipped(self) -> list[int]:
        """Null blocks that each table of the ready ones begins with."""
        return [next(i for i, block in enumerate(table) if block) for table in self.tables[: self.num_ready]]

    @property
    def used(self) -> list[int]:
        return [-(-(start + count) // self.block_size) for start, count in self.sequences]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 9))
    sequences = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=7))
    num_ready = draw(st.integers(0, len(sequences)))
    tables = []
    for number, (start, count) in enumerate(sequences):
        used, null = -(-(start + count) // size), draw(st.integers(0, start // size))
        table = [0] * null + draw(st.lists(st.integers(1, 999), min_size=used - null, max_size=used - null))
        if number >= num_ready:
            table = draw(st.sampled_from([[], [0] * used, table[:-1], [*table[:-1], 0, 0]]))
        tables.append(table + draw(st.sampled_from([[], [0], [-1, 10**6]])) if number < num_ready else table)
    return Case(size, sequences, tables, num_ready)


@settings(deadline=None, max_examples=300)
@given(case=cases())
def test_slots_are_where_the_tables_say(case: Case) -> None:
    size = case.block_size
    slots, positions, first_rows = [], [], [0]
    for (start, count), table in zip(case.sequences, case.tables, strict=True):
        for position in range(start, start + count):
            block = table[position // size] if position // size < len(table) else 0
            slots.append(block * size + position % size if block else 0)
            positions.append(position)
        first_rows.append(len(slots))
    index = index_of(case.sequences, case.tables, size)
    assert index.slots.tolist() == slots
    assert index.rows.positions.tolist() == positions
    assert index.rows.first_rows.tolist() == first_rows
    assert index.rows.owners.tolist() == [i for i, (_, count) in enumerate(case.sequences) for _ in range(count)]


@settings(deadline=None, max_examples=300)
@given(case=cases(), num_padding=st.integers(0, 3))
def test_pages_are_those_of_the_leading_sequences_that_have_their_blocks(case: Case, num_padding: int) -> None:
    index = index_of(case.sequences, case.tables, case.block_size, num_padding)
    held = [table[null:used] for table, null, used in zip(case.tables, case.skipped, case.used, strict=False)]
    lengths = [start + count - null * case.block_size for (start, count), null in zip(case.sequences, case.skipped, strict=False)]
    skipped = [null * case.block_size for null in case.skipped]
    if case.num_ready == len(case.sequences):  # padding follows, which reads the null block
        held += [[0]] * num_padding
        lengths += [1] * num_padding
        skipped += [0] * num_padding
    width = max(map(len, held), default=0) + 2
    assert index.num_sequences == len(held)
    assert index.pages.tolist() == [block for blocks in held for block in blocks]
    assert np.diff(index.first_page).tolist() == index.num_pages.tolist() == [len(blocks) for blocks in held]
    assert index.table(width).tolist() == [blocks + [0] * (width - len(blocks)) for blocks in held]
    assert index.lengths.tolist() == lengths
    assert index.skipped.tolist() == skipped


@settings(deadline=None, max_examples=300)
@given(case=cases(), data=st.data())
def test_tables_and_slots_of_chosen_sequences_are_theirs(case: Case, data: st.DataObject) -> None:
    if case.num_ready == 0:
        return
    index = index_of(case.sequences, case.tables, case.block_size)
    chosen = data.draw(st.lists(st.integers(0, case.num_ready - 1), min_size=1, unique=True).map(sorted))
    blocks = index.blocks_of(ints(*chosen))
    assert blocks.flags.c_contiguous
    for row, sequence in zip(blocks.tolist(), chosen, strict=True):
        assert row[: case.used[sequence]] == case.tables[sequence][: case.used[sequence]]
        assert not any(row[case.used[sequence] :])
    ends = [sum(case.sequences[sequence]) for sequence in chosen]
    lengths = [data.draw(st.integers(1, end - case.skipped[i] * case.block_size)) for i, end in zip(chosen, ends, strict=True)]
    slots, padding = index.slots_at_end(ints(*chosen), ints(*lengths))
    for row, hidden, sequence, end, length in zip(slots.tolist(), padding.tolist(), chosen, ends, lengths, strict=True):
        positions = ints(*range(end - length, end))
        expected = index.slots_of(sequence, positions).tolist()
        assert expected == [case.tables[sequence][p // case.block_size] * case.block_size + p % case.block_size for p in positions.tolist()]
        assert row == expected + expected[-1:] * (max(lengths) - length)
        assert hidden == [False] * length + [True] * (max(lengths) - length)


def test_a_sequence_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="without rows"):
        rows_of((4, 1), (7, 0))


def test_a_table_per_sequence_is_asked_for() -> None:
    with pytest.raises(ValueError, match="zip"):
        plan_group(rows_of((4, 1), (7, 1)), [ints(1)], 16)
    with pytest.raises(AssertionError, match="one block table per sequence"):
        GroupIndex(rows_of((4, 1), (7, 1)), plan_group(rows_of((4, 1)), [ints(1)], 16), 16)


@pytest.mark.parametrize("table", [[], [0], [4], [0, 0, 0], [4, 0, 5], [0, 4], [4, 5, 0]])
def test_a_table_that_lacks_blocks_in_use_is_refused(table: list[int]) -> None:
    index = index_of([(3, 1), (40, 1)], [[7], table], 16)
    index.check(1, None)
    for window in (None, 1):
        with pytest.raises(AssertionError, match="lacks blocks"):
            index.check(2, window)


def test_a_window_that_reaches_into_the_null_block_is_refused() -> None:
    index = index_of([(40, 2)], [[0, 4, 5]], 16)
    index.check(1, 40 - 16 + 1)
    for window in (None, 40 - 16 + 2):
        with pytest.raises(AssertionError, match="null block"):
            index.check(1, window)


def test_rows_are_narrowed_to_whole_sequences() -> None:
    rows = rows_of((0, 3), (5, 1), (9, 2))
    assert [rows.num_leading(count) for count in (0, 3, 4, 6)] == [0, 1, 2, 3]
    for count in (1, 2, 5, 7):
        with pytest.raises(AssertionError, match="not whole sequences"):
            rows.num_leading(count)


def test_what_goes_into_a_step_are_arrays_that_no_table_can_change_any_more() -> None:
    table = ints(3, 4)
    group = plan_group(rows_of((17, 1)), [table], 16)
    table[:] = 9
    assert group.tables.tolist() == [[3, 4]]
    assert [(array.dtype, array.flags.c_contiguous) for array in (group.tables, group.slots)] == [(np.int64, True)] * 2


def test_a_step_of_no_sequences_has_no_rows() -> None:
    rows = StepRows(ints(), ints())
    index = GroupIndex(rows, plan_group(rows, [], 16), 16)
    assert (rows.num_leading(0), index.num_sequences, index.slots.size, index.pages.size) == (0, 0, 0, 0)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 5000), max_size=60), max_slots=st.integers(1, 8192))
def test_buckets_hold_every_sequence_once_within_their_bounds(lengths: list[int], max_slots: int) -> None:
    buckets = buckets_by_length(lengths, max_slots, free_padding=512)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        area = max(lengths[i] for i in bucket) * len(bucket)
        assert len(bucket) == 1 or area <= max_slots
        assert area - sum(lengths[i] for i in bucket) <= max(512, area // 5)
