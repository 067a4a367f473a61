"""The paged KV cache by itself: block tables, windows, and which prefixes can be found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.cache.block_table import BlockTable
from engine.cache.chain import HashChain
from engine.cache.kv import KVCache
from engine.cache.pool import NULL_BLOCK
from tests.unit.core_fakes import make_group

TOKENS = list(range(24))


def full_only(blocks: int = 10, size: int = 2) -> KVCache:
    return KVCache([make_group((0, 1), None, size, blocks)])


def two_groups(full: int = 20, sliding: int = 20, window: int = 5) -> KVCache:
    """Layer 0 attends to everything (blocks of 2), layer 1 to a window (blocks of 3)."""
    return KVCache([make_group((0,), None, 2, full), make_group((1,), window, 3, sliding)])


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
    assert len(set(tables.blocks[0].array.tolist())) == 3


def test_the_group_with_the_fewest_blocks_decides_and_the_others_take_no_more() -> None:
    kv = two_groups(full=20, sliding=2)
    tables = kv.new_tables(2)
    assert kv.extend(tables, 0, 20) == 6
    assert [len(blocks) for blocks in tables.blocks] == [3, 2]


def test_a_request_that_does_not_run_deep_enough_takes_nothing_from_a_group() -> None:
    kv = two_groups()
    tables = kv.new_tables(1)
    assert kv.extend(tables, 0, 8) == 8
    assert len(tables.blocks[1]) == 0
    assert kv.alignment(1) == 2
    assert kv.alignment(2) == 6
    assert kv.alignment(0) == 1


def test_blocks_that_the_window_has_passed_are_given_back() -> None:
    kv = two_groups()
    tables = kv.new_tables(2)
    kv.extend(tables, 0, 9)
    kv.extend(tables, 9, 12)
    # Position 9 sees 5 … 9: block 0 (0 … 2) has been passed, block 1 (3 … 5) not.
    assert tables.blocks[1].array.astype(bool).tolist() == [False, True, True, True]
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


def test_a_hit_may_be_of_a_single_token_where_blocks_are_of_one() -> None:
    kv, names = full_only(size=1), chains(TOKENS, 1)
    tables = kv.new_tables(2)
    kv.extend(tables, 0, 3)
    kv.register(tables, names, 3)
    assert kv.hit_lengths(names, 2, 20) == [3, 2, 1, 0]


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
    assert tables.blocks[1].array.astype(bool).tolist() == [False] * 4 + [True] * 2
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
    shared = second.blocks[0].array == first.blocks[0].array
    assert shared.tolist() == [True, True, True, False]
    kv.release(first)
    assert kv.stats().referenced == 4
    kv.check_integrity()


def test_the_tokens_that_fit_are_those_of_groups_without_a_window_where_there_are_any() -> None:
    assert two_groups(full=20, sliding=4).num_tokens == 40
    assert KVCache([make_group((0,), None, 2, 20), make_group((1,), None, 3, 11)]).num_tokens == 33
    assert KVCache([make_group((0,), 5, 2, 20), make_group((1,), 7, 3, 11)]).num_tokens == 33


@pytest.mark.parametrize("broken", [0, 1])
def test_books_of_every_group_are_checked(broken: int) -> None:
    kv = two_groups()
    kv.check_integrity()
    kv.groups[broken].pool._references[3] = 1
    with pytest.raises(AssertionError):
        kv.check_integrity()


def test_tables_that_were_released_offer_their_blocks_again_from_the_beginning() -> None:
    kv, names = full_only(blocks=4), chains(TOKENS, 2)
    tables, other = kv.new_tables(2), kv.new_tables(2)
    for _ in range(2):
        kv.extend(tables, 0, 6)
        kv.register(tables, names, 6)
        kv.release(tables)
        assert kv.hit_lengths(names, 2, 20)[0] == 6
        kv.extend(other, 0, 8)  # evicts all
        kv.release(other)
        assert kv.hit_lengths(names, 2, 20)[0] == 0


def test_keys_and_values_of_blocks_that_hold_nothing_are_poisoned() -> None:
    kv = full_only()
    group, tables = kv.groups[0], kv.new_tables(2)
    assert group.keys.isnan().all()
    assert group.values.isnan().all()
    kv.extend(tables, 0, 8)
    group.touch()
    assert not group.keys.any()
    assert not group.values.any()
    held = tables.blocks[0].array.tolist()
    kv.release(tables)
    for block in range(11):
        dead = block in held
        assert bool(group.keys[:, block].isnan().all()) == bool(group.values[:, block].isnan().all()) == dead


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


def test_who_has_its_blocks_needs_none_and_none_of_groups_that_it_does_not_run() -> None:
    kv = KVCache([make_group((0,), None, 2, 4), make_group((1,), None, 3, 2)])
    whole, shallow = kv.new_tables(2), kv.new_tables(1)
    kv.extend(whole, 0, 6)
    kv.extend(shallow, 0, 2)
    assert [group.pool.num_available for group in kv.groups] == [0, 0]
    assert kv.can_hold(whole, 6)
    assert not kv.can_hold(whole, 7)
    assert kv.can_hold(shallow, 2)
    assert not kv.can_hold(shallow, 3)


def test_statistics_are_summed_over_the_groups() -> None:
    kv = two_groups(full=5, sliding=4)
    tables = kv.new_tables(2)
    kv.extend(tables, 0, 4)
    kv.register(tables, chains(TOKENS, 2, 3), 4)
    kv.release(tables)
    stats = kv.stats()
    assert (stats.total, stats.cached, stats.referenced, stats.free) == (9, 3, 0, 6)


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 2), st.integers(1, 4), st.integers(0, 24)), min_size=1, max_size=6),
    sliding=st.integers(8, 12),
    window=st.integers(1, 7),
    limit=st.integers(0, 24),
)
def test_a_hit_has_every_block_that_the_next_position_sees(
    steps: list[tuple[int, int, int, int]], sliding: int, window: int, limit: int
) -> None:
    kv = two_groups(full=15, sliding=sliding, window=window)
    for count, depth, num_steps, parted in steps:
        compute(kv, [*TOKENS[:parted], *[99] * (24 - parted)], depth, count, steps=num_steps)
    names = chains(TOKENS, 2, 3)
    for depth in (1, 2):
        groups = kv.groups[:depth]
        found = {
            group: [group.pool.find([link], depth=depth).all() for link in _all_links(names, group.spec.block_size)] for group in groups
        }
        expected = [
            length
            for length in range(limit, -1, -1)
            if length % kv.alignment(depth) == 0
            and all(all(found[g][g.first_needed_block(length) : length // g.spec.block_size]) for g in groups)
        ]
        assert kv.hit_lengths(names, depth, limit) == expected
        for length in expected:
            tables = kv.new_tables(depth)
            kv.adopt(tables, names, length)
            kv.release(tables)
    kv.check_integrity()


def _all_links(names: dict[int, HashChain], size: int) -> list[tuple[bytes, bytes]]:
    return names[size].links(0, names[size].num_full_blocks)


@pytest.mark.parametrize(("window", "num_dropped"), [(3, 5), (4, 5), (5, 4)])
def test_a_hit_needs_no_block_that_was_dropped_before_it_was_offered(window: int, num_dropped: int) -> None:
    kv, names = two_groups(window=window), chains(TOKENS, 2, 3)
    tables = kv.new_tables(2)
    for start in range(0, 21, 3):
        kv.extend(tables, start, start + 3)
    kv.register(tables, names, 18)
    found = kv.groups[1].pool.find(names[3].links(0, 6)).all(axis=1)
    assert found.tolist() == [False] * num_dropped + [True] * (6 - num_dropped)
    assert kv.hit_lengths(names, 2, 18) == [18, 0]


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=30), restart=st.integers(0, 30), window=st.integers(1, 7))
def test_after_every_step_blocks_reach_to_its_end_and_back_to_what_it_sees(counts: list[int], restart: int, window: int) -> None:
    kv, names = two_groups(full=80, sliding=80, window=window), chains(TOKENS * 10, 2, 3)
    tables, start = kv.new_tables(2), 0
    for number, count in enumerate(counts):
        if number == restart:
            kv.release(tables)
            start = kv.hit_lengths(names, 2, start)[0]
            kv.adopt(tables, names, start)
        assert kv.extend(tables, start, start + count) == start + count
        for group, table in zip(kv.groups, tables.blocks, strict=True):
            assert table.num_dropped == group.first_needed_block(start)
            assert len(table) == -(-(start + count) // group.spec.block_size)
            assert group.pool.stats().referenced == table.num_held
        start += count
        kv.register(tables, names, start)
        assert tables.num_registered == [start // group.spec.block_size for group in kv.groups]
        assert kv.hit_lengths(names, 2, start)[0] == start - start % 6
    kv.release(tables)
    kv.check_integrity()


class TableMachine(RuleBasedStateMachine):
    """A block table against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.blocks: list[int] = []
        self.num_dropped = 0

    @rule(blocks=st.lists(st.integers(1, 99), max_size=30))
    def extend(self, blocks: list[int]) -> None:
        self.table.extend(np.array(blocks, np.int64))
        self.blocks += blocks

    @rule(first=st.integers(0, 60))
    def drop_before(self, first: int) -> None:
        dropped = self.table.drop_before(first).tolist()
        assert dropped == self.blocks[self.num_dropped : first]
        self.num_dropped = max(self.num_dropped, min(first, len(self.blocks)))

    @rule(count=st.integers(0, 20))
    def begin_behind_what_is_not_held(self, count: int) -> None:
        if not self.blocks:
            self.table.skip(count)
            self.blocks, self.num_dropped = [NULL_BLOCK] * count, count

    @rule()
    def clear(self) -> None:
        assert self.table.clear().tolist() == self.blocks[self.num_dropped :]
        self.blocks, self.num_dropped = [], 0

    @invariant()
    def both_hold_the_same(self) -> None:
        held = self.blocks[self.num_dropped :]
        assert self.table.array.tolist() == [NULL_BLOCK] * self.num_dropped + held
        assert self.table.held.tolist() == held
        assert (len(self.table), self.table.num_dropped, self.table.num_held) == (len(self.blocks), self.num_dropped, len(held))


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestTableMachine = TableMachine.TestCase
