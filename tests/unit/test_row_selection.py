"""Which rows are kept, against Python's own slices."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.saves.spec import ALL_ROWS, LAST_ROW, RowSelection

BOUNDS = st.integers(-6, 6)
PAIRS = st.lists(st.tuples(BOUNDS, st.none() | BOUNDS), min_size=1, max_size=3).map(tuple)


def positions(ranges: list[tuple[int, int]]) -> list[int]:
    return [position for low, high in ranges for position in range(low, high)]


def accepted(pairs: tuple[tuple[int, int | None], ...], total: int | None) -> bool:
    try:
        RowSelection(pairs).validate(total)
    except InvalidRequest:
        return False
    return True


@given(pairs=PAIRS, total=st.integers(0, 12))
def test_ranges_are_ascending_and_disjoint_whatever_the_pairs_are(pairs: tuple[tuple[int, int | None], ...], total: int) -> None:
    kept = positions(RowSelection(pairs).ranges(total))
    assert kept == sorted(set(kept))
    assert all(0 <= position < total for position in kept)


@given(pairs=PAIRS, total=st.integers(1, 12))
def test_valid_pairs_keep_what_python_slices_keep(pairs: tuple[tuple[int, int | None], ...], total: int) -> None:
    if accepted(pairs, total):
        rows = list(range(total))
        slices = [rows[start:end] for start, end in pairs]
        assert all(slices), "an empty pair is refused where the length is known"
        assert positions(RowSelection(pairs).ranges(total)) == list(chain.from_iterable(slices))


@given(pairs=PAIRS, at_least=st.integers(0, 12), more=st.integers(0, 12))
def test_what_is_settled_stays_so_however_long_the_sequence_becomes(
    pairs: tuple[tuple[int, int | None], ...], at_least: int, more: int
) -> None:
    selection = RowSelection(pairs)
    if accepted(pairs, None):
        horizon, kept = selection.settled(at_least)
        assert positions(kept) == [p for p in positions(selection.ranges(at_least + more)) if p < horizon]


@given(pairs=PAIRS, at_least=st.integers(0, 12))
def test_all_but_the_lookback_is_settled(pairs: tuple[tuple[int, int | None], ...], at_least: int) -> None:
    selection = RowSelection(pairs)
    assert selection.settled(at_least)[0] == max(0, at_least - selection.lookback)


def test_lookback_is_the_furthest_bound_from_the_end() -> None:
    assert ALL_ROWS.lookback == 0
    assert LAST_ROW.lookback == 1
    assert RowSelection(((2, 4), (-7, -2))).lookback == 7
    assert RowSelection(((0, -3),)).lookback == 3


def test_everything_means_one_pair_from_the_first_to_the_last() -> None:
    assert ALL_ROWS.everything
    assert not LAST_ROW.everything
    assert not RowSelection(((0, 5),)).everything


@pytest.mark.parametrize(
    ("pairs", "total", "message"),
    [
        ((), None, "must not be empty"),
        (((0, 9),), 8, "9, out of range for 8"),
        (((-9, None),), 8, "-9, out of range for 8"),
        (((3, 3),), 8, "which is empty"),
        (((5, 2),), 8, "which is empty"),
        (((-1, -4),), 8, "which is empty"),
        (((8, None),), 8, "which is empty"),
        (((0, 4), (3, 6)), 8, "ascending and disjoint"),
        (((4, 6), (0, 2)), 8, "ascending and disjoint"),
        (((0, 6), (-3, None)), 8, "ascending and disjoint"),
        (((0, None), (2, 4)), 8, "ascending and disjoint"),
        (((3, 3),), None, "which is empty"),
        (((-1, -4),), None, "which is empty"),
        (((0, 4), (3, 6)), None, "ascending and disjoint"),
        (((-5, -2), (-3, -1)), None, "ascending and disjoint"),
        (((0, None), (2, 4)), None, "ascending and disjoint"),
    ],
)
def test_pairs_that_are_refused(pairs: tuple[tuple[int, int | None], ...], total: int | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        RowSelection(pairs).validate(total, "positions")
    assert refused.value.param == "positions"


@pytest.mark.parametrize("pairs", [((0, None),), ((-8, None),), ((0, 3), (3, 8)), ((0, 2), (-2, None)), ((7, 8),)])
def test_pairs_that_are_accepted(pairs: tuple[tuple[int, int | None], ...]) -> None:
    RowSelection(pairs).validate(8)
    RowSelection(pairs).validate(None)


def test_pairs_beyond_the_end_are_clamped_where_the_length_is_not_known_before() -> None:
    selection = RowSelection(((0, 3), (10, 20)))
    selection.validate(None)
    assert selection.ranges(2) == [(0, 2)]
    assert selection.ranges(12) == [(0, 3), (10, 12)]
