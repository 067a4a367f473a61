"""The block pool against a model of dictionaries and lists."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.chain import HashChain
from engine.cache.eviction import EvictionQueue
from engine.cache.pool import NULL_BLOCK, BlockPool, IntArray

TOTAL = 8
KEYS, LABELS = "abc", (1, 2, "norm")
Label = int | str | None


class PoolModel:
    """What a pool must do, one block after the other."""

    def __init__(self) -> None:
        self.references = dict.fromkeys(range(1, TOTAL + 1), 0)
        self.cached: list[int] = []
        """The least recently used first."""
        self.contents: dict[tuple[str, Label], int] = {}
        self.depths: dict[str, int] = {}
        self.poisoned: set[int] = set()
        """Since the last time it was asked."""

    @property
    def free(self) -> set[int]:
        return {block for block, count in self.references.items() if not count} - set(self.cached)

    def known(self, block: int) -> bool:
        return block in self.contents.values()

    def take(self, blocks: Sequence[int]) -> None:
        """`blocks` are what the pool has taken."""
        num_free = min(len(blocks), len(self.free))
        assert set(blocks[:num_free]) <= self.free
        assert list(blocks[num_free:]) == self.cached[: len(blocks) - num_free]
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
                self.forget(block)
            self.references[block] = 1
        self.poisoned |= set(blocks)

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block] and self.known(block):
                self.cached.append(block)
            elif not self.references[block]:
                self.poisoned.add(block)

    def register(self, key: str, labels: Sequence[Label], blocks: Sequence[int], depth: int) -> None:
        known = {label: block for (other, label), block in self.contents.items() if other == key}
        if known and self.depths[key] > depth:
            return
        if known and self.depths[key] < depth:
            for block in known.values():
                self.forget(block)
                if block in self.cached:
                    self.cached.remove(block)
                    self.poisoned.add(block)
            known = {}
        self.depths[key] = depth
        for label, block in zip(labels, blocks, strict=True):
            if label not in known:
                self.contents[key, label] = block

    def forget(self, block: int) -> None:
        self.contents = {place: held for place, held in self.contents.items() if held != block}

    def find(self, key: str, label: Label, depth: int) -> int:
        return self.contents.get((key, label), NULL_BLOCK) if self.depths.get(key, 0) >= depth else NULL_BLOCK


class PoolMachine(RuleBasedStateMachine):
    """Takes, shares, registers and gives back at random. Sets are of several blocks, some of a depth."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PoolModel()
        self.poisoned: list[int] = []
        self.pool = BlockPool(TOTAL + 1, lambda blocks: self.poisoned.extend(blocks.tolist()))

    @property
    def held(self) -> list[int]:
        return [block for block, count in self.model.references.items() if count]

    @rule(count=st.integers(0, TOTAL + 1))
    def take(self, count: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is None:
            assert self.pool.num_available == available
        else:
            assert len(blocks) == count
            self.model.take(blocks.tolist())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.pool.release(np.array(blocks, np.int64))
        self.model.release(blocks)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        candidates = self.held + self.model.cached
        blocks = data.draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []
        assert self.pool.num_unreferenced(np.array(blocks, np.int64)) == len(set(blocks) - set(self.held))
        self.pool.retain(np.array(blocks, np.int64))
        self.model.retain(blocks)

    @rule(
        data=st.data(), labels=st.lists(st.sampled_from(LABELS), min_size=1, unique=True), keys=st.sets(st.sampled_from(KEYS), min_size=1)
    )
    def register_sets(self, data: st.DataObject, labels: list[Label], keys: set[str]) -> None:
        self._register(data, sorted(keys), tuple(labels), 0)

    @rule(data=st.data(), key=st.sampled_from("de"), depth=st.integers(0, 2), labels=st.sampled_from([(None,), (None,), (1, None)]))
    def register_set_of_a_depth(self, data: st.DataObject, key: str, depth: int, labels: tuple[Label, ...]) -> None:
        self._register(data, [key], labels, depth)

    def _register(self, data: st.DataObject, keys: list[str], labels: tuple[Label, ...], depth: int) -> None:
        fresh = [block for block in self.held if not self.model.known(block)]
        if len(fresh) < len(keys) * len(labels):
            return
        blocks = np.array(data.draw(st.permutations(fresh))[: len(keys) * len(labels)]).reshape(len(keys), len(labels))
        self.pool.register(keys, blocks, labels, depth)
        for key, of_key in zip(keys, blocks.tolist(), strict=True):
            self.model.register(key, labels, of_key, depth)

    @rule(labels=st.lists(st.sampled_from(LABELS), min_size=1, unique=True), keys=st.permutations("abcx"))
    def find_any_labels_of_any_keys(self, labels: list[Label], keys: list[str]) -> None:
        found = self.pool.find(keys, tuple(labels))
        assert found.tolist() == [[self.model.find(key, label, 0) for label in labels] for key in keys]

    @invariant()
    def everything_is_found_and_nothing_else(self) -> None:
        for depth in range(3):
            for labels, keys in ((LABELS, KEYS), ((None, 1), "de")):
                found = self.pool.find(list(keys), labels, depth)
                assert found.tolist() == [[self.model.find(key, label, depth) for label in labels] for key in keys]

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert (stats.total, stats.free, stats.cached, stats.referenced) == (
            TOTAL,
            len(self.model.free),
            len(self.model.cached),
            len(self.held),
        )
        blocks = np.arange(TOTAL + 1)
        assert np.flatnonzero(self.pool.is_referenced(blocks)).tolist() == self.held

    @invariant()
    def contents_are_poisoned_just_when_they_become_meaningless(self) -> None:
        assert sorted(self.poisoned) == sorted(self.model.poisoned)
        self.poisoned.clear()
        self.model.poisoned.clear()


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def take(pool: BlockPool, count: int) -> IntArray:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cached(pool: BlockPool, keys: Sequence[Hashable], labels: tuple[Label, ...] = (None,), depth: int = 0) -> IntArray:
    """Blocks `[keys, labels]` that have been registered and given back."""
    blocks = take(pool, len(keys) * len(labels)).reshape(len(keys), len(labels))
    pool.register(keys, blocks, labels, depth)
    pool.release(blocks.ravel())
    return blocks


def test_blocks_are_taken_all_together_or_not_at_all() -> None:
    pool = BlockPool(5)
    take(pool, 1)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert sorted(take(pool, 3).tolist()) == [2, 3, 4]


def test_blocks_that_stood_together_stand_together_when_they_are_taken_again() -> None:
    pool = BlockPool(10)
    first = take(pool, 9)[:6]
    pool.release(first)
    assert np.array_equal(take(pool, 6), first)


def test_blocks_without_contents_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    (kept,) = cached(pool, "a")[:, 0]
    assert kept not in take(pool, 2)
    assert pool.find(["a"]) == kept
    assert take(pool, 1) == kept
    assert pool.find(["a"]) == NULL_BLOCK


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = np.concatenate([cached(pool, [key])[:, 0] for key in "abc"])
    pool.retain(blocks[:1])
    pool.release(blocks[:1])
    assert take(pool, 3).tolist() == blocks[[1, 2, 0]].tolist()


def test_of_blocks_released_together_the_last_one_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, "abc")[:, 0]
    assert take(pool, 3).tolist() == blocks[::-1].tolist()


def test_arrays_released_together_may_have_blocks_in_common() -> None:
    pool = BlockPool(8)
    blocks = take(pool, 5)
    pool.retain(blocks[:2])
    pool.release_all([blocks[:3], blocks[:2]])
    assert pool.is_referenced(blocks).tolist() == [False, False, False, True, True]
    pool.release_all([blocks[3:4], blocks[4:, None]])
    assert pool.stats().free == 7
    pool.check_integrity()


def test_keys_of_what_is_evicted_are_let_go() -> None:
    class Key: ...

    pool, key = BlockPool(2), Key()
    cached(pool, [key])
    known = weakref.ref(key)
    del key
    take(pool, 1)
    assert known() is None


def test_the_order_of_eviction_holds_however_often_blocks_are_used() -> None:
    pool = BlockPool(251)
    blocks = cached(pool, [str(i) for i in range(250)])[:, 0]
    order = blocks[::-1]
    for start in range(0, 1500, 7):
        used = order[[start % 240, start % 240 + 5]]
        pool.retain(used)
        pool.release(used)
        order = np.concatenate([order[~np.isin(order, used)], used[::-1]])
    pool.check_integrity()
    taken = [take(pool, count) for count in (1, 100, 149)]
    assert np.array_equal(np.concatenate(taken), order)


def test_a_large_pool_gives_up_cached_blocks_in_lots() -> None:
    pool = BlockPool(1025)
    blocks = cached(pool, [str(i) for i in range(1024)])[:, 0]
    order, lot = blocks[::-1], 4
    taken = [take(pool, 1) for _ in range(lot)]
    assert pool.stats().free == 0
    assert sorted(np.concatenate(taken)) == sorted(order[:lot])
    found = pool.find([str(i) for i in range(1024)])[:, 0]
    assert np.array_equal(found[found != NULL_BLOCK], blocks[:-lot])
    take(pool, 1)
    assert pool.stats().free == lot - 1
    pool.check_integrity()


def test_of_what_is_registered_under_one_key_before_somebody_looks_the_first_stays() -> None:
    pool = BlockPool(10)
    first, second, third = take(pool, 2), take(pool, 2), take(pool, 1)
    pool.register(["a", "b"], first[:, None])
    pool.register(["b", "c"], second[:, None])
    pool.register(["c"], third[:, None], depth=2)
    assert pool.find("abc")[:, 0].tolist() == [*first, third[0]]
    pool.release(np.concatenate([first, second, third]))
    assert pool.stats().free == 9 - 3, "what came second holds nothing"
    pool.check_integrity()


def test_what_loses_its_key_while_it_is_given_back_is_free() -> None:
    pool = BlockPool(5)
    shallow, deep = take(pool, 1), take(pool, 1)
    pool.register(["a"], shallow[:, None], depth=1)
    assert pool.find(["a"]) == shallow
    pool.register(["a"], deep[:, None], depth=2)
    pool.release(shallow)
    assert (pool.stats().free, pool.stats().cached) == (3, 0)
    assert pool.find(["a"]) == deep
    pool.check_integrity()


def test_blocks_are_registered_as_they_were_when_they_were_named() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 1)
    given = blocks[:, None].copy()
    pool.register(["a"], given)
    given[:] = NULL_BLOCK
    assert pool.find(["a"]) == blocks


def test_gaps_in_the_order_of_eviction_are_closed_only_when_there_is_no_room_left(monkeypatch: pytest.MonkeyPatch) -> None:
    closings: list[int] = []
    close = EvictionQueue._close_gaps
    monkeypatch.setattr(EvictionQueue, "_close_gaps", lambda queue: closings.append(queue.size) or close(queue))
    pool = BlockPool(101)
    blocks = cached(pool, [str(i) for i in range(100)])[:, 0]
    for _ in range(10):
        for block in blocks:
            pool.retain(block[None])
            pool.release(block[None])
    assert 0 < len(closings) <= 1 + 10 * 100 // 100
    pool.check_integrity()


def test_a_deeper_block_takes_over_the_entry_of_a_shallow_one_that_lives_on_with_its_holder() -> None:
    pool = BlockPool(4)
    shallow, deep = take(pool, 1), take(pool, 1)
    pool.register(["k"], shallow[:, None], depth=2)
    assert pool.find(["k"], depth=3) == NULL_BLOCK
    pool.register(["k"], deep[:, None], depth=5)
    assert pool.find(["k"], depth=3) == deep
    assert pool.is_referenced(shallow).all()
    pool.release(shallow)
    assert pool.stats().free == 2


def test_blocks_of_a_set_are_held_and_evicted_apart() -> None:
    pool = BlockPool(5)
    (blocks,) = cached(pool, "a", (2, 15, 27, 30))
    pool.retain(blocks[[0, 3]])
    assert sorted(take(pool, 2).tolist()) == sorted(blocks[[1, 2]].tolist())
    assert pool.find(["a"], (2, 15, 27, 30)).tolist() == [[blocks[0], 0, 0, blocks[3]]]
    assert pool.find(["a"], (30, 2)).tolist() == [[blocks[3], blocks[0]]]


def test_what_a_known_set_lacks_is_added_to_it() -> None:
    pool = BlockPool(9)
    (first,) = cached(pool, "a", (1, 2))
    pool.retain(first[:1])
    more = take(pool, 7)  # evicts the block of label 2
    pool.register(["a"], more[None, :3], (3, 2, 1))
    assert pool.find(["a"], (1, 2, 3)).tolist() == [[first[0], more[1], more[0]]]
    pool.release(more)
    assert pool.stats().free == 5, "label 1 was known, and what was not registered holds nothing"


def test_sets_with_different_labels_are_found_in_one_search() -> None:
    pool = BlockPool(20)
    first, second = cached(pool, "ab", (1, 2, 3)), cached(pool, "c", (3, 4))
    found = pool.find(["c", "a", "x", "b"], (3, 1))
    assert found.tolist() == [[second[0, 0], 0], [first[0, 2], first[0, 0]], [0, 0], [first[1, 2], first[1, 0]]]


def test_a_collision_of_digests_is_no_hit() -> None:
    pool = BlockPool(3)
    (block,) = cached(pool, [(b"same digest", b"tokens")])[:, 0]
    assert pool.find([(b"same digest", b"others")]) == NULL_BLOCK
    assert pool.find([(b"same digest", b"tokens")]) == block


@pytest.mark.parametrize("known", [0, 1, 63, 64, 65, 300])
def test_a_run_ends_at_the_first_block_that_lacks_a_label(known: int) -> None:
    pool, chain = BlockPool(1000), HashChain(range(800), 2)
    links = chain.links(0, 400)
    pages = cached(pool, links[:known] + links[known + 1 :], (1, 2))
    cached(pool, [links[known]], (2,))
    assert np.array_equal(pool.find_run(chain, 0, 400, (1, 2)), pages[:known])
    assert np.array_equal(pool.find_run(chain, known + 1, 1000, (2,))[:, 0], pages[known:, 1])


def test_only_as_much_of_a_chain_is_named_as_its_known_beginning_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    chain = HashChain(range(8192), 2)
    links = chain.links
    monkeypatch.setattr(chain, "links", lambda first, end: asked.append(end) or links(first, end))
    assert len(BlockPool(10).find_run(chain, 0, 4096)) == 0
    assert max(asked) < 100


def calls(function: Callable[[], object]) -> int:
    """How many calls, into C too, the interpreter makes meanwhile."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(seen)


def test_the_check_of_the_books_makes_no_more_calls_for_more_blocks() -> None:
    assert calls(BlockPool(10_000).check_integrity) == calls(BlockPool(100).check_integrity)


def test_what_is_done_with_many_blocks_makes_no_more_calls_than_with_a_few() -> None:
    def use(num_labels: int) -> int:
        pool, labels = BlockPool(num_labels + 1), tuple(range(num_labels))
        cached(pool, ["before"], labels)

        def all_uses() -> None:
            blocks = take(pool, num_labels)
            pool.register(["a"], blocks[None], labels)
            pool.retain(blocks)
            pool.release(blocks)
            pool.release(blocks)
            pool.find(["a"], labels)

        return calls(all_uses)

    assert use(400) == use(10)


def test_releasing_a_free_block_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="more often"):
        BlockPool(2).release(np.array([1]))


def test_retaining_a_free_block_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="cached"):
        BlockPool(2).retain(np.array([1]))


def test_a_block_has_one_key() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 1)[:, None]
    pool.register(["a"], blocks)
    pool.register(["a"], blocks)
    assert pool.find(["a"]) == blocks
    pool.register(["b"], blocks)
    with pytest.raises(AssertionError, match="two keys"):
        pool.find(["b"])


BOOKS: dict[str, Callable[[BlockPool], object]] = {
    "references": lambda pool: pool._references.__setitem__(3, 0),
    "negative": lambda pool: pool._references.__setitem__(1, -1),
    "null": lambda pool: pool._references.__setitem__(NULL_BLOCK, 1),
    "held and cached": lambda pool: pool._references.__setitem__(2, 1),
    "held and free": lambda pool: pool._references.__setitem__(1, 1),
    "free twice": lambda pool: pool._free_blocks(np.array([1])),
    "free and null": lambda pool: pool._free_blocks(np.array([NULL_BLOCK])),
    "cached and unknown": lambda pool: pool._index._set_of.__setitem__(2, 0),
    "free and known": lambda pool: pool._index._set_of.__setitem__(1, int(pool._index._set_of[2])),
    "sets": lambda pool: pool._index._sizes.__setitem__(0, 1),
    "keys": lambda pool: pool._index._numbers.clear(),
    "place in a set": lambda pool: pool._index._column_of.__setitem__(2, 0),
    "members": lambda pool: pool._index._members.fill(2),
    "queue": lambda pool: pool._cached._blocks.fill(1),
    "queue size": lambda pool: setattr(pool._cached, "size", 0),
}
"""Each spoils one book of a pool whose block 1 is free, 2 cached and 3 referenced."""


@pytest.mark.parametrize("book", BOOKS)
def test_books_that_disagree_are_noticed(book: str) -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    pool.register(["a"], blocks[1:2, None])
    pool.release(blocks[:2])
    pool.check_integrity()
    BOOKS[book](pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()
