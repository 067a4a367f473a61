"""The block pool against a model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.pool import NULL_BLOCK, BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Takes, shares, registers and gives back at random; a dictionary says what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: set[int] = set()
        self.pool = BlockPool(NUM_BLOCKS, self.poisoned.add)
        self.held: list[int] = []
        self.contents: dict[int, tuple[str, int]] = {}

    @rule()
    def allocate(self) -> None:
        self.poisoned.clear()
        block = self.pool.allocate()
        if block is None:
            assert len(set(self.held)) == NUM_BLOCKS - 1
            return
        assert block != NULL_BLOCK
        assert block not in self.held
        assert block in self.poisoned
        self.contents.pop(block, None)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from("abc"), depth=st.integers(0, 2))
    def register(self, data: st.DataObject, key: str, depth: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        before = self.pool.lookup(key, key.encode())
        self.pool.register(block, key, key.encode(), depth)
        found = self.pool.lookup(key, key.encode())
        assert found is not None
        if before is not None and before != block and self.contents[before][1] >= depth:
            assert found == before
            return
        if before != block:
            assert found == block
            self.contents[block] = (key, depth)

    @rule(key=st.sampled_from("abc"), depth=st.integers(0, 2))
    def take_cached(self, key: str, depth: int) -> None:
        block = self.pool.lookup(key, key.encode(), depth)
        assert self.pool.lookup(key, b"other tokens") is None
        if block is not None:
            stored_key, stored_depth = self.contents[block]
            assert stored_key == key
            assert stored_depth >= depth
            self.pool.retain(block)
            self.held.append(block)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert stats.referenced == len(set(self.held))
        assert stats.free + stats.cached + stats.referenced == stats.total == NUM_BLOCKS - 1
        assert self.pool.num_available == stats.free + stats.cached


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_blocks_without_contents_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None
    assert second is not None
    pool.register(first, "kept", b"")
    pool.release(first)
    pool.release(second)
    assert pool.allocate() == second
    assert pool.lookup("kept", b"") == first


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate(), pool.allocate()]
    for key, block in zip("ab", blocks, strict=True):
        assert block is not None
        pool.register(block, key, b"")
    for block in blocks:
        assert block is not None
        pool.release(block)
    pool.allocate()
    assert pool.lookup("a", b"") is None
    assert pool.lookup("b", b"") == blocks[1]


def test_a_deeper_block_takes_over_the_entry_of_a_shallow_one_that_lives_on_with_its_holder() -> None:
    pool = BlockPool(4)
    shallow, deep = pool.allocate(), pool.allocate()
    assert shallow is not None
    assert deep is not None
    pool.register(shallow, "k", b"", depth=2)
    assert pool.lookup("k", b"", depth=3) is None
    pool.register(deep, "k", b"", depth=5)
    assert pool.lookup("k", b"", depth=3) == deep
    assert pool.is_referenced(shallow)
    pool.release(shallow)
    assert pool.stats().free == 2


def test_a_collision_of_keys_is_no_hit() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert block is not None
    pool.register(block, "same digest", b"tokens")
    assert pool.lookup("same digest", b"others") is None


def test_releasing_a_free_block_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="more often"):
        BlockPool(2).release(1)
