"""Attention over a paged KV cache: plan a batch once, then per layer write keys and values at their slots and attend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.models.base import AttentionContext


@dataclass(frozen=True)
class SequencePlan:
    """One sequence's part of a batch: positions `start … start + count - 1` are computed in this step."""

    start: int
    count: int


@dataclass(frozen=True)
class GroupPlan:
    """One KV group's part of a batch."""

    layers: tuple[int, ...]
    block_size: int
    keys: torch.Tensor  # [layers, blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # the same
    block_tables: Sequence[Sequence[int]]
    """Per sequence: the block of each block_size positions from position 0 on.
    Entries before a sliding window are 0, the null block, which must not be read."""


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


@dataclass(frozen=True)
class FixedShape:
    """The shape of a context that is filled anew for every replay of a captured graph."""

    num_sequences: int
    """Of one row each; fewer are padded."""
    max_len: int
    """Positions of the longest sequence."""

    def max_pages(self, block_size: int) -> int:
        return -(-self.max_len // block_size)


class AttentionBackend(Protocol):
    """Made once per engine."""

    name: str
    default_block_size: int

    def check_block_size(self, block_size: int) -> None:
        """Raises `ConfigError` where this backend can't use the block size."""

    def plan(self, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> AttentionContext:
        """Prepares slots and tables for one batch whose rows are the sequences' tokens, packed in order."""


class RefillableContext(AttentionContext, Protocol):
    """A context of fixed shape, whose arrays stay where they are."""

    def refill(self, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> None:
        """Prepares another step of single rows over the same caches: called between replays, never while a graph is captured.

        Rows beyond the sequences are padding: what they write goes to the null block, and what they get is of no use.
        """


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose steps of single rows can be captured in a CUDA graph."""

    def plan_decodes(self, shape: FixedShape, groups: Sequence[GroupPlan]) -> RefillableContext:
        """A context of `shape`, all padding at first. Of `groups` only layers and tensors are read.

        Every layer must have run once outside of a graph, after a refill or none, before the context is captured.
        """
