"""Index arithmetic of a step, on the host: one planner of its input, and what attention backends derive from that.

Only the leading sequences that have their blocks in a group are looked at: layers run for fewer and fewer leading sequences, so those
behind may have none there.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.attention.facade import GroupInput, IntArray, StepRows
from engine.cache.pool import NULL_BLOCK

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


def plan_group(rows: StepRows, tables: Sequence[IntArray], block_size: int, chunk: int | None = None) -> GroupInput:
    """One group's part of a step. `tables` name each sequence's blocks: as many as it has there, in excess or none.

    `chunk`: positions of a chunk of local attention, a multiple of the block size.
    """
    if chunk is not None:
        begins = rows.starts - rows.starts % chunk
        present = np.array([len(table) > 0 for table in tables], np.bool_)
        assert (rows.ends - begins <= chunk)[present].all(), "a step of a sequence goes beyond its chunk"
        own = StepRows(rows.starts - begins, rows.counts)
        firsts = (begins // block_size).tolist()
        given = plan_group(own, [table[first:] for table, first in zip(tables, firsts, strict=True)], block_size)
        return replace(given, rows=own)
    used = _num_blocks(rows.ends, block_size)
    blocks = np.zeros((len(tables), int(used.max(initial=0))), np.int64)  # of null blocks, which cost nothing until they are written
    for row, table, count in zip(blocks, tables, used.tolist(), strict=True):
        held = table[:count]
        row[: len(held)] = held
    of_rows = blocks[rows.owners, rows.positions // block_size]
    slots = of_rows * block_size + rows.positions % block_size
    slots[of_rows == NULL_BLOCK] = 0
    return GroupInput(blocks, slots)


def pad_rows(rows: StepRows, num_padding: int) -> StepRows:
    """With sequences of one row each, at position 0, after the others."""
    padding = np.ones(num_padding, np.int64)
    return StepRows(np.concatenate([rows.starts, padding - 1]), np.concatenate([rows.counts, padding]))


class GroupIndex:
    """One KV group's part of a step as its layers ask for it. Everything is derived when it is first asked for."""

    def __init__(self, rows: StepRows, given: GroupInput, block_size: int, num_padding: int = 0) -> None:
        """`rows`: the step's, or the group's own. `num_padding`: so many sequences at the end
        of `rows` are padding of which the input knows nothing.

        They write into the null block, and read what they wrote there.
        """
        assert len(given.tables) + num_padding == len(rows.starts), "one block table per sequence and group"
        self.rows = rows
        self.block_size = block_size
        self._given = given
        self._num_padding = num_padding
        self._checked: set[tuple[int, int | None]] = set()

    @cached_property
    def used(self) -> IntArray:  # [sequences], blocks up to the step's end
        return _num_blocks(self.rows.ends, self.block_size)

    @cached_property
    def slots(self) -> IntArray:  # [rows]
        return np.concatenate([self._given.slots, np.zeros(self._num_padding, np.int64)]) if self._num_padding else self._given.slots

    @property
    def num_sequences(self) -> int:
        """Leading sequences that have all their blocks from their first one to the step's end; the group's layers may run for no others."""
        return len(self._num_null)

    @cached_property
    def skipped(self) -> IntArray:  # [num_sequences], positions before the first block, which a sliding window has passed
        return self._num_null * self.block_size

    @cached_property
    def lengths(self) -> IntArray:  # [num_sequences], positions from the first block to the step's end
        return self.rows.ends[: self.num_sequences] - self.skipped

    @cached_property
    def num_pages(self) -> IntArray:  # [num_sequences], blocks from the first one to the step's end
        return self.used[: self.num_sequences] - self._num_null

    @cached_property
    def first_page(self) -> IntArray:  # [num_sequences + 1], where a sequence's blocks begin in `pages`
        return _offsets(self.num_pages)

    @cached_property
    def pages(self) -> Int32Array:
        """`[pages]`: the blocks of each sequence without those before its window, packed.

        No kernel is told of the null block. Since masks are aligned to a sequence's end, it doesn't matter to one how many positions
        precede the first page that it knows.
        """
        padding = np.full(len(self._num_null) - len(self._held), NULL_BLOCK, np.int32)
        return np.concatenate([*self._held, padding], dtype=np.int32)

    def table(self, width: int) -> Int32Array:
        """`[num_sequences, width]`: the same, a row per sequence, then null blocks."""
        table = np.full((self.num_sequences, width), NULL_BLOCK, np.int32)
        for row, held in zip(table, self._held, strict=False):  # rows of padding are right as they are
            row[: len(held)] = held
        return table

    def blocks_of(self, sequences: IntArray) -> IntArray:
        """`[n, blocks of the longest]`: the tables of some sequences, contiguous, from position 0 on."""
        if len(sequences) == len(self._given.tables):
            return np.ascontiguousarray(self._given.tables)
        width = int(self.used[sequences].max(initial=0))
        return np.ascontiguousarray(self._given.tables[:, :width][sequences])

    def slots_of(self, sequences: IntArray | int, positions: IntArray) -> IntArray:
        """Flat slots of `positions` of `sequences`, broadcast against each other."""
        blocks: IntArray = self._given.tables[sequences, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def slots_at_end(self, sequences: IntArray, lengths: IntArray) -> tuple[IntArray, BoolArray]:
        """`[n, longest]` each: slots of the last `lengths` positions of `sequences`, and which of them are padding.

        Padding repeats the last slot: what it reads is masked, but must be finite, since 0 * NaN is NaN.
        """
        columns, ends = np.arange(lengths.max()), self.rows.ends[sequences, None]
        positions = np.minimum(ends - lengths[:, None] + columns, ends - 1)
        return self.slots_of(sequences[:, None], positions), columns >= lengths[:, None]

    def first_seen(self, num_sequences: int, window: int | None) -> IntArray:
        """`[num_sequences]`: the earliest position that any row of a sequence sees."""
        starts = self.rows.starts[:num_sequences]
        return np.zeros_like(starts) if window is None else np.maximum(0, starts + 1 - window)

    def check(self, num_sequences: int, window: int | None) -> None:
        """That the leading sequences have blocks for everything their rows see and write."""
        if (num_sequences, window) not in self._checked:
            assert num_sequences <= self.num_sequences, "a sequence lacks blocks, or a position in use lies in the null block"
            seen = self.first_seen(num_sequences, window)
            assert (self.skipped[:num_sequences] <= seen).all(), "a position in use lies in the null block"
            self._checked.add((num_sequences, window))

    @cached_property
    def _num_null(self) -> IntArray:
        """`[num_sequences]`: the null blocks that tables begin with."""
        tables = self._given.tables
        num_given = len(tables)
        used, starts = self.used[:num_given], self.rows.starts[:num_given]
        if np.count_nonzero(tables) == used.sum():  # none anywhere: mostly so, and quickly found out
            return np.zeros(num_given + self._num_padding, np.int64)
        num_null = used - _num_present(tables, used)
        ready = (_num_present(tables, num_null) == 0) & (num_null * self.block_size <= starts)
        if not ready.all():
            return num_null[: int(ready.argmin())]
        return np.concatenate([num_null, np.zeros(self._num_padding, np.int64)])

    @cached_property
    def _held(self) -> list[IntArray]:
        """Each sequence's blocks without those before its window; of padding nothing, since it has no table."""
        ends = self.used[: self.num_sequences].tolist()
        each = zip(self._given.tables, self._num_null.tolist(), ends, strict=False)
        return [table[first:end] for table, first, end in each]


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


def _num_present(tables: IntArray, ends: IntArray) -> IntArray:
    """`[sequences]`: how many of a table's entries before `ends` aren't the null block."""
    return np.array([np.count_nonzero(row[:end]) for row, end in zip(tables, ends.tolist(), strict=True)], np.int64)


def _num_blocks(lengths: IntArray, block_size: int) -> IntArray:
    return -(-lengths // block_size)


def _offsets(counts: IntArray) -> IntArray:
    """`[n + 1]`: 0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
