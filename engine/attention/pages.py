"""Which pages of a group a step's sequences read, and where its rows are written: host-side, for kernels that read pages themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine.attention.facade import GroupPlan, SequencePlan
from engine.attention.slots import IntArray
from engine.cache.pool import NULL_BLOCK


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, packed sequence by sequence."""

    starts: IntArray  # [sequences]
    counts: IntArray  # [sequences]
    first_rows: IntArray  # [sequences + 1], the last one is the number of rows

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan], num_padding: int = 0) -> "StepRows":
        """`num_padding` sequences of one row each follow."""
        assert all(sequence.count > 0 for sequence in sequences), "a sequence without rows"
        starts = np.array([sequence.start for sequence in sequences] + [0] * num_padding, np.int64)
        counts = np.array([sequence.count for sequence in sequences] + [1] * num_padding, np.int64)
        return cls(starts, counts, _offsets(counts))


@dataclass(frozen=True)
class GroupPages:
    """One group's part of a step.

    The pages before a sliding window are left out: no kernel is told of the null block. Since masks are aligned to a sequence's
    end, it doesn't matter to a kernel how many positions precede the first page it knows.
    """

    slots: IntArray  # [rows of the sequences below], `page * block_size + position % block_size`
    pages: IntArray  # [pages in use], sequence by sequence
    first_page: IntArray  # [sequences + 1], where a sequence's pages begin in `pages`
    skipped: IntArray  # [sequences], positions before the first page
    lengths: IntArray  # [sequences], positions from the first page to the step's end

    @property
    def num_sequences(self) -> int:
        """Leading sequences of the step that have their blocks in this group; the layers of the group may run for no others."""
        return len(self.lengths)

    def padded(self, num_padding: int) -> "GroupPages":
        """With sequences of a single position after the others: they write into the null block, and read what they wrote there."""
        ones, zeros = np.ones(num_padding, np.int64), np.zeros(num_padding, np.int64)
        return GroupPages(
            slots=np.concatenate([self.slots, zeros]),
            pages=np.concatenate([self.pages, zeros + NULL_BLOCK]),
            first_page=np.concatenate([self.first_page, self.first_page[-1] + ones.cumsum()]),
            skipped=np.concatenate([self.skipped, zeros]),
            lengths=np.concatenate([self.lengths, ones]),
        )

    def table(self, width: int) -> IntArray:
        """`[sequences, width]`: the pages of each sequence, then null blocks."""
        table = np.full((self.num_sequences, width), NULL_BLOCK, np.int64)
        owners, columns = _split(np.diff(self.first_page))
        table[owners, columns] = self.pages
        return table


def find_pages(rows: StepRows, plan: GroupPlan) -> GroupPages:
    """Pages of the leading sequences whose tables name all the blocks they need; what tables say beyond a sequence's end is ignored."""
    num_planned, size = len(plan.block_tables), plan.block_size
    starts, ends = rows.starts[:num_planned], (rows.starts + rows.counts)[:num_planned]
    used = -(-ends // size)
    tables = [table[:count] for table, count in zip(plan.block_tables, used.tolist(), strict=True)]
    held = np.fromiter(map(len, tables), np.int64, len(tables))
    blocks = np.fromiter(chain.from_iterable(tables), np.int64, int(held.sum()))
    owners, columns = _split(held)
    null = blocks == NULL_BLOCK
    num_null = np.bincount(owners[null], minlength=len(tables))
    misplaced = np.bincount(owners[null != (columns < num_null[owners])], minlength=len(tables))
    ready = (held == used) & (misplaced == 0) & (num_null * size <= starts)
    count = len(tables) if ready.all() else int(ready.argmin())
    return _gather(rows, size, blocks, _offsets(held), num_null[:count])


def _gather(rows: StepRows, size: int, blocks: IntArray, first_block: IntArray, num_null: IntArray) -> GroupPages:
    count = len(num_null)
    starts, counts = rows.starts[:count], rows.counts[:count]
    owners, offsets = _split(counts)
    positions = starts[owners] + offsets
    held = np.diff(first_block[: count + 1])
    sequence, column = _split(held)
    return GroupPages(
        slots=blocks[first_block[owners] + positions // size] * size + positions % size,
        pages=blocks[: first_block[count]][column >= num_null[sequence]],
        first_page=_offsets(held - num_null),
        skipped=num_null * size,
        lengths=starts + counts - num_null * size,
    )


def _offsets(counts: IntArray) -> IntArray:
    """`[n + 1]`: 0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int64), counts.cumsum()])


def _split(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Of parts of `counts` elements each, packed: every element's part, and its place in that part."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (counts.cumsum() - counts)[owners]
