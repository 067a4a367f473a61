"""Where positions of sequences lie in a paged cache: host-side index arithmetic, done once per step."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class SlotIndex:
    """Maps (sequence, position) to a flat slot, `block * block_size + position % block_size`, for one group of layers."""

    def __init__(self, block_tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int) -> None:
        """`lengths[i]`: sequence i has positions 0 … lengths[i] - 1; its table names the block of each of them."""
        used = [-(-length // block_size) for length in lengths]
        for table, blocks in zip(block_tables, used, strict=True):
            assert len(table) >= blocks, f"a block table names {len(table)} blocks where {blocks} are needed"
        self._block_size = block_size
        self._blocks = np.fromiter(chain.from_iterable(table[:n] for table, n in zip(block_tables, used, strict=True)), np.int64, sum(used))
        self._first = np.cumsum([0, *used[:-1]]) if used else np.zeros(0, np.int64)

    def slots(self, sequences: IntArray | int, positions: IntArray) -> IntArray:
        """Flat slots of `positions` of `sequences` (broadcast against each other). None of them may lie in the null block."""
        blocks: IntArray = self._blocks[self._first[sequences] + positions // self._block_size]
        assert blocks.size == 0 or blocks.min() > 0, "a position in use lies in the null block"
        return blocks * self._block_size + positions % self._block_size


def buckets_by_length(lengths: Sequence[int], max_slots: int, free_padding: int) -> list[list[int]]:
    """Sets of indices whose lengths are alike, longest first, so that each set can be padded to one rectangle.

    A set's padding is at most `free_padding` slots or a fifth of the rectangle, whichever is more, and the rectangle
    is at most `max_slots` (a set of one may be larger).
    """
    buckets: list[list[int]] = []
    longest = used = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if buckets:
            area = longest * (len(buckets[-1]) + 1)
            padding = area - used - lengths[index]
            if area <= max_slots and padding <= max(free_padding, area // 5):
                buckets[-1].append(index)
                used += lengths[index]
                continue
        buckets.append([index])
        longest = used = lengths[index]
    return buckets
