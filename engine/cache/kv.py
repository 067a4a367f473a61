"""The paged KV cache: a pool and two tensors per group of layers, and the block tables that requests hold in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

import torch

from engine.cache.chain import HashChain
from engine.cache.pool import NULL_BLOCK, BlockPool
from engine.cache.spec import KVSpec
from engine.stats import PoolStats


class KVGroup:
    """Keys and values of layers of one kind: `[layers, blocks, block_size, kv_heads, head_dim]` each."""

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device, *, poison: bool = False) -> None:
        self.spec = spec
        shape = (len(spec.layers), num_blocks, spec.block_size, spec.kind.num_kv_heads, spec.kind.head_dim)
        # Left undefined: filling would touch all the memory at start, and nothing is read that wasn't written.
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty(shape, dtype=spec.dtype, device=device)
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

    def _fill_with_nan(self, block: int) -> None:
        self.keys[:, block] = torch.nan
        self.values[:, block] = torch.nan


@dataclass
class BlockTables:
    """The blocks that one request holds, per group; 0 where a sliding window has passed."""

    depth: int
    """Decoder layers that the request runs: groups without any of them hold nothing."""
    blocks: list[list[int]]
    num_registered: list[int] = field(default_factory=list)
    """Per group: leading blocks that have been offered to the prefix cache."""


class KVCache:
    """All groups. A request either gets the blocks it asks for in every group, or none."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = tuple(groups)
        self._used_at: dict[int, list[tuple[int, KVGroup]]] = {}

    def new_tables(self, depth: int) -> BlockTables:
        return BlockTables(depth, [[] for _ in self.groups], [0] * len(self.groups))

    def alignment(self, depth: int) -> int:
        """Prefix hits end at multiples of this: at a block border of every group in use."""
        return lcm(*(group.spec.block_size for _, group in self._used(depth)), 1)

    def blocks_for(self, depth: int, num_tokens: int) -> list[tuple[KVGroup, int]]:
        """How many blocks a request holds at most at a time, per group in use, while `num_tokens` are computed one by one."""
        needs = []
        for _, group in self._used(depth):
            size, window = group.spec.block_size, group.spec.kind.window
            span = num_tokens if window is None else min(num_tokens, window + size)
            needs.append((group, -(-span // size) + (window is not None)))
        return needs

    def fits(self, depth: int, num_tokens: int) -> bool:
        """Whether the request could run if it were alone."""
        return all(need <= group.pool.total for group, need in self.blocks_for(depth, num_tokens))

    def hit_lengths(self, chains: dict[int, HashChain], depth: int, limit: int) -> list[int]:
        """Lengths of cached prefixes that computation could start from, longest first, none above `limit`, 0 always last."""
        step = self.alignment(depth)
        usable = set(range(0, limit + 1, step))
        for _, group in self._used(depth):
            usable &= _usable_in(group, chains[group.spec.block_size], depth, limit)
        return sorted(usable | {0}, reverse=True)

    def adopt(self, tables: BlockTables, chains: dict[int, HashChain], length: int) -> None:
        """Takes references to the cached blocks of a prefix that `hit_lengths` has just named."""
        for index, group in self._used(tables.depth):
            chain, count = chains[group.spec.block_size], length // group.spec.block_size
            first = group.first_needed_block(length)
            table = [NULL_BLOCK] * first
            for i in range(first, count):
                block = group.pool.lookup(*chain.link(i), tables.depth)
                assert block is not None
                group.pool.retain(block)
                table.append(block)
            tables.blocks[index] = table
            tables.num_registered[index] = count

    def extend(self, tables: BlockTables, start: int, end: int) -> int:
        """Gives the request blocks for positions `start … end - 1`, as far as every group has them; returns how far (`start`: none).

        Blocks that have fallen out of a sliding window are given back first.
        """
        used = self._used(tables.depth)
        for index, group in used:
            table, size = tables.blocks[index], group.spec.block_size
            if group.spec.kind.window is not None:
                _drop_before(group, table, group.first_needed_block(start))
            if len(table) * size < end:
                end = min(end, (len(table) + group.pool.num_available) * size)
        for index, group in used:
            table = tables.blocks[index]
            while len(table) * group.spec.block_size < end:
                block = group.pool.allocate()
                assert block is not None
                table.append(block)
        return max(start, end)

    def can_hold(self, tables: BlockTables, num_tokens: int, claims: Sequence[tuple[BlockTables, int]] = ()) -> bool:
        """Whether the request could be computed up to `num_tokens` beside the `claims` of others that are on their way to theirs."""
        missing = [self._missing(held, tokens) for held, tokens in (*claims, (tables, num_tokens))]
        return all(sum(need[index] for need in missing) <= group.pool.num_available for index, group in enumerate(self.groups))

    def register(self, tables: BlockTables, chains: dict[int, HashChain], num_computed: int) -> None:
        """Offers blocks whose tokens have all been computed to the prefix cache."""
        for index, group in self._used(tables.depth):
            chain = chains[group.spec.block_size]
            for i in range(tables.num_registered[index], num_computed // group.spec.block_size):
                block = tables.blocks[index][i]
                if block != NULL_BLOCK:
                    group.pool.register(block, *chain.link(i), tables.depth)
                tables.num_registered[index] = i + 1

    def release(self, tables: BlockTables) -> None:
        """Gives everything back. The last block goes first, so that the beginning of a prefix is evicted last."""
        for index, group in enumerate(self.groups):
            for block in reversed(tables.blocks[index]):
                if block != NULL_BLOCK:
                    group.pool.release(block)
            tables.blocks[index] = []
            tables.num_registered[index] = 0

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
        held = [sum(block != NULL_BLOCK for block in blocks) for blocks in tables.blocks]
        return [max(0, needs.get(group, 0) - count) for group, count in zip(self.groups, held, strict=True)]

    def _used(self, depth: int) -> list[tuple[int, KVGroup]]:
        used = self._used_at.get(depth)
        if used is None:
            used = self._used_at[depth] = [(index, group) for index, group in enumerate(self.groups) if group.spec.layers[0] < depth]
        return used


def _usable_in(group: KVGroup, chain: HashChain, depth: int, limit: int) -> set[int]:
    """Prefix lengths, in whole blocks, for which the group has every block that the next position can see."""
    size, lengths, run = group.spec.block_size, {0}, 0
    for i in range(min(limit // size, chain.num_full_blocks)):
        hit = group.pool.lookup(*chain.link(i), depth) is not None
        run = run + 1 if hit else 0
        length = (i + 1) * size
        if run >= i + 1 - group.first_needed_block(length):
            lengths.add(length)
        elif group.spec.kind.window is None:
            break
    return lengths


def _drop_before(group: KVGroup, table: list[int], first: int) -> None:
    for i in range(min(first, len(table)) - 1, -1, -1):
        if table[i] == NULL_BLOCK:
            break
        group.pool.release(table[i])
        table[i] = NULL_BLOCK
