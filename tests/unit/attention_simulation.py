"""Steps of several sequences run through an attention backend and compared with dense attention in float64.

The cache is poisoned: what was not written, what was freed and the null block hold NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.facade import AttentionBackend, GroupCache, GroupStep, IntArray, StepRows
from engine.attention.index import plan_group
from engine.attention.sdpa import SdpaBackend
from engine.models.base import AttentionOptions

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


Member = tuple[int, int, int]
"""A sequence's name, first position and number of positions in a step."""


def ints(*numbers: int) -> IntArray:
    return np.array(numbers, np.int64)


def rows_of(*sequences: tuple[int, int]) -> StepRows:
    """Of (first position, number of positions)."""
    return StepRows(ints(*(start for start, _ in sequences)), ints(*(count for _, count in sequences)))


def rows_of_members(members: Sequence[Member]) -> StepRows:
    return rows_of(*((start, count) for _, start, count in members))


@dataclass(frozen=True)
class Shape:
    """One group of layers that keep the same thing."""

    layers: tuple[int, ...] = (0,)
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(0.3, self.window, self.soft_cap, sinks=self.sink_scores.float() if self.sinks else None)

    @property
    def sink_scores(self) -> torch.Tensor:
        """`[heads]`: below, among and above the other scores."""
        return torch.linspace(-4, 6, self.heads, dtype=torch.float64)


def dense_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The last `query.shape[0]` positions over all keys, in float64, written out plainly."""
    rows, length = query.shape[0], key.shape[0]
    key, value = (x.double().repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * 0.3
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    query_at = torch.arange(length - rows, length)[:, None]
    key_at = torch.arange(length)[None]
    seen = key_at <= query_at
    if shape.window is not None:
        seen &= key_at > query_at - shape.window
    scores = scores.masked_fill(~seen, -math.inf)
    if shape.sinks:
        scores = torch.cat([scores, shape.sink_scores[:, None, None].expand(-1, rows, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], value)


@dataclass
class PagedGroup:
    """A poisoned cache with scattered blocks, and what it should hold."""

    shape: Shape
    num_blocks: int = 400
    tail: tuple[int, ...] = ()
    """What block tables hold behind the blocks in use."""
    keys: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(init=False)
    history: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        size = (len(shape.layers), self.num_blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        self.keys, self.values = (torch.full(size, math.nan, dtype=shape.dtype) for _ in range(2))
        self.free = [block + 1 for block in torch.randperm(self.num_blocks - 1).tolist()]

    @property
    def cache(self) -> GroupCache:
        return GroupCache(self.shape.layers, self.shape.block_size, self.keys, self.values)

    def step(self, members: Sequence[Member]) -> GroupStep:
        for name, start, count in members:
            self._grow(self.tables.setdefault(name, []), start, count)
        tables = [ints(*self.tables[name], *self.tail) for name, _, _ in members]
        return self.cache, plan_group(rows_of_members(members), tables, self.shape.block_size)

    def _grow(self, table: list[int], start: int, count: int) -> None:
        while len(table) * self.shape.block_size < start + count:
            table.append(self.free.pop())
        if self.shape.window is not None:
            for index in range(max(0, start + 1 - self.shape.window) // self.shape.block_size):
                self._release(table, index)

    def _release(self, table: list[int], index: int) -> None:
        block, table[index] = table[index], 0
        if block:
            self.keys[:, block] = self.values[:, block] = math.nan
            self.free.insert(0, block)

    def remember(self, name: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        past = self.history.setdefault((name, layer), [])
        past.append((key, value))
        return torch.cat([k for k, _ in past]), torch.cat([v for _, v in past])


@dataclass
class Simulation:
    """Runs steps through the backend and compares every row of every layer with the dense reference."""

    shapes: Sequence[Shape]
    num_blocks: int = 400
    tail: tuple[int, ...] = ()
    backend: AttentionBackend = field(default_factory=lambda: SdpaBackend(CPU))
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = [PagedGroup(shape, self.num_blocks, self.tail) for shape in self.shapes]

    def step(self, *wanted: tuple[int, int], keep: int | None = None) -> None:
        """Computes `count` more positions of each `(name, count)`; layers after the first of a group see `keep` sequences only."""
        members = [(name, self.lengths.get(name, 0), count) for name, count in wanted]
        context = self.backend.plan(rows_of_members(members), [group.step(members) for group in self.groups])
        for group in self.groups:
            for layer in group.shape.layers:
                kept = members if layer == group.shape.layers[0] else members[:keep]
                self._check_layer(context.attend, group, layer, kept)
        self.lengths |= {name: start + count for name, start, count in members}

    def _check_layer(self, attend: Callable[..., torch.Tensor], group: PagedGroup, layer: int, members: Sequence[Member]) -> None:
        shape = group.shape
        counts = [count for _, _, count in members]
        fused = torch.randn(sum(counts), shape.heads + 2 * shape.kv_heads, shape.head_dim).to(shape.dtype)
        query, key, value = fused.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        out = attend(layer, query, key, value, shape.options)
        assert out.shape == query.shape
        assert out.dtype == shape.dtype
        parts = zip(members, *(x.split(counts) for x in (query, key, value, out)), strict=True)
        for (name, _, _), q, k, v, got in parts:
            expected = dense_reference(q, *group.remember(name, layer, k, v), shape)
            error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() <= TOLERANCE[shape.dtype], f"sequence {name}, layer {layer}: relative error {error.max():.2e}"
