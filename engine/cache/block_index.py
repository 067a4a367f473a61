"""What blocks hold: sets of blocks found by key, and in a set by label."""

from collections.abc import Hashable, Sequence
from itertools import repeat

import numpy as np

from engine.cache.eviction import BoolArray, IntArray

NULL_BLOCK = 0
"""Padding is written there and nobody reads it; never handed out."""

UNLABELLED: tuple[Hashable, ...] = (None,)
"""The labels of a set of one block."""

_NO_SET = _NO_LABEL = 0
"""The first row and the first column of the table of members, which stay empty."""


class BlockIndex:
    """Every set has a number while it has blocks. All methods take arrays and sequences that name nothing twice."""

    def __init__(self, num_blocks: int) -> None:
        self._set_of = np.full(num_blocks, _NO_SET)  # [blocks]
        self._column_of = np.full(num_blocks, _NO_LABEL)  # [blocks]
        self._members = np.full((1, 1), NULL_BLOCK)  # [sets, labels], grows
        self._columns: dict[Hashable, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._keys: list[Hashable] = [None] * num_blocks  # by set, as all below
        self._depths = np.zeros(num_blocks, np.int64)
        self._sizes = np.zeros(num_blocks, np.int64)
        self._free_numbers = list(range(num_blocks - 1, _NO_SET, -1))

    def known(self, blocks: IntArray) -> BoolArray:
        """Of each block: whether it can be found."""
        known: BoolArray = self._set_of[blocks] != _NO_SET
        return known

    def find(self, keys: Sequence[Hashable], labels: tuple[Hashable, ...], depth: int) -> IntArray:
        """Blocks `[keys, labels]` of sets of at least this depth, `NULL_BLOCK` where there are none."""
        numbers = self._numbers_of(keys)
        if depth:
            numbers[self._depths[numbers] < depth] = _NO_SET
        columns = list(map(self._columns.get, labels, repeat(_NO_LABEL)))
        found: IntArray = self._members[numbers[:, None], columns]
        return found

    def add(self, keys: Sequence[Hashable], blocks: IntArray, labels: tuple[Hashable, ...], depth: int) -> IntArray:
        """Makes blocks `[keys, labels]` known that aren't yet; returns blocks that can't be found any more.

        What is known under a key and label stays, but of sets with one key only the deepest.
        """
        numbers, columns = self._numbers_of(keys), self._columns_for(labels)
        if not np.count_nonzero(numbers):
            self._begin(keys, blocks, columns, depth)
            return blocks[:0, 0]
        shallow = self._members[numbers[self._depths[numbers] < depth]]
        lost: IntArray = shallow[shallow != NULL_BLOCK]
        if len(lost):
            self.remove(lost)
            numbers = self._numbers_of(keys)
        fresh = np.flatnonzero(numbers == _NO_SET)
        equal = np.flatnonzero((numbers != _NO_SET) & (self._depths[numbers] == depth))
        if len(fresh):
            self._begin([keys[row] for row in fresh.tolist()], blocks[fresh], columns, depth)
        self._complete(numbers[equal], blocks[equal], columns)
        return lost

    def remove(self, blocks: IntArray) -> None:
        """The blocks, all of which are known, can't be found any more; sets without blocks are forgotten."""
        numbers = self._set_of[blocks]
        self._members[numbers, self._column_of[blocks]] = NULL_BLOCK
        self._set_of[blocks] = _NO_SET
        np.subtract.at(self._sizes, numbers, 1)
        empty = set(numbers[self._sizes[numbers] == 0].tolist())
        for number in empty:
            del self._numbers[self._keys[number]]
            self._keys[number] = None
        self._free_numbers.extend(empty)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree with themselves."""
        blocks = np.flatnonzero(self._set_of != _NO_SET)
        sets = self._set_of[blocks]
        assert np.array_equal(self._members[sets, self._column_of[blocks]], blocks), "a block isn't where it is said to be"
        assert np.count_nonzero(self._members) == len(blocks), "a set has a block that doesn't know of it"
        sizes = np.bincount(sets, minlength=len(self._sizes))
        assert np.array_equal(sizes, self._sizes), "a set's size is wrong"
        assert len(self._numbers) == np.count_nonzero(sizes) == len(sizes) - 1 - len(self._free_numbers)

    def _numbers_of(self, keys: Sequence[Hashable]) -> IntArray:
        return np.fromiter(map(self._numbers.get, keys, repeat(_NO_SET)), np.int64, len(keys))

    def _begin(self, keys: Sequence[Hashable], blocks: IntArray, columns: IntArray, depth: int) -> None:
        """Sets under keys that aren't known."""
        taken = [self._free_numbers.pop() for _ in keys]
        for number, key in zip(taken, keys, strict=True):
            self._numbers[key] = number
            self._keys[number] = key
        self._make_room(max(taken) + 1, 0)
        numbers = np.array(taken)
        self._depths[numbers] = depth
        self._sizes[numbers] = len(columns)
        self._put(blocks, numbers[:, None], columns)

    def _complete(self, numbers: IntArray, blocks: IntArray, columns: IntArray) -> None:
        """Adds what the sets lack."""
        missing = self._members[numbers[:, None], columns] == NULL_BLOCK
        rows, places = missing.nonzero()
        self._put(blocks[rows, places], numbers[rows], columns[places])
        self._sizes[numbers] += missing.sum(axis=1)

    def _put(self, blocks: IntArray, numbers: IntArray, columns: IntArray) -> None:
        assert not np.count_nonzero(self._set_of[blocks]), "a block is registered under two keys"
        self._members[numbers, columns] = blocks
        self._set_of[blocks] = numbers
        self._column_of[blocks] = columns

    def _columns_for(self, labels: tuple[Hashable, ...]) -> IntArray:
        """Labels that are new get a column."""
        columns = list(map(self._columns.get, labels))
        if None in columns:
            columns = [self._columns.setdefault(label, len(self._columns) + 1) for label in labels]
            self._make_room(0, len(self._columns) + 1)
        return np.array(columns)

    def _make_room(self, num_sets: int, num_labels: int) -> None:
        rows, columns = self._members.shape
        if num_sets > rows or num_labels > columns:
            grown = np.full((_room(rows, num_sets), _room(columns, num_labels)), NULL_BLOCK)
            grown[:rows, :columns] = self._members
            self._members = grown


def _room(present: int, needed: int) -> int:
    return present if needed <= present else max(needed, 2 * present)
