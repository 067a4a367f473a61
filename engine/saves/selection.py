"""Which rows of a sequence a save keeps: as it was asked for, and as it is asked about in every step."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidRequest

Range = tuple[int, int]
IntArray = npt.NDArray[np.int64]

_FAR = 2**62
"""Beyond every sequence."""


@dataclass(frozen=True)
class RowSelection:
    """Which rows of a sequence are kept: ascending disjoint `[start, end)` pairs, negatives from the end, None = to the end."""

    pairs: tuple[tuple[int, int | None], ...] = ((0, None),)

    @property
    def everything(self) -> bool:
        return self.pairs == ((0, None),)

    @cached_property
    def lookback(self) -> int:
        """How many rows at the end can change their membership while the sequence still grows."""
        bounds = [bound for pair in self.pairs for bound in pair if bound is not None and bound < 0]
        return max((-bound for bound in bounds), default=0)

    @cached_property
    def bounds(self) -> tuple[IntArray, IntArray]:
        """Starts and ends of the pairs, `[pairs]` each."""
        return _as_array([start for start, _ in self.pairs]), _as_array([_FAR if end is None else end for _, end in self.pairs])

    def spans(self, total: int) -> tuple[IntArray, IntArray]:
        """Starts and ends of the kept ranges of a sequence of `total` rows: clamped, ascending, disjoint, never empty ones."""
        starts, ends = (np.where(bound < 0, bound + total, bound).clip(0, total) for bound in self.bounds)
        reach = np.maximum.accumulate(np.where(starts < ends, ends, 0))  # where the range or those before it end
        starts[1:] = np.maximum(starts[1:], reach[:-1])
        kept = starts < ends
        return starts[kept], ends[kept]

    def ranges(self, total: int) -> list[Range]:
        """What `spans` says, as pairs."""
        starts, ends = self.spans(total)
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def validate(self, total: int | None, param: str = "positions") -> None:
        """Raises `InvalidRequest` for pairs that are not ascending and disjoint, or out of range where `total` is known."""
        if not self.pairs:
            raise InvalidRequest(f"{param} must not be empty", param)
        if total is None:
            self._validate_by_side(param)
            return
        previous_end = 0
        for start, end in self.pairs:
            for bound in (start, end):
                if bound is not None and not -total <= bound <= total:
                    raise InvalidRequest(f"{param} holds {bound}, out of range for {total} positions", param)
            low, high = _clamp(start, total), total if end is None else _clamp(end, total)
            _check_order(previous_end, low, high, (start, end), param)
            previous_end = high

    def _validate_by_side(self, param: str) -> None:
        """Bounds that count from the beginning must ascend, and so must those that count from the end."""
        latest: dict[bool, int] = {}
        for start, end in self.pairs:
            if end is not None and (start < 0) == (end < 0) and end <= start:
                raise InvalidRequest(f"{param} holds [{start}, {end}], which is empty", param)
            for bound in (start, _FAR if end is None else end):
                side = bound < 0
                if latest.get(False) == _FAR or bound < latest.get(side, bound):
                    raise InvalidRequest(f"{param} must be ascending and disjoint, [{start}, {end}] is not", param)
                latest[side] = bound


def _as_array(bounds: Sequence[int]) -> IntArray:
    """What lies beyond every sequence, and maybe beyond 64 bits, is moved to `_FAR`."""
    if max(map(abs, bounds), default=0) > _FAR:
        bounds = [max(-_FAR, min(_FAR, bound)) for bound in bounds]
    return np.array(bounds, dtype=np.int64)


def _clamp(bound: int, total: int) -> int:
    return max(0, min(total, bound if bound >= 0 else total + bound))


def _check_order(previous_end: int, low: int, high: int, pair: tuple[int, int | None], param: str) -> None:
    if low >= high:
        raise InvalidRequest(f"{param} holds [{pair[0]}, {pair[1]}], which is empty", param)
    if low < previous_end:
        raise InvalidRequest(f"{param} must be ascending and disjoint, [{pair[0]}, {pair[1]}] is not", param)


ALL_ROWS = RowSelection()
LAST_ROW = RowSelection(((-1, None),))


class WantedRows:
    """What a selection that `validate` accepts keeps of one sequence; answers take time for themselves, however many pairs there are.

    `total` is the number of rows that the selection is taken from. While it isn't known, the rows that bounds from the end can still
    move over may turn out to be kept. Ranges that touch are one.
    """

    def __init__(self, selection: RowSelection, total: int | None) -> None:
        self.total = total
        self._lookback = selection.lookback if total is None else 0
        starts, ends = _merged(*(_settled_spans(selection) if total is None else selection.spans(total)))
        self._starts: list[int] = starts.tolist()
        self._ends: list[int] = ends.tolist()

    @property
    def kept_end(self) -> int | None:
        """The end of the last kept row, 0 where none is; None where it isn't known."""
        if self.total is None:
            return None
        return self._ends[-1] if self._ends else 0

    def settled(self, at_least: int) -> int:
        """The membership of rows below it can't change any more, in a sequence that is sure to have `at_least` rows.

        Bounds counted from the end only move up, so a row further than the lookback from it has been passed by all of them.
        """
        return max(0, at_least - self._lookback) if self.total is None else self.total

    def within(self, start: int, end: int, at_least: int) -> list[Range]:
        """Ranges of the positions `start … end - 1` that are kept or may turn out to be, see `settled`."""
        horizon = self.settled(at_least)
        ranges = self.kept(start, min(end, horizon))
        low = max(start, horizon)
        if self.total is None and low < end:
            if ranges and ranges[-1][1] == low:
                low = ranges.pop()[0]
            ranges.append((low, end))
        return ranges

    def may_keep(self, position: int, at_least: int) -> bool:
        """Whether a single position is kept or may turn out to be, see `within`."""
        if self.total is None:
            if position >= at_least - self._lookback:
                return True
        elif position >= self.total:
            return False
        return position < self.kept_until(position)

    def kept_until(self, position: int) -> int:
        """All positions from this one up to there are kept, or may turn out to be; `position` or less, where that isn't known."""
        place = bisect_right(self._starts, position) - 1
        return self._ends[place] if place >= 0 else 0

    def kept(self, start: int, end: int) -> list[Range]:
        """The kept ranges of positions `start … end - 1`, all of which must be settled."""
        if start >= end:
            return []
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        ranges = list(zip(self._starts[first:last], self._ends[first:last], strict=True))
        if ranges:
            ranges[0] = max(start, ranges[0][0]), ranges[0][1]
            ranges[-1] = ranges[-1][0], min(end, ranges[-1][1])
        return ranges


def _settled_spans(selection: RowSelection) -> tuple[IntArray, IntArray]:
    """What is kept of rows that no bound from the end can reach any more.

    A pair that ends at a number from the end covers all of them from its start on, or none; the pairs behind it cover none.
    """
    starts, ends = selection.bounds
    from_end = (ends < 0).nonzero()[0]
    if len(from_end):
        starts, ends = starts[: from_end[0] + 1], ends[: from_end[0] + 1]
    fixed = starts >= 0
    return starts[fixed], np.where(ends < 0, _FAR, ends)[fixed]


def _merged(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Ascending disjoint ranges with those joined that touch."""
    apart = starts[1:] > ends[:-1]
    first, last = np.append(True, apart)[: len(starts)], np.append(apart, True)[: len(starts)]
    return starts[first], ends[last]


def positions_of(starts: IntArray, ends: IntArray) -> IntArray:
    """The positions in ascending disjoint ranges."""
    if len(starts) == 1:
        return np.arange(starts[0], ends[0])
    counts = ends - starts
    before = np.cumsum(counts) - counts  # positions in the ranges before
    return np.repeat(starts - before, counts) + np.arange(counts.sum())
