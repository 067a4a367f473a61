"""The paged KV cache by itself: block tables, windows, and which prefixes can be found."""

from __future__ import annotations

import pytest

from engine.cache.chain import HashChain
from engine.cache.kv import KVCache
from tests.unit.core_fakes import make_group

TOKENS = list(range(24))


def full_only(blocks: int = 10, size: int = 2) -> KVCache:
    return KVCache([make_group((0, 1), None, size, blocks)])


def two_groups(full: int = 20, sliding: int = 20) -> KVCache:
    """Layer 0 attends to everything (blocks of 2), layer 1 to a window of 5 (blocks of 3)."""
    return KVCache([make_group((0,), None, 2, full), make_group((1,), 5, 3, sliding)])


def chains(tokens: list[int], *sizes: int) -> dict[int, HashChain]:
    return {size: HashChain(tokens, size) for size in sizes}


def compute(kv: KVCache, tokens: list[int], depth: int, count: int, *, steps: int = 1) -> None:
    """Runs a request over the first `count` tokens and lets it go."""
    tables, names = kv.new_tables(depth), chains(tokens, 2, 3)
    for step in range(steps):
        start, end = count * step // steps, count * (step + 1) // steps
        assert kv.extend(tables, start, end) == end
        kv.register(tables, names, end)
    kv.release(tables)


def test_blocks_are_given_as_far_as_they_go() -> None:
    kv = full_only(blocks=3)
    tables = kv.new_tables(2)
    assert kv.extend(tables, 0, 5) == 5
    assert kv.extend(tables, 5, 9) == 6
    assert kv.extend(tables, 6, 9) == 6, "there is none left"
    assert len(set(tables.blocks[0])) == 3


def test_the_group_with_the_fewest_blocks_decides_and_the_others_take_no_more() -> None:
    kv = two_groups(full=20, sliding=2)
    tables = kv.new_tables(2)
    assert kv.extend(tables, 0, 20) == 6
    assert [len(blocks) for blocks in tables.blocks] == [3, 2]


def test_a_request_that_does_not_run_deep_enough_takes_nothing_from_a_group() -> None:
    kv = two_groups()
    tables = kv.new_tables(1)
    assert kv.extend(tables, 0, 8) == 8
    assert tables.blocks[1] == []
    assert kv.alignment(1) == 2
    assert kv.alignment(2) == 6
    assert kv.alignment(0) == 1


def test_blocks_that_the_window_has_passed_are_given_back() -> None:
    kv = two_groups()
    tables = kv.new_tables(2)
    kv.extend(tables, 0, 9)
    kv.extend(tables, 9, 12)
    # Position 9 sees 5 … 9: block 0 (0 … 2) has been passed, block 1 (3 … 5) not.
    assert [block != 0 for block in tables.blocks[1]] == [False, True, True, True]
    assert kv.groups[1].pool.stats().referenced == 3
    kv.release(tables)
    assert kv.stats().referenced == 0
    kv.check_integrity()


@pytest.mark.parametrize(("position", "block"), [(0, 0), (4, 0), (6, 0), (7, 1), (9, 1), (10, 2)])
def test_the_first_block_that_a_position_sees(position: int, block: int) -> None:
    assert two_groups().groups[1].first_needed_block(position) == block
    assert two_groups().groups[0].first_needed_block(position) == 0


def test_only_blocks_whose_tokens_have_all_been_computed_are_found() -> None:
    kv, names = full_only(), chains(TOKENS, 2)
    tables = kv.new_tables(2)
    kv.extend(tables, 0, 20)
    kv.register(tables, names, 5)
    assert kv.hit_lengths(names, 2, 20) == [4, 2, 0]
    kv.register(tables, names, 6)
    assert kv.hit_lengths(names, 2, 20) == [6, 4, 2, 0]


def test_hits_end_at_the_limit_and_where_the_tokens_part() -> None:
    kv = full_only()
    compute(kv, TOKENS, 2, 12)
    assert kv.hit_lengths(chains(TOKENS, 2), 2, 7)[0] == 6
    assert kv.hit_lengths(chains([*TOKENS[:5], 99, *TOKENS[6:]], 2), 2, 20)[0] == 4
    assert kv.hit_lengths(chains(TOKENS[1:], 2), 2, 20) == [0]


def test_hits_end_at_a_border_of_every_group() -> None:
    kv = two_groups()
    compute(kv, TOKENS, 2, 16)
    assert kv.hit_lengths(chains(TOKENS, 2, 3), 2, 16) == [12, 6, 0]
    assert kv.hit_lengths(chains(TOKENS, 2, 3), 1, 16)[0] == 16


def test_a_window_needs_only_the_blocks_that_the_next_position_sees() -> None:
    kv, names = two_groups(full=20, sliding=4), chains(TOKENS, 2, 3)
    compute(kv, TOKENS, 2, 18, steps=6)
    # Blocks 0 and 1 of the window's four have been used again: a hit at 6 lacks block 0, one at 18 or 12 doesn't.
    assert kv.hit_lengths(names, 2, 18) == [18, 12, 0]
    tables = kv.new_tables(2)
    kv.adopt(tables, names, 18)
    assert [block != 0 for block in tables.blocks[1]] == [False] * 4 + [True] * 2
    assert kv.extend(tables, 18, 21) == 21


def test_kv_that_does_not_hold_enough_layers_is_not_found() -> None:
    kv = KVCache([make_group((0, 1, 2), None, 2, 20)])
    compute(kv, TOKENS, 1, 8)
    assert kv.hit_lengths(chains(TOKENS, 2), 2, 20) == [0]
    assert kv.hit_lengths(chains(TOKENS, 2), 1, 20)[0] == 8
    compute(kv, TOKENS, 3, 4)
    assert kv.hit_lengths(chains(TOKENS, 2), 3, 20)[0] == 4
    assert kv.hit_lengths(chains(TOKENS, 2), 1, 20)[0] == 8


def test_adopted_blocks_are_shared_and_what_follows_is_private() -> None:
    kv, names = full_only(), chains(TOKENS, 2)
    first = kv.new_tables(2)
    kv.extend(first, 0, 8)
    kv.register(first, names, 8)
    second = kv.new_tables(2)
    kv.adopt(second, names, 6)
    kv.extend(second, 6, 8)
    assert second.blocks[0][:3] == first.blocks[0][:3]
    assert second.blocks[0][3] != first.blocks[0][3]
    kv.release(first)
    assert kv.stats().referenced == 4
    kv.check_integrity()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = full_only(blocks=4)
    compute(kv, TOKENS, 2, 8)
    other = kv.new_tables(2)
    kv.extend(other, 0, 4)
    assert kv.hit_lengths(chains(TOKENS, 2), 2, 20)[0] == 4


def test_whether_a_request_fits_alone_depends_on_its_depth_and_on_windows() -> None:
    kv = two_groups(full=5, sliding=4)
    assert kv.fits(2, 10)
    assert not kv.fits(2, 11)
    assert kv.fits(0, 1000)
    # A window of 5 in blocks of 3 spans three blocks while it grows, and one is being passed.
    assert dict(kv.blocks_for(2, 1000))[kv.groups[1]] == 4
    assert not two_groups(full=1000, sliding=3).fits(2, 20)


def test_what_others_are_on_their_way_to_counts() -> None:
    kv = full_only(blocks=10)
    first, second = kv.new_tables(2), kv.new_tables(2)
    kv.extend(first, 0, 4)
    assert kv.can_hold(second, 16)
    assert kv.can_hold(second, 8, [(first, 12)])
    assert not kv.can_hold(second, 9, [(first, 12)])


def test_statistics_are_summed_over_the_groups() -> None:
    kv = two_groups(full=5, sliding=4)
    tables = kv.new_tables(2)
    kv.extend(tables, 0, 4)
    kv.register(tables, chains(TOKENS, 2, 3), 4)
    kv.release(tables)
    stats = kv.stats()
    assert (stats.total, stats.cached, stats.referenced, stats.free) == (9, 3, 0, 6)
