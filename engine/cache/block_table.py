"""The blocks that one request holds in one group, by position."""

import numpy as np

from engine.cache.pool import NULL_BLOCK, IntArray

_FIRST_CAPACITY = 8


class BlockTable:
    """Block `i` holds positions `i * block_size … (i + 1) * block_size - 1`; leading ones may have been dropped."""

    __slots__ = ("_blocks", "_first", "_length")

    def __init__(self) -> None:
        self._blocks = np.full(_FIRST_CAPACITY, NULL_BLOCK)
        self._first = 0
        self._length = 0

    def __len__(self) -> int:
        """Dropped ones included."""
        return self._length

    @property
    def array(self) -> IntArray:
        """All of them, `NULL_BLOCK` where they were dropped: a view, good until the table changes."""
        return self._blocks[: self._length]

    @property
    def held(self) -> IntArray:
        """Those that weren't dropped: a view, good until the table changes."""
        return self._blocks[self._first : self._length]

    @property
    def num_dropped(self) -> int:
        return self._first

    @property
    def num_held(self) -> int:
        return self._length - self._first

    def extend(self, blocks: IntArray) -> None:
        length = self._length + len(blocks)
        if length > len(self._blocks):
            grown = np.full(max(length, 2 * len(self._blocks)), NULL_BLOCK)
            grown[: self._length] = self.array
            self._blocks = grown
        self._blocks[self._length : length] = blocks
        self._length = length

    def replace(self, number: int, block: int) -> int:
        """Puts a block in the place of another, which is returned."""
        replaced = int(self._blocks[number])
        self._blocks[number] = block
        return replaced

    def skip(self, count: int) -> None:
        """An empty table begins with `count` blocks that are not held."""
        assert not self._length
        self.extend(np.full(count, NULL_BLOCK))
        self._first = count

    def drop_before(self, first: int) -> IntArray:
        """Takes out the blocks before block `first`."""
        end = min(first, self._length)
        dropped = self._blocks[self._first : end].copy()
        self._blocks[self._first : end] = NULL_BLOCK
        self._first = max(self._first, end)
        return dropped

    def clear(self) -> IntArray:
        """Takes out all blocks; the table is empty again."""
        held = self.held.copy()
        self._first = self._length = 0
        return held
