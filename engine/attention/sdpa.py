"""The reference attention backend: gathers each sequence's keys and values and calls torch, on any device.

Measured in float32, 9 heads over 3 of 64 wide, 16 sequences of 256 positions. With the cache's rows in the processor's cache, two
threads: gathering per slot and KV head plus two `bmm` 0.22 ms, the same through `scaled_dot_product_attention` 0.28 ms, one call per
sequence 0.6 ms, and 2.1 ms with freshly allocated memory for what is gathered. With the rows in main memory, one thread: 0.74 ms,
of which gathering takes 0.45. Whole blocks are gathered a third faster, 0.61 ms in all, but then what lies behind a sequence's
end would have to be blanked in every layer. Not gathering for a lone sequence saves a quarter at 256 positions where its blocks
happen to be neighbours, nothing otherwise. Chunks in pieces of 128 rows, each over the keys up to its own end, take 0.85 of one
causal call (1,024 rows).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.attention.dense import CausalMasks, Scratch, attend_chunk, attend_packed
from engine.attention.facade import GroupPlan, SequencePlan
from engine.attention.slots import IntArray, SlotIndex, buckets_by_length
from engine.errors import ConfigError
from engine.models.base import AttentionOptions
from engine.native.kernels import MAX_GROUP, MAX_HEAD_DIM, Kernels

GATHER_BYTES = 4 << 20
"""Keys gathered at once for decoding on a CPU: more would fall out of its caches."""
GPU_GATHER_BYTES = 256 << 20
FREE_PADDING = 512
"""Slots of padding that cost no more than the calls for one further bucket."""
PIECE_ROWS = 128
GPU_PIECE_ROWS = 512


@dataclass(frozen=True)
class _Decodes:
    """Sequences of one new position each, of like length, padded to one rectangle."""

    rows: torch.Tensor  # [n], rows of the batch
    index: torch.Tensor  # [n * kv_heads * length], rows of the cache seen as [slots * kv_heads, head_dim]
    mask: torch.Tensor  # [n * kv_heads, 1, length]
    length: int


@dataclass(frozen=True)
class _PagedDecodes:
    """Sequences of one new position each, as the compiled kernel takes them: it reads the cache where it lies."""

    rows: torch.Tensor  # [n], rows of the batch
    tables: torch.Tensor  # [n, blocks]
    begins: torch.Tensor  # [n], the first position seen
    ends: torch.Tensor  # [n]


@dataclass(frozen=True)
class _PagedChunks:
    """Sequences of several new positions, as the compiled kernel takes them."""

    tables: torch.Tensor  # [n, blocks]
    rows: torch.Tensor  # [n], first rows of the batch
    starts: torch.Tensor  # [n]
    counts: torch.Tensor  # [n]


@dataclass(frozen=True)
class _Chunk:
    """A sequence of several new positions."""

    row: int
    start: int
    count: int
    first_key: int
    """The earliest position that any of the rows sees."""
    index: torch.Tensor | None  # [start + count - first_key] slots; None: all keys are among the step's own


@dataclass(frozen=True)
class _Access:
    """What the layers of a group write and read."""

    slots: torch.Tensor  # [rows]
    decodes: list[_Decodes]
    paged_decodes: _PagedDecodes | None
    chunks: list[_Chunk]
    paged_chunks: _PagedChunks | None


class SdpaBackend:
    """Through torch's operators, which others are compared with, or compiled kernels on a CPU. See `AttentionBackend`."""

    name = "sdpa"
    default_block_size = 32

    def __init__(self, device: torch.device, kernels: Kernels | None = None) -> None:
        """`kernels`, of the cache's dtype, take over on a CPU: single new positions, and in float32 several too."""
        on_cpu = device.type == "cpu"
        self.device = device
        self.kernels = kernels
        self.piece_rows = PIECE_ROWS if on_cpu else GPU_PIECE_ROWS
        self.gather_bytes = GATHER_BYTES if on_cpu else GPU_GATHER_BYTES
        self.masks = CausalMasks(self.piece_rows)
        self.scratch = Scratch()

    def check_block_size(self, block_size: int) -> None:
        """Any size from 1 on will do."""
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}, but must be at least 1")

    def plan(self, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> "SdpaContext":
        return SdpaContext(self, sequences, groups)


class SdpaContext:
    """One batch. What a group's layers read is prepared when the first of them runs and reused by the others."""

    def __init__(self, backend: SdpaBackend, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> None:
        ends = list(accumulate(sequence.count for sequence in sequences))
        assert all(sequence.count > 0 for sequence in sequences), "a sequence without rows"
        self._num_sequences = {0: 0} | {rows: index + 1 for index, rows in enumerate(ends)}
        prepared = [_Group(backend, sequences, group) for group in groups]
        self._layers = {layer: (group, index) for group in prepared for index, layer in enumerate(group.plan.layers)}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        num_rows = query.shape[0]
        assert num_rows in self._num_sequences, f"{num_rows} rows are not whole sequences"
        group, index = self._layers[layer]
        return group.attend(index, query, key, value, options, self._num_sequences[num_rows])


class _Group:
    """One KV group's part of a batch."""

    def __init__(self, backend: SdpaBackend, sequences: Sequence[SequencePlan], plan: GroupPlan) -> None:
        self.plan = plan
        self._backend = backend
        self._sequences = sequences
        layers, blocks, block_size, kv_heads, head_dim = plan.keys.shape
        assert (layers, block_size) == (len(plan.layers), plan.block_size), "a group's tensors must match its plan"
        self._head_dim = head_dim
        self._keys = plan.keys.view(layers, blocks * block_size, kv_heads, head_dim).unbind(0)
        self._values = plan.values.view(layers, blocks * block_size, kv_heads, head_dim).unbind(0)
        self._access: dict[tuple[int, int | None], _Access] = {}

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions, num_sequences: int
    ) -> torch.Tensor:
        keys, values = self._keys[index], self._values[index]  # [slots, kv_heads, head_dim]
        access = self._access_of(num_sequences, options.window, query.shape[1])
        keys.index_copy_(0, access.slots, key)
        values.index_copy_(0, access.slots, value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if access.paged_decodes is not None:
            self._attend_decodes_natively(access.paged_decodes, query, (keys, values), options, out)
        for decodes in access.decodes:
            out.index_copy_(0, decodes.rows, self._attend_decodes(decodes, query, keys, values, options))
        if access.paged_chunks is not None:
            self._attend_chunks_natively(access.paged_chunks, query, (keys, values), options, out)
        for chunk in access.chunks:
            self._attend_chunk(chunk, query, (key, value), (keys, values), options, out)
        return out

    def _access_of(self, num_sequences: int, window: int | None, heads: int) -> _Access:
        """Tables of sequences beyond the leading ones aren't looked at: those may have no blocks for these layers."""
        key = (num_sequences, window)
        if key not in self._access:
            tables, sequences = self.plan.block_tables[:num_sequences], self._sequences[:num_sequences]
            self._access[key] = _AccessPlanner(self.plan, tables, sequences, window, self._backend, heads).plan()
        return self._access[key]

    def _attend_decodes_natively(
        self,
        decodes: _PagedDecodes,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        kernels, seen = self._backend.kernels, (decodes.begins, decodes.ends)
        assert kernels is not None
        size = self.plan.block_size
        kernels.attend_decodes(query, decodes.rows, cache, decodes.tables, seen, size, options.scale, options.soft_cap, out)

    def _attend_chunks_natively(
        self,
        chunks: _PagedChunks,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        kernels = self._backend.kernels
        assert kernels is not None
        which = chunks.rows, chunks.starts, chunks.counts
        kernels.attend_chunks(query, cache, chunks.tables, which, self.plan.block_size, options, out)

    def _attend_decodes(
        self, decodes: _Decodes, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        by_head = (-1, self._head_dim)
        packed = (-1, decodes.length, self._head_dim)
        key, value = self._backend.scratch.gather(keys.view(by_head), values.view(by_head), decodes.index)
        rows = query.index_select(0, decodes.rows)
        grouped = rows.view(decodes.mask.shape[0], -1, self._head_dim)  # [n * kv_heads, heads / kv_heads, head_dim]
        return attend_packed(grouped, key.view(packed), value.view(packed), decodes.mask, options).reshape(rows.shape)

    def _attend_chunk(
        self,
        chunk: _Chunk,
        query: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Piece by piece, each over the keys from the first one in its window to its own end."""
        rows = slice(chunk.row, chunk.row + chunk.count)
        key, value = (own[0][rows], own[1][rows]) if chunk.index is None else self._backend.scratch.gather(*cache, chunk.index)
        for low, high in self._pieces(chunk, options):
            end = chunk.start + high
            first = 0 if options.window is None else max(0, chunk.start + low + 1 - options.window)
            seen = slice(first - chunk.first_key, end - chunk.first_key)
            piece = slice(chunk.row + low, chunk.row + high)
            mask = self._mask(high - low, end - first, options)
            out[piece] = attend_chunk(query[piece], key[seen], value[seen], mask, options)

    def _pieces(self, chunk: _Chunk, options: AttentionOptions) -> list[tuple[int, int]]:
        whole = self.plan.keys.device.type != "cpu" and chunk.start == 0 and self._plainly_causal(chunk.count, chunk.count, options)
        step = chunk.count if whole else self._backend.piece_rows  # fused GPU kernels skip what a causal mask hides
        return [(low, min(low + step, chunk.count)) for low in range(0, chunk.count, step)]

    def _mask(self, rows: int, length: int, options: AttentionOptions) -> torch.Tensor | None:
        if self._plainly_causal(rows, length, options):
            return None
        return self._backend.masks.get(rows, length, options.window, self.plan.keys.dtype, self.plan.keys.device)

    @staticmethod
    def _plainly_causal(rows: int, length: int, options: AttentionOptions) -> bool:
        """Whether `is_causal` says it all: the queries' own keys are all there is, and no window or cap needs more."""
        return rows == length and options.soft_cap is None and (options.window is None or options.window >= rows)


class _AccessPlanner:
    """Finds slots on the host and moves them to the device."""

    def __init__(
        self,
        plan: GroupPlan,
        block_tables: Sequence[Sequence[int]],
        sequences: Sequence[SequencePlan],
        window: int | None,
        backend: SdpaBackend,
        heads: int,
    ) -> None:
        """`heads`: of the queries."""
        self._keys = plan.keys
        self._tables = block_tables
        self._block_size = plan.block_size
        kernels = backend.kernels if plan.keys.shape[4] <= MAX_HEAD_DIM else None
        self._pages_decodes = kernels is not None
        self._pages_chunks = kernels is not None and kernels.attends_chunks and heads // plan.keys.shape[3] <= MAX_GROUP
        self._kv_heads = plan.keys.shape[3]
        self._sequences = sequences
        self._window = window
        self._max_slots = max(1, backend.gather_bytes // (self._kv_heads * plan.keys.shape[4] * plan.keys.dtype.itemsize))
        self._counts = np.array([sequence.count for sequence in sequences], np.int64)
        self._starts = np.array([sequence.start for sequence in sequences], np.int64)
        self._first_rows = self._counts.cumsum() - self._counts
        self._index = SlotIndex(block_tables, (self._starts + self._counts).tolist(), plan.block_size)

    def plan(self) -> _Access:
        single, several = (np.nonzero(which)[0].tolist() for which in (self._counts == 1, self._counts > 1))
        paged, paged_chunks = self._pages_decodes and bool(single), self._pages_chunks and bool(several)
        return _Access(
            slots=self._row_slots(),
            decodes=[] if paged else self._plan_decodes(single),
            paged_decodes=self._plan_paged(single) if paged else None,
            chunks=[] if paged_chunks else [self._plan_chunk(i) for i in several],
            paged_chunks=self._plan_paged_chunks(several) if paged_chunks else None,
        )

    def _row_slots(self) -> torch.Tensor:
        owners = np.repeat(np.arange(len(self._counts)), self._counts)
        positions = np.arange(len(owners)) + (self._starts - self._first_rows)[owners]
        return self._to_device(self._index.slots(owners, positions))

    def _plan_chunk(self, sequence: int) -> _Chunk:
        start, count = self._sequences[sequence].start, self._sequences[sequence].count
        first = 0 if self._window is None else max(0, start + 1 - self._window)
        index = None
        if first < start:
            index = self._to_device(self._index.slots(sequence, np.arange(first, start + count)))
        return _Chunk(int(self._first_rows[sequence]), start, count, first, index)

    def _plan_paged(self, sequences: list[int]) -> _PagedDecodes:
        ends = self._starts[sequences] + 1
        begins = np.zeros_like(ends) if self._window is None else np.maximum(0, ends - self._window)
        rows, tables = self._first_rows[sequences], self._table_rows(sequences, ends)
        return _PagedDecodes(*(torch.from_numpy(array) for array in (rows, tables, begins, ends)))

    def _plan_paged_chunks(self, sequences: list[int]) -> _PagedChunks:
        starts, counts = self._starts[sequences], self._counts[sequences]
        rows, tables = self._first_rows[sequences], self._table_rows(sequences, starts + counts)
        return _PagedChunks(*(torch.from_numpy(array) for array in (tables, rows, starts, counts)))

    def _table_rows(self, sequences: list[int], ends: IntArray) -> IntArray:
        """`[n, blocks]`: the blocks of each sequence up to its end, side by side; what lies beyond is the null block."""
        tables = np.zeros((len(sequences), -(-int(ends.max()) // self._block_size)), np.int64)
        for table, sequence, end in zip(tables, sequences, ends.tolist(), strict=True):
            used = -(-end // self._block_size)
            table[:used] = self._tables[sequence][:used]
        return tables

    def _plan_decodes(self, sequences: list[int]) -> list[_Decodes]:
        ends = [self._sequences[i].start + 1 for i in sequences]
        lengths = ends if self._window is None else [min(end, self._window) for end in ends]
        buckets = buckets_by_length(lengths, self._max_slots, FREE_PADDING)
        return [self._plan_bucket(np.array([sequences[i] for i in bucket]), np.array([lengths[i] for i in bucket])) for bucket in buckets]

    def _plan_bucket(self, sequences: IntArray, lengths: IntArray) -> _Decodes:
        columns = np.arange(lengths.max())
        last = self._starts[sequences, None]
        # Padding repeats the last valid slot: what it reads is masked, but must be finite, since 0 * NaN is NaN.
        positions = np.minimum(last + 1 - lengths[:, None] + columns, last)
        slots = self._index.slots(sequences[:, None], positions)  # [n, length]
        index = slots[:, None, :] * self._kv_heads + np.arange(self._kv_heads)[:, None]  # [n, kv_heads, length]
        hidden = np.repeat(columns >= lengths[:, None], self._kv_heads, axis=0)[:, None, :]
        mask = torch.zeros(hidden.shape, dtype=self._keys.dtype, device=self._keys.device)
        mask.masked_fill_(torch.from_numpy(hidden).to(mask.device), -torch.inf)
        return _Decodes(self._to_device(self._first_rows[sequences]), self._to_device(index.reshape(-1)), mask, len(columns))

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._keys.device)
