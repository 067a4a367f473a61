"""Attention backends against plain dense attention in float32: ragged batches over a paged cache, where what nobody may read is poisoned.

Results must not lie in memory that happens to be right: before each call the allocator's free memory of that size is filled with NaN,
so that rows which a kernel leaves out show. Tables go on behind a sequence's end with the number of a block that holds NaN.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.gpu.driver import Rows
from benchmarks.gpu.model import ModelShape
from engine.attention.facade import AttentionBackend, GroupCache, StepRows
from engine.attention.index import plan_group
from engine.models.base import AttentionOptions

NUM_BATCHES = 40
_POISONED_BLOCK = 1
_DENSE_ROWS = 256
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of a row's relative L2 error: some roundings of the dtype."""
_WINDOWS = (None, None, None, 300)


@dataclass
class Parity:
    """What became of one backend."""

    backend: str
    batches: int = 0
    worst_error: float = 0.0
    """Of all rows, relative L2."""
    tolerance: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.batches > 0 and not self.faults


def check(backend: AttentionBackend, shape: ModelShape, device: torch.device, *, longest: int, num_batches: int = NUM_BATCHES) -> Parity:
    """Runs the batches; every fault is a sentence. A backend that raises is a fault too."""
    parity = Parity(backend.name, tolerance=_TOLERANCE[shape.dtype])
    generator = random.Random(0)
    for number in range(num_batches):
        try:
            error = _Batch(backend, shape, device, generator, longest).worst_error(_WINDOWS[number % len(_WINDOWS)])
        except Exception as raised:  # a kernel that doesn't run is what is to be found out
            parity.faults.append(f"batch {number}: {type(raised).__name__}: {raised}")
            return parity
        parity.batches += 1
        parity.worst_error = max(parity.worst_error, error)
        if not error <= parity.tolerance:
            parity.faults.append(f"batch {number}: a row differs by {error:.2g}")
    return parity


def compare(name: str, dtype: torch.dtype, expected: Sequence[Rows], found: Sequence[Rows]) -> Parity:
    """Rows that were saved of the same prompts in two ways, up to where roundings have led to another token."""
    parity = Parity(name, tolerance=_TOLERANCE[dtype])
    for number, (left, right) in enumerate(zip(expected, found, strict=True)):
        parity.batches += 1
        for (tokens, states), (other_tokens, other) in zip(left, right, strict=True):
            same = next((i for i, pair in enumerate(zip(tokens, other_tokens, strict=False)) if pair[0] != pair[1]), len(tokens))
            difference = (states[:same].float() - other[:same].float()).norm(dim=-1) / states[:same].float().norm(dim=-1)
            error = float(torch.nan_to_num(difference, nan=torch.inf).max())
            parity.worst_error = max(parity.worst_error, error)
            if not error <= parity.tolerance:
                parity.faults.append(f"batch {number}: a row differs by {error:.2g}")
    return parity


@dataclass(frozen=True)
class _Sequence:
    """One of a batch: `count` positions from `start` on."""

    start: int
    count: int


class _Batch:
    """Sequences of any lengths, some at their beginning, some of one row, in scattered blocks."""

    def __init__(self, backend: AttentionBackend, shape: ModelShape, device: torch.device, rng: random.Random, longest: int) -> None:
        self._backend, self._shape, self._device, self._rng = backend, shape, device, rng
        self._block_size = backend.default_block_size
        self._sequences = [self._sequence(longest) for _ in range(rng.randint(1, 12))]
        self._tables, num_blocks = self._scattered()
        size = (1, num_blocks, self._block_size, shape.kv_heads, shape.head_dim)
        self._keys, self._values = (torch.full(size, torch.nan, dtype=shape.dtype, device=device) for _ in range(2))
        self._fill_pasts()

    def worst_error(self, window: int | None) -> float:
        """The largest relative L2 error of a row; infinite where one isn't finite."""
        shape, rows = self._shape, sum(sequence.count for sequence in self._sequences)
        fused = torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device)
        query = fused[:, : shape.heads]
        key, value = fused[:, shape.heads :].chunk(2, 1)
        starts = np.array([sequence.start for sequence in self._sequences], np.int64)
        step = StepRows(starts, np.array([sequence.count for sequence in self._sequences], np.int64))
        tables = [np.array(table, np.int64) for table in self._tables]
        cache = GroupCache((0,), self._block_size, self._keys, self._values)
        context = self._backend.plan(step, [(cache, plan_group(step, tables, self._block_size))])
        _poison_free_memory(query)
        found = context.attend(0, query, key, value, AttentionOptions(shape.head_dim**-0.5, window))
        expected = self._dense(query, key, value, window)
        difference = (found.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        return float(torch.nan_to_num(difference, nan=torch.inf).max())

    def _sequence(self, longest: int) -> _Sequence:
        rng = self._rng
        count = rng.choice([1, 1, 1, rng.randint(2, 40), rng.randint(2, longest)])
        start = rng.choice([0, rng.randint(0, longest)]) if count > 1 else rng.randint(0, longest)
        return _Sequence(start, count)

    def _scattered(self) -> tuple[list[list[int]], int]:
        needs = [-(-(sequence.start + sequence.count) // self._block_size) for sequence in self._sequences]
        blocks = list(range(_POISONED_BLOCK + 1, _POISONED_BLOCK + 1 + sum(needs)))
        self._rng.shuffle(blocks)
        tables = []
        for need in needs:
            tables.append(blocks[:need] + [_POISONED_BLOCK] * self._rng.randint(0, 3))
            del blocks[:need]
        return tables, _POISONED_BLOCK + 1 + sum(needs)

    def _fill_pasts(self) -> None:
        """What lies behind a sequence's start was computed in earlier steps; of its last block only that much."""
        slots = [
            table[position // self._block_size] * self._block_size + position % self._block_size
            for sequence, table in zip(self._sequences, self._tables, strict=True)
            for position in range(sequence.start)
        ]
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        size = (len(slots), self._shape.kv_heads, self._shape.head_dim)
        self._pasts = [torch.randn(size, dtype=self._shape.dtype, device=self._device) for _ in range(2)]
        for cache, past in zip((self._keys, self._values), self._pasts, strict=True):
            cache.view(-1, *size[1:]).index_copy_(0, index, past)

    def _dense(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
        """`[rows, heads, head_dim]` float32. Keys and values come from where they were made, not from the cache."""
        out, row, past = [], 0, 0
        for sequence in self._sequences:
            rows, pasts = slice(row, row + sequence.count), slice(past, past + sequence.start)
            keys, values = (torch.cat([old[pasts], new[rows]]).float() for old, new in zip(self._pasts, (key, value), strict=True))
            for at in range(0, sequence.count, _DENSE_ROWS):
                piece = query[rows][at : at + _DENSE_ROWS].float()
                out.append(_attend(piece, keys, values, sequence.start + at, window))
            row, past = rows.stop, pasts.stop
        return torch.cat(out)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """Queries of the positions from `start` on over the keys of all positions."""
    rows, heads, head_dim = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], head_dim)
    query_at = torch.arange(start, start + rows, device=query.device)[:, None]
    key_at = torch.arange(key.shape[0], device=query.device)
    hidden = key_at > query_at if window is None else (key_at > query_at) | (key_at <= query_at - window)
    scores = torch.einsum("qkgd,skd->kgqs", grouped, key) * head_dim**-0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", weights, value).reshape(query.shape)


def _poison_free_memory(like: torch.Tensor) -> None:
    """The next tensor of this size is likely to get this memory."""
    for _ in range(2):
        torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device)


def describe(parities: Sequence[Parity]) -> list[str]:
    """A line per backend, and one per fault."""
    lines = []
    for parity in parities:
        state = "equal" if parity.ok else "NOT EQUAL"
        lines.append(
            f"{parity.backend}: {state}, {parity.batches} batches, worst row {parity.worst_error:.2g} (limit {parity.tolerance:g})"
        )
        lines += [f"  {fault}" for fault in parity.faults[:5]]
    return lines
