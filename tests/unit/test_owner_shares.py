"""What owners of API keys may hold of a bound that they share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import Busy
from service.shares import EngineShare, Share


def share(most: int, *, several: bool) -> Share:
    return Share("places", most, lambda: several)


def takes(places: Share, owner: str | None) -> int:
    """How many an owner gets."""
    taken = 0
    while True:
        try:
            places.acquire(owner)
        except Busy:
            return taken
        taken += 1


def test_where_there_is_one_owner_it_may_take_everything() -> None:
    assert takes(share(10, several=False), None) == 10
    assert takes(share(10, several=False), "alice") == 10


def test_of_several_owners_each_leaves_as_much_as_it_takes() -> None:
    places = share(64, several=True)
    assert [takes(places, owner) for owner in ("alice", "bob", "carol")] == [32, 16, 8]
    places.release("alice", 32)
    assert takes(places, "bob") > 0


def test_one_place_is_for_whoever_comes_first() -> None:
    places = share(1, several=True)
    assert takes(places, "alice") == 1
    with pytest.raises(Busy, match="1 of 1"):
        places.acquire("bob")


def test_a_block_gives_its_part_back_whatever_happens() -> None:
    places = share(3, several=False)
    with pytest.raises(ValueError, match="x"), places.acquired(None, 3):
        raise ValueError("x")
    assert places.total == 0


def test_the_engine_refuses_by_itself_and_owners_are_bounded_all_the_same() -> None:
    free = EngineShare("choices", 4, lambda: False)
    for _ in range(10):
        free.acquire(None)
    assert takes(EngineShare("choices", 4, lambda: True), "alice") == 2


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 40), st.booleans()), max_size=60), st.integers(1, 100))
def test_nothing_is_counted_twice_and_no_owner_has_all(steps: list[tuple[str, int, bool]], most: int) -> None:
    places, held = share(most, several=True), dict.fromkeys("abcdefgh", 0)
    for owner, amount, back in steps:
        if back and held[owner]:
            places.release(owner, held[owner])
            held[owner] = 0
        else:
            try:
                places.acquire(owner, amount)
                held[owner] += amount
            except Busy:
                continue
        assert places.total == sum(held.values()) <= most
        assert all(part <= max(most / 2, 1) for part in held.values())
