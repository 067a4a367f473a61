"""Fixed-size blocks with reference counts; free blocks that still hold something known are found again by key."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from engine.stats import PoolStats

NULL_BLOCK = 0
"""Padding is written there and nobody reads it; never handed out."""


@dataclass(frozen=True)
class CacheEntry:
    """What a registered block holds."""

    key: Hashable
    tokens: bytes
    """The block's own tokens: compared on a hit, so that a collision of keys can't give another prompt's rows."""
    depth: int
    """How many decoder layers the contents are complete for."""


class BlockPool:
    """Used for KV blocks and for hidden-state pages. Not thread-safe: it belongs to the engine thread.

    A block is free, cached (nobody holds it, but its contents can be found) or referenced. `poison` is called with a block whose
    contents have just become meaningless; tests fill it with NaN.
    """

    def __init__(self, num_blocks: int, poison: Callable[[int], None] | None = None) -> None:
        """`num_blocks` counts the null block, which is always there."""
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Eviction order: blocks without contents first, then cached ones, least recently used first.
        self._unheld: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._by_key: dict[Hashable, int] = {}
        self._entries: dict[int, CacheEntry] = {}
        self._num_cached = 0
        self._poison = poison or _leave

    @property
    def total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still hand out, cached ones included."""
        return len(self._unheld)

    def allocate(self) -> int | None:
        """A block referenced once, with undefined contents; None when every block is referenced."""
        if not self._unheld:
            return None
        block, _ = self._unheld.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        self._poison(block)
        return block

    def retain(self, block: int) -> None:
        assert block != NULL_BLOCK
        if self._references[block] == 0:
            del self._unheld[block]
            self._num_cached -= block in self._entries
        self._references[block] += 1

    def release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} is released more often than it was taken"
        self._references[block] -= 1
        if self._references[block] == 0:
            self._put_back(block)

    def is_referenced(self, block: int) -> bool:
        return self._references[block] > 0

    def register(self, block: int, key: Hashable, tokens: bytes, depth: int = 0) -> None:
        """Makes a referenced, completely computed block findable. Of two blocks with one key the deeper one is kept."""
        assert self._references[block] > 0
        known = self._by_key.get(key)
        if known is not None:
            if known == block or self._entries[known].depth >= depth:
                return
            self._forget(known)
            if self._references[known] == 0:
                self._put_back(known)
        self._forget(block)
        self._by_key[key] = block
        self._entries[block] = CacheEntry(key, tokens, depth)

    def lookup(self, key: Hashable, tokens: bytes, depth: int = 0) -> int | None:
        """The block registered for `key`, if it holds just these tokens to at least this depth. Takes no reference."""
        block = self._by_key.get(key)
        if block is None:
            return None
        entry = self._entries[block]
        return block if entry.tokens == tokens and entry.depth >= depth else None

    def forget_cached(self) -> None:
        """Drops everything that can be found; referenced blocks stay with their holders."""
        for block in list(self._entries):
            self._forget(block)
            if self._references[block] == 0:
                self._put_back(block)

    def stats(self) -> PoolStats:
        """May be called from any thread: a snapshot, not a consistent one while the engine runs."""
        available, cached = len(self._unheld), self._num_cached
        return PoolStats(self.total, available - cached, cached, self.total - available)

    def check_integrity(self) -> None:
        """Raises AssertionError where the pool's books disagree with themselves."""
        assert self._references[NULL_BLOCK] == 0
        assert NULL_BLOCK not in self._unheld
        unheld = {block for block in range(1, self.num_blocks) if self._references[block] == 0}
        assert unheld == set(self._unheld), "unheld blocks and reference counts disagree"
        assert all(count >= 0 for count in self._references)
        assert {entry.key: block for block, entry in self._entries.items()} == self._by_key
        assert self._num_cached == sum(1 for block in self._entries if self._references[block] == 0)
        stats = self.stats()
        assert stats.free + stats.cached + stats.referenced == stats.total

    def _put_back(self, block: int) -> None:
        self._unheld[block] = None
        if block in self._entries:
            self._num_cached += 1
        else:
            self._unheld.move_to_end(block, last=False)
            self._poison(block)

    def _forget(self, block: int) -> None:
        entry = self._entries.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]
            self._num_cached -= self._references[block] == 0


def _leave(block: int) -> None:
    """Contents of dead blocks are left as they are."""
