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

import torch

from engine.attention.access import Access, AccessPlanner, Chunk, Decodes, PagedChunks, PagedDecodes
from engine.attention.dense import CausalMasks, Scratch, attend_chunk, attend_packed, is_unfused
from engine.attention.facade import GroupCache, GroupStep, StepRows
from engine.attention.index import GroupIndex
from engine.cache.spec import KVSpec
from engine.errors import ConfigError
from engine.models.base import AttentionOptions
from engine.native.kernels import MAX_HEAD_DIM, Kernels

GATHER_BYTES = 4 << 20
"""Keys gathered at once for decoding on a CPU: more would fall out of its caches."""
GPU_GATHER_BYTES = 256 << 20
UNFUSED_BYTES = 256 << 20
"""The most that the scores of a piece take where no fused kernel computes them."""
_BYTES_PER_SCORE = 12
"""In float32, together with two copies on the way."""
PIECE_ROWS = 128
GPU_PIECE_ROWS = 512


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

    def workspace_bytes(self, specs: Sequence[KVSpec], max_len: int, max_step_tokens: int) -> int:
        """See `AttentionBackend`. Layers that compiled kernels take on whole gather nothing; more than `MAX_GROUP` query heads per
        key head, which they leave, aren't looked at here."""
        gathering = [spec for spec in specs if not self._reads_pages(spec)]
        if not gathering:
            return 0
        gathered = max(self._most_gathered(spec, max_len, max_step_tokens) for spec in gathering)
        windows = {spec.kind.window for spec in gathering}
        lengths = [max_len if window is None else min(max_len, window - 1 + self.piece_rows) for window in windows]
        dtype = gathering[0].dtype
        scores = 0 if self.device.type == "cpu" else UNFUSED_BYTES
        return scores + self.scratch.bytes_for(gathered, dtype) + sum(self.masks.bytes_for(length, dtype) for length in lengths)

    def _reads_pages(self, spec: KVSpec) -> bool:
        if self.kernels is None or not self.kernels.attends_chunks:
            return False
        return spec.kv.head_dim <= MAX_HEAD_DIM and spec.kv.value_dim is None

    def _most_gathered(self, spec: KVSpec, max_len: int, max_step_tokens: int) -> int:
        """Numbers: a whole sequence's keys, of those that a chunk sees; or those of many sequences' single positions."""
        kind = spec.kv
        seen = max_len if kind.window is None else min(max_len, kind.window - 1 + max_step_tokens)
        return max(seen * kind.num_kv_heads * kind.head_dim, self.gather_bytes // spec.dtype.itemsize)

    def plan(self, rows: StepRows, groups: Sequence[GroupStep]) -> "SdpaContext":
        return SdpaContext(self, rows, groups)


class SdpaContext:
    """One batch. What a group's layers read is prepared when the first of them runs and reused by the others."""

    def __init__(self, backend: SdpaBackend, rows: StepRows, groups: Sequence[GroupStep]) -> None:
        self._rows = rows
        prepared = [_Group(backend, cache, GroupIndex(given.rows or rows, given, cache.block_size)) for cache, given in groups]
        self._layers = {layer: (group, number) for group in prepared for number, layer in enumerate(group.cache.layers)}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        num_sequences = self._rows.num_leading(query.shape[0])
        if num_sequences == 0:
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        group, number = self._layers[layer]
        return group.attend(number, query, key, value, options, num_sequences)


class _Group:
    """One KV group's part of a batch."""

    def __init__(self, backend: SdpaBackend, cache: GroupCache, index: GroupIndex) -> None:
        self.cache = cache
        self._backend = backend
        self._planner = AccessPlanner(cache, index, backend.kernels, backend.gather_bytes)
        self._access: dict[tuple[int, int | None, int], Access] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions, num_sequences: int
    ) -> torch.Tensor:
        keys, values = self.cache.flat_layers[layer]  # [slots, kv_heads, head_dim]
        access = self._access_of(num_sequences, options.window, query.shape[1])
        keys.index_copy_(0, access.slots, key)
        if not self.cache.values_in_keys:
            values.index_copy_(0, access.slots, value)
        out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        if access.paged_decodes is not None:
            self._attend_decodes_natively(access.paged_decodes, query, (keys, values), options, out)
        for decodes in access.decodes:
            out.index_copy_(0, decodes.rows, self._attend_decodes(decodes, query, keys, values, options))
        if access.paged_chunks is not None:
            self._attend_chunks_natively(access.paged_chunks, query, (keys, values), options, out)
        for chunk in access.chunks:
            self._attend_chunk(chunk, query, (key, value), (keys, values), options, out)
        return out

    def _access_of(self, num_sequences: int, window: int | None, heads: int) -> Access:
        key = (num_sequences, window, heads)
        if key not in self._access:
            self._access[key] = self._planner.plan(num_sequences, window, heads)
        return self._access[key]

    def _attend_decodes_natively(
        self,
        decodes: PagedDecodes,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        kernels, seen = self._backend.kernels, (decodes.begins, decodes.ends)
        assert kernels is not None
        size, how = self.cache.block_size, (options.scale, options.soft_cap, options.sinks)
        kernels.attend_decodes(query, decodes.rows, cache, decodes.tables, seen, size, *how, out)

    def _attend_chunks_natively(
        self,
        chunks: PagedChunks,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        kernels = self._backend.kernels
        assert kernels is not None
        which = chunks.rows, chunks.starts, chunks.counts
        how = options.scale, options.window, options.soft_cap, options.sinks
        kernels.attend_chunks(query, cache, chunks.tables, which, self.cache.block_size, *how, out)

    def _attend_decodes(
        self, decodes: Decodes, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        by_head = keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])
        gathered = self._backend.scratch.gather(*by_head, decodes.index)
        key, value = (part.view(-1, decodes.length, part.shape[-1]) for part in gathered)
        rows = query.index_select(0, decodes.rows)
        grouped = rows.view(decodes.mask.shape[0], -1, self.cache.head_dim)  # [n * kv_heads, heads / kv_heads, head_dim]
        return attend_packed(grouped, key, value, decodes.mask, options).reshape(*rows.shape[:-1], -1)

    def _attend_chunk(
        self,
        chunk: Chunk,
        query: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Piece by piece, each over the keys from the first one in its window to its own end."""
        rows = slice(chunk.row, chunk.row + chunk.count)
        key, value = (own[0][rows], own[1][rows]) if chunk.index is None else self._backend.scratch.gather(*cache, chunk.index)
        for low, high in self._pieces(chunk, options, query.shape[1]):
            end = chunk.start + high
            first = 0 if options.window is None else max(0, chunk.start + low + 1 - options.window)
            seen = slice(first - chunk.first_key, end - chunk.first_key)
            piece = slice(chunk.row + low, chunk.row + high)
            mask = self._mask(high - low, end - first, options)
            out[piece] = attend_chunk(query[piece], key[seen], value[seen], mask, options)

    def _pieces(self, chunk: Chunk, options: AttentionOptions, heads: int) -> list[tuple[int, int]]:
        whole = self.cache.keys.device.type != "cpu" and chunk.start == 0 and self._plainly_causal(chunk.count, chunk.count, options)
        step = chunk.count if whole else self._backend.piece_rows  # fused GPU kernels skip what a causal mask hides
        if is_unfused(options) or self.cache.values_in_keys:
            step = min(step, max(1, UNFUSED_BYTES // (_BYTES_PER_SCORE * heads * (chunk.start + chunk.count - chunk.first_key))))
        return [(low, min(low + step, chunk.count)) for low in range(0, chunk.count, step)]

    def _mask(self, rows: int, length: int, options: AttentionOptions) -> torch.Tensor | None:
        if self._plainly_causal(rows, length, options):
            return None
        return self._backend.masks.get(rows, length, options.window, self.cache.keys.dtype, self.cache.keys.device)

    @staticmethod
    def _plainly_causal(rows: int, length: int, options: AttentionOptions) -> bool:
        """Whether `is_causal` says it all: the queries' own keys are all there is, and no window, cap or sink needs more."""
        return rows == length and not is_unfused(options) and (options.window is None or options.window >= rows)
