"""Slots of recurrent layers: whatever is planned, committed, withdrawn or preempted, a chunk reads the state behind its first position."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.chain import HashChain
from engine.cache.groups import RecurrentGroup
from engine.cache.kv import KVCache, SlotPair
from engine.cache.pool import NULL_BLOCK
from engine.cache.spec import NUM_SPARES, KVSpec, LayerRecurrent, StatePart
from tests.unit.core_fakes import make_group

DISTANCE, BLOCK, LENGTH = 6, 4, 40
PROMPTS = [[1] * LENGTH, [1] * 15 + [2] * (LENGTH - 15), [3] * LENGTH]


def recurrent_group(num_slots: int, distance: int = DISTANCE) -> RecurrentGroup:
    """Layer 1; one number per state, poisoned."""
    spec = KVSpec(LayerRecurrent((StatePart((1,), torch.float32),)), (1,), distance, torch.float32)
    return RecurrentGroup(spec, num_slots + 1, torch.device("cpu"), poison=True)


class Request:
    """What a scheduler keeps of one."""

    def __init__(self, kv: KVCache, prompt: list[int]) -> None:
        self.prompt = prompt
        self.tables = kv.new_tables(2)
        self.chains = {size: HashChain(prompt, size) for size in (BLOCK, DISTANCE)}
        self.computed = self.planned = 0
        self.in_flight: list[tuple[int, int, tuple[SlotPair, ...]]] = []
        """Start, end and slots."""


class Slots(RuleBasedStateMachine):
    """A state is named by the tokens behind which it is: `held` says what a slot holds once its chunk has been launched."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache([make_group((0,), None, BLOCK, 60), recurrent_group(14)])
        self.running: list[Request] = []
        self.held: dict[int, tuple[int, ...]] = {}

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: len(self.running) < 3)
    def start(self, which: int) -> None:
        request = Request(self.kv, PROMPTS[which])
        length = self.kv.hit_lengths(request.chains, 2, LENGTH - 1)[0]
        assert length % DISTANCE == 0
        self.kv.adopt(request.tables, request.chains, length)
        request.computed = request.planned = length
        self.running.append(request)

    @rule(which=st.integers(0, 2), count=st.integers(1, 9))
    @precondition(lambda self: self.running)
    def plan(self, which: int, count: int) -> None:
        request = self.running[which % len(self.running)]
        start = request.planned
        if len(request.in_flight) == NUM_SPARES or start == LENGTH:
            return
        end = self.kv.extend(request.tables, start, min(start + count, LENGTH), request.computed)
        if end == start:
            return
        assert start // DISTANCE == (end - 1) // DISTANCE, "a chunk crosses a snapshot"
        pairs = self.kv.begin_chunk(request.tables, start)
        [pair] = pairs
        if start:
            assert self.held[pair.read] == tuple(request.prompt[:start])
        else:
            assert pair.read == NULL_BLOCK
        assert pair.write not in (pair.read, NULL_BLOCK)
        self.held[pair.write] = tuple(request.prompt[:end])
        request.in_flight.append((start, end, pairs))
        request.planned = end

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: self.running)
    def commit(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        if request.in_flight:
            start, end, pairs = request.in_flight.pop(0)
            # It may be computed once more until now, so what it reads must still be there.
            assert not start or self.held[pairs[0].read] == tuple(request.prompt[:start])
            self.kv.commit_chunk(request.tables, pairs, start)
            request.computed = end
            self.kv.register(request.tables, request.chains, end)

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: self.running)
    def withdraw(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        if request.in_flight:
            start, _, pairs = request.in_flight.pop()
            self.kv.withdraw_chunk(request.tables, pairs, start)
            request.planned = start

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: self.running)
    def end(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        while request.in_flight:
            start, _, pairs = request.in_flight.pop()
            self.kv.withdraw_chunk(request.tables, pairs, start)
        self.kv.release(request.tables)

    @invariant()
    def the_books_agree(self) -> None:
        self.kv.check_integrity()
        if not self.running:
            assert self.kv.stats().referenced == self.kv.stats(recurrent=True).referenced == 0

    @invariant()
    def what_can_be_found_is_what_it_says(self) -> None:
        pool = self.kv.groups[1].pool
        for prompt in PROMPTS:
            chain = HashChain(prompt, DISTANCE)
            for number, slot in enumerate(pool.find(chain.links(0, chain.num_full_blocks), depth=2)[:, 0].tolist()):
                if slot != NULL_BLOCK:
                    assert self.held[slot] == tuple(prompt[: (number + 1) * DISTANCE])


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_request_that_does_not_run_deep_enough_takes_no_slot() -> None:
    kv = KVCache([make_group((0,), None, BLOCK, 10), recurrent_group(8)])
    tables = kv.new_tables(1)
    assert kv.extend(tables, 0, 10) == 10, "and isn't cut at snapshots"
    assert kv.begin_chunk(tables, 0) == ()
    assert kv.stats(recurrent=True).referenced == 0


def test_a_request_without_its_spare_slots_does_not_start() -> None:
    kv = KVCache([make_group((0,), None, BLOCK, 10), recurrent_group(NUM_SPARES)])
    tables = kv.new_tables(2)
    assert kv.extend(tables, 0, 4) == 0
    assert kv.stats(recurrent=True).referenced == kv.stats().referenced == 0


def test_a_chunk_ends_at_a_snapshot_also_where_blocks_behind_it_are_held_already() -> None:
    """A chunk behind the snapshot was planned and withdrawn, and the one before it was shortened after it had run out of memory."""
    kv = KVCache([make_group((0,), None, BLOCK, 20), recurrent_group(8)])
    tables = kv.new_tables(2)
    assert kv.extend(tables, 0, DISTANCE) == DISTANCE
    first = kv.begin_chunk(tables, 0)
    assert kv.extend(tables, DISTANCE, DISTANCE + 3, 0) == DISTANCE + 3
    kv.withdraw_chunk(tables, kv.begin_chunk(tables, DISTANCE), DISTANCE)
    kv.commit_chunk(tables, first, 0)  # of half of its positions
    assert kv.extend(tables, DISTANCE // 2, DISTANCE + 1, DISTANCE // 2) == DISTANCE
