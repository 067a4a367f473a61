"""The store of hidden-state pages: promises, and pages found by block and layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.cache.chain import HashChain
from engine.cache.pool import IntArray
from engine.cache.states import StateStore
from engine.layers import LayerId


@dataclass
class Holder:
    reservation: int = 0
    num_held: int = 0


def store(pages: int = 8) -> StateStore:
    return StateStore(pages + 1, 2, 3, torch.float32, poison=True)


def take(states: StateStore, holder: Holder, count: int) -> IntArray:
    pages = states.allocate(holder, count)
    assert pages is not None
    holder.num_held += count
    return pages


def test_pages_are_taken_all_together_or_not_at_all() -> None:
    states, holder = store(4), Holder()
    take(states, holder, 3)
    assert states.allocate(holder, 2) is None
    assert states.pool.num_available == 1


def test_what_was_promised_to_one_is_out_of_reach_for_others() -> None:
    states, promised, other = store(8), Holder(reservation=5), Holder()
    states.reserve(promised)
    assert states.headroom(other) == 3
    assert states.headroom(promised) == 8
    assert states.allocate(other, 4) is None
    take(states, other, 3)
    assert states.headroom(promised) == 5
    take(states, promised, 5)


def test_a_promise_shrinks_by_what_has_been_taken_of_it_and_never_below_nothing() -> None:
    states, promised, other = store(8), Holder(reservation=3), Holder()
    states.reserve(promised)
    take(states, promised, 2)
    assert states.headroom(other) == 5
    take(states, promised, 3)
    assert states.headroom(other) == 3


def test_a_promise_counts_once_and_ends_when_it_is_given_back() -> None:
    states, promised, other = store(8), Holder(reservation=5), Holder()
    states.reserve(promised)
    states.reserve(promised)
    assert states.headroom(other) == 3
    states.cancel_reservation(promised)
    states.cancel_reservation(promised)
    assert states.headroom(other) == 8


def test_promises_of_several_add_up() -> None:
    states, first, second = store(8), Holder(reservation=3), Holder(reservation=4)
    states.reserve(first)
    states.reserve(second)
    assert states.headroom(Holder()) == 1
    assert states.headroom(first) == 4
    assert states.headroom(second) == 5


def register(states: StateStore, chain: HashChain, blocks: list[int], layers: tuple[LayerId, ...]) -> IntArray:
    """Pages `[blocks, layers]` that are offered to the prefix cache and still held."""
    pages = take(states, Holder(), len(blocks) * len(layers)).reshape(len(blocks), len(layers))
    states.register(chain, blocks, layers, pages)
    return pages


def test_pages_are_found_by_block_and_layer_in_any_combination_of_layers() -> None:
    states, chain = store(), HashChain([1, 2], 2)
    (pages,) = register(states, chain, [0], (1, 4, "norm"))
    assert states.lookup(chain, 0, 1, (4,)).tolist() == [[pages[1]]]
    assert states.lookup(chain, 0, 1, ("norm", 1)).tolist() == [[pages[2], pages[0]]]
    assert states.lookup(chain, 0, 1, (1, 2)).shape == (0, 2)
    assert states.lookup(HashChain([1, 2], 2, "salt"), 0, 1, (1,)).shape == (0, 1)


def test_pages_registered_by_different_requests_serve_one_that_wants_both_layers() -> None:
    states, chain = store(), HashChain([1, 2, 3, 4], 2)
    first = register(states, chain, [0, 1], (1,))
    second = register(states, chain, [1, 0], (2,))
    assert states.lookup(chain, 0, 2, (1, 2)).tolist() == [[first[0, 0], second[1, 0]], [first[1, 0], second[0, 0]]]


def test_pages_are_found_up_to_the_first_block_that_lacks_one() -> None:
    states, chain = store(), HashChain(range(10), 2)
    pages = register(states, chain, [1, 2, 4], (1, 2))
    assert states.lookup(chain, 0, 5, (1, 2)).shape == (0, 2)
    assert np.array_equal(states.lookup(chain, 1, 5, (1, 2)), pages[:2])
    assert np.array_equal(states.lookup(chain, 1, 2, (1, 2)), pages[:1])
    assert np.array_equal(states.lookup(chain, 4, 9, (1, 2)), pages[2:]), "there are no more blocks than tokens"


def test_rows_and_pages_are_the_same_memory_and_dead_ones_are_poisoned() -> None:
    states = store()
    (page,) = take(states, Holder(), 1)
    states.rows[page * 2 + 1] = 7
    assert states.pages[page, 1].tolist() == [7, 7, 7]
    assert states.pages[0].isnan().all()
    states.pool.release(np.array([page]))
    assert states.pages.isnan().all()
