"""What backends with kernels that read pages have in common: writing keys and values, narrowing, and buffers for captured graphs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.facade import AttentionNeeds, FixedShape, GroupCache, GroupInput, GroupStep, IntArray, StepRows
from engine.attention.index import GroupIndex, Int32Array, pad_rows, plan_group
from engine.attention.transfer import StaticArray, StepBuffer
from engine.models.base import AttentionOptions


def device_refusal(needs: AttentionNeeds) -> str | None:
    """Why such a backend can't run on the device and in the dtype, None where it can."""
    if needs.capability is None:
        return "it needs a CUDA device"
    if needs.capability < (8, 0):
        return f"it needs compute capability 8.0, this device has {needs.capability[0]}.{needs.capability[1]}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(needs.dtype).removeprefix('torch.')}"
    return "it reads no latents, which this model keeps instead of keys and values" if needs.values_in_keys else None


@dataclass(frozen=True)
class Step:
    """One step's rows and, per group, its index: padded where the shape is fixed."""

    rows: StepRows
    indexes: Sequence[GroupIndex]

    @classmethod
    def of(cls, rows: StepRows, groups: Sequence[GroupStep], fixed: FixedShape | None) -> "Step":
        if fixed is None:
            return cls(rows, [GroupIndex(given.rows or rows, given, cache.block_size) for cache, given in groups])
        num_padding = fixed.num_sequences - len(rows.starts)
        assert num_padding >= 0, "more sequences than the fixed shape has"
        assert (rows.counts == 1).all(), "a fixed shape is for single rows"
        assert (rows.starts < fixed.max_len).all(), "a sequence is longer than the fixed shape"
        padded = pad_rows(rows, num_padding)
        indexes = [
            GroupIndex(padded if given.rows is None else pad_rows(given.rows, num_padding), given, cache.block_size, num_padding)
            for cache, given in groups
        ]
        assert all(index.num_sequences == fixed.num_sequences for index in indexes), "a sequence of a fixed shape lacks blocks"
        return cls(padded, indexes)


class KernelGroup(ABC):
    """One KV group's part of a step."""

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache

    def fill(self, index: GroupIndex, slots: torch.Tensor) -> None:
        """The step that the group's layers work on next; `slots` is `[rows]`, int64, on the device."""
        self.index, self.slots = index, slots

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = self.slots[: key.shape[0]]
        for cache, rows in zip(self.cache.flat_layers[layer], (key, value), strict=True):
            cache.index_copy_(0, slots, rows)

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions, num_sequences: int) -> torch.Tensor:
        """Attention of the leading sequences' rows over the pages of the group's layer number `layer`."""


class PagedContext(ABC):
    """One step. With a fixed shape it can be given further ones: `refill` writes to the addresses that a captured graph reads."""

    def __init__(
        self,
        buffer: StepBuffer,
        rows: StepRows,
        groups: Sequence[KernelGroup],
        inputs: Sequence[GroupInput],
        fixed: FixedShape | None,
    ) -> None:
        """`buffer`: one of its own for a context of fixed shape."""
        self._buffer = buffer
        self._groups = groups
        self._fixed = fixed
        self._kept = [] if fixed is None else [StaticArray(fixed.num_pages(group.cache.block_size), buffer.device) for group in groups]
        self._layers = {layer: (group, number) for group in groups for number, layer in enumerate(group.cache.layers)}
        self._fill(rows, inputs)

    def refill(self, rows: StepRows, inputs: Sequence[GroupInput]) -> None:
        """Another step of single rows over the same caches, at most as many sequences as the shape has, none longer than its limit."""
        assert self._fixed is not None, "only a context of fixed shape can be filled again"
        self._fill(rows, inputs)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        num_sequences = self._rows.num_leading(query.shape[0])
        if num_sequences == 0:
            return torch.empty_like(query)
        group, number = self._layers[layer]
        group.index.check(num_sequences, options.window)
        group.write(number, key, value)
        return group.attend(number, query, options, num_sequences)

    def _fill(self, rows: StepRows, inputs: Sequence[GroupInput]) -> None:
        step = Step.of(rows, [(group.cache, given) for group, given in zip(self._groups, inputs, strict=True)], self._fixed)
        self._rows = step.rows
        self._send(step)

    @abstractmethod
    def _send(self, step: Step) -> None:
        """Moves the step's arrays to the device and hands each group its own."""

    def _transfer(
        self, arrays: Sequence[IntArray | Int32Array], pages: Sequence[Int32Array]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Both on the device: in one transfer or, where the shape is fixed, of each group's `pages` only what has changed."""
        if self._fixed is None:
            sent = self._buffer.send([*arrays, *pages])
            return sent[: len(arrays)], sent[len(arrays) :]
        return self._buffer.send(arrays), [kept.update(each) for kept, each in zip(self._kept, pages, strict=True)]


def unfilled(caches: Sequence[GroupCache]) -> tuple[StepRows, list[GroupStep]]:
    """A step of no sequences: what a context of fixed shape begins with."""
    rows = StepRows(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return rows, [(cache, plan_group(rows, [], cache.block_size)) for cache in caches]
