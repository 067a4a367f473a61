"""Pages that rows are on their way to belong to nobody else, whatever becomes of the request meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cache.pool import BlockPool, IntArray
from engine.capture.sink import Landing
from engine.capture.transfers import PagesInFlight


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(9)


def take(pool: BlockPool, count: int) -> IntArray:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def test_pages_that_their_owner_has_let_go_of_come_free_when_the_rows_have_landed(pool: BlockPool) -> None:
    in_flight, landing = PagesInFlight(pool), Landing(landed=False)
    pages = take(pool, 5)
    in_flight.hold(landing, [pages[:2], pages[2:]])
    pool.release(pages)
    in_flight.release_landed()
    assert pool.num_available == 3
    landing.landed = True
    assert pool.num_available == 3, "nobody has asked"
    in_flight.release_landed()
    in_flight.release_landed()
    assert pool.num_available == 8


def test_pages_that_their_owner_keeps_stay_its_own(pool: BlockPool) -> None:
    in_flight, landing = PagesInFlight(pool), Landing(landed=False)
    pages = take(pool, 2)
    in_flight.hold(landing, [pages])
    landing.landed = True
    in_flight.release_landed()
    assert pool.stats().referenced == 2
    pool.release(pages)
    assert pool.num_available == 8


def test_a_page_that_two_steps_in_flight_write_to_is_held_for_both(pool: BlockPool) -> None:
    in_flight, first, second = PagesInFlight(pool), Landing(landed=False), Landing(landed=False)
    pages = take(pool, 1)
    in_flight.hold(first, [pages])
    in_flight.hold(second, [pages])
    pool.release(pages)
    first.landed = True
    in_flight.release_landed()
    assert pool.stats().referenced == 1
    second.landed = True
    in_flight.release_landed()
    assert pool.stats().referenced == 0


def test_pages_of_the_oldest_step_come_free_while_later_ones_are_in_flight(pool: BlockPool) -> None:
    in_flight, first, second = PagesInFlight(pool), Landing(landed=False), Landing(landed=False)
    pages = take(pool, 5)
    in_flight.hold(first, [pages[:2]])
    in_flight.hold(second, [pages[2:]])
    pool.release(pages)
    first.landed = True
    in_flight.release_landed()
    assert pool.stats().referenced == 3


def test_nothing_is_held_for_rows_that_stand_in_their_pages_or_for_none(pool: BlockPool) -> None:
    in_flight, pages = PagesInFlight(pool), take(pool, 2)
    in_flight.hold(Landing(landed=True), [pages])
    in_flight.hold(Landing(landed=False), [])
    pool.release(pages)
    assert pool.num_available == 8
    in_flight.release_landed()
    assert np.array_equal(np.sort(take(pool, 8)), np.arange(1, 9))
