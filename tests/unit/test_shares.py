"""How prompts share a step: max-min fairness."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.shares import even_shares

DEMANDS = st.lists(st.integers(0, 40), max_size=12)


@given(demands=DEMANDS, tokens=st.integers(0, 200))
def test_everything_is_given_out_that_is_asked_for_and_nobody_gets_more_than_they_ask_for(demands: list[int], tokens: int) -> None:
    shares = even_shares(demands, tokens)
    assert sum(shares) == min(tokens, sum(demands))
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))


@given(demands=DEMANDS, tokens=st.integers(0, 200))
def test_nobody_gets_more_than_one_who_did_not_get_all_they_asked_for_but_for_what_does_not_divide(demands: list[int], tokens: int) -> None:
    shares = even_shares(demands, tokens)
    for share, demand in zip(shares, demands, strict=True):
        if share < demand:
            assert max(shares) <= share + 1


@given(demands=DEMANDS, tokens=st.integers(0, 200))
def test_what_does_not_divide_goes_to_those_that_come_first(demands: list[int], tokens: int) -> None:
    shares = even_shares(demands, tokens)
    lacking = [share for share, demand in zip(shares, demands, strict=True) if share < demand]
    assert lacking == sorted(lacking, reverse=True)


def test_some_shares() -> None:
    assert even_shares([100, 3, 100], 11) == [4, 3, 4]
    assert even_shares([5, 5, 5], 11) == [4, 4, 3]
    assert even_shares([1, 100], 100) == [1, 99]
    assert even_shares([], 7) == []
