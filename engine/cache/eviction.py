"""The order in which blocks without references are evicted."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_ABSENT = -1
_FIRST_LOOKUP = 64
"""Places that are looked at at first beyond those asked for, since some may be gaps; then four times as many, since many may be."""


class EvictionQueue:
    """Blocks, the least recently pushed first. One that is removed leaves a gap, which is skipped and later closed."""

    def __init__(self, num_blocks: int) -> None:
        self.size = 0
        self._blocks = np.zeros(2 * num_blocks, np.int64)
        self._places = np.full(num_blocks, _ABSENT)  # by block: where it stands in `_blocks`
        self._head = 0
        self._tail = 0

    def contains(self) -> BoolArray:
        """`[num_blocks]`"""
        present: BoolArray = self._places != _ABSENT
        return present

    def push(self, blocks: IntArray) -> None:
        """Blocks that aren't there, in the order in which they are to be given up."""
        if not len(blocks):
            return
        if self._tail + len(blocks) > len(self._blocks):
            self._close_gaps()
        end = self._tail + len(blocks)
        self._blocks[self._tail : end] = blocks
        self._places[blocks] = np.arange(self._tail, end)
        self._tail = end
        self.size += len(blocks)

    def remove(self, blocks: IntArray) -> None:
        """Blocks that are there, wherever they stand."""
        if len(blocks):
            assert (self._places[blocks] != _ABSENT).all(), "a block is taken from the cached ones that isn't among them"
            self._places[blocks] = _ABSENT
            self.size -= len(blocks)

    def pop(self, count: int) -> IntArray:
        """The `count` blocks that have been here longest."""
        assert count <= self.size
        parts: list[IntArray] = []
        missing, look = count, _FIRST_LOOKUP
        while missing:
            end, look = min(self._tail, self._head + missing + look), look * 4
            places = self._filled(self._head, end)[:missing]
            missing -= len(places)
            self._head = end if missing else int(places[-1]) + 1
            parts.append(self._blocks[places])
        blocks = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])
        self.remove(blocks)
        return blocks

    def check_integrity(self) -> None:
        """Raises AssertionError where the queue disagrees with itself."""
        present = np.flatnonzero(self._places != _ABSENT)
        assert len(present) == self.size == len(self._filled(self._head, self._tail))
        assert np.array_equal(self._blocks[self._places[present]], present)

    def _filled(self, start: int, end: int) -> IntArray:
        """Those of the places `start … end - 1` that are no gaps."""
        places = np.arange(start, end)
        filled: IntArray = places[self._places[self._blocks[start:end]] == places]
        return filled

    def _close_gaps(self) -> None:
        """Half of the room is enough for all blocks that there are."""
        blocks = self._blocks[self._filled(self._head, self._tail)]
        self._head, self._tail = 0, len(blocks)
        self._blocks[: self._tail] = blocks
        self._places[blocks] = np.arange(self._tail)
