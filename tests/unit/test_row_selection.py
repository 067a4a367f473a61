"""Which rows are kept, against Python's own slices; and what is known of them while the sequence grows, against where it ends."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.saves.selection import ALL_ROWS, LAST_ROW, Range, RowSelection, WantedRows

BOUNDS = st.integers(-6, 6)
ANY_PAIRS = st.lists(st.tuples(BOUNDS, st.none() | BOUNDS), min_size=1, max_size=3).map(tuple)
FROM_THE_BEGINNING = st.lists(st.integers(0, 12), min_size=2, max_size=8, unique=True).map(
    lambda bounds: tuple(pairwise(sorted(bounds)))[::2]
)
PAIRS = ANY_PAIRS | FROM_THE_BEGINNING


def positions(ranges: list[Range]) -> list[int]:
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
        wanted = WantedRows(selection, None)
        horizon = wanted.settled(at_least)
        assert positions(wanted.kept(0, horizon)) == [p for p in positions(selection.ranges(at_least + more)) if p < horizon]


@given(pairs=PAIRS, at_least=st.integers(0, 12))
def test_all_but_the_lookback_is_settled(pairs: tuple[tuple[int, int | None], ...], at_least: int) -> None:
    selection = RowSelection(pairs)
    assert WantedRows(selection, None).settled(at_least) == max(0, at_least - selection.lookback)


@given(pairs=PAIRS, total=st.integers(1, 12))
def test_what_is_refused_whatever_the_length_is_refused_where_it_is_known(pairs: tuple[tuple[int, int | None], ...], total: int) -> None:
    assert accepted(pairs, None) or not accepted(pairs, total)


@given(pairs=PAIRS, total=st.none() | st.integers(0, 12), at_least=st.integers(0, 12), start=st.integers(0, 14), end=st.integers(0, 14))
def test_wanted_rows_are_those_that_are_kept_or_may_be(
    pairs: tuple[tuple[int, int | None], ...], total: int | None, at_least: int, start: int, end: int
) -> None:
    if not accepted(pairs, None):
        return
    selection = RowSelection(pairs)
    wanted = WantedRows(selection, total)
    kept = positions(selection.ranges(20 if total is None else total))
    horizon = wanted.settled(at_least)
    assert horizon == (max(0, at_least - selection.lookback) if total is None else total)
    sure = [p for p in range(start, min(end, horizon)) if p in kept]
    unsure = [] if total is not None else list(range(max(start, horizon), end))
    found = wanted.within(start, end, at_least)
    assert positions(found) == sure + unsure
    assert_apart(found)
    assert positions(wanted.kept(start, min(end, horizon))) == sure
    assert [p for p in range(start, end) if wanted.may_keep(p, at_least)] == sure + unsure
    assert wanted.kept_end == (None if total is None else max((p + 1 for p in kept), default=0))


def assert_apart(ranges: list[Range]) -> None:
    """None is empty, and those that touch have been joined."""
    assert all(low < high for low, high in ranges)
    assert all(low > high for (_, high), (low, _) in pairwise(ranges))


def test_pairs_that_touch_are_one_range() -> None:
    pairs = tuple((position, position + 1) for position in range(5000))
    assert WantedRows(RowSelection(pairs), 5000).kept(0, 5000) == [(0, 5000)]
    assert WantedRows(RowSelection((*pairs, (5000, None))), None).within(0, 9000, 6000) == [(0, 9000)]


def test_bounds_beyond_every_sequence_are_as_good_as_its_end() -> None:
    selection = RowSelection(((3, 10**30),))
    assert selection.ranges(8) == [(3, 8)]
    assert WantedRows(selection, None).kept(0, 10**9) == [(3, 10**9)]
    assert RowSelection(((-(10**30), 4),)).ranges(8) == [(0, 4)]


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
        (((0, 0),), None, "which is empty"),
        (((-1, -4),), None, "which is empty"),
        (((0, 4), (3, 6)), None, "ascending and disjoint"),
        (((-5, -2), (-3, -1)), None, "ascending and disjoint"),
        (((0, None), (2, 4)), None, "ascending and disjoint"),
        (((5, -3), (2, 4)), None, "ascending and disjoint"),
        (((-5, 3), (2, 6)), None, "ascending and disjoint"),
        (((-2, 9), (-3, None)), None, "ascending and disjoint"),
        (((0, 5), (-3, 2)), None, "ascending and disjoint"),
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
