"""Attention over a paged KV cache: plan a batch once, then per layer write keys and values at their slots and attend.

What a step is, `StepRows` and a `GroupInput` per KV group, is plain arrays; what stays from step to step is a `GroupCache` per group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.groups import KVGroup
from engine.cache.spec import KVSpec
from engine.models.base import AttentionContext

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step, packed sequence by sequence: sequence i computes positions `starts[i] … starts[i] + counts[i] - 1`."""

    starts: IntArray  # [sequences]
    counts: IntArray  # [sequences], all > 0

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.counts), "one start and one count per sequence"
        assert (self.counts > 0).all(), "a sequence without rows"

    @cached_property
    def ends(self) -> IntArray:  # [sequences]
        return self.starts + self.counts

    @cached_property
    def first_rows(self) -> IntArray:  # [sequences + 1], the last one is the number of rows
        return np.append(0, self.counts.cumsum())

    @cached_property
    def owners(self) -> IntArray:  # [rows], the sequence of each
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def positions(self) -> IntArray:  # [rows]
        shifts: IntArray = self.starts - self.first_rows[:-1]
        return np.arange(len(self.owners)) + shifts[self.owners]

    def num_leading(self, num_rows: int) -> int:
        """How many leading sequences have `num_rows` rows together."""
        assert num_rows in self._sequences_by_rows, f"{num_rows} rows are not whole sequences"
        return self._sequences_by_rows[num_rows]

    @cached_property
    def _sequences_by_rows(self) -> dict[int, int]:
        return {rows: count for count, rows in enumerate(self.first_rows.tolist())}


@dataclass(frozen=True, eq=False)
class GroupInput:
    """One KV group's part of a step's input. `index.plan_group` makes it."""

    tables: IntArray  # [sequences, width]
    """The block of each block_size positions from position 0 on. The null block stands before a sliding window, behind a sequence's
    end, and for sequences that have no blocks in this group; it must not be read."""
    slots: IntArray  # [rows], block * block_size + position % block_size; 0 for rows without a block
    rows: StepRows | None = None
    """Of chunked local attention: the step's rows counted from the beginning of each sequence's chunk, as the tables are. Within one step a
    sequence stays in one chunk, so to a backend this is plain causal attention. None: the step's rows as they are."""


@dataclass(frozen=True, eq=False)
class GroupCache:
    """One KV group: what stays from step to step."""

    layers: tuple[int, ...]
    block_size: int
    keys: torch.Tensor  # [layers, blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # the same; or a view of the keys' first numbers, which then are the values (latent attention)

    def __post_init__(self) -> None:
        assert (self.keys.shape[0], self.keys.shape[2]) == (len(self.layers), self.block_size), "a group's tensors must match it"

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[3]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[4]

    @property
    def values_in_keys(self) -> bool:
        """Whether the values are part of the keys, and written with them."""
        return self.values.data_ptr() == self.keys.data_ptr()

    @cached_property
    def paged_layers(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer keys and values, `[blocks, block_size, kv_heads, head_dim]` each."""
        return list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @cached_property
    def flat_layers(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer keys and values, `[slots, kv_heads, head_dim]` each."""
        keys, values = (tensor.flatten(1, 2).unbind(0) for tensor in (self.keys, self.values))
        return list(zip(keys, values, strict=True))


def cache_of(group: KVGroup) -> GroupCache:
    """A group's tensors as attention takes them."""
    return GroupCache(group.spec.layers, group.spec.block_size, group.keys, group.values)


GroupStep = tuple[GroupCache, GroupInput]
"""One KV group in a step."""


@dataclass(frozen=True)
class AttentionNeeds:
    """What a backend is to run on and for."""

    device: torch.device
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device; None for any other."""
    dtype: torch.dtype
    head_dims: frozenset[int]
    block_size: int | None
    """What was asked for; None: the backend's own."""
    soft_caps: bool = False
    sinks: bool = False
    """Whether some layer has them: see `AttentionOptions`."""
    values_in_keys: bool = False
    """Whether some layer's values are part of its keys: see `LayerKV.value_dim`."""


@dataclass(frozen=True)
class FixedShape:
    """The shape of a context that is filled anew for every replay of a captured graph."""

    num_sequences: int
    """Of one row each; fewer are padded."""
    max_len: int
    """Positions of the longest sequence."""

    def max_pages(self, block_size: int) -> int:
        """Of one sequence."""
        return -(-self.max_len // block_size)

    def num_pages(self, block_size: int) -> int:
        """Of all sequences, at most."""
        return self.num_sequences * self.max_pages(block_size)


class AttentionBackend(Protocol):
    """Made once per engine."""

    name: str
    default_block_size: int

    def check_block_size(self, block_size: int) -> None:
        """Raises `ConfigError` where this backend can't use the block size."""

    def workspace_bytes(self, specs: Sequence[KVSpec], max_len: int, max_step_tokens: int) -> int:
        """What its buffers can still grow to on the device, for sequences of up to `max_len` positions and steps of `max_step_tokens`.

        What it has allocated when it was made isn't counted.
        """

    def plan(self, rows: StepRows, groups: Sequence[GroupStep]) -> AttentionContext:
        """Prepares one batch. Layers of groups that aren't named must not run."""


class RefillableContext(AttentionContext, Protocol):
    """A context of fixed shape, whose arrays stay where they are."""

    def refill(self, rows: StepRows, inputs: Sequence[GroupInput]) -> None:
        """Prepares another step of single rows, an input per cache: called between replays, never while a graph is captured.

        Rows beyond the sequences are padding: what they write goes to the null block, and what they get is of no use.
        """


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose steps of single rows can be captured in a CUDA graph."""

    def plan_decodes(self, shape: FixedShape, caches: Sequence[GroupCache]) -> RefillableContext:
        """A context of `shape`, all padding at first.

        Every layer must have run once outside of a graph, after a refill or none, before the context is captured.
        """
