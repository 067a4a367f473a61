"""Attention over a paged KV cache: plan a batch once, then per layer write keys and values at their slots and attend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class AttentionBackend(Protocol):
    """Made once per engine."""

    name: str
    default_block_size: int

    def check_block_size(self, block_size: int) -> None:
        """Raises `ConfigError` where this backend can't use the block size."""

    def plan(self, sequences: Sequence[SequencePlan], groups: Sequence[GroupPlan]) -> AttentionContext:
        """Prepares slots and tables for one batch whose rows are the sequences' tokens, packed in order."""
