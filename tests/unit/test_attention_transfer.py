"""What of a step's index arrays is sent to the device: everything once, and of long tables that stay only what has changed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.facade import FixedShape, GraphBackend, GroupCache, RefillableContext
from engine.attention.index import plan_group
from engine.attention.transfer import StaticArray
from tests.unit.attention_simulation import CPU, ints, rows_of
from tests.unit.decode_bench import make_backend
from tests.unit.paged_kernels import Operations

PAGE_BYTES = 4
"""Of a page's number."""


class Text:
    """Sequences that get a position each in every step of a context of fixed shape, as long as its longest may be."""

    def __init__(self, backend: str, lengths: list[int], max_len: int = 1 << 20) -> None:
        made = make_backend(backend)
        assert isinstance(made, GraphBackend)
        self.size = made.default_block_size
        self.lengths = [length * self.size for length in lengths]
        self.tables = [list(range(1 + 10_000 * i, 1 + 10_000 * i + length)) for i, length in enumerate(lengths)]
        cache = torch.zeros(1, 2, self.size, 2, 8)
        shape = FixedShape(len(lengths), max_len)
        self.table_bytes = PAGE_BYTES * shape.num_pages(self.size)
        self.context: RefillableContext = made.plan_decodes(shape, [GroupCache((0,), self.size, cache, cache.clone())])

    def step(self, *grown: int) -> int:
        """Bytes sent for one more position of each; those that have `grown` begin another block, the others' go on."""
        for number in grown:
            self.lengths[number] += self.size
            self.tables[number].append(self.tables[number][-1] + 1)
        rows = rows_of(*((length - 1, 1) for length in self.lengths))
        given = plan_group(rows, [ints(*table) for table in self.tables], self.size)
        with Operations() as operations:
            self.context.refill(rows, [given])
        return operations.bytes_copied


@pytest.mark.parametrize("backend", ["varlen", "flashinfer"])
def test_a_step_that_begins_no_block_sends_nothing_of_the_tables(backend: str) -> None:
    text = Text(backend, [40, 30, 50])
    text.step()
    assert text.step() < 1000 < text.table_bytes


def test_flashinfer_is_never_sent_what_no_sequence_uses() -> None:
    text = Text("flashinfer", [40, 30, 50])
    first = text.step()
    assert first - text.step() == PAGE_BYTES * (40 + 30 + 50)


def test_varlen_sends_the_rows_between_the_first_and_the_last_that_changed() -> None:
    text = Text("varlen", [40, 30, 50])
    text.step()
    rest = text.step()
    assert text.step(0) - rest == PAGE_BYTES
    assert text.step(2) - rest == PAGE_BYTES
    assert text.step(0, 1) - rest == text.table_bytes // 3 + PAGE_BYTES * (1 + 30 - 41)


def test_flashinfer_sends_what_moves_behind_the_first_change() -> None:
    text = Text("flashinfer", [40, 30, 50])
    text.step()
    rest = text.step()
    assert text.step(2) - rest == PAGE_BYTES
    assert text.step(1) - rest == PAGE_BYTES * (1 + 51)
    assert text.step(0) - rest == PAGE_BYTES * (1 + 31 + 51)


@settings(deadline=None)
@given(arrays=st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=12))
def test_a_kept_array_is_sent_from_its_first_to_its_last_difference(arrays: list[list[int]]) -> None:
    kept, before = StaticArray(8, CPU), [0] * 8
    address = kept.update(np.zeros(8, np.int32)).data_ptr()
    for numbers in arrays:
        with Operations() as operations:
            sent = kept.update(np.array(numbers, np.int32))
        different = [place for place, number in enumerate(numbers) if before[place] != number]
        assert operations.bytes_copied == PAGE_BYTES * (different[-1] - different[0] + 1 if different else 0)
        assert sent.tolist() == numbers
        assert sent.data_ptr() in (address, 0)  # torch knows no address of what is empty
        before[: len(numbers)] = numbers


def test_a_kept_array_has_the_shape_of_what_it_was_given() -> None:
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert StaticArray(9, CPU).update(table).tolist() == table.tolist()
