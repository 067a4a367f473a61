"""Fixed-size blocks with reference counts; those without references whose contents are known are found by key."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.cache.block_index import NULL_BLOCK, UNLABELLED, BlockIndex
from engine.cache.chain import HashChain
from engine.cache.eviction import BoolArray, EvictionQueue, IntArray

__all__ = ["NULL_BLOCK", "UNLABELLED", "BlockPool", "BoolArray", "IntArray"]

_FIRST_LOOKUP = 64
"""Blocks in the first lookup, before it is clear that a prefix of the sequence is cached at all."""

_MAX_PENDING = 512
"""Most keys whose registration may be pending."""

_EVICTION_FRACTION = 256
"""Cached blocks are evicted in batches of one part in so many of the pool."""


@dataclass(frozen=True)
class PoolStats:
    """Blocks of one pool: `free + cached + referenced == total`."""

    total: int
    free: int
    cached: int
    """Without references, kept for prefix hits."""
    referenced: int


class BlockPool:
    """Used for KV blocks and for hidden-state pages. Not thread-safe: it belongs to the engine thread.

    A block is free, cached (nobody holds it, but its contents can be found) or referenced. Contents are registered as sets of blocks:
    a key names the set, a label a block in it. Blocks of a set are held and evicted apart.

    Registrations are pending until a lookup or a release needs them: a step registers blocks of many requests, and one batch costs much
    less than many calls. For the same reason cached blocks are evicted in small batches.

    All methods take arrays of any shape in which no block is named twice. `poison` is called with blocks whose contents have just become
    meaningless; tests fill them with NaN.
    """

    def __init__(self, num_blocks: int, poison: Callable[[IntArray], None] | None = None) -> None:
        """`num_blocks` counts the null block, which is always there."""
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, np.int64)
        self._free = np.arange(num_blocks - 1, -1, -1)  # a stack: the block on top is handed out first
        self._num_free = num_blocks - 1
        self._cached = EvictionQueue(num_blocks)
        self._index = BlockIndex(num_blocks)
        self._pending: dict[tuple[tuple[Hashable, ...], int], list[tuple[Sequence[Hashable], IntArray]]] = {}
        """By labels and depth."""
        self._num_pending = 0
        """Keys."""
        self._poison = poison or _keep_contents

    @property
    def total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still hand out, cached ones included."""
        return self._num_free + self._cached.size

    def allocate(self, count: int) -> IntArray | None:
        """`count` blocks referenced once, with undefined contents; None, and nothing taken, where fewer are available.

        Free ones first, then cached ones, the least recently used first.
        """
        if count > self.num_available:
            return None
        num_free = min(count, self._num_free)
        blocks = self._free[self._num_free - num_free : self._num_free][::-1].copy()
        self._num_free -= num_free
        if num_free < count:
            blocks = np.concatenate([blocks, self._evict(count - num_free)])
        self._references[blocks] = 1
        self._poison(blocks)
        return blocks

    def retain(self, blocks: IntArray) -> None:
        """One more reference to each of the blocks, all of which are referenced or cached."""
        references = self._references[blocks]
        self._cached.remove(blocks[references == 0])
        self._references[blocks] = references + 1

    def release(self, blocks: IntArray) -> None:
        """One reference less to each of the blocks.

        Of those that become cached, one that stands later in the array counts as less recently used: of a prefix that is released in
        its order, the end is evicted first.
        """
        references = self._references[blocks] - 1
        assert not np.count_nonzero(references < 0), f"blocks {blocks[references < 0]} are released more often than they were taken"
        num_held = np.count_nonzero(references)
        if num_held < blocks.size:
            self._register_pending()  # while they are held
        self._references[blocks] = references
        if num_held == blocks.size:
            return
        unheld = blocks[references == 0] if num_held else blocks.reshape(-1)
        known = self._index.known(unheld)
        if np.count_nonzero(known) < len(known):
            self._free_blocks(unheld[~known])
            unheld = unheld[known]
        self._cached.push(unheld[::-1])

    def release_all(self, arrays: Sequence[IntArray]) -> None:
        """`release` of each of the arrays, which may have blocks in common."""
        blocks = np.concatenate(arrays, axis=None)
        if len(np.unique(blocks)) == len(blocks):
            self.release(blocks)
        else:
            for array in arrays:
                self.release(array)

    def is_referenced(self, blocks: IntArray) -> BoolArray:
        return self._references[blocks] > 0

    def num_unreferenced(self, blocks: IntArray) -> int:
        return blocks.size - int(np.count_nonzero(self._references[blocks]))

    def register(self, keys: Sequence[Hashable], blocks: IntArray, labels: tuple[Hashable, ...] = UNLABELLED, depth: int = 0) -> None:
        """Makes referenced, completely computed blocks `[keys, labels]` findable. No key may be named twice.

        What can be found already stays, but a deeper set takes over the key of a shallower one, whose blocks live on with their
        holders. Labels that the known set of a key lacks are added to it.
        """
        if len(keys):
            assert blocks.shape == (len(keys), len(labels))
            assert np.count_nonzero(self._references[blocks]) == blocks.size
            self._pending.setdefault((labels, depth), []).append((keys, blocks.copy()))
            self._num_pending += len(keys)
            if self._num_pending >= _MAX_PENDING:
                self._register_pending()

    def find(self, keys: Sequence[Hashable], labels: tuple[Hashable, ...] = UNLABELLED, depth: int = 0) -> IntArray:
        """Blocks `[keys, labels]` with contents of at least this depth, `NULL_BLOCK` where there are none. Takes no reference."""
        self._register_pending()
        return self._index.find(keys, labels, depth)

    def find_run(self, chain: HashChain, first: int, end: int, labels: tuple[Hashable, ...] = UNLABELLED, depth: int = 0) -> IntArray:
        """Blocks `[n, labels]` of the chain's full blocks `first … first + n - 1`, as far as all labels are found, below `end`."""
        end, look, runs = min(end, chain.num_full_blocks), _FIRST_LOOKUP, [np.zeros((0, len(labels)), np.int64)]
        while first < end:
            found = self.find(chain.links(first, min(end, first + look)), labels, depth)
            complete = (found != NULL_BLOCK).all(axis=1)
            if not complete.all():
                runs.append(found[: complete.argmin()])
                break
            runs.append(found)
            first, look = first + look, look * 4
        return np.concatenate(runs)

    def stats(self) -> PoolStats:
        """May be called from any thread: a snapshot, not a consistent one while the engine runs."""
        free, cached = self._num_free, self._cached.size
        return PoolStats(self.total, free, cached, self.total - free - cached)

    def check_integrity(self) -> None:
        """Raises AssertionError where the pool's books disagree with themselves."""
        self._register_pending()
        assert self._references[NULL_BLOCK] == 0
        assert not (self._references < 0).any()
        self._cached.check_integrity()
        states = np.stack([self._references > 0, self._cached.contains(), self._is_free()])  # [3, blocks]
        assert not states[:, NULL_BLOCK].any(), "the null block is handed out, or about to be"
        assert (states[:, NULL_BLOCK + 1 :].sum(axis=0) == 1).all(), "a block is not just one of referenced, cached and free"
        known = self._index.known(np.arange(self.num_blocks))  # [blocks]
        assert not (states[1] & ~known).any(), "a block is cached that can't be found"
        assert not (states[2] & known).any(), "a free block can be found"
        self._index.check_integrity()

    def _is_free(self) -> BoolArray:
        free = np.zeros(self.num_blocks, np.bool_)
        free[self._free[: self._num_free]] = True
        assert np.count_nonzero(free) == self._num_free, "a block is free twice"
        return free

    def _evict(self, count: int) -> IntArray:
        """`count` blocks that were cached. The rest of the batch that they are evicted with is free."""
        blocks = self._cached.pop(max(count, min(self._cached.size, self.num_blocks // _EVICTION_FRACTION)))
        self._index.remove(blocks)
        self._free_blocks(blocks[count:])
        return blocks[:count]

    def _register_pending(self) -> None:
        """Enters the pending registrations into the index."""
        self._num_pending = 0
        while self._pending:
            (labels, depth), batches = self._pending.popitem()
            unknown = self._index.add(*_merged(batches), labels, depth)
            if len(unknown):
                unheld = unknown[self._references[unknown] == 0]
                self._cached.remove(unheld)
                self._free_blocks(unheld)

    def _free_blocks(self, blocks: IntArray) -> None:
        """Frees blocks without references whose contents aren't indexed."""
        if len(blocks):
            self._free[self._num_free : self._num_free + len(blocks)] = blocks[::-1]  # neighbours stay neighbours when taken again
            self._num_free += len(blocks)
            self._poison(blocks)


def _merged(batches: Sequence[tuple[Sequence[Hashable], IntArray]]) -> tuple[Sequence[Hashable], IntArray]:
    """Keys, each once, and their blocks `[keys, labels]`: of what two requests have registered at a time, the first stays."""
    if len(batches) == 1:
        return batches[0]
    keys = [key for of_batch, _ in batches for key in of_batch]
    blocks = np.concatenate([blocks for _, blocks in batches])
    rows = {key: row for row, key in reversed(list(enumerate(keys)))}
    if len(rows) < len(keys):
        return list(rows), blocks[list(rows.values())]
    return keys, blocks


def _keep_contents(blocks: IntArray) -> None:
    """Contents of dead blocks are left as they are."""
