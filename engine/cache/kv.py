"""The paged KV cache: a pool and two tensors per group of layers, and the block tables that requests hold in them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
import torch

from engine.cache.block_table import BlockTable
from engine.cache.chain import HashChain
from engine.cache.pool import NULL_BLOCK, BlockPool, BoolArray, IntArray, PoolStats
from engine.cache.spec import KVSpec


class KVGroup:
    """Keys and values of layers of one kind: `[layers, blocks, block_size, kv_heads, head_dim]` each; values may be part of keys."""

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device, *, poison: bool = False) -> None:
        self.spec = spec
        shape = (len(spec.layers), num_blocks, spec.block_size, spec.kind.num_kv_heads, spec.kind.head_dim)
        # Left undefined: filling would touch all the memory at start, and nothing is read that wasn't written.
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        shared = spec.kind.value_dim
        self.values = torch.empty(shape, dtype=spec.dtype, device=device) if shared is None else self.keys[..., :shared]
        self.pool = BlockPool(num_blocks, self._fill_with_nan if poison else None)
        if poison:
            self.keys.fill_(torch.nan)
            self.values.fill_(torch.nan)

    def touch(self) -> None:
        """Has the system hand over all the memory now."""
        self.keys.zero_()
        self.values.zero_()

    def first_needed_block(self, position: int) -> int:
        """The first block that a query at `position` can see."""
        window = self.spec.kind.window
        return 0 if window is None else max(0, position - window + 1) // self.spec.block_size

    def _fill_with_nan(self, blocks: IntArray) -> None:
        self.keys[:, torch.from_numpy(blocks)] = torch.nan
        self.values[:, torch.from_numpy(blocks)] = torch.nan


@dataclass
class BlockTables:
    """The blocks that one request holds, per group; `NULL_BLOCK` where a sliding window has passed."""

    depth: int
    """Decoder layers that the request runs: groups without any of them hold nothing."""
    blocks: list[BlockTable]
    num_registered: list[int] = field(default_factory=list)
    """Per group: leading blocks that have been offered to the prefix cache."""
    steady_end: int = 0
    """Up to this position nothing need be taken, nor dropped."""
    unregistered_end: int = 0
    """The end of the first block that hasn't been offered: nothing need be registered before."""


class KVCache:
    """All groups. A request either gets the blocks it asks for in every group, or none."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = tuple(groups)
        self._used_at: dict[int, list[tuple[int, KVGroup]]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, over all requests: those of the groups without a window, where there are any."""
        full = [group for group in self.groups if group.spec.kind.window is None]
        return min(group.pool.total * group.spec.block_size for group in full or self.groups)

    def new_tables(self, depth: int) -> BlockTables:
        return BlockTables(depth, [BlockTable() for _ in self.groups], [0] * len(self.groups))

    def alignment(self, depth: int) -> int:
        """Prefix hits end at multiples of this: at a block border of every group in use."""
        return lcm(*(group.spec.block_size for _, group in self._used(depth)), 1)

    def blocks_for(self, depth: int, num_tokens: int) -> list[tuple[KVGroup, int]]:
        """`KVSpec.blocks_for` per group in use."""
        return [(group, group.spec.blocks_for(num_tokens)) for _, group in self._used(depth)]

    def fits(self, depth: int, num_tokens: int) -> bool:
        """Whether the request could run if it were alone."""
        return all(need <= group.pool.total for group, need in self.blocks_for(depth, num_tokens))

    def hit_lengths(self, chains: dict[int, HashChain], depth: int, limit: int) -> list[int]:
        """Lengths of cached prefixes that computation could start from, longest first, none above `limit`, 0 always last."""
        used = [group for _, group in self._used(depth)]
        for group in used:
            limit = _longest(group, chains[group.spec.block_size], depth, limit)
        step = self.alignment(depth)
        lengths = np.arange(limit - limit % step, 0, -step)
        for group in used:
            if group.spec.kind.window is not None and len(lengths):
                lengths = lengths[_window_is_cached(group, chains[group.spec.block_size], depth, lengths)]
        return [*lengths.tolist(), 0]

    def adopt(self, tables: BlockTables, chains: dict[int, HashChain], length: int) -> None:
        """Takes references to the cached blocks of a prefix that `hit_lengths` has just named."""
        for index, group in self._used(tables.depth):
            table, count = tables.blocks[index], length // group.spec.block_size
            table.skip(group.first_needed_block(length))
            links = chains[group.spec.block_size].links(len(table), count)
            blocks = group.pool.find(links, depth=tables.depth)[:, 0]
            assert blocks.all()
            group.pool.retain(blocks)
            table.extend(blocks)
            tables.num_registered[index] = count

    def extend(self, tables: BlockTables, start: int, end: int, computed: int | None = None) -> int:
        """Gives the request blocks for positions `start … end - 1`, as far as every group has them; returns how far (`start`: none).

        Blocks that have fallen out of a sliding window are given back first; not those that positions from `computed` on (None: `start`)
        see, since steps that are in flight read them, and may have to be repeated.
        """
        if end <= tables.steady_end:
            return end
        used = self._used(tables.depth)
        for index, group in used:
            table, size = tables.blocks[index], group.spec.block_size
            _drop_before(group, table, group.first_needed_block(start if computed is None else computed))
            if len(table) * size < end:
                end = min(end, (len(table) + group.pool.num_available) * size)
        for index, group in used:
            table = tables.blocks[index]
            missing = -(-end // group.spec.block_size) - len(table)
            if missing > 0:
                blocks = group.pool.allocate(missing)
                assert blocks is not None
                table.extend(blocks)
        tables.steady_end = min([_steady_end(group, tables.blocks[index]) for index, group in used], default=end)
        return max(start, end)

    def headroom(self, claims: Sequence[tuple[BlockTables, int]]) -> tuple[int, ...]:
        """Per group the blocks that are left beside the `claims` of requests that are on their way to so many tokens; may be negative."""
        missing = [self._missing(tables, num_tokens) for tables, num_tokens in claims]
        return tuple(group.pool.num_available - sum(need[index] for need in missing) for index, group in enumerate(self.groups))

    def drop_passed(self, sequences: Iterable[tuple[BlockTables, int]]) -> int:
        """Gives back the blocks of which the sequences' next positions (the second of each pair) see nothing any more; how many. Those are
        the next ones to be computed: steps in flight compute them, and read what they see.

        `extend` does so for its own sequence alone: the others hold the blocks of their last chunk until they are extended themselves.
        """
        return sum(
            _drop_before(group, tables.blocks[index], group.first_needed_block(position))
            for tables, position in sequences
            for index, group in self._used(tables.depth)
        )

    def can_hold(self, tables: BlockTables, num_tokens: int, claims: Sequence[tuple[BlockTables, int]] = ()) -> bool:
        """Whether the request could be computed up to `num_tokens` beside the `claims` of others."""
        needs = self._missing(tables, num_tokens)
        return all(need <= left for need, left in zip(needs, self.headroom(claims), strict=True))

    def register(self, tables: BlockTables, chains: dict[int, HashChain], num_computed: int) -> None:
        """Offers blocks whose tokens have all been computed to the prefix cache."""
        if num_computed < tables.unregistered_end:
            return
        used = self._used(tables.depth)
        for index, group in used:
            end = num_computed // group.spec.block_size
            if end > tables.num_registered[index]:
                table = tables.blocks[index]
                first = max(tables.num_registered[index], table.num_dropped)
                links = chains[group.spec.block_size].links(first, end)
                group.pool.register(links, table.array[first:end, None], depth=tables.depth)
                tables.num_registered[index] = end
        tables.unregistered_end = min([(tables.num_registered[index] + 1) * group.spec.block_size for index, group in used], default=0)

    def release(self, tables: BlockTables) -> None:
        """Gives everything back. The beginning of a prefix is evicted last."""
        for index, group in enumerate(self.groups):
            table = tables.blocks[index]
            if len(table):
                group.pool.release(table.clear())
            tables.num_registered[index] = 0
        tables.steady_end = tables.unregistered_end = 0

    def stats(self) -> PoolStats:
        """Summed over the groups."""
        each = [group.pool.stats() for group in self.groups]
        return PoolStats(*(sum(values) for values in zip(*((s.total, s.free, s.cached, s.referenced) for s in each), strict=True)))

    def check_integrity(self) -> None:
        for group in self.groups:
            group.pool.check_integrity()

    def _missing(self, tables: BlockTables, num_tokens: int) -> list[int]:
        """Per group: blocks that the request must still get, at most at a time."""
        needs = dict(self.blocks_for(tables.depth, num_tokens))
        return [max(0, needs.get(group, 0) - table.num_held) for group, table in zip(self.groups, tables.blocks, strict=True)]

    def _used(self, depth: int) -> list[tuple[int, KVGroup]]:
        used = self._used_at.get(depth)
        if used is None:
            used = self._used_at[depth] = [(index, group) for index, group in enumerate(self.groups) if group.spec.layers[0] < depth]
        return used


def _longest(group: KVGroup, chain: HashChain, depth: int, limit: int) -> int:
    """What a prefix may span at most: with a window its beginning need not be there, else all of it must be."""
    num_blocks = min(limit // group.spec.block_size, chain.num_full_blocks)
    if group.spec.kind.window is None:
        num_blocks = len(group.pool.find_run(chain, 0, num_blocks, depth=depth))
    return num_blocks * group.spec.block_size


def _window_is_cached(group: KVGroup, chain: HashChain, depth: int, lengths: IntArray) -> BoolArray:
    """Of prefix lengths, longest first: whether the group has every block that the next position can see."""
    size, window = group.spec.block_size, group.spec.kind.window
    assert window is not None
    cached = group.pool.find(chain.links(0, int(lengths[0]) // size), depth=depth)[:, 0] != NULL_BLOCK
    num_cached = np.concatenate([[0], cached.cumsum()])  # [blocks + 1]: of the blocks before this one
    ends = lengths // size
    firsts = np.maximum(0, lengths - window + 1) // size
    complete: BoolArray = num_cached[ends] - num_cached[firsts] == ends - firsts
    return complete


def _steady_end(group: KVGroup, table: BlockTable) -> int:
    """Positions before it have their blocks, and see every block that is held."""
    size, window = group.spec.block_size, group.spec.kind.window
    end = len(table) * size
    return end if window is None else min(end, (table.num_dropped + 1) * size + window - 1)


def _drop_before(group: KVGroup, table: BlockTable, first: int) -> int:
    """Gives back the blocks before number `first`; how many there were."""
    if first <= table.num_dropped:
        return 0
    dropped = table.drop_before(first)
    group.pool.release(dropped)
    return len(dropped)
