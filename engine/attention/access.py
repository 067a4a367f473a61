"""What the layers of a group write and read in a step, as the reference backend takes it: index tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from engine.attention.facade import GroupCache, IntArray
from engine.attention.index import GroupIndex, buckets_by_length
from engine.device.streams import to_device
from engine.native.kernels import MAX_GROUP, MAX_HEAD_DIM, Kernels

FREE_PADDING = 512
"""Slots of padding that cost no more than the calls for one further bucket."""


@dataclass(frozen=True)
class Decodes:
    """Sequences of one new position each, of like length, padded to one rectangle."""

    rows: torch.Tensor  # [n], rows of the batch
    index: torch.Tensor  # [n * kv_heads * length], rows of the cache seen as [slots * kv_heads, head_dim]
    mask: torch.Tensor  # [n * kv_heads, 1, length]
    length: int


@dataclass(frozen=True)
class PagedDecodes:
    """Sequences of one new position each, as the compiled kernel takes them: it reads the cache where it lies."""

    rows: torch.Tensor  # [n], rows of the batch
    tables: torch.Tensor  # [n, blocks]
    begins: torch.Tensor  # [n], the first position seen
    ends: torch.Tensor  # [n]


@dataclass(frozen=True)
class PagedChunks:
    """Sequences of several new positions, as the compiled kernel takes them."""

    tables: torch.Tensor  # [n, blocks]
    rows: torch.Tensor  # [n], first rows of the batch
    starts: torch.Tensor  # [n]
    counts: torch.Tensor  # [n]


@dataclass(frozen=True)
class Chunk:
    """A sequence of several new positions."""

    row: int
    start: int
    count: int
    first_key: int
    """The earliest position that any of the rows sees."""
    index: torch.Tensor | None  # [start + count - first_key] slots; None: all keys are among the step's own


@dataclass(frozen=True)
class Access:
    """What the layers of a group write and read."""

    slots: torch.Tensor  # [rows]
    decodes: Sequence[Decodes]
    paged_decodes: PagedDecodes | None
    chunks: Sequence[Chunk]
    paged_chunks: PagedChunks | None


class AccessPlanner:
    """Of one group in one step. What doesn't depend on how many leading sequences go on is made once."""

    def __init__(self, cache: GroupCache, index: GroupIndex, kernels: Kernels | None, gather_bytes: int) -> None:
        """`gather_bytes`: of keys that may be gathered at once."""
        self._index = index
        self._rows = index.rows
        self._cache = cache
        self._kernels = kernels if cache.head_dim <= MAX_HEAD_DIM and not cache.values_in_keys else None
        self._max_slots = max(1, gather_bytes // (cache.kv_heads * cache.head_dim * cache.keys.dtype.itemsize))
        self._single, self._several = (np.flatnonzero(which) for which in (self._rows.counts == 1, self._rows.counts > 1))

    def plan(self, num_sequences: int, window: int | None, heads: int) -> Access:
        """For the leading sequences; `heads` are those of the queries."""
        self._index.check(num_sequences, window)
        single, several = (which[: which.searchsorted(num_sequences)] for which in (self._single, self._several))
        first_seen = self._index.first_seen(num_sequences, window)
        paged, paged_chunks = self._pages_decodes and len(single) > 0, self._pages_chunks(heads) and len(several) > 0
        return Access(
            slots=self._slots[: self._rows.first_rows[num_sequences]],
            decodes=[] if paged else self._plan_decodes(single, first_seen),
            paged_decodes=self._plan_paged(single, first_seen) if paged else None,
            chunks=[] if paged_chunks else [self._plan_chunk(i, int(first_seen[i])) for i in several.tolist()],
            paged_chunks=self._plan_paged_chunks(several) if paged_chunks else None,
        )

    @property
    def _pages_decodes(self) -> bool:
        return self._kernels is not None

    def _pages_chunks(self, heads: int) -> bool:
        return self._kernels is not None and self._kernels.attends_chunks and heads // self._cache.kv_heads <= MAX_GROUP

    @cached_property
    def _slots(self) -> torch.Tensor:  # [rows]
        return self._to_device(self._index.slots)

    @cached_property
    def _single_tables(self) -> torch.Tensor:  # [sequences of one row, blocks]
        return torch.from_numpy(self._index.blocks_of(self._single))

    @cached_property
    def _several_tables(self) -> torch.Tensor:  # [sequences of several rows, blocks]
        return torch.from_numpy(self._index.blocks_of(self._several))

    def _plan_paged(self, single: IntArray, first_seen: IntArray) -> PagedDecodes:
        rows, begins, ends = (torch.from_numpy(array[single]) for array in (self._rows.first_rows, first_seen, self._rows.ends))
        return PagedDecodes(rows, self._single_tables[: len(single)], begins, ends)

    def _plan_paged_chunks(self, several: IntArray) -> PagedChunks:
        arrays = (self._rows.first_rows, self._rows.starts, self._rows.counts)
        return PagedChunks(self._several_tables[: len(several)], *(torch.from_numpy(array[several]) for array in arrays))

    def _plan_chunk(self, sequence: int, first: int) -> Chunk:
        rows = self._rows
        start, end = int(rows.starts[sequence]), int(rows.ends[sequence])
        index = self._to_device(self._index.slots_of(sequence, np.arange(first, end))) if first < start else None
        return Chunk(int(rows.first_rows[sequence]), start, end - start, first, index)

    def _plan_decodes(self, single: IntArray, first_seen: IntArray) -> list[Decodes]:
        lengths = self._rows.ends[single] - first_seen[single]
        buckets = buckets_by_length(lengths.tolist(), self._max_slots, FREE_PADDING)
        return [self._plan_bucket(single[bucket], lengths[bucket]) for bucket in buckets]

    def _plan_bucket(self, sequences: IntArray, lengths: IntArray) -> Decodes:
        kv_heads, keys = self._cache.kv_heads, self._cache.keys
        slots, padding = self._index.slots_at_end(sequences, lengths)  # [n, length] each
        index = slots[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]  # [n, kv_heads, length]
        hidden = np.repeat(padding, kv_heads, axis=0)[:, None, :]
        mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        mask.masked_fill_(to_device(torch.from_numpy(hidden), mask.device), -torch.inf)
        rows = self._to_device(self._rows.first_rows[sequences])
        return Decodes(rows, self._to_device(index.reshape(-1)), mask, slots.shape[1])

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._cache.keys.device)
