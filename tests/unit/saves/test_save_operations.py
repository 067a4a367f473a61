"""What a save costs the writer goes by what is handed over and by its bytes, not by how many pairs of positions chose its rows."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from engine.saves.builder import PIECE_BYTES, FileBuilder
from engine.saves.chunk import SaveEnd
from engine.saves.selection import RowSelection

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench

PAIRS = 5000
EVEN = RowSelection(tuple((2 * number, 2 * number + 1) for number in range(PAIRS)))
"""Every second position."""
TOTAL = 2 * PAIRS
TOKENS = range(100, 100 + TOTAL)
BESIDE_ROWS = 2
"""Writes of a file whose end isn't known before: the header, and the tensors behind the rows."""


@pytest.fixture
def bench(make_bench: "Callable[..., Bench]") -> "Iterator[Bench]":
    made = make_bench(page_size=32, width=64)
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the writer takes a chunk and writes to a file."""
    counted: Counter[str] = Counter()
    add_rows, pwrite = FileBuilder.add_rows, os.pwrite

    def count_add_rows(*arguments: object) -> None:
        counted["add_rows"] += 1
        add_rows(*arguments)  # type: ignore[arg-type]  # passed on

    def count_pwrite(fd: int, data: bytes, offset: int) -> int:
        counted["pwrite"] += 1
        return pwrite(fd, data, offset)

    monkeypatch.setattr(FileBuilder, "add_rows", count_add_rows)
    monkeypatch.setattr(os, "pwrite", count_pwrite)
    return counted


def save_even_rows(bench: "Bench", ranges_per_chunk: int) -> torch.Tensor:
    rows, ranges = bench.rows(PAIRS), EVEN.ranges(TOTAL)
    job = bench.begin(bench.spec(bench.target(), rows=EVEN), num_rows=None, max_rows=PAIRS)
    for first in range(0, PAIRS, ranges_per_chunk):
        some = slice(first, first + ranges_per_chunk)
        job.append(bench.chunk_of(rows[some], ranges[some]))
    job.finish(SaveEnd.of(EVEN, TOKENS, TOTAL, TOTAL))
    assert bench.wait_for_end().status == "completed"
    return rows


@pytest.mark.parametrize("num_chunks", [1, 20])
def test_five_thousand_pairs_are_as_many_operations_and_writes_as_chunks(bench: "Bench", calls: Counter[str], num_chunks: int) -> None:
    rows = save_even_rows(bench, PAIRS // num_chunks)
    pieces_per_chunk = -(-rows.nbytes // num_chunks // PIECE_BYTES)
    assert calls == {"add_rows": num_chunks, "pwrite": num_chunks * pieces_per_chunk + BESIDE_ROWS}
    saved = bench.read().tensors
    assert torch.equal(saved["hidden_states"], rows)
    assert saved["positions"].tolist() == list(range(0, TOTAL, 2))
    assert saved["token_ids"].tolist() == list(TOKENS[::2])
