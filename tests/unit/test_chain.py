"""Block names: equal for equal beginnings, and for nothing else."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.chain import HashChain

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(first=TOKENS, second=TOKENS, size=st.integers(1, 4), salts=st.tuples(*[st.sampled_from(["", "a"])] * 2))
def test_names_are_equal_just_where_tokens_and_salt_are(first: list[int], second: list[int], size: int, salts: tuple[str, str]) -> None:
    one, other = HashChain(first, size, salts[0]), HashChain(second, size, salts[1])
    for i in range(min(one.num_full_blocks, other.num_full_blocks)):
        equal = first[: (i + 1) * size] == second[: (i + 1) * size] and salts[0] == salts[1]
        assert (one.link(i)[0] == other.link(i)[0]) == equal


def test_equal_blocks_at_different_places_have_different_names() -> None:
    chain = HashChain([1, 2, 1, 2, 1, 2], 2)
    assert len({chain.link(i)[0] for i in range(3)}) == 3
    assert len({chain.link(i)[1] for i in range(3)}) == 1


def test_block_sizes_give_names_of_their_own() -> None:
    assert HashChain([1, 2, 3, 4], 2).link(1)[0] != HashChain([1, 2, 3, 4], 4).link(0)[0]


def test_only_full_blocks_have_names_and_new_ones_follow_as_the_tokens_grow() -> None:
    tokens = [5, 6, 7]
    chain = HashChain(tokens, 2)
    assert chain.num_full_blocks == 1
    first = chain.link(0)
    tokens.append(8)
    assert chain.num_full_blocks == 2
    assert chain.link(1)[0] == HashChain([5, 6, 7, 8], 2).link(1)[0]
    assert chain.link(0) == first


@given(asked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_names_asked_for_together_are_those_asked_for_one_by_one(asked: list[tuple[int, int]]) -> None:
    chain, other = HashChain(list(range(30)), 3), HashChain(list(range(30)), 3)
    for first, end in asked:
        assert chain.links(first, end) == [other.link(i) for i in range(first, end)]


def test_names_carry_the_tokens_of_their_block() -> None:
    assert HashChain([1, 2, 300_000, 4], 2).link(1)[1] == struct.pack("<2q", 300_000, 4)


@given(shared=st.integers(0, 400), tails=st.tuples(TOKENS, TOKENS), size=st.integers(1, 5), salt=st.sampled_from(["", "a"]))
def test_two_share_the_blocks_before_the_first_name_that_differs(
    shared: int, tails: tuple[list[int], list[int]], size: int, salt: str
) -> None:
    one, other = (HashChain([7] * shared + tail, size, of) for tail, of in zip(tails, ("", salt), strict=True))
    num_blocks = min(one.num_full_blocks, other.num_full_blocks)
    equal = [mine == theirs for mine, theirs in zip(one.links(0, num_blocks), other.links(0, num_blocks), strict=True)]
    assert one.shared_end(other) == other.shared_end(one) == sum(equal) * size
