"""The paged cache of keys, values and recurrent states: the block tables that requests hold in the groups of layers.

A group of recurrent layers is like one with a sliding window of two positions, of which only a block's last state is kept: its blocks are
slots, chunks end at its block borders, and a slot that is full is the snapshot that later requests start from. Within a block the state
moves from slot to slot: a chunk reads the slot that the one before has written, and writes another, so it can be repeated until it is
committed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np

from engine.cache.block_table import BlockTable
from engine.cache.chain import HashChain
from engine.cache.groups import CacheGroup
from engine.cache.pool import NULL_BLOCK, BoolArray, IntArray, PoolStats
from engine.cache.spec import NUM_SPARES


@dataclass
class RecurrentSlots:
    """Of one request in one recurrent group, beside its block table."""

    spares: list[int]
    latest: int = NULL_BLOCK
    """Where the state behind the last planned position is, or will be; the null block where nothing has been planned."""


@dataclass(frozen=True, slots=True)
class SlotPair:
    """Where a chunk's recurrent states come from and go to, in one group."""

    group: int
    read: int
    """The null block: the sequence begins with this chunk, so it starts from nothing."""
    write: int


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
    slots: dict[int, RecurrentSlots] = field(default_factory=dict)
    """Of each recurrent group that the request has begun to use."""

    def num_spares_missing(self, index: int, group: CacheGroup) -> int:
        """Slots that the request must get before it can use a group."""
        return NUM_SPARES if group.spec.is_recurrent and index not in self.slots else 0


class KVCache:
    """All groups. A request either gets the blocks it asks for in every group, or none."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self.has_recurrent = any(group.spec.is_recurrent for group in groups)
        self._used_at: dict[int, list[tuple[int, CacheGroup]]] = {}

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

    def blocks_for(self, depth: int, num_tokens: int) -> list[tuple[CacheGroup, int]]:
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

    def begin_chunk(self, tables: BlockTables, start: int) -> tuple[SlotPair, ...]:
        """The slots of a chunk that begins at `start`, for which `extend` has found room. Chunks are committed in the order of their
        planning, or withdrawn against it."""
        pairs = []
        for index, slots in tables.slots.items():
            size, table = self.groups[index].spec.block_size, tables.blocks[index]
            if start and slots.latest == NULL_BLOCK:
                slots.latest = int(table.array[start // size - 1])  # a prefix that was adopted
            write = slots.spares.pop() if start % size else int(table.array[start // size])
            pairs.append(SlotPair(index, slots.latest, write))
            slots.latest = write
        return tuple(pairs)

    def commit_chunk(self, tables: BlockTables, pairs: Sequence[SlotPair], start: int) -> None:
        """The chunk has been computed: what it has written is the state of its block, and what it has read within the block is a spare."""
        for pair in pairs:
            size = self.groups[pair.group].spec.block_size
            if start % size:
                replaced = tables.blocks[pair.group].replace(start // size, pair.write)
                assert replaced == pair.read, "a chunk was committed that isn't the next one"
                self._spare(tables, pair.group, replaced)

    def withdraw_chunk(self, tables: BlockTables, pairs: Sequence[SlotPair], start: int) -> None:
        """The latest chunk won't be computed."""
        for pair in pairs:
            tables.slots[pair.group].latest = pair.read
            if start % self.groups[pair.group].spec.block_size:
                self._spare(tables, pair.group, pair.write)

    def _spare(self, tables: BlockTables, group: int, slot: int) -> None:
        """The slot's state is of no use any more."""
        tables.slots[group].spares.append(slot)
        self.groups[group].poison(np.array([slot]))

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
            if group.spec.border is not None:
                end = min(end, start - start % group.spec.border + group.spec.border)
            room = group.pool.num_available - tables.num_spares_missing(index, group)
            if room < 0:
                return start
            if len(table) * size < end:
                end = min(end, (len(table) + room) * size)
        if end <= start:
            return start
        for index, group in used:
            table = tables.blocks[index]
            if tables.num_spares_missing(index, group):
                spares = group.pool.allocate(NUM_SPARES)
                assert spares is not None
                tables.slots[index] = RecurrentSlots(spares.tolist())
            missing = -(-end // group.spec.block_size) - len(table)
            if missing > 0:
                blocks = group.pool.allocate(missing)
                assert blocks is not None
                table.extend(blocks)
        tables.steady_end = min([_steady_end(group, tables.blocks[index]) for index, group in used], default=end)
        return end

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
            table, slots = tables.blocks[index], tables.slots.pop(index, None)
            if slots is not None:
                assert len(slots.spares) == NUM_SPARES, "a chunk is in flight, with a slot that would be given to others"
                group.pool.release(np.array(slots.spares))
            if len(table):
                group.pool.release(table.clear())
            tables.num_registered[index] = 0
        tables.steady_end = tables.unregistered_end = 0

    def stats(self, *, recurrent: bool = False) -> PoolStats:
        """Summed over the groups of recurrent layers, or over the others."""
        each = [group.pool.stats() for group in self.groups if group.spec.is_recurrent is recurrent]
        return PoolStats(*(sum(getattr(stats, name) for stats in each) for name in ("total", "free", "cached", "referenced")))

    def check_integrity(self) -> None:
        for group in self.groups:
            group.pool.check_integrity()

    def _missing(self, tables: BlockTables, num_tokens: int) -> list[int]:
        """Per group: blocks that the request must still get, at most at a time."""
        needs = dict(self.blocks_for(tables.depth, num_tokens))
        held = [table.num_held + NUM_SPARES * (index in tables.slots) for index, table in enumerate(tables.blocks)]
        return [max(0, needs.get(group, 0) - count) for group, count in zip(self.groups, held, strict=True)]

    def _used(self, depth: int) -> list[tuple[int, CacheGroup]]:
        used = self._used_at.get(depth)
        if used is None:
            used = self._used_at[depth] = [(index, group) for index, group in enumerate(self.groups) if group.spec.layers[0] < depth]
        return used


def _longest(group: CacheGroup, chain: HashChain, depth: int, limit: int) -> int:
    """What a prefix may span at most: with a window its beginning need not be there, else all of it must be."""
    num_blocks = min(limit // group.spec.block_size, chain.num_full_blocks)
    if group.spec.kind.window is None:
        num_blocks = len(group.pool.find_run(chain, 0, num_blocks, depth=depth))
    return num_blocks * group.spec.block_size


def _window_is_cached(group: CacheGroup, chain: HashChain, depth: int, lengths: IntArray) -> BoolArray:
    """Of prefix lengths, longest first: whether the group has every block that the next position can see."""
    size = group.spec.block_size
    cached = group.pool.find(chain.links(0, int(lengths[0]) // size), depth=depth)[:, 0] != NULL_BLOCK
    num_cached = np.concatenate([[0], cached.cumsum()])  # [blocks + 1]: of the blocks before this one
    ends = lengths // size
    firsts = group.spec.kind.first_seen(lengths) // size
    complete: BoolArray = num_cached[ends] - num_cached[firsts] == ends - firsts
    return complete


def _steady_end(group: CacheGroup, table: BlockTable) -> int:
    """Positions before it have their blocks, and see every block that is held."""
    size, kind = group.spec.block_size, group.spec.kind
    end, first = len(table) * size, table.num_dropped * size
    if kind.window is None:
        return end
    if group.spec.border is not None:  # `extend` cuts there, so it must be asked
        return min(end, (first // group.spec.border + 1) * group.spec.border)
    return min(end, first + size + kind.window - 1)


def _drop_before(group: CacheGroup, table: BlockTable, first: int) -> int:
    """Gives back the blocks before number `first`; how many there were."""
    if first <= table.num_dropped:
        return 0
    dropped = table.drop_before(first)
    group.pool.release(dropped)
    return len(dropped)
