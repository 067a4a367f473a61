"""The pages that one request holds: how far they reach, what is promised, and what others find in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.chain import HashChain
from engine.cache.states import StateStore
from engine.capture.page_table import PageTable, positions_in
from engine.layers import LayerId
from engine.saves.selection import Range

TOKENS = list(range(40))
SIZE = 4


class Setup:
    """A store with pages of four rows."""

    def __init__(self, pages: int = 20) -> None:
        self.store = StateStore(pages + 1, SIZE, 1, torch.float32, poison=True)

    def pages(self, layers: tuple[LayerId, ...] = (1, 2), reservation: int = 0, *, cached: bool = True) -> PageTable:
        return PageTable(self.store, layers, HashChain(TOKENS, SIZE) if cached else None, reservation)

    @property
    def num_available(self) -> int:
        return self.store.pool.num_available


RANGES = st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True).map(
    lambda bounds: list(zip(*[iter(sorted(bounds)[: len(bounds) // 2 * 2])] * 2, strict=True))
)


@given(ranges=RANGES)
def test_positions_and_blocks_of_ranges_are_those_of_each_row(ranges: list[Range]) -> None:
    positions = [position for low, high in ranges for position in range(low, high)]
    assert positions_in(ranges).tolist() == positions
    assert Setup().pages().blocks_of(ranges) == sorted({position // SIZE for position in positions})


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=3), first=st.integers(0, 7))
def test_a_block_is_offered_to_others_once_all_of_its_rows_were_filled(parts: list[int], first: int) -> None:
    setup = Setup()
    held, other = setup.pages(), setup.pages()
    end = first
    for count in parts:
        part = (end, min(end + count, len(TOKENS)))
        if part[0] < part[1]:
            held.allocate([part])
            held.mark_filled(0 if part[0] == first else part[0], [part], part[1])
        end = part[1]
    first_whole, whole_end = -(-first // SIZE) * SIZE, end // SIZE * SIZE
    if first_whole < whole_end:
        assert other.hit_limit([(first_whole, whole_end)], whole_end) == whole_end
        assert other.hit_limit([(first_whole, whole_end + 1)], whole_end + 1) == whole_end
    if first % SIZE:
        assert other.hit_limit([(0, SIZE)], SIZE) == 0


def test_a_chunk_reaches_as_far_as_pages_go_and_takes_none() -> None:
    setup = Setup(pages=5)
    held = setup.pages()
    assert held.end_within_reach([(2, 16)], 16) == 8, "two blocks of two layers"
    assert held.end_within_reach([(2, 7)], 16) == 16
    assert held.end_within_reach([(2, 3), (17, 30)], 30) == 20
    assert setup.num_available == 5
    held.allocate([(2, 8)])
    assert held.end_within_reach([(8, 9)], 9) == 8
    assert held.end_within_reach([(5, 9)], 9) == 8
    assert setup.pages().end_within_reach([(3, 9)], 9) == 3, "not at all"


def test_pages_are_taken_once_per_block_and_layer() -> None:
    setup = Setup()
    held = setup.pages()
    held.allocate([(1, 3), (9, 10)])
    held.allocate([(3, 6), (9, 12)])
    assert (held.num_held, setup.num_available) == (6, 14)
    pages = held.pages_of([0, 1, 2])
    assert pages.shape == (3, 2)
    assert len(set(pages.reshape(-1).tolist())) == 6


def test_what_is_dropped_comes_free_and_the_rest_stays() -> None:
    setup = Setup()
    held = setup.pages()
    held.allocate([(0, 14)])
    held.release_before(7)
    assert (held.num_held, setup.num_available) == (6, 14)
    held.release_before(8)
    assert held.num_held == 4
    held.release_all()
    assert setup.num_available == 20
    assert not held.in_use


def test_rows_that_land_after_their_block_was_given_up_are_passed_over() -> None:
    setup = Setup()
    held = setup.pages()
    held.allocate([(0, 8)])
    held.release_before(4)
    held.mark_filled(0, [(0, 8)], 8)
    assert setup.pages().hit_limit([(0, 8)], 8) == 0
    assert setup.pages().hit_limit([(4, 8)], 8) == 8


@pytest.mark.parametrize(("end", "num_held"), [(3, 4), (4, 2), (7, 2), (8, 0)])
def test_pages_that_were_given_away_are_held_by_both_or_by_the_other_alone(end: int, num_held: int) -> None:
    setup = Setup()
    held = setup.pages(cached=False)
    held.allocate([(0, 8)])
    given = held.transfer([0, 1], end)
    assert held.num_held == num_held
    held.close()
    assert setup.num_available == 16
    setup.store.pool.release(given.reshape(-1))
    assert setup.num_available == 20


def test_promised_pages_are_out_of_the_others_reach_until_the_holder_closes() -> None:
    setup = Setup(pages=8)
    ring, other = setup.pages(reservation=6), setup.pages()
    assert other.end_within_reach([(0, 16)], 16) == 16, "nothing was claimed"
    ring.claim()
    assert ring.in_use
    assert other.end_within_reach([(0, 16)], 16) == 4
    assert not setup.pages(reservation=4).can_start(0)
    ring.allocate([(0, 16)])
    assert other.end_within_reach([(0, 16)], 16) == 0, "more was taken than promised"
    ring.close()
    assert other.end_within_reach([(0, 16)], 16) == 16
    assert not ring.in_use


def test_who_has_its_pages_goes_on_though_others_lack_what_they_were_promised() -> None:
    setup = Setup(pages=8)
    ring, other = setup.pages(reservation=6), setup.pages()
    ring.claim()
    ring.allocate([(0, 12)])
    other.allocate([(0, 4)])
    ring.transfer([0], 4)  # the writer has them, and the ring is promised others in their place
    assert setup.store.headroom(other) == -2
    assert other.can_start(3)
    assert not other.can_start(4)
    assert other.end_within_reach([(1, 4)], 4) == 4
    assert other.end_within_reach([(1, 9)], 9) == 4


@pytest.mark.parametrize(("position", "can_start"), [(3, True), (11, True), (12, False)])
def test_who_holds_all_that_was_promised_needs_no_page_but_for_a_new_block(position: int, can_start: bool) -> None:
    setup = Setup(pages=6)
    ring = setup.pages(reservation=6)
    ring.claim()
    ring.allocate([(0, 12)])
    assert setup.num_available == 0
    assert ring.can_start(position) == can_start


def test_one_page_is_needed_for_one_layer() -> None:
    setup = Setup(pages=3)
    first, second = setup.pages(layers=(1,)), setup.pages(layers=(1,))
    first.allocate([(0, 8)])
    assert second.can_start(0)
    first.allocate([(8, 12)])
    assert not second.can_start(0)
    assert first.can_start(11)


def test_who_holds_a_part_of_what_was_promised_needs_the_rest() -> None:
    setup = Setup(pages=8)
    ring, other = setup.pages(reservation=6), setup.pages()
    ring.allocate([(0, 4)])
    other.allocate([(0, 4)])
    assert ring.can_start(1)
    other.allocate([(4, 5)])
    assert not ring.can_start(1)


def test_a_hit_takes_the_place_of_what_was_held_of_its_blocks() -> None:
    setup = Setup()
    first, second = setup.pages(), setup.pages()
    first.allocate([(0, 12)])
    first.mark_filled(0, [(0, 12)], 12)
    second.allocate([(4, 6)])
    assert second.hit_limit([(2, 12)], 12) == 12
    second.adopt([(2, 12)])
    assert second.pages_of([0, 1, 2]).tolist() == first.pages_of([0, 1, 2]).tolist()
    assert setup.num_available == 14
    second.close()
    first.close()
    assert setup.num_available == 20


def test_a_hit_needs_no_page_between_the_ranges() -> None:
    setup = Setup()
    first, second = setup.pages(), setup.pages()
    for start, ranges in ((0, [(0, 8)]), (8, [(12, 16)])):
        first.allocate(ranges)
        first.mark_filled(start, ranges, ranges[-1][1])
    wanted = [(1, 6), (13, 15)]
    assert second.hit_limit(wanted, 16) == 16
    second.adopt(wanted)
    assert second.num_held == 6
    assert second.pages_of([0, 1, 3]).tolist() == first.pages_of([0, 1, 3]).tolist()


def test_a_hit_stops_before_it_takes_what_was_promised_to_others() -> None:
    setup = Setup(pages=10)
    first = setup.pages()
    first.allocate([(0, 12)])
    first.mark_filled(0, [(0, 12)], 12)
    first.close()  # cached now, and available
    ring = setup.pages(reservation=6)
    ring.claim()
    assert setup.pages().hit_limit([(0, 12)], 12) == 8
    assert setup.pages(layers=(1,)).hit_limit([(0, 12)], 12) == 12
