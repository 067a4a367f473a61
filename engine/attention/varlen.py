"""Attention through torch's own kernel for packed sequences over a paged cache, `torch.nn.attention.varlen` (CUDA).

What holds for that kernel, and what is made of it here:

- It may be told how many parts to split long sequences into. Its own choice can leave rows of a paged batch unwritten without an error
  (pytorch issue 194167), so it is always told 1.
- Its causal and window masks are aligned to the lower right, to the ends of the queries and of the keys, as chunks need it.
- Pages must be a multiple of 256 positions.
- It has no soft cap: layers that have one go through the reference backend instead, over the same cache.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.facade import AttentionNeeds, FixedShape, GroupCache, GroupStep, IntArray, StepRows
from engine.attention.index import GroupIndex, Int32Array
from engine.attention.paged import KernelGroup, PagedContext, Step, device_refusal, unfilled
from engine.attention.transfer import StepBuffer
from engine.cache.spec import KVSpec
from engine.errors import ConfigError
from engine.models.base import AttentionOptions

Kernel = Callable[..., torch.Tensor]
"""With the signature of `varlen_attn`."""

_PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256
_FULL = -1
_ARGUMENTS = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}


def find_kernel() -> Kernel | None:
    """torch's kernel, where this torch has it with block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    kernel: Any = varlen_attn
    return kernel if set(inspect.signature(kernel).parameters) >= _ARGUMENTS else None


def has_flash_attention() -> bool:
    """Whether this torch was built with the CUDA code behind the kernel."""
    return torch.backends.cuda.is_flash_attention_available()


class VarlenBackend:
    """See `AttentionBackend`. A context is valid until the next one is planned."""

    name = "varlen"
    default_block_size = 256

    def __init__(self, device: torch.device, kernel: Kernel | None = None) -> None:
        found = kernel or find_kernel()
        assert found is not None
        self.kernel = found
        self.device = device
        self._buffer = StepBuffer(device)

    @staticmethod
    def refusal(needs: AttentionNeeds) -> str | None:
        """See `select.Candidate`."""
        general = device_refusal(needs)
        if general is not None:
            return general
        unfit = [size for size in sorted(needs.head_dims) if size % 8 or size > _MAX_HEAD_DIM]
        if unfit:
            return f"it takes heads that are a multiple of 8 and at most {_MAX_HEAD_DIM} wide, not {unfit[0]}"
        if needs.soft_caps or needs.sinks:
            return "it has neither soft caps nor attention sinks, and this model has some"
        if find_kernel() is None:
            return f"torch {torch.__version__} has no varlen_attn with block tables"
        return None if has_flash_attention() else "this torch was built without flash attention"

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1 or block_size % _PAGE_MULTIPLE:
            raise ConfigError(f"block_size is {block_size}, but the attention backend varlen needs a multiple of {_PAGE_MULTIPLE}")

    @staticmethod
    def workspace_bytes(specs: Sequence[KVSpec], max_len: int, max_step_tokens: int) -> int:
        """Nothing: the kernel reads pages where they lie."""
        return 0

    def plan(self, rows: StepRows, groups: Sequence[GroupStep]) -> "VarlenContext":
        return VarlenContext(self, self._buffer, rows, groups)

    def plan_decodes(self, shape: FixedShape, caches: Sequence[GroupCache]) -> "VarlenContext":
        """See `GraphBackend.plan_decodes`."""
        return VarlenContext(self, StepBuffer(self.device), *unfilled(caches), shape)


class _Arrays(NamedTuple):
    """What a group's calls read, on the device; all but the slots are int32, as the kernel wants it."""

    first_rows: torch.Tensor  # [sequences + 1]
    first_keys: torch.Tensor  # [sequences + 1]
    lengths: torch.Tensor  # [sequences]
    table: torch.Tensor  # [sequences, pages of the longest]


class _Group(KernelGroup):
    """One KV group: a call of the kernel per layer, with arguments that are the same for all its layers."""

    def __init__(self, kernel: Kernel, cache: GroupCache, fixed: FixedShape | None) -> None:
        super().__init__(cache)
        self._kernel = kernel
        self._fixed = fixed

    def table_of(self, index: GroupIndex) -> Int32Array:
        """`[sequences, pages of the longest]`: where the shape is fixed, of the longest there can be."""
        return index.table(int(index.num_pages.max(initial=1)) if self._fixed is None else self._fixed.max_pages(index.block_size))

    def take(self, arrays: _Arrays) -> None:
        self._arrays = arrays
        self._arguments: dict[tuple[int, int | None], dict[str, Any]] = {}

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions, num_sequences: int) -> torch.Tensor:
        key = (num_sequences, options.window)
        if key not in self._arguments:
            self._arguments[key] = self._arguments_for(num_sequences, options.window)
        keys, values = self.cache.paged_layers[layer]
        grouped = query.shape[1] != keys.shape[2]
        return self._kernel(query, keys, values, scale=options.scale, enable_gqa=grouped, num_splits=1, **self._arguments[key])

    def _arguments_for(self, num_sequences: int, window: int | None) -> dict[str, Any]:
        first_rows, first_keys, lengths, table = self._arrays
        max_rows = int(self.index.rows.counts[:num_sequences].max())
        max_keys = int(self.index.lengths[:num_sequences].max()) if self._fixed is None else table.shape[1] * self.cache.block_size
        return {
            "cu_seq_q": first_rows[: num_sequences + 1],
            "cu_seq_k": first_keys[: num_sequences + 1],
            "max_q": max_rows,
            "max_k": max_keys,
            "window_size": _window_size(window, max_rows),
            "seqused_k": lengths[:num_sequences],
            "block_table": table[:num_sequences],
        }


def _window_size(window: int | None, max_rows: int) -> tuple[int, int]:
    """Positions that are seen to the left and to the right of a row's own.

    A sequence's last row sees all there is, so single rows need no mask, and the kernel packs the query heads of a key head only
    where it is asked for none.
    """
    if window is not None:
        return window - 1, 0
    return _FULL, _FULL if max_rows == 1 else 0


class VarlenContext(PagedContext):
    """One batch."""

    _groups: Sequence[_Group]

    def __init__(
        self, backend: VarlenBackend, buffer: StepBuffer, rows: StepRows, groups: Sequence[GroupStep], fixed: FixedShape | None = None
    ) -> None:
        kernel_groups = [_Group(backend.kernel, cache, fixed) for cache, _ in groups]
        super().__init__(buffer, rows, kernel_groups, [given for _, given in groups], fixed)

    def _send(self, step: Step) -> None:
        arrays: list[IntArray | Int32Array] = [step.rows.first_rows.astype(np.int32)]
        for index in step.indexes:
            lengths = index.lengths.astype(np.int32)
            arrays += [np.append(0, lengths.cumsum()).astype(np.int32), lengths, index.slots]
        tables = [group.table_of(index) for group, index in zip(self._groups, step.indexes, strict=True)]
        (first_rows, *sent), sent_tables = self._transfer(arrays, tables)
        for number, (group, index) in enumerate(zip(self._groups, step.indexes, strict=True)):
            first_keys, sent_lengths, slots = sent[3 * number : 3 * number + 3]
            group.fill(index, slots)
            group.take(_Arrays(first_rows, first_keys, sent_lengths, sent_tables[number]))
